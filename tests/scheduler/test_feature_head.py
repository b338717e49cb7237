"""Feature heads under the engine: what they draft is their definition, and nobody sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedraft.decoding.drafters.feature_head import FeatureHeadDrafter
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.single import generate_with_kv_cache, speculative_decode
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.feature_graphs import FeatureHeadRunner
from pagedraft.model.kv_cache import kv_bytes_per_token
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler import cli, memory
from pagedraft.scheduler.async_engine import AsyncEngine
from pagedraft.scheduler.graph_runners import graph_runners
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.warm_up import warm_up
from pagedraft.tests.model.feature_heads import Definition, head_tensors, save_head
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.model.words import save_words
from pagedraft.tests.scheduler.runs import (
    GREEDY,
    mixed_params,
    plain_outputs,
    random_prompts,
    run_alone,
    run_preempted,
    run_staggered,
    run_together,
)

LENGTHS = (1, 7, 12, 23, 40)
PROMPTS, PARAMS = random_prompts(97, LENGTHS), mixed_params(len(LENGTHS), 16)
LONG = [replace(GREEDY, max_tokens=24)] * len(LENGTHS)
RUNS = {"together": run_together, "staggered": run_staggered, "preempted": run_preempted}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """ "target" of 2 layers with "head" and "cut"; "small" of one, whose "same" is itself."""
    root = tmp_path_factory.mktemp("heads")
    save_tiny(root / "target", "llama", dtype=torch.bfloat16)
    save_head(root / "head", root / "target")
    save_head(root / "cut", root / "target", ids=range(1, 97, 2))
    save_tiny(root / "small", "llama", dtype=torch.bfloat16, num_hidden_layers=1)
    save_head(root / "same", root / "small", states=0.0)
    return root


def make(folders: Path, draft: str | None = "head", target: str = "target", **options: Any) -> LLM:
    given = {"speculate": "draft" if draft else "off", "k": 3, "block_size": 8, "kv_tokens": 1024}
    return LLM(folders / target, draft and folders / draft, **(given | options))


@pytest.fixture(scope="module")
def definition(folders) -> Definition:
    tensors = head_tensors(folders / "target", 0, 0.5, 1.0)
    return Definition("llama", folders / "target", tensors)


class Checked:
    """Holds greedy proposals against the definition's; another one turns the drafter off.

    missing: of each proposal, how many tokens the head had yet to read.
    """

    def __init__(self, llm: LLM, definition: Definition) -> None:
        self.drafter = llm.engine.speculation.drafters["draft"]
        assert isinstance(self.drafter, FeatureHeadDrafter)
        self.propose, self.definition = self.drafter.propose, definition
        self.drafter.propose = self.checked  # type: ignore[method-assign]
        self.missing: list[int] = []

    def checked(self, sequences, num_drafts):
        self.missing += [s.num_tokens - s.num_draft_written for s in sequences]
        proposals = self.propose(sequences, num_drafts)
        for sequence, proposal in zip(sequences, proposals, strict=True):
            expected = self.definition.draft(sequence.token_ids, len(proposal.tokens))
            assert proposal.tokens == expected
            assert sequence.num_draft_written <= sequence.num_tokens
        return proposals


def forks(llm: LLM) -> None:
    llm.generate(PROMPTS[:4], [replace(LONG[0], n=n) for n in (3, 2, 2, 3)])


def prefix_hits(llm: LLM) -> None:
    for _ in range(2):
        run_alone(llm, PROMPTS, LONG)
    assert llm.engine.prefixes.num_hit_tokens > 0


def prefix_hits_of_others(llm: LLM) -> None:
    """Whose blocks have no KV of the head."""
    run_alone(llm, PROMPTS, [replace(row, speculate=False) for row in LONG])
    run_alone(llm, PROMPTS, LONG)
    assert llm.engine.prefixes.num_hit_tokens > 0


def swapped(llm: LLM) -> None:
    llm.engine.prefixes.swap.policy.forced = True
    run_preempted(llm, PROMPTS, LONG)
    assert llm.engine.prefixes.swap.stats.num_swapped_in > 0


# name: (options of the LLM, what runs)
WAYS: dict[str, tuple[dict[str, Any], Callable[[LLM], Any]]] = {
    "alone": ({}, lambda llm: run_alone(llm, PROMPTS, LONG)),
    "together": ({}, lambda llm: run_together(llm, PROMPTS, LONG)),
    "staggered, in chunks": ({"chunk_tokens": 5}, lambda llm: run_staggered(llm, PROMPTS, LONG)),
    "one draft": ({"k": 1}, lambda llm: run_together(llm, PROMPTS, LONG)),
    "many drafts": ({"k": 7}, lambda llm: run_together(llm, PROMPTS, LONG)),
    "preempted": ({"prefix_cache": False}, lambda llm: run_preempted(llm, PROMPTS, LONG)),
    "small pool": ({"kv_tokens": 128}, lambda llm: run_together(llm, PROMPTS, LONG)),
    "swapped": ({"prefix_cache": False, "swap_bytes": 2**24}, swapped),
    "forks": ({}, forks),
    "prefix hits": ({}, prefix_hits),
    "prefix hits of others": ({}, prefix_hits_of_others),
}


@pytest.mark.usefixtures("cpu_path")
class TestDrafts:
    @pytest.mark.parametrize("name", WAYS)
    def test_they_are_the_definitions(self, folders, definition, name):
        options, run = WAYS[name]
        llm = make(folders, dtype="fp32", **options)
        checked = Checked(llm, definition)
        run(llm)
        assert llm.engine.speculation.num_errors == 0
        assert {1, 2} <= set(checked.missing), "after no accepted draft and after one"
        llm.engine.check_integrity()

    def test_a_wrong_state_is_noticed(self, folders, definition):
        """Teeth: the states are those of other positions."""
        llm = make(folders, dtype="fp32")
        Checked(llm, definition)
        states = llm.engine.cache.features_NBE
        forward = llm.target.forward

        def shifted(batch, cache):
            logits_QV = forward(batch, cache)
            states.copy_(states.roll(1, dims=1))
            return logits_QV

        llm.engine.launcher.forward = shifted
        [answer] = llm.generate([PROMPTS[3]], LONG[0])
        assert answer.stats.drafter_errors
        assert "AssertionError" in answer.stats.drafter_errors[0]

    def test_a_context_is_read_within_the_budget(self, folders, definition):
        llm = make(folders, dtype="fp32")
        checked = Checked(llm, definition)
        checked.drafter.catch_up_tokens = 7
        [answer] = llm.generate([PROMPTS[4]], LONG[0])
        assert checked.missing[:7] == [41, 35, 29, 23, 17, 11, 5]
        assert sum(answer.stats.drafted) > 0
        assert not answer.stats.drafter_errors


@pytest.mark.usefixtures("cpu_path")
class TestUnderTheEngine:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("draft", ["head", "cut"])
    def test_speculation_cannot_be_seen(self, folders, draft, run, dtype):
        llm = make(folders, draft, dtype=DTYPES[dtype])
        outcome = RUNS[run](llm, PROMPTS, PARAMS)
        assert outcome.token_ids == plain_outputs(llm.target, PROMPTS, PARAMS)
        assert outcome.num_drafted > 0

    @pytest.mark.parametrize("accept", ["match", "rejection", "block"])
    @pytest.mark.parametrize("run", RUNS)
    def test_a_head_that_is_the_target_is_always_accepted(self, folders, run, accept):
        params = [
            SamplingParams(max_tokens=17, ignore_eos=True, seed=i, accept=accept, temperature=t)
            for i, t in enumerate((0.0, 0.7, 1.0, 1.3, 1.0))
        ]
        outcome = RUNS[run](make(folders, "same", "small"), PROMPTS, params)
        assert outcome.num_accepted == outcome.num_drafted > 0

    def test_a_head_that_went_wrong_is_not_seen(self, folders):
        llm = make(folders)
        llm.engine.speculation.drafters["draft"].model.final_norm_E.fill_(torch.nan)
        outcome = run_together(llm, PROMPTS, PARAMS)
        assert outcome.token_ids == plain_outputs(llm.target, PROMPTS, PARAMS)
        assert outcome.num_drafted == 0

    def test_from_graphs(self, folders):
        def capture(run):
            run()
            return run

        expected = run_staggered(make(folders, max_rows=4), PROMPTS, PARAMS)
        llm = make(folders, max_rows=4)
        runners = graph_runners(llm.engine, make_capture=lambda device: capture)
        warm_up(llm.engine, runners=runners)
        llm.engine.launcher.forward = runners[0].forward
        outcome = run_staggered(llm, PROMPTS, PARAMS)
        assert (outcome.token_ids, outcome.num_drafted, outcome.num_accepted) == (
            *(expected.token_ids, expected.num_drafted),
            expected.num_accepted,
        )
        assert isinstance(runners[1], FeatureHeadRunner)
        assert runners[0].num_replays > 0
        assert runners[1].num_replays > 10 * runners[1].num_eager, "accepted drafts fit, too"

    def test_warm_up_changes_no_block(self, folders):
        llm = make(folders)
        tensors = [tensor for cache in llm.engine.caches for tensor in cache.tensors]
        for tensor in tensors:
            tensor.fill_(0.5)
        assert llm.engine.warm_up().num_steps > 0
        assert all(bool((tensor[1:] == 0.5).all()) for tensor in tensors)

    def test_a_wide_choice(self, folders):
        """The controller weighs it against a lookup, by what steps take."""
        llm = make(folders, speculate="auto", k="auto")
        outcome = run_together(llm, PROMPTS, PARAMS)
        assert outcome.token_ids == plain_outputs(llm.target, PROMPTS, PARAMS)
        assert list(llm.engine.speculation.drafters) == ["draft", "suffix"]

    def test_by_the_async_engine(self, folders):
        async def run() -> list[int]:
            async with AsyncEngine(make(folders)) as engine:
                [answer] = await engine.generate(PROMPTS[2], PARAMS[0])
                return answer.token_ids

        target = make(folders, None).target
        assert asyncio.run(run()) == plain_outputs(target, PROMPTS[2:3], PARAMS[:1])[0]

    @pytest.mark.parametrize("length", [1, 23])
    def test_by_the_teaching_function(self, folders, length):
        prompt = PROMPTS[LENGTHS.index(length)]
        found = speculative_decode(prompt, folders / "head", folders / "target", max_length=40)
        assert found == generate_with_kv_cache(folders / "target", prompt, 40)

    def test_quantised_kv(self, folders):
        plain = run_together(make(folders, None, kv_dtype="int8"), PROMPTS, PARAMS)
        llm = make(folders, kv_dtype="int8")
        assert llm.engine.cache.features_NBE.dtype == torch.float32
        assert run_together(llm, PROMPTS, PARAMS).token_ids == plain.token_ids


@pytest.mark.usefixtures("cpu_path")
def test_memory_is_shared_by_kv_and_states(folders, monkeypatch):
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 4 * 2**20)
    llm = make(folders, kv_tokens=None)
    target, head = llm.target, llm.engine.speculation.drafters["draft"].model
    per_token = kv_bytes_per_token(target.config, torch.float32, torch.float32)
    per_token += kv_bytes_per_token(head.config, torch.float32)
    assert llm.engine.pool.num_usable == -(-(2**20 // per_token) // 8)
    assert make(folders, None).engine.cache.features_NBE is None


@pytest.mark.usefixtures("cpu_path")
def test_by_its_folder_on_the_command_line(tmp_path, capsys):
    """Generate as without it, and an estimate that holds what the engine then does."""
    tokenizer = save_words(tmp_path / "target", "byte-level")
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1}
    save_tiny(tmp_path / "target", "llama-tied", dtype=torch.bfloat16, **sizes)
    head = str(save_head(tmp_path / "head", tmp_path / "target", states=0.04, ids=range(0, 200, 2)))
    arguments = ["generate", "some text", "--model", str(tmp_path / "target"), "--raw"]
    arguments += ["--max-tokens", "9", "--kv-tokens", "256"]
    assert cli.main([*arguments, "--speculate", "off"]) == 0
    plain = capsys.readouterr().out
    assert cli.main([*arguments, "--draft", head, "--weights", "int8"]) == 0
    assert cli.main([*arguments, "--draft", head]) == 0
    assert capsys.readouterr().out.endswith(plain)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("some text\nmore text\n")
    arguments = ["estimate", "--model", str(tmp_path / "target"), "--prompts", str(prompts)]
    arguments += ["--draft", head, "--draft-weights", "int8", "--check"]
    assert cli.main([*arguments, "--max-tokens", "12", "--k", "2"]) == 0
    assert "draft: alpha" in capsys.readouterr().out


def test_interpreted_kernels(folders):
    """Greedy and sampled rows."""
    prompts, params = [[5, 9], [7]], mixed_params(2, 4)
    with use_implementation("cpu"):
        expected = run_together(make(folders, None, dtype="fp32"), prompts, params).token_ids
    outcome = run_together(make(folders, dtype="fp32"), prompts, params)
    assert outcome.token_ids == expected
    assert outcome.num_drafted > 0


@pytest.mark.usefixtures("cpu_path")
def test_a_pool_without_states_is_refused(folders):
    llm = make(folders)
    drafter = llm.engine.speculation.drafters["draft"]
    llm.engine.cache.features_NBE = None
    with pytest.raises(ValueError, match="the target's pool keeps none"):
        FeatureHeadDrafter(drafter.model, drafter.cache, llm.engine.cache, target_vocab_size=97)


@pytest.mark.usefixtures("cpu_path")
def test_a_head_of_another_width_is_refused(folders, tmp_path):
    save_tiny(tmp_path / "wide", "llama", hidden_size=160)
    target = Transformer.from_folder(tmp_path / "wide")
    head = make(folders).engine.speculation.drafters["draft"].model
    with pytest.raises(ValueError, match="reads states of 80 numbers, the target's have 160"):
        LLM(target, head, speculate="draft", kv_tokens=64)
