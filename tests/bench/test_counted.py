"""The counted figures hold, are the same in every run, and see what was made worse on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from pagedraft.bench import counted, counted_launches, counted_tokens
from pagedraft.bench.changes import Rule, compare_figures
from pagedraft.bench.counted_host import (
    PYTHON,
    HostCounter,
    count_case,
    even_clock,
    host_figures,
)
from pagedraft.bench.counted_tokens import ALPHAS, DRAFTS, NUM_NEW, token_figures
from pagedraft.bench.figures import Figure, read_figures
from pagedraft.bench.overhead_bed import Case, FakeTarget
from pagedraft.kernels import verify
from pagedraft.scheduler.launch import Launcher
from pagedraft.scheduler.speculation import Speculation

pytestmark = pytest.mark.usefixtures("cpu_path")
TINY = Case(rows=3, context=96, k=2, block_size=8)


def run(module: str, *arguments: str) -> tuple[int, str, dict]:
    """Run a module in a process whose launches can be recorded: (status, output, document)."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1])


def marked(base: list[Figure], fresh: list[Figure]) -> dict[str, str]:
    """The mark of every figure that changed, by what was counted and where."""
    changes = counted.changes_since(base, fresh)
    return {change.name: change.mark for change in changes if change.mark != "same"}


@pytest.fixture(scope="module")
def check(tmp_path_factory) -> tuple[int, str, dict]:
    folder = tmp_path_factory.mktemp("counted")
    return run("pagedraft.bench.counted", "--check", "--out", str(folder))


@pytest.fixture(scope="module")
def tokens() -> list[Figure]:
    return token_figures()


def test_nothing_is_worse_than_committed(check):
    status, printed, _ = check
    assert status == 0, printed[-5000:]


def test_everything_is_compared(check):
    _, _, document = check
    if document["versions"] != counted.read_baseline()[1]:
        pytest.skip(f"another baseline is needed: {document['left_out']}")
    assert document["left_out"] == []
    held = {figure.name.split("/")[0] for figure in read_figures(document)}
    assert held == set(counted.PARTS)


def test_the_baseline_covers_all_parts():
    figures, versions = counted.read_baseline()
    assert {figure.name.split("/")[0] for figure in figures} == set(counted.PARTS)
    assert set(versions) >= {name for names in counted.DEPENDS.values() for name in names}
    assert {figure.how for figure in figures} == {"counted", "modelled"}


def test_an_op_that_runs_twice_in_a_layer_is_caught():
    status, printed, document = run("pagedraft.tests.bench.toy_counted")
    worse = {change["name"] for change in document["changes"] if change["mark"] == "worse"}
    where = "launches/llama-8b decode1@1024 cuda/layer"
    assert status == 1
    assert {where, f"{where}/gate_up/_gated_linear_kernel"} <= worse
    assert counted.ADVICE in printed


def test_a_kernel_that_is_gone_is_caught():
    base = counted_launches.figures_of(counted_launches.baseline())
    name = next(figure.name for figure in base if figure.name.endswith("_rms_norm_kernel"))
    fresh = [figure for figure in base if figure.name != name]
    assert marked(base, fresh) == {name: "gone"}


def test_host_counts_are_the_same_in_every_run():
    assert host_figures([TINY]) == host_figures([TINY])


def test_a_call_too_many_is_caught(monkeypatch):
    """Teeth: what the plan asks for is worked out twice."""
    base = host_figures([TINY])
    honest = Speculation.decide

    def decide(self, *args):
        honest(self, *args)
        honest(self, *args)

    monkeypatch.setattr(Speculation, "decide", decide)
    assert marked(base, host_figures([TINY])).get(f"host/{TINY.name}/{PYTHON}") == "worse"


def test_an_operator_too_many_is_caught(monkeypatch):
    base = host_figures([TINY])
    honest = Launcher.launch

    def launch(self, *args):
        torch.zeros(1)
        return honest(self, *args)

    monkeypatch.setattr(Launcher, "launch", launch)
    fresh = host_figures([TINY])
    by_name = {figure.name: figure.value for figure in fresh}
    assert marked(base, fresh)[f"host/{TINY.name}/operators"] == "worse"
    [before] = [figure.value for figure in base if figure.unit == "operators"]
    assert by_name[f"host/{TINY.name}/operators"] == before + 1


def test_what_a_device_runs_is_not_counted(monkeypatch):
    base = count_case(TINY, 4)
    honest = FakeTarget.forward
    monkeypatch.setattr(FakeTarget, "forward", lambda *args: honest(*args) + torch.zeros(1))
    assert count_case(TINY, 4) == base


def test_counting_ends_with_the_block():
    before = sys.getprofile()
    counter = HostCounter()
    with counter.counting():
        torch.zeros(1)
    torch.zeros(1)
    assert counter.counts["operators"] == 1
    assert sys.getprofile() is before


def test_the_clock_is_given_back():
    before = time.perf_counter
    with even_clock():
        assert time.perf_counter() < time.perf_counter() < 1e-3
    assert time.perf_counter is before


