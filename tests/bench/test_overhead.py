"""The overhead bench: its arithmetic under a clock of its own, a slow plan, a dry run."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

from pagedraft.bench import kv_waste, overhead, overhead_parts
from pagedraft.bench.figures import read_figures
from pagedraft.bench.overhead import measure
from pagedraft.bench.overhead_bed import (
    INDEXED_TOKENS,
    Bed,
    Case,
    EndDrafter,
    EndIndex,
    FakeTarget,
    script,
)
from pagedraft.bench.overhead_parts import (
    BEHIND,
    COMMIT,
    HOST_PARTS,
    MODEL,
    OTHER_PARTS,
    PARTS,
    PLAN,
    REST,
    Probes,
)
from pagedraft.bench.overhead_report import SHOWN, Result, context_ratios, figures
from pagedraft.decoding.drafters.suffix_automaton import SuffixAutomaton
from pagedraft.scheduler import engine as engine_module

pytestmark = pytest.mark.usefixtures("cpu_path")
TINY = Case(rows=3, context=96, k=2, block_size=8)


class Clock:
    """Thread time that passes only in ``work``, and 1 ns whenever it is read."""

    def __init__(self) -> None:
        self.now = 0

    def read(self) -> int:
        self.now += 1
        return self.now

    def work(self, ns: int) -> None:
        self.now += ns


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(overhead_parts.time, "thread_time_ns", clock.read)
    return clock


def test_a_part_is_its_functions_without_those_of_other_parts(clock):
    probes = Probes({})
    plan = probes.wrap(lambda: clock.work(500), PLAN)
    model = probes.wrap(lambda: clock.work(9000), MODEL)

    def commit() -> None:
        clock.work(30)
        plan()
        plan()
        clock.work(70)

    commit = probes.wrap(commit, COMMIT)

    def step() -> None:
        clock.work(7)
        model()
        commit()
        plan()

    spent = probes.measure(step)
    want = dict.fromkeys((*HOST_PARTS, *OTHER_PARTS), 0) | {
        PLAN: 1500,
        MODEL: 9000,
        COMMIT: 100,
        REST: 7,
    }
    assert spent == pytest.approx(want, abs=1)


def test_a_part_that_raises_is_counted(clock):
    probes = Probes({})

    def broken() -> None:
        clock.work(40)
        raise KeyError("broken")

    plan = probes.wrap(broken, PLAN)

    def step() -> None:
        with pytest.raises(KeyError):
            plan()
        clock.work(5)

    spent = probes.measure(step)
    assert (spent[PLAN], spent[REST]) == pytest.approx((40, 5), abs=1)


def test_parts_add_up_to_the_step():
    with torch.inference_mode():
        (result,) = measure([Case(rows=8, context=96, k=2, block_size=8)], 60, Probes())
    assert len(result.host) == len(result.parts[PLAN]) == 30
    assert min(result.part(name) for name in HOST_PARTS) > 0
    assert result.part(*HOST_PARTS) == pytest.approx(sorted(result.host)[15], rel=0.5)


def test_a_slow_plan_is_seen_in_plan(monkeypatch):
    """Teeth: 3 ms of CPU time in ``plan_step``."""
    honest = engine_module.plan_step

    def slow(*args, **kwargs):
        end = time.thread_time() + 0.003
        while time.thread_time() < end:
            pass
        return honest(*args, **kwargs)

    with torch.inference_mode():
        (before,) = measure([TINY], 12, Probes())
        monkeypatch.setattr(engine_module, "plan_step", slow)
        (after,) = measure([TINY], 12, Probes())
    assert before.part(PLAN) < 2000 < 3000 < after.part(PLAN)
    assert min(after.host) > 3000
    others = [name for name in HOST_PARTS if name != PLAN]
    assert after.part(*others) < 3000


def test_what_runs_behind_the_device_is_not_of_the_host(monkeypatch):
    """Teeth: 3 ms of CPU time in a drafter that learns."""
    honest = EndDrafter.learn

    def slow(*args):
        end = time.thread_time() + 0.003
        while time.thread_time() < end:
            pass
        return honest(*args)

    monkeypatch.setattr(EndDrafter, "learn", slow)
    with torch.inference_mode():
        (result,) = measure([TINY], 12, Probes())
    assert max(result.part(*HOST_PARTS), sorted(result.host)[3]) < 2000 < 3000 < min(result.total)
    assert result.part(BEHIND) > 3000


def test_probes_leave_the_engine_as_it_was():
    probes = Probes()
    before = [overhead_parts.find(name)[2] for name in PARTS]
    with probes.installed():
        inside = [overhead_parts.find(name)[2] for name in PARTS]
    assert [overhead_parts.find(name)[2] for name in PARTS] == before
    assert not set(before) & set(inside)


@pytest.mark.parametrize(
    "name",
    ["scheduler.engine:Engine._gone", "scheduler.engine:gone", "gone:f", "scheduler.engine:Gone.f"],
)
def test_a_name_that_is_gone_says_where_to_look(name):
    with pytest.raises(LookupError, match=f"{name}: expected a function .*overhead_parts.py"):
        Probes({name: PLAN})


def test_an_entry_that_is_no_function():
    with pytest.raises(LookupError, match="expected a plain function or method, got <property"):
        Probes({"scheduler.engine:Engine.has_work": PLAN})


def test_an_output_off_the_script_is_caught():
    """Teeth: one token of the script changes behind the model's back."""
    with torch.inference_mode():
        bed = Bed(TINY, 4)
        bed.step()
        bed.check()
        bed.target.script[bed.requests[1].num_tokens - 1] += 1
        with pytest.raises(RuntimeError, match="3 rows, context 96, k=2: request-1 left the scr"):
            bed.check()


