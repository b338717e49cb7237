"""Replays: what was traced runs again the same way, and the first thing that differs is named."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from dataclasses import replace as with_fields
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler import llm as llm_module
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.replay import replay
from pagedraft.scheduler.swap_policy import Decision, SwapPolicy
from pagedraft.scheduler.trace import Trace
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler import fuzz_run
from pagedraft.tests.scheduler.fuzz_cases import Case, cases
from pagedraft.tests.scheduler.fuzz_models import load, tokenizer
from pagedraft.tests.scheduler.traced import edited, random_run, traced_llm

pytestmark = pytest.mark.usefixtures("cpu_path")
PROMPT = [5, 9, 33, 7, 41, 5, 9, 33]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_runs_are_replayed(target, tmp_path, seed, overlap):
    path = tmp_path / "trace.json"
    llm = traced_llm(tmp_path / "unused.json", target)
    llm.engine.observers.clear()
    llm.engine.overlap = overlap
    with Trace(path).begin(llm.engine, {"prefix_cache": True}):
        requests = random_run(llm, seed)
    report = replay(path, traced_llm(tmp_path / "other.json", target))
    num_tokens = sum(request.num_output for request in requests)
    assert report.is_identical, report.lines()
    assert (report.num_tokens, report.num_requests) == (num_tokens, len(requests))


def test_a_replay_is_traced_the_same_way(target, tmp_path):
    """What is written of a replay is replayed, too."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    llm = traced_llm(first, target)
    random_run(llm, seed=7)
    llm.trace.close()
    again = traced_llm(second, target)
    assert replay(first, again).is_identical
    again.trace.close()
    assert replay(second, traced_llm(tmp_path / "third.json", target)).is_identical


def without_processors(case: Case) -> Case:
    rows = (
        with_fields(row, options={k: v for k, v in row.options.items() if k != "processors"})
        for row in case.rows
    )
    return with_fields(case, rows=tuple(rows))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases().map(without_processors))
