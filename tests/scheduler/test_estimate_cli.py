"""``pagedraft estimate``: its predictions beside the engine, its output, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from pagedraft.decoding.estimate import Estimate, Row, estimate
from pagedraft.decoding.estimate_costs import Costs
from pagedraft.decoding.estimate_text import Text
from pagedraft.decoding.params import MODEL_DEFAULTS, SamplingParams, logit_rules
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.cli import main
from pagedraft.scheduler.estimate_check import Measured, measure
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.feature_heads import save_head
from pagedraft.tests.model.tiny import save_tiny, tiny_model
from pagedraft.tests.scheduler.runs import random_prompts

pytestmark = pytest.mark.usefixtures("cpu_path")
LENGTHS = (6, 11, 17)
STOP_IDS = (11, 12, 13)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_tiny(path, "llama")
    return path


@pytest.fixture(scope="module")
def near(tmp_path_factory) -> Path:
    """A draft whose weights are the target's with noise: right about half of the time."""
    path = tmp_path_factory.mktemp("near")
    model, noise = tiny_model("llama"), tiny_model("llama", seed=1)
    for mine, other in zip(model.parameters(), noise.parameters(), strict=True):
        mine.data.lerp_(other.data, 0.15)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(folder, near) -> tuple[Transformer, Transformer]:
    with use_implementation("cpu"):
        return Transformer.from_folder(folder), Transformer.from_folder(near)


def written(target: Transformer, temperature: float) -> list[Text]:
    """What the target writes after a few prompts; some end with a stop."""
    prompts = random_prompts(97, LENGTHS)
    rows = [
        SamplingParams(
            max_tokens=40,
            temperature=temperature,
            seed=seed,
            repetition_penalty=1.1,
            stop_token_ids=STOP_IDS,
        )
        for seed in range(len(prompts))
    ]
    answers = LLM(target, speculate="off", kv_tokens=512).generate(prompts, rows)
    return [
        Text(
            tuple(prompt),
            tuple(answer.token_ids),
            40,
            temperature,
            seed,
            logit_rules(row, MODEL_DEFAULTS, STOP_IDS),
        )
        for seed, (prompt, row, answer) in enumerate(zip(prompts, rows, answers, strict=True))
    ]


