"""The step table: what a failing op and a failing baseline do to a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedraft.bench.ceiling import Ceiling
from pagedraft.bench.kernels import (
    HEADERS,
    LAYER_PARTS,
    MAKERS,
    STEP_PARTS,
    _cells,
    measure_case,
)
from pagedraft.bench.layer_cases import LAYER_MAKERS, Maker
from pagedraft.bench.shapes import DTYPES, TINY, StepShape

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