def test_cases_of_the_fuzzer_are_replayed(tmp_path_factory, case):
    """Drafters of all kinds, models of all families, all sampling parameters."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    start, options, traces = fuzz_run._start, {}, []

    def make(*args, **given) -> LLM:
        options.update(given, drafter=None)
        return LLM(*args, **given)

    def traced_start(*args) -> fuzz_run.Run:
        run = start(*args)
        traces.append(Trace(path).begin(run.llm.engine, options))
        return run

    with (
        patch.object(fuzz_run, "LLM", make),
        patch.object(fuzz_run, "_start", traced_start),
        patch.object(fuzz_run, "assert_as_plain", lambda *args: None),
        patch.object(llm_module, "load_tokenizer", lambda target: tokenizer()),
    ):
        fuzz_run.run_case(case, torch.float32, {})
        traces[0].close()
        report = replay(path, model=load(case.model, torch.float32))
    assert report.is_identical, report.lines()
    shutil.rmtree(path.parent)


@pytest.fixture(scope="module")
def recorded(target, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with use_implementation("cpu"):
        llm = traced_llm(path, target)
        random_run(llm, seed=2)
    llm.trace.close()
    return path


def change_draft(args: dict) -> bool:
    row = next((r for r in args["rows"] if len(r.get("tokens", ())) > 1), None)
    if row is not None:  # an accepted draft
        row["drafts"][0] = (row["drafts"][0] + 1) % 97
    return row is not None


def change_token(args: dict) -> bool:
    row = next((r for r in args["rows"] if "tokens" in r), None)
    if row is not None:
        row["tokens"][-1] = (row["tokens"][-1] + 1) % 97
    return row is not None


def change_span(args: dict) -> bool:
    args["rows"][0]["span"] += 1
    return args["step"] == 4


def change_end(args: dict) -> bool:
    row = next((r for r in args["rows"] if r.get("end") == "length"), None)
    if row is not None:
        row["end"] = "stop"
    return row is not None


def set_budget(args: dict) -> bool:
    args["prompt_budget"] = 3
    return args["step"] == 0


def drop_admission(args: dict) -> bool:
    admitted, args["admitted"] = args["admitted"], []
    return bool(admitted)


def lose_block(args: dict) -> bool:
    args["free"] -= 1
    return args["step"] == 2


def drop_row(args: dict) -> bool:
    del args["rows"][-1]
    return True


def change_request(args: dict) -> bool:
    args["request"] = (args["request"] + 1) % 6
    return True


# name -> event, change, what the report says of schedule and tokens
TEETH = {
    "a draft": ("step", change_draft, "schedule: identical until there", "output position"),
    "a token": ("step", change_token, "schedule: identical until there", "output position"),
    "an end": ("step", change_end, "schedule: identical", "its end: recorded stop, got length"),
    "a span": ("step", change_span, "span: recorded", "tokens: identical until there"),
    "a budget": ("step", set_budget, "recorded", "tokens: identical until there"),
    "an admission": ("step", drop_admission, "admitted: recorded nobody, got 'request-", "until"),
    "a block": ("step", lose_block, "step 2: blocks that are free or evictable, after", "until"),
    "a row": ("step", drop_row, "rows: recorded 'request-", "until"),
    "an abort": ("abort", change_request, "differs", "until"),
    "a seed": ("submit", lambda args: args.update(seed="3", temperature=2.0) is None, "until", ""),
    "a prompt": ("submit", lambda args: args["prompt"].append(4) is None, "span", "until"),
}


@pytest.mark.parametrize("name", TEETH)
def test_what_was_changed_in_a_trace_is_found(target, recorded, tmp_path, name):
    kind, change, schedule, tokens = TEETH[name]
    path = tmp_path / "trace.json"
    shutil.copy(recorded, path)
    edited(path, kind, change)
    report = replay(path, traced_llm(tmp_path / "other.json", target))
    assert not report.is_identical
    assert schedule in report.lines()[-2]
    assert tokens in report.lines()[-1]
    assert "step " in report.lines()[-2] + report.lines()[-1]


def test_an_engine_that_plans_otherwise_is_found(target, recorded, tmp_path, monkeypatch):
    llm = traced_llm(tmp_path / "other.json", target)
    monkeypatch.setattr(llm.engine.prefixes, "is_ready", lambda request: False)
    report = replay(recorded, llm)
    assert report.schedule is not None
    assert report.schedule.startswith("step 0: ")


def test_a_trace_that_is_cut_off_is_replayed_as_far_as_it_goes(target, recorded, tmp_path):
    path = tmp_path / "trace.json"
    data = recorded.read_bytes()
    whole = replay(recorded, traced_llm(tmp_path / "other.json", target))
    path.write_bytes(data[: len(data) // 2])
    report = replay(path, traced_llm(tmp_path / "other.json", target))
    assert report.is_identical, report.lines()
    assert 0 < report.num_steps < whole.num_steps
    assert "no end" in report.lines()[0]
    assert whole.notes == []


@pytest.mark.parametrize("part", [0.93, 0.95, 0.97, 0.99])
def test_any_end_is_one(target, recorded, tmp_path, part):
    path = tmp_path / "trace.json"
    data = recorded.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    assert replay(path, traced_llm(tmp_path / "other.json", target)).is_identical


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "error", [MemoryError("no room"), ArithmeticError("bad luck")], ids=["memory", "other"]
)
def test_steps_that_failed_fail_again(target, tmp_path, monkeypatch, overlap, error):
    path = tmp_path / "trace.json"
    llm = traced_llm(tmp_path / "unused.json", target)
    llm.engine.observers.clear()
    llm.engine.overlap = overlap
    forward, calls = target.forward, []

    def failing(*args, **options) -> torch.Tensor:
        calls.append(0)
        if len(calls) in (2, 3, 6):
            raise error
        return forward(*args, **options)

    monkeypatch.setattr(target, "forward", failing)
    with Trace(path).begin(llm.engine, {}):
        params = SamplingParams(max_tokens=6, temperature=0.0)
        for number in range(4):
            llm.submit([*PROMPT, number], params)
        while llm.engine.has_work:
            with suppress(ArithmeticError):
                llm.engine.step()
    monkeypatch.undo()
    assert path.read_text().count('"name":"fail"') == 3
    report = replay(path, traced_llm(tmp_path / "other.json", target))
    assert report.is_identical, report.lines()


class Moody(SwapPolicy):
    """Decides by whim, as a clock would."""

    choose = random.Random(6)

    def decide(self, num_blocks: int, num_tokens: int) -> Decision:
        return Decision(self.choose.random() < 0.7, 0.0, 0.0, "a whim")

    decide_back = decide


@pytest.mark.parametrize("overlap", [False, True])
def test_swapped_runs_are_replayed(target, tmp_path, overlap):
    """In a small pool, with room on the host for few: decisions and evictions come again."""
    path = tmp_path / "trace.json"
    options = {"kv_tokens": 64, "swap_bytes": 20_000}
    llm = traced_llm(tmp_path / "unused.json", target, **options)
    llm.engine.observers.clear()
    llm.engine.overlap = overlap
    llm.engine.prefixes.swap.policy = Moody()
    with Trace(path).begin(llm.engine, {}):
        for seed in range(3):
            random_run(llm, seed)
    stats = llm.engine.prefixes.swap.stats
    assert min(stats.num_swapped_in, stats.num_recomputed, stats.num_evicted) > 0, stats
    report = replay(path, traced_llm(tmp_path / "other.json", target, **options))
    assert report.is_identical, report.lines()
    without = {**options, "swap_bytes": 0}
    with pytest.raises(ValueError, match="swap_bytes: expected some as recorded, got none"):
        replay(path, traced_llm(tmp_path / "other.json", target, **without))


def test_distributions_of_drafts_are_in_the_trace(tmp_path, target):
    """The rejection rule reads them, and here they are not one token's."""
    folder = tmp_path / "draft"
    save_tiny(folder, "llama", seed=5, num_hidden_layers=1)
    path = tmp_path / "trace.json"
    llm = traced_llm(path, target, draft=folder, speculate="draft")
    rows = [
        SamplingParams(max_tokens=12, temperature=1.3, seed=s, accept=accept, ignore_eos=True)
        for s in range(3)
        for accept in ("rejection", "block")
    ]
    completions = llm.generate([PROMPT] * len(rows), rows)
    llm.trace.close()
    assert sum(sum(c.stats.accepted) for c in completions) > 0
    assert '"q":{"shape":[3,97],' in path.read_text()
    report = replay(path, traced_llm(tmp_path / "other.json", target))
    assert report.is_identical, report.lines()