def test_right_drafts_give_all_their_tokens(tokens):
    """The first token comes of the prompt; the others in passes of k+1."""
    by_name = {figure.name: figure.value for figure in tokens}
    found = [by_name[f"tokens/synthetic acceptance 1, k={k}, 8 rows/tokens a pass"] for k in DRAFTS]
    assert found == [NUM_NEW / (1 + -(-(NUM_NEW - 1) // (k + 1))) for k in DRAFTS]
    assert by_name["tokens/plain, 8 rows/tokens a pass"] == 1.0
    assert len(tokens) == 1 + len(ALPHAS) * len(DRAFTS)


def test_a_verdict_that_accepts_nothing_is_caught(tokens, monkeypatch):
    """Teeth: the output stays the same, only the drafts are in vain."""
    honest = verify.verify_cpu

    def nothing(draft_tokens_K, *args):
        return honest(torch.full_like(draft_tokens_K, -1), *args)

    monkeypatch.setattr(verify, "verify_cpu", nothing)
    found = marked(tokens, token_figures())
    assert found == {f.name: "worse" for f in tokens if f.name.startswith("tokens/synthetic")}


def test_drafts_that_change_an_output_are_an_error(monkeypatch):
    """Teeth: one token of one output is another."""
    honest = counted_tokens._run

    def wrong(model, drafter, k):
        first, *others = honest(model, drafter, k)
        token_ids = [*first.token_ids[:-1], first.token_ids[-1] + (k > 0)]
        return [replace(first, token_ids=token_ids), *others]

    monkeypatch.setattr(counted_tokens, "_run", wrong)
    with pytest.raises(RuntimeError, match="k=1, 8 rows: expected the plain output"):
        token_figures()


def test_waste_is_counted_for_every_block_size():
    figures = counted.waste_figures()
    assert len(figures) == 4
    small, large = (
        [figure.value for figure in figures if f"blocks of {size}," in figure.name]
        for size in (16, 64)
    )
    assert max(small) < min(large) < 0.2


def counts(unit: str, value: float) -> list[Figure]:
    return [Figure("host/case/what", value, unit, "lower", "counted")]


@pytest.mark.parametrize(
    "unit, before, after, mark",
    [
        ("calls", 1000, 1009, "same"),
        ("calls", 1000, 1011, "worse"),
        ("calls", 97, 99, "same"),
        ("calls", 97, 99.1, "worse"),
        ("calls", 97, 94, "better"),
        ("operators", 1000, 1001, "worse"),
    ],
)
def test_only_calls_have_a_margin(unit, before, after, mark):
    [change] = counted.changes_since(counts(unit, before), counts(unit, after))
    assert change.mark == mark


def test_calls_have_no_margin_in_a_plain_comparison():
    [change] = compare_figures(counts("calls", 1000), counts("calls", 1001), Rule())
    assert change.mark == "worse"


def known(monkeypatch, **versions: str) -> None:
    figures = [*counts("operators", 5), Figure("tokens/a", 2.0, "tokens", "higher", "counted")]
    here = counted.versions()
    monkeypatch.setattr(counted, "read_baseline", lambda: (figures, {**here, **versions}))


def test_other_versions_leave_out_what_depends_on_them(monkeypatch):
    known(monkeypatch, torch="2.0")
    fresh = [Figure("tokens/a", 2.0, "tokens", "higher", "counted"), *counts("operators", 9)]
    changes, left_out = counted.check(fresh, ["tokens", "host"])
    assert [change.name for change in changes] == ["tokens/a"]
    here = counted.versions()["torch"]
    assert left_out == [f"host: the baseline is of torch 2.0, this is torch {here}"]


def test_nothing_left_to_compare_is_no_success(monkeypatch, capsys):
    known(monkeypatch, torch="2.0")
    monkeypatch.setitem(counted.PARTS, "host", lambda: counts("operators", 5))
    assert counted.main(["--check", "--parts", "host"]) == 2
    assert "nothing to compare: host: the baseline is of torch 2.0" in capsys.readouterr().err


def test_saved_figures_are_what_is_checked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(counted, "BASELINE", tmp_path / "counted.json")
    figures = [*counts("operators", 5), Figure("launches/a", 7, "launches", "lower", "counted")]
    counted.save(figures)
    held, versions = counted.read_baseline()
    assert [figure for figure in held if figure.name.startswith("host/")] == figures[:1]
    assert versions == counted.versions()
    monkeypatch.setitem(counted.PARTS, "host", lambda: counts("operators", 6))
    assert counted.main(["--check", "--parts", "host"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [change["mark"] for change in document["changes"]] == ["worse"]


def test_no_baseline_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(counted, "BASELINE", tmp_path / "gone.json")
    monkeypatch.setitem(counted.PARTS, "host", lambda: counts("operators", 5))
    assert counted.main(["--check", "--parts", "host"]) == 2
    assert "gone.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--parts", "speed"], "unknown ['speed'], expected some of"),
        (["--save", "--parts", "host"], "--save: a baseline has all parts"),
        (["--save", "--check"], "not allowed with argument"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        counted.main(arguments)
    assert message in capsys.readouterr().err