def test_a_drafter_that_fails_is_caught(monkeypatch):
    """Teeth: without this, its rows would be those of plain decoding."""
    monkeypatch.setattr(EndIndex, "propose", None)
    with torch.inference_mode():
        bed = Bed(TINY, 4)
        bed.step()
        with pytest.raises(RuntimeError, match="k=2: expected drafts, accepted None: ..Ty"):
            bed.check()


def test_the_index_of_an_end_proposes_what_the_whole_one_does():
    tokens = script(3000).tolist()
    whole, end = SuffixAutomaton(), EndIndex()
    whole.extend(tokens[-INDEXED_TOKENS:])
    end.extend(tokens)
    assert end.tokens == tokens
    proposed = []
    for token in script(3100).tolist()[3000:]:
        whole.extend([token])
        end.extend([token])
        assert end.propose(4) == whole.propose(4)
        proposed += end.propose(4).tokens
    assert proposed


def test_turnover_keeps_the_rows_full():
    with torch.inference_mode():
        bed = Bed(Case(rows=4, context=16, k=0, block_size=8, answer=6), 20)
        for _ in range(20):
            bed.prepare()
            bed.step()
            assert len(bed.engine.running) + len(bed.engine.waiting) == 4
    bed.check()
    assert bed.num_ended > 8


def test_the_fake_model_continues_the_script():
    target = FakeTarget(50)
    assert target.script.tolist() == script(51).tolist()
    positions_T = torch.tensor([7, 3, 49, 0])
    batch = SimpleNamespace(positions_T=positions_T, logit_rows_Q=torch.tensor([2, 1, 3]))
    logits_QV = target.forward(batch, None)
    assert logits_QV.argmax(-1).tolist() == [target.script[place + 1] for place in (49, 3, 0)]


def test_verdicts_and_ratios():
    def result(context: int, host: float, plan: float) -> Result:
        parts = {name: [1.0] * 3 for name in HOST_PARTS} | {PLAN: [plan] * 3}
        return Result(Case(64, context, 0), host=[host] * 3, parts=parts)

    fast, slow = result(128, 400.0, 50.0), result(4096, 600.0, 150.0)
    assert fast.verdict == "pass"
    assert slow.verdict == "fail: host > 500, plan+commit > 100"
    assert context_ratios([slow, fast]) == {"64 rows, k=0": 1.5}
    assert Result(Case(63, 128, 0)).verdict == "-"