def test_logits_processors_are_refused(target, tmp_path):
    path = tmp_path / "trace.json"
    llm = traced_llm(path, target)
    params = SamplingParams(max_tokens=2, logits_processors=(lambda ids, logits_V: logits_V,))
    llm.generate([PROMPT], params)
    llm.trace.close()
    with pytest.raises(ValueError, match="request 'request-0' has logits processors"):
        replay(path, traced_llm(tmp_path / "other.json", target))


def test_a_trace_that_begins_late_is_refused(target, tmp_path):
    path = tmp_path / "trace.json"
    llm = traced_llm(tmp_path / "other.json", target)
    llm.generate([PROMPT], SamplingParams(max_tokens=2))
    Trace(path).begin(llm.engine, {}).close()
    with pytest.raises(ValueError, match="the engine had run before"):
        replay(path, target)


def test_an_llm_that_has_run_is_refused(target, recorded, tmp_path):
    llm = traced_llm(tmp_path / "other.json", target)
    llm.generate([PROMPT], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="expected one on which nothing has run"):
        replay(recorded, llm)


def test_an_llm_decides_for_itself_after_a_replay(target, recorded, tmp_path):
    """One that was stopped by a difference, too."""
    params = SamplingParams(max_tokens=12, temperature=0.0)
    [plain] = traced_llm(tmp_path / "other.json", target).generate([PROMPT * 2], params)
    path = tmp_path / "trace.json"
    shutil.copy(recorded, path)
    edited(path, "step", set_budget)
    for trace in (recorded, path):
        llm = traced_llm(tmp_path / "other.json", target, swap_bytes=0)
        own = llm.engine.speculation, llm.engine.pace, llm.engine.overlap
        assert replay(trace, llm).is_identical == (trace is recorded)
        assert (llm.engine.speculation, llm.engine.pace, llm.engine.overlap) == own
        [again] = llm.generate([PROMPT * 2], params)
        assert again.token_ids == plain.token_ids
        assert again.stats.drafted == plain.stats.drafted != []


def test_a_model_in_memory_is_recorded_as_it_was_loaded(target, recorded):
    """Made from a loaded Transformer, without a word of its dtype: its folder is enough."""
    with use_implementation("cpu"):
        assert replay(recorded).is_identical


def test_a_model_in_memory_must_be_named(recorded, monkeypatch, target):
    edit = recorded.parent / "nameless.json"
    shutil.copy(recorded, edit)
    edited(edit, "settings", lambda args: args["options"].update(model=None) is None)
    with pytest.raises(ValueError, match="made in memory; name one"):
        replay(edit)


def test_another_model_of_the_same_shape_is_refused(recorded, tmp_path):
    save_tiny(tmp_path / "model", "llama", seed=9)
    llm = traced_llm(tmp_path / "t.json", Transformer.from_folder(tmp_path / "model"))
    with pytest.raises(ValueError, match="model.weights: expected '.*' as recorded, got '"):
        replay(recorded, llm)


def test_an_engine_of_other_sizes_is_refused(recorded, target, tmp_path):
    llm = traced_llm(tmp_path / "t.json", target, token_budget=23)
    with pytest.raises(ValueError, match="engine.token_budget: expected 24 as recorded, got 23"):
        replay(recorded, llm)