def with_best(k: int, monkeypatch) -> None:
    """Costs that make ``k`` the best: more drafts cost far more than they bring."""
    steps = (1.0,) * (k + 1) + (100.0,) * (8 - k)
    costs = Costs(8, steps, (0.0,) * 9)
    monkeypatch.setattr("pagedraft.decoding.estimate.measure_costs", lambda *a, **kw: costs)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["draft", "ngram", "suffix", "layers"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_predicted_passes_are_those_of_the_engine(models, monkeypatch, temperature, drafter, k):
    """Exactly, also where a text ends with a stop or k is cut because few tokens are left."""
    target, near = models
    texts = written(target, temperature)
    draft = near if drafter == "draft" else None
    with_best(k, monkeypatch)
    found = estimate(target, texts, draft=draft, drafter=drafter)
    rows = [row for row in found.rows if (row.rule, row.k) == ("match", k)]
    only = Estimate(**{**vars(found), "rows": tuple(rows)})
    measured = measure(target, draft, texts, only)
    assert (measured.k, measured.num_tokens) == (k, found.num_tokens)
    assert measured.num_passes == rows[0].num_passes


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_predicted_passes_of_a_feature_head(monkeypatch, temperature, k, tmp_path):
    """Whose drafts are right more often at the first place of a pass than at later ones."""
    save_tiny(tmp_path / "target", "llama", num_hidden_layers=1, eos_token_id=STOP_IDS[0])
    target = Transformer.from_folder(tmp_path / "target")
    head = load_draft(save_head(tmp_path / "head", tmp_path / "target", states=0.04), target)
    texts = written(target, temperature)
    with_best(k, monkeypatch)
    found = estimate(target, texts, draft=head)
    rows = [row for row in found.rows if (row.rule, row.k) == ("match", k)]
    measured = measure(target, head, texts, Estimate(**{**vars(found), "rows": tuple(rows)}))
    assert (measured.k, measured.num_tokens) == (k, found.num_tokens)
    assert measured.num_passes == rows[0].num_passes
    assert 0.2 < found.equal < 0.9


def test_half_right_drafts_are_among_them(models, monkeypatch):
    """Teeth: the comparison above means little where all drafts are right or all are wrong."""
    with_best(3, monkeypatch)
    texts = written(models[0], 0.9)
    found = estimate(models[0], texts, draft=models[1])
    assert 0.2 < found.equal < 0.9
    assert len({len(text.output_ids) for text in texts}) > 1  # a stop ended one of them


def test_the_mean_of_rejection_is_that_of_the_engine(models, monkeypatch):
    """Over many texts: the engine's own tokens a pass under the rejection rule."""
    target, near = models
    with_best(3, monkeypatch)
    prompts, count = random_prompts(97, LENGTHS), 40
    base = {"max_tokens": 25, "temperature": 0.9, "ignore_eos": True}
    rows = [SamplingParams(seed=seed, **base) for seed in range(count)]
    many = [prompts[seed % 3] for seed in range(count)]
    answers = LLM(target, speculate="off", kv_tokens=2048).generate(many, rows)
    texts = [
        Text(tuple(prompt), tuple(answer.token_ids), 25, 0.9, seed)
        for seed, (prompt, answer) in enumerate(zip(many, answers, strict=True))
    ]
    expected = estimate(target, texts, draft=near).of_rule("rejection")[2]
    rows = [SamplingParams(seed=seed, accept="rejection", **base) for seed in range(count)]
    llm = LLM(target, near, speculate="draft", k=3, kv_tokens=2048)
    passes = torch.tensor(
        [answer.stats.num_passes - 1 for answer in llm.generate(many, rows)], dtype=torch.float64
    )
    error = (2 * passes.var() * count).sqrt().item()  # of both sums
    assert passes.sum().item() == pytest.approx(expected.num_passes, abs=3 * error)
    assert error < 0.05 * expected.num_passes


def run(folder: Path, *arguments: str) -> int:
    base = ["estimate", "--model", str(folder), "--device", "cpu", "--dtype", "fp32"]
    return main([*base, "--max-tokens", "6", *arguments])


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": ids}) for ids in random_prompts(97, LENGTHS)]
    path.write_text("\n".join(lines))
    return str(path)


def test_the_command_judges_a_draft(folder, near, prompts, tmp_path, capsys):
    path = tmp_path / "out.json"
    options = ["--draft", str(near), "--temperature", "0.8", "--k", "2", "--json", str(path)]
    assert run(folder, "--prompts", prompts, *options, "--check") == 0
    output = capsys.readouterr().out
    assert "3 prompts of 34 tokens in all, answered with" in output
    assert "draft: alpha 0." in output
    assert "rejection rule, one request at " in output
    assert "tokens/pass; expected " in output
    assert "verdict: " in output
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (document["draft"], document["num_prompts"]) == (str(near), 3)
    [found] = document["drafters"]
    assert found["drafter"] == "draft"
    assert [(row["rule"], row["k"]) for row in found["rows"]] == [
        ("match", 1),
        ("match", 2),
        ("rejection", 1),
        ("rejection", 2),
    ]
    assert found["measured"]["k"] in (1, 2)
    assert len(found["costs"]["step_seconds"]) == 3
    assert document["verdict"] == found["verdict"]["match"]


def test_without_a_draft_it_judges_what_needs_none(folder, prompts, capsys):
    assert run(folder, "--prompts", prompts, "--k", "1") == 0
    output = capsys.readouterr().out
    assert "ngram: first draft right at" in output
    assert "suffix: first draft right at" in output
    assert "layers: alpha" in output
    assert output.count("verdict: ") == 1


def test_a_draft_like_its_target_is_advised_against(folder, prompts, capsys, monkeypatch):
    """It drafts as slowly as the target decodes: right drafts cannot pay for it."""
    costs = Costs(8, (1.0, 1.1, 1.2), (0.0, 1.0, 2.0))
    monkeypatch.setattr("pagedraft.decoding.estimate.measure_costs", lambda *a, **kw: costs)
    assert run(folder, "--prompts", prompts, "--draft", str(folder), "--k", "2") == 0
    assert "verdict: don't: at best 0.9" in capsys.readouterr().out


def test_measured_is_said_beside_expected():
    expected = Row("match", 1, 2.0, 1.0, 15.0, 0.05, 2.0, (2.0,))
    assert Measured(1, 30, 20, 2.0, 3.0).line(expected) == (
        "measured at k=1: 1.50x, 1.50 tokens/pass; expected 2.00x (+33%), 2.00 tokens/pass"
    )


def test_another_text_than_the_estimate_s_is_an_error(models, monkeypatch):
    with_best(1, monkeypatch)
    text = Text((3, 4), (5, 6, 7), 3)
    found = estimate(models[0], [text], draft=models[0])
    with pytest.raises(RuntimeError, match="the engine's output differs"):
        measure(models[0], models[0], [text], found)


BAD = {
    "no tokenizer": ([], "demo prompt 1: --model: .* has no tokenizer; give token ids"),
    "no file": (["--prompts", "/no/such"], "/no/such"),
    "a name": (["--drafter", "orakel"], "--drafter: expected some of"),
    "no draft": (["--drafter", "draft"], '--drafter: "draft" needs --draft'),
    "a folder": (["--json", "/no/such/file"], "--json: /no/such/file: no such folder"),
    "no drafts": (["--k", "0"], "--k: expected an integer >= 1, got 0"),
    "temperature": (["--temperature", "-1"], "temperature: expected from 0 to"),
    "weights": (["--draft-weights", "int8"], "--draft-weights: there is no --draft"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(folder, prompts, capsys, name):
    arguments, message = BAD[name]
    options = [] if name in ("no tokenizer", "no file") else ["--prompts", prompts]
    assert run(folder, *options, *arguments) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(message, error)


BAD_PROMPTS = {
    "too long": ([5] * 128, "prompts.jsonl:1: prompt: 128 tokens leave no room to generate"),
    "unknown": ([97], "prompts.jsonl:1: prompt[0]: expected a token id from 0 to 96, got 97"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_named_by_line(folder, tmp_path, capsys, name):
    ids, message = BAD_PROMPTS[name]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": ids}))
    assert run(folder, "--prompts", str(path)) == 2
    assert message in capsys.readouterr().err


def test_a_draft_of_another_tokenizer_is_refused(folder, prompts, tmp_path, capsys):
    save_tiny(tmp_path / "draft", "llama", vocab_size=2000)
    assert run(folder, "--prompts", prompts, "--draft", str(tmp_path / "draft")) == 2
    assert "its vocabulary of 2000 tokens does not agree" in capsys.readouterr().err
