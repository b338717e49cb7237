"""The step table: what a failing op and a failing baseline do to a row, figures, ceilings."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from pagedraft.bench import ceiling, kernels, timing
from pagedraft.bench.ceiling import OTHER_PRODUCT, Ceiling, measure_ceiling
from pagedraft.bench.figures import read_figures
from pagedraft.bench.kernels import (
    HEADERS,
    LAYER_PARTS,
    MAKERS,
    STEP_PARTS,
    _cells,
    figures_of,
    measure_case,
    step_estimate,
)
from pagedraft.bench.layer_cases import LAYER_MAKERS, Maker
from pagedraft.bench.report import RESULTS
from pagedraft.bench.shapes import DTYPES, TINY, StepShape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import OPS

CPU = torch.device("cpu")
CEILING = Ceiling(1e9, 1e9)
STEPS = {"decode": StepShape("decode", 2, 1, 40), "verify": StepShape("verify", 2, 5, 40)}


def attention_case(step: str):
    make = Maker(TINY, STEPS[step], DTYPES["fp32"], CPU)
    return next(LAYER_MAKERS["paged_attention"](make))


def fails(tensors):
    raise RuntimeError("no kernel for this")


@pytest.mark.parametrize("step", STEPS)
def test_attention_row_is_gated_and_timed(step):
    row = measure_case(attention_case(step), CPU, CEILING, 0.01)
    assert row["problem"] is None
    assert row["speedup"] == row["baseline_time"]["median"] / row["time"]["median"]
    assert len(_cells(row)) == len(HEADERS)


def test_failing_baseline_leaves_the_row_its_time():
    row = measure_case(replace(attention_case("decode"), baseline=fails), CPU, CEILING, 0.01)
    assert row["problem"] is None
    assert row["time"]["median"] > 0
    assert _cells(row)[-2:] == ["RuntimeError: no kernel for this", "-"]


def test_failing_op_has_no_time():
    row = measure_case(replace(attention_case("decode"), prepare=fails), CPU, CEILING, 0.01)
    assert row["problem"] == "RuntimeError: no kernel for this"
    assert "time" not in row
    assert len(_cells(row)) == len(HEADERS)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("op", MAKERS)
@pytest.mark.usefixtures("cpu_path")
def test_every_part_is_right_and_timed(op, step):
    make = Maker(TINY, STEPS[step], DTYPES["bf16"], CPU)
    rows = [measure_case(case, CPU, CEILING, 0.001) for case in MAKERS[op](make)]
    assert rows or (op, step) == ("verify", "decode")
    assert {row["part"]: row["problem"] for row in rows if row["problem"]} == {}
    assert [row["part"] for row in rows if "baseline_problem" in row] == []


def test_a_step_is_the_sum_of_parts_that_exist():
    make = Maker(TINY, STEPS["decode"], DTYPES["fp32"], CPU)
    parts = {case.part for op in MAKERS for case in MAKERS[op](make)}
    assert {*LAYER_PARTS, *STEP_PARTS} <= parts


def timed_row(part: str, seconds: float = 2e-6, floor: float = 1e-6) -> dict:
    time = {"median": seconds, "p20": seconds / 2, "p80": seconds * 2, "method": "clock"}
    row = {"op": "op", "part": part, "step": "decode", "problem": None, "time": time}
    return row | {"floor": floor, "bytes": 1000, "flops": 0, "share_of_ceiling": floor / seconds}


def test_figures_are_times_and_shares_with_their_spread():
    wrong = timed_row("wrong") | {"problem": "output 0: error 1"}
    figures = figures_of("kernels/tiny-bf16", [timed_row("part"), wrong], [])
    names = ["kernels/tiny-bf16/decode/op part/us", "kernels/tiny-bf16/decode/op part/ceiling"]
    assert [figure.name for figure in figures] == names
    us, share = figures
    assert (us.value, us.low, us.high) == pytest.approx((2.0, 1.0, 4.0))
    assert (share.value, share.low, share.high) == pytest.approx((50.0, 25.0, 100.0))
    assert (us.better, share.better) == ("lower", "higher")
    assert {figure.how for figure in figures} == {"measured"}


def test_figures_of_a_step_are_sums():
    rows = [timed_row(part) for part in (*LAYER_PARTS, *STEP_PARTS)]
    step = step_estimate(rows, "decode", TINY, CEILING)
    us, share = figures_of("p", [], [step])
    num_calls = TINY.num_layers * len(LAYER_PARTS) + len(STEP_PARTS)
    assert (us.name, us.value) == ("p/decode/sum of parts/us", pytest.approx(2.0 * num_calls))
    assert share.value == pytest.approx(50.0)
    assert us.how == share.how == "predicted"


class TestCommand:
    """The command on one op of a tiny model, without two seconds of ceilings."""

    OPTIONS = ("--device", "cpu", "--model", "tiny", "--dtype", "fp32", "--budget", "0.001")

    @pytest.fixture(autouse=True)
    def _known_ceiling(self, monkeypatch, cpu_path):
        monkeypatch.setattr(kernels, "measure_ceiling", lambda *_: CEILING)

    def test_document_has_what_was_printed(self, tmp_path, capsys):
        options = ("--op", "gated_mlp", "--steps", "decode1", "--out", str(tmp_path))
        assert kernels.main([*self.OPTIONS, *options]) == 0
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        document = json.loads((tmp_path / "kernels-tiny-fp32.json").read_text())
        assert last["figures"] == document["figures"]
        names = [figure.name for figure in read_figures(document)]
        assert names[0] == "kernels/tiny-fp32/decode1/gated_mlp act/us"
        assert document["bench"] == last["bench"] == "kernels"

    def test_chart_lies_beside_the_document(self, tmp_path):
        pytest.importorskip("matplotlib", reason="the chart needs matplotlib")
        options = ("--op", "gated_mlp", "--steps", "decode1", "--out", str(tmp_path))
        assert kernels.main([*self.OPTIONS, *options]) == 0
        assert (tmp_path / "kernels-tiny-fp32-roofline.png").exists()

    def test_row_above_its_ceiling_is_doubted(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(kernels, "measure_ceiling", lambda *_: Ceiling(1.0, 1.0))
        options = ("--op", "gated_mlp", "--steps", "decode1", "--out", str(tmp_path))
        assert kernels.main([*self.OPTIONS, *options]) == 0
        assert "above the measured ceiling (partly cached, or" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "flag, value, known",
        [("--op", "linear,liner", OPS), ("--steps", "decode3", ("decode1", "verify8"))],
    )
    def test_unknown_name_is_answered_with_all(self, capsys, flag, value, known):
        with pytest.raises(SystemExit) as caught:
            kernels.main([*self.OPTIONS, flag, value])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert f"{flag}: unknown ['{value.split(',')[-1]}']" in error
        assert all(name in error for name in known)

    def test_two_rounds_are_too_few(self, capsys):
        with pytest.raises(SystemExit):
            kernels.main([*self.OPTIONS, "--base", "HEAD", "--rounds", "2", "--pairs", "1"])
        assert (
            "--rounds: expected at least 3 in all pairs, got 1 pairs of 2 rounds"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    "op, steps, is_whole",
    [
        (",".join(OPS), "decode1,verify1", True),
        ("linear", "decode1,verify1", False),
        (",".join(OPS), "decode1", False),
    ],
)
def test_results_hold_whole_tables_only(op, steps, is_whole):
    options = kernels._parser().parse_args(["--model", "135m", "--op", op, "--steps", steps])
    path = kernels.result_file(options, CPU)
    assert path.name == "kernels-135m-bf16.json"
    assert path.is_relative_to(RESULTS) == is_whole


def test_ceiling_is_the_fastest_product_of_the_activations_dtype(monkeypatch):
    monkeypatch.setattr(ceiling, "measure", partial(timing.measure, budget=0.01))
    found = measure_ceiling(CPU, torch.float32)
    judging = {name: rate for name, rate in found.products.items() if name != OTHER_PRODUCT}
    assert {"mm", "plain_fp32"} <= set(judging)
    assert found.matmul_rate == max(judging.values())
    assert OTHER_PRODUCT in found.products
    assert found.byte_rate == max(found.copy_rate, found.read_rate)
    assert "read" in found.text()


def test_floor_is_at_the_faster_of_copying_and_reading():
    assert Ceiling(1e9, 1e9, 2e9).floor(Cost(bytes=10**9, flops=1)) == pytest.approx(0.5)
    assert Ceiling(1e9, 1e9).floor(Cost(bytes=10**9, flops=1)) == pytest.approx(1.0)


def test_copies_exceed_a_large_last_level_cache(monkeypatch):
    monkeypatch.setattr(timing, "last_cache_bytes", lambda: 50 << 20)
    assert timing.num_copies(1 << 20, 1 << 20, CPU) == 150
    monkeypatch.setattr(timing, "last_cache_bytes", lambda: 0)
    assert timing.num_copies(1 << 20, 1 << 20, CPU) == 96