def test_dry_run(tmp_path, capsys):
    arguments = ["--rows", "2", "--contexts", "96", "200", "--k", "0", "2", "--steps", "6"]
    arguments += ["--block-size", "8", "--out", str(tmp_path)]
    num_threads = torch.get_num_threads()
    assert overhead.main(arguments) == 0
    assert torch.get_num_threads() == num_threads
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert json.loads((tmp_path / "overhead.json").read_text()) == document
    assert [(row["context"], row["answer"], row["k"]) for row in document["rows"]] == [
        (context, answer, k)
        for k in (0, 2)
        for context, answer in ((96, None), (200, None), (96, overhead.ANSWER))
    ]
    assert set(document["context_ratios"]) == {"2 rows, k=0", "2 rows, k=2"}
    assert "96 turnover" in printed
    assert all(row["total_us"][1] > row["host_us"][1] for row in document["rows"])
    figures = {figure.name: figure for figure in read_figures(document)}
    assert len(figures) == 3 * len(document["rows"]) + 2
    host = figures["overhead/rows=2, context=96, k=2, turnover/host"]
    assert host.value == pytest.approx(document["rows"][5]["host_us"][1], abs=0.01)


def test_only_steady_rows_are_judged_by_the_limits():
    values = {"host": [501.0] * 2, "parts": {name: [60.0] * 2 for name in SHOWN}}
    steady, turnover = Case(64, 128, 0), Case(64, 128, 0, answer=200)
    found = figures([Result(steady, **values), Result(turnover, **values)])
    targets = {figure.name: (figure.target, figure.value) for figure in found}
    name = "overhead/rows=64, context=128, k=0"
    assert targets[f"{name}/host"] == (500.0, 501.0)
    assert targets[f"{name}/plan and commit"] == (100.0, 120.0)
    assert targets[f"{name}, turnover/host"] == (None, 501.0)


def test_kv_waste_is_judged_by_its_block_size():
    rows = [kv_waste.simulate(size, sigma=1.0, rows=4, steps=10) for size in (16, 32)]
    assert [figure.target for figure in kv_waste.figures(rows)] == [0.04, None]


def test_profile(capsys):
    arguments = ["--profile", "--rows", "2", "--k", "2", "--steps", "5", "--contexts", "16"]
    assert overhead.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "2 rows, context 16, k=2: a step under the profiler" in printed
    assert "scheduler/engine.py:" in printed


def test_kv_waste_of_blocks_of_one_token_is_nothing():
    waste = kv_waste.simulate(block_size=1, sigma=1.0, rows=4, steps=20)
    assert waste.kv_waste == waste.expected == 0.0
    assert waste.verdict == "-"


def test_kv_waste_of_equal_lengths_is_half_a_block():
    waste = kv_waste.simulate(block_size=16, sigma=0.0, rows=16, steps=40)
    assert waste.kv_waste == pytest.approx(waste.expected, rel=0.15)
    assert waste.verdict == "pass"


def test_kv_waste_sees_blocks_that_nobody_needs(monkeypatch):
    """Teeth: every request is given four blocks too many."""
    pool = kv_waste.Engine.__init__.__globals__["BlockPool"]
    honest = pool.blocks_for
    monkeypatch.setattr(pool, "blocks_for", lambda self, n: honest(self, n) + 4)
    assert kv_waste.simulate(block_size=16, sigma=1.0, rows=4, steps=10).verdict == "fail"


def test_lengths_have_the_published_means():
    lengths = kv_waste.Lengths(0.5)
    drawn = [lengths.draw() for _ in range(4000)]
    means = [sum(column) / len(drawn) for column in zip(*drawn, strict=True)]
    assert means == pytest.approx([kv_waste.MEAN_PROMPT, kv_waste.MEAN_ANSWER], rel=0.04)
    under_way = [lengths.under_way() for _ in range(500)]
    assert all(prompt > 0 and answer > 0 for prompt, answer in under_way)
    assert max(prompt + answer for prompt, answer in under_way) <= kv_waste.MAX_CONTEXT


def test_kv_waste_dry_run(tmp_path, capsys):
    arguments = ["--rows", "4", "--steps", "10", "--block-sizes", "64", "--out", str(tmp_path)]
    assert kv_waste.main(arguments) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["sigma"] for row in document["rows"]] == list(kv_waste.SIGMAS)
