"""How far two results of one stage are apart, and how far two right implementations may be.

The error of an element is ``|a - b| / max(|a|, rms of a's row)``: a difference of one rounding is
at most one step of the dtype, however large the element, and a small element, which may be what
large ones left when they cancelled, is measured by its row.

The tolerance of a stage is 4 steps of the coarsest format in it, plus 1e-4. A stage rounds at most
four times to the activations' dtype on the way to its result (a sum with its residual and norm; an
MLP's two halves, activation and product), and another order of fp32 sums moves a row by less than
1e-4: 2e-5 was the most between the CPU path and the references on the demo model. Attention gets 16
steps, and 32 over pools of two formats: its exponential multiplies what rounding did to a score.
Stages that hold the residual get one step more a square root of the sums that made it, which round
in any direction.
A format counts where it can part the sides: the activations' dtype always, the weights' where the
sides' differ, the pool's in what reads it, that of quantised weights in what multiplies them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from pagedraft.decoding.diff.report import STAGE_OPS
from pagedraft.decoding.diff.side import Stage, finished

ROUNDINGS, ATTENTION_ROUNDINGS = 4, 16
SUM_ORDER = 1e-4
# Distance of neighbouring numbers, relative to the number; int8: 4 rms of a token over 127 codes.
# Beside a float pool, int8 and fp8 ones showed 0.45 and 1.7 in the demo model's attention.
STEPS = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7, "fp8": 2.0**-3, "int8": 2.0**-5}
# Linear weights of another format part the sides by what the demo model showed (int8 0.35, fp8
# 0.65, int4 2.2), with some room: this finds a NaN or layers mixed up, not a fine error.
WEIGHT_STEPS = {**STEPS, "int8": 2.0**-3, "fp8": 2.0**-2, "int4": 1.0}
# The CPU path's products with int8 and int4 round their fp32 inputs (0.0003 and 0.09 there).
PRODUCT_STEPS = {"int8": 2.0**-12, "int4": 2.0**-4}
POOL_STAGES = ("write_kv", "attention")
SUMS_BEFORE = {"o_norm": 1, "down_norm": 2}  # residual sums of a layer when the stage ends
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_NOT_A_NUMBER = 2**62


class Difference(NamedTuple):
    """Two results of one stage, compared.

    differs_R: rows with any value that differs; NaN equals NaN, and -0 equals 0.
    error_R: each row's largest error; infinite where one side has NaN and the other none.
    nan: the sides that have a NaN or an infinity where the other has none: "", "A", "B" or "AB".
    max_abs: largest |a - b|; max_ulps: largest distance of any element; ulps: distance of the
        element whose error is largest. Distances count numbers of the narrower side's dtype; None
        beside a NaN.
    """

    differs_R: torch.Tensor
    error_R: torch.Tensor
    nan: str
    max_abs: float
    max_ulps: int | None
    ulps: int | None


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many numbers of their dtype lie between ``a`` and ``b``: int64, 0 for equal ones.

    NaN is equal to NaN and 2**62 from any number. Raises TypeError unless both are of one dtype of
    1, 2 or 4 bytes, ValueError for different shapes.
    """
    if a.dtype != b.dtype or not a.is_floating_point() or a.element_size() not in _INTEGERS:
        raise TypeError(f"ulp_distance: expected one float dtype, got {a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        raise ValueError(f"ulp_distance: expected one shape, got {a.shape} and {b.shape}")
    distance = (_ordered(a) - _ordered(b)).abs()
    distance = distance.masked_fill(a.isnan() != b.isnan(), _NOT_A_NUMBER)
    return distance.masked_fill(a.isnan() & b.isnan(), 0)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers, neighbours one apart, both zeros 0."""
    integer = _INTEGERS[x.element_size()]
    bits = x.contiguous().view(integer).long()
    return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)


def compare_stages(a: Stage, b: Stage) -> Difference | None:
    """Compare part by part; None if every value is equal. ``b`` is moved to ``a``'s device."""
    if a[:2] != b[:2]:
        raise ValueError(f"stages: A made {a.name} of layer {a.layer}, B {b.name} of {b.layer}")
    if a.parts.keys() == b.parts.keys():
        pairs = [(rows, b.parts[part]) for part, rows in a.parts.items()]
    else:
        pairs = [(finished(a), finished(b))]
    found = [difference for pair in pairs if (difference := compare(*pair)) is not None]
    if not found:
        return None
    worst = max(found, key=lambda difference: float(difference.error_R.max()))
    return worst._replace(
        differs_R=torch.stack([difference.differs_R for difference in found]).any(0),
        error_R=torch.stack([difference.error_R for difference in found]).amax(0),
        nan="".join(sorted({side for difference in found for side in difference.nan})),
    )


def compare(a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    """Compare results [R, ...] of the same rows; None if every value is equal."""
    if a.shape != b.shape:
        raise ValueError(f"results: A has shape {tuple(a.shape)}, B {tuple(b.shape)}")
    b = b.to(a.device)
    narrow = max(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    a_RC, b_RC = (x.flatten(1).float() for x in (a, b))
    is_equal_RC = (a_RC == b_RC) | (a_RC.isnan() & b_RC.isnan())
    if bool(is_equal_RC.all()):
        return None
    bad_a_RC, bad_b_RC = ~a_RC.isfinite() & ~is_equal_RC, ~b_RC.isfinite() & ~is_equal_RC
    is_bad_RC = bad_a_RC | bad_b_RC
    distance_RC = (a_RC - b_RC).abs().masked_fill(is_equal_RC | is_bad_RC, 0.0)
    finite_RC = a_RC.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    rms_R1 = finite_RC.square().mean(1, keepdim=True).sqrt()
    error_RC = (distance_RC / torch.maximum(finite_RC.abs(), rms_R1)).nan_to_num(0.0, math.inf)
    error_RC = error_RC.masked_fill(is_bad_RC, math.inf)
    ulps_RC = ulp_distance(a_RC.to(narrow), b_RC.to(narrow))
    has_bad = bool(is_bad_RC.any())
    return Difference(
        differs_R=~is_equal_RC.all(1),
        error_R=error_RC.amax(1),
        nan="A" * bool(bad_a_RC.any()) + "B" * bool(bad_b_RC.any()),
        max_abs=math.inf if has_bad else float(distance_RC.max()),
        max_ulps=None if has_bad else int(ulps_RC.max()),
        ulps=None if has_bad else int(ulps_RC.flatten()[error_RC.argmax()]),
    )


def tolerance_of(stage: Stage, a: Mapping[str, str], b: Mapping[str, str]) -> float:
    """The largest error that two right implementations may show in ``stage``.

    a, b: the ``formats`` of the sides' runners.
    """
    steps = [STEPS[a["activations"]], STEPS[b["activations"]]]
    if a["dtype"] != b["dtype"]:
        steps += [STEPS[a["dtype"]], STEPS[b["dtype"]]]
    if "linear" in STAGE_OPS[stage.name]:
        steps += _product_steps(a, b)
    if stage.name in POOL_STAGES:
        steps += [STEPS[a["kv"]], STEPS[b["kv"]]]
    rounding = max(steps[:2])
    num_sums = 2 * stage.layer + SUMS_BEFORE[stage.name] if stage.name in SUMS_BEFORE else 0
    roundings = ROUNDINGS
    if stage.name == "attention":
        roundings = ATTENTION_ROUNDINGS * (1 if a["kv"] == b["kv"] else 2)
    return roundings * max(steps) + SUM_ORDER + rounding * math.sqrt(num_sums)


def _product_steps(a: Mapping[str, str], b: Mapping[str, str]) -> list[float]:
    """Steps of the formats of linear weights."""
    sides = (a, b)
    if a["weights"] != b["weights"]:
        return [WEIGHT_STEPS[side["weights"]] for side in sides]
    on_cpu_path = [side for side in sides if side["activations"] == "fp32"]
    return [PRODUCT_STEPS.get(side["weights"], 0.0) for side in on_cpu_path]
