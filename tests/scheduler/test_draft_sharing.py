"""Drafts that share the target's embedding and head, under the engine and by their names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.single import generate_with_kv_cache, speculative_decode
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model import demo
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler import cli
from pagedraft.scheduler.async_engine import AsyncEngine
from pagedraft.scheduler.graph_runners import graph_runners
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.warm_up import warm_up
from pagedraft.tests.model.drafts import save_layers
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.model.words import save_words
from pagedraft.tests.scheduler.runs import (
    mixed_params,
    plain_outputs,
    random_prompts,
    run_preempted,
    run_staggered,
    run_together,
)

LENGTHS = (1, 7, 12, 23, 40)
PROMPTS, PARAMS = random_prompts(97, LENGTHS), mixed_params(len(LENGTHS), 16)
IDS = list(range(1, 97, 2))
RUNS = {"together": run_together, "staggered": run_staggered, "preempted": run_preempted}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """ "target" and, made of its layers, "whole", "cut" (one layer, IDS) and "all layers cut"."""
    root = tmp_path_factory.mktemp("sharing")
    save_tiny(root / "target", "llama", dtype=torch.bfloat16)
    save_layers(root / "whole", root / "target")
    save_layers(root / "cut", root / "target", num_layers=1, ids=IDS)
    save_layers(root / "all layers cut", root / "target", ids=IDS)
    return root


def make(folders: Path, draft: str | None, **options: Any) -> LLM:
    given = {"speculate": "draft" if draft else "off", "k": 3, "block_size": 8, "kv_tokens": 1024}
    return LLM(folders / "target", draft and folders / draft, **(given | options))


def proposed(llm: LLM, monkeypatch) -> list[int]:
    """The tokens that the draft will have proposed."""
    tokens: list[int] = []
    drafter = llm.engine.speculation.drafters["draft"]
    propose = drafter.propose

    def recorded(sequences, num_drafts):
        proposals = propose(sequences, num_drafts)
        tokens.extend(token for proposal in proposals for token in proposal.tokens)
        return proposals

    monkeypatch.setattr(drafter, "propose", recorded)
    return tokens


@pytest.mark.usefixtures("cpu_path")
class TestUnderTheEngine:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("draft", ["whole", "cut", "all layers cut"])
    def test_speculation_cannot_be_seen(self, folders, draft, run, dtype):
        llm = make(folders, draft, dtype=DTYPES[dtype])
        outcome = RUNS[run](llm, PROMPTS, PARAMS)
        assert outcome.token_ids == plain_outputs(llm.target, PROMPTS, PARAMS)
        assert outcome.num_drafted > 0

    @pytest.mark.parametrize("accept", ["match", "rejection", "block"])
    def test_the_targets_own_layers_are_always_accepted(self, folders, accept):
        params = [
            SamplingParams(max_tokens=17, ignore_eos=True, seed=i, accept=accept, temperature=t)
            for i, t in enumerate((0.0, 0.7, 1.0, 1.3, 1.0))
        ]
        outcome = run_together(make(folders, "whole"), PROMPTS, params)
        assert outcome.num_accepted == outcome.num_drafted > 0

    def test_proposals_never_leave_the_cut_vocabulary(self, folders, monkeypatch):
        params = [
            SamplingParams(
                max_tokens=20,
                temperature=temperature,
                seed=seed,
                accept=accept,
                ignore_eos=True,
                logit_bias={0: 50.0, 2: 50.0, 3: 1.0},
                top_p=0.999,
                repetition_penalty=1.2,
            )
            for seed, (temperature, accept) in enumerate(
                [(0.0, "match"), (1.0, "match"), (5.0, "match"), (5.0, "rejection"), (5.0, "block")]
            )
        ]
        llm = make(folders, "cut")
        tokens = proposed(llm, monkeypatch)
        outcome = run_together(llm, PROMPTS, params)
        assert len(set(tokens)) > 10
        assert set(tokens) <= set(IDS)
        assert not {t for tokens in outcome.token_ids for t in tokens} <= set(IDS)

    def test_nothing_is_proposed_where_all_its_tokens_are_banned(self, folders, tmp_path):
        folder = save_layers(tmp_path / "few", folders / "target", ids=[5, 9])
        params = SamplingParams(
            max_tokens=12, temperature=0.0, stop_token_ids=(5, 9), min_tokens=11, ignore_eos=True
        )
        outcome = run_together(make(folders, folder.absolute()), PROMPTS[:2], [params] * 2)
        plain = run_together(make(folders, None), PROMPTS[:2], [params] * 2)
        assert outcome.token_ids == plain.token_ids
        assert outcome.num_drafted <= 2, "no more than the last token of each may be a stop"

    def test_a_draft_that_went_wrong_is_not_seen(self, folders):
        llm = make(folders, "cut")
        llm.engine.speculation.drafters["draft"].model.final_norm_E.fill_(torch.nan)
        outcome = run_together(llm, PROMPTS, PARAMS)
        assert outcome.token_ids == plain_outputs(llm.target, PROMPTS, PARAMS)
        assert outcome.num_drafted == 0

    def test_from_graphs(self, folders):
        def capture(run):
            run()
            return run

        expected = run_staggered(make(folders, "cut", max_rows=4), PROMPTS, PARAMS)
        llm = make(folders, "cut", max_rows=4)
        runners = graph_runners(llm.engine, make_capture=lambda device: capture)
        warm_up(llm.engine, runners=runners)
        llm.engine.launcher.forward = runners[0].forward
        outcome = run_staggered(llm, PROMPTS, PARAMS)
        assert (outcome.token_ids, outcome.num_accepted) == (
            expected.token_ids,
            expected.num_accepted,
        )
        assert runners[1].num_replays > 0

    def test_two_drafts_share_one_embedding(self, folders):
        target = Transformer.from_folder(folders / "target")
        models = [
            LLM(target, folders / "whole", kv_tokens=64).engine.speculation.drafters["draft"].model
            for _ in range(2)
        ]
        assert {m.embed_VE.data_ptr() for m in models} == {target.embed_VE.data_ptr()}
        assert all(m.head is target.head for m in models)

    def test_by_the_async_engine(self, folders):
        async def run() -> list[int]:
            async with AsyncEngine(make(folders, "cut")) as engine:
                [answer] = await engine.generate(PROMPTS[2], PARAMS[0])
                return answer.token_ids

        target = Transformer.from_folder(folders / "target", dtype=torch.bfloat16)
        assert asyncio.run(run()) == plain_outputs(target, PROMPTS[2:3], PARAMS[:1])[0]

    def test_by_the_teaching_function(self, folders):
        prompt = PROMPTS[3]
        found = speculative_decode(prompt, folders / "cut", folders / "target", max_length=40)
        assert found == generate_with_kv_cache(folders / "target", prompt, 40)

    def test_a_draft_is_no_target(self, folders):
        with pytest.raises(ValueError, match="expected a whole model, got a draft"):
            LLM(folders / "whole")


def test_interpreted_kernels(folders):
    """Greedy and sampled rows, a whole draft and one of few tokens."""
    prompts, params = [[5, 9], [7]], mixed_params(2, 4)
    with use_implementation("cpu"):
        expected = run_together(make(folders, None, dtype="fp32"), prompts, params).token_ids
    whole = run_together(make(folders, "whole", dtype="fp32"), prompts, params)
    cut = run_together(make(folders, "all layers cut", dtype="fp32"), prompts, params)
    assert whole.token_ids == cut.token_ids == expected
    assert whole.num_accepted == whole.num_drafted > 0
    assert cut.num_drafted > 0


@pytest.fixture(scope="module")
def worded(tmp_path_factory) -> Path:
    """A target that reads text, and beside it its draft "draft"."""
    root = tmp_path_factory.mktemp("worded")
    tokenizer = save_words(root / "target", "byte-level")
    save_tiny(root / "target", "llama-tied", dtype=torch.bfloat16, vocab_size=len(tokenizer))
    save_layers(root / "draft", root / "target", num_layers=1, ids=list(range(0, 200, 2)))
    return root


@pytest.mark.usefixtures("cpu_path")
class TestNames:
    def test_generate(self, worded, capsys):
        arguments = ["generate", "some text", "--model", str(worded / "target"), "--raw"]
        arguments += ["--max-tokens", "9", "--kv-tokens", "256"]
        assert cli.main([*arguments, "--speculate", "off"]) == 0
        plain = capsys.readouterr().out
        assert cli.main([*arguments, "--draft", str(worded / "draft"), "--weights", "int8"]) == 0
        assert cli.main([*arguments, "--draft", str(worded / "draft")]) == 0
        assert capsys.readouterr().out.endswith(plain)

    def test_estimate(self, worded, tmp_path, capsys):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("some text\nmore text\n")
        arguments = ["estimate", "--model", str(worded / "target"), "--prompts", str(prompts)]
        arguments += ["--draft", str(worded / "draft"), "--draft-weights", "int8", "--check"]
        assert cli.main([*arguments, "--max-tokens", "12", "--k", "2"]) == 0
        assert "draft: alpha" in capsys.readouterr().out

    def test_a_draft_of_another_target(self, folders, worded, capsys):
        arguments = ["generate", "hi", "--model", str(worded / "target")]
        assert cli.main([*arguments, "--draft", str(folders / "cut")]) == 2
        error = capsys.readouterr().err
        assert "was distilled for the target" in error
        assert len(error.splitlines()) == 1

    @pytest.fixture
    def demos(self, worded, monkeypatch) -> Path:
        """Let the demo model and its draft be the tiny ones."""
        monkeypatch.setattr(demo, "demo_folder", lambda progress=None: worded / "target")
        monkeypatch.setattr(demo, "DRAFT_FOLDER", worded / "draft")
        return worded

    def test_the_shipped_draft(self, demos):
        llm = LLM("demo", "demo-draft", kv_tokens=64)
        assert list(llm.engine.speculation.drafters) == ["draft", "suffix"]
        assert llm.engine.speculation.drafters["draft"].model.folder == demos / "draft"

    def test_the_shipped_draft_is_missing(self, demos, monkeypatch):
        monkeypatch.setattr(demo, "DRAFT_FOLDER", demos / "nowhere")
        with pytest.raises(FileNotFoundError, match="demo-draft: this installation .* has no"):
            LLM("demo", "demo-draft", kv_tokens=64)

    @pytest.mark.parametrize(
        ("options", "drafters"),
        [
            ([], ["draft", "suffix"]),
            (["--speculate", "draft+ngram"], ["draft", "ngram"]),
            (["--speculate", "ngram"], ["ngram"]),
            (["--speculate", "off"], []),
        ],
        ids=["auto", "named", "other", "off"],
    )
    def test_what_the_demo_runs(self, demos, monkeypatch, options, drafters):
        assert self.demo_drafters(monkeypatch, options) == drafters

    def test_the_demo_without_a_draft(self, demos, monkeypatch):
        monkeypatch.setattr(demo, "DRAFT_FOLDER", demos / "nowhere")
        assert self.demo_drafters(monkeypatch, []) == ["suffix"]

    def test_the_demo_with_a_draft_that_does_not_fit(self, demos, folders, monkeypatch, capsys):
        monkeypatch.setattr(demo, "DRAFT_FOLDER", folders / "cut")
        assert self.demo_drafters(monkeypatch, []) == ["suffix"]
        assert "another conversion of the demo model: left out" in capsys.readouterr().out

    def demo_drafters(self, monkeypatch, options: list[str]) -> list[str]:
        seen: list[LLM] = []
        monkeypatch.setattr(cli, "run_demo", lambda llm, max_tokens: seen.append(llm) or 0)
        assert cli.main(["demo", "--kv-tokens", "256", *options]) == 0
        return list(seen[0].engine.speculation.drafters)
