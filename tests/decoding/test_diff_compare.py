"""How far two results are apart, and how far right ones may be."""

from __future__ import annotations

import math

import pytest
import torch

from pagedraft.decoding.diff.compare import (
    PRODUCT_STEPS,
    STEPS,
    WEIGHT_STEPS,
    compare,
    compare_stages,
    tolerance_of,
    ulp_distance,
)
from pagedraft.decoding.diff.side import Stage, _overwrite, finished
from pagedraft.kernels.normed import Normed

INF, NAN = math.inf, math.nan

ULPS = {
    "equal": (torch.float32, 1.0, 1.0, 0),
    "neighbours": (torch.float32, 1.0, 1.0 + 2**-23, 1),
    "across a power of two": (torch.float32, 1.0, 1.0 - 2**-24, 1),
    "both zeros": (torch.float32, 0.0, -0.0, 0),
    "across zero": (torch.float32, 2.0**-149, -(2.0**-149), 2),
    "bf16": (torch.bfloat16, 1.0, 1.0 + 2**-6, 2),
    "fp16 negative": (torch.float16, -1.0, -1.0 - 2**-10, 1),
    "infinity behind the largest": (torch.float16, 65504.0, INF, 1),
    "one NaN": (torch.float32, NAN, 1.0, 2**62),
    "two NaN": (torch.float32, NAN, -NAN, 0),
}


@pytest.mark.parametrize("name", ULPS)
def test_ulp_distance(name):
    dtype, a, b, expected = ULPS[name]
    a, b = torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype)
    assert ulp_distance(a, b).item() == ulp_distance(b, a).item() == expected


def test_ulp_distance_wants_one_dtype_and_shape():
    with pytest.raises(TypeError, match="one float dtype"):
        ulp_distance(torch.zeros(1), torch.zeros(1, dtype=torch.float16))
    with pytest.raises(ValueError, match="one shape"):
        ulp_distance(torch.zeros(1), torch.zeros(2))


# a row of A, of B -> error, NaN sides.
ERRORS = {
    "by the element": ([3.0, 4.0], [3.0, 5.0], 0.25, ""),
    "small ones by the row": ([5.0, 5.0, 0.0, 0.0], [5.0, 5.0, 1.0, 0.0], 1 / math.sqrt(12.5), ""),
    "from nothing": ([0.0, 0.0], [0.0, 1e-9], INF, ""),
    "NaN in B": ([1.0, 1.0], [1.0, NAN], INF, "B"),
    "NaN in A": ([NAN, 1.0], [1.0, 1.0], INF, "A"),
    "infinity in A": ([INF, 1.0], [1.0, 1.0], INF, "A"),
    "other infinities": ([INF, 1.0], [-INF, 1.0], INF, "AB"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name):
    a, b, error, nan = ERRORS[name]
    difference = compare(torch.tensor([[0.0] * len(a), a]), torch.tensor([[0.0] * len(b), b]))
    assert difference.error_R.tolist() == pytest.approx([0.0, error])
    assert difference.differs_R.tolist() == [False, True]
    assert difference.nan == nan


def test_equal_results_have_no_difference():
    rows = torch.tensor([[0.0, NAN, INF]])
    assert compare(rows, torch.tensor([[-0.0, NAN, INF]])) is None


def test_distances_count_numbers_of_the_narrower_dtype():
    difference = compare(torch.tensor([[1.0]]), torch.tensor([[1 + 2**-6]], dtype=torch.bfloat16))
    assert difference.ulps == 2


def formats(dtype="fp32", weights="", activations="fp32", kv="fp32") -> dict[str, str]:
    return {"dtype": dtype, "weights": weights or dtype, "activations": activations, "kv": kv}


QUANTISED = formats(weights="int8")
# stage, formats of A, of B -> steps of which format, beside the order of sums.
TOLERANCES = {
    "equal weights do not count": ("qkv", formats("bf16"), formats("bf16"), 4 * STEPS["fp32"]),
    "other weights do": ("qkv", formats("bf16"), formats("fp32"), 4 * STEPS["bf16"]),
    "also norms": ("input_norm", formats("bf16"), formats("fp32"), 4 * STEPS["bf16"]),
    "quantised ones most": ("qkv", QUANTISED, formats(), 4 * WEIGHT_STEPS["int8"]),
    "but only in products": ("input_norm", QUANTISED, formats(), 4 * STEPS["fp32"]),
    "products with quantised ones": ("qkv", QUANTISED, QUANTISED, 4 * PRODUCT_STEPS["int8"]),
    "of what is exact elsewhere": (
        "qkv",
        formats(weights="int8", activations="bf16"),
        formats(weights="int8", activations="bf16"),
        4 * STEPS["bf16"],
    ),
    "the coarser activations": (
        "qkv",
        formats(activations="fp16"),
        formats(activations="fp32"),
        4 * STEPS["fp16"],
    ),
    "a pool's format in what reads it": (
        "write_kv",
        formats(kv="int8"),
        formats(kv="int8"),
        4 * STEPS["int8"],
    ),
    "but not elsewhere": ("head", formats(kv="int8"), formats(), 4 * STEPS["fp32"]),
    "scores": ("attention", formats(kv="int8"), formats(kv="int8"), 16 * STEPS["int8"]),
    "over two pools": ("attention", formats(kv="fp16"), formats(), 32 * STEPS["fp16"]),
    "sums of 4 layers": ("down_norm", formats(), formats(), 7 * STEPS["fp32"]),
}


@pytest.mark.parametrize("name", TOLERANCES)
def test_tolerance(name):
    stage, a, b, expected = TOLERANCES[name]
    layer = 3.5 if stage == "down_norm" else 1  # 9 sums
    assert tolerance_of(Stage(layer, stage, {}), a, b) == pytest.approx(1e-4 + expected)


def normed_stage(rows_TE: torch.Tensor) -> tuple[Stage, Normed]:
    squares_TP = rows_TE.square().unflatten(1, (-1, 32)).sum(-1)
    normed = Normed(rows_TE * 1.5, squares_TP, 1e-5)
    parts = {"rows": normed.rows_TE.clone(), "squares": squares_TP.clone()}
    return Stage(0, "o_norm", parts, normed.eps), normed


def test_stages_are_compared_part_by_part():
    """Also where only the sums of squares differ; and by their rows where the forms differ."""
    stage, _ = normed_stage(torch.ones(2, 64))
    other = stage._replace(parts={**stage.parts, "squares": stage.parts["squares"] * 2})
    assert compare_stages(stage, other).error_R.tolist() == [1.0, 1.0]
    plain = Stage(0, "o_norm", {"rows": finished(stage)})
    assert compare_stages(stage, plain) is None
    with pytest.raises(ValueError, match="A made o_norm of layer 0, B o_norm of 1"):
        compare_stages(stage, stage._replace(layer=1))


def test_rows_of_one_form_take_the_place_of_the_other():
    generator = torch.Generator().manual_seed(0)
    a_TE, b_TE = torch.randn(2, 3, 64, generator=generator)
    stage, normed = normed_stage(a_TE)
    plain = Stage(0, "o_norm", {"rows": b_TE})
    _overwrite({"rows": normed.rows_TE, "squares": normed.squares_TP}, stage, plain)
    parts = {"rows": normed.rows_TE, "squares": normed.squares_TP}
    torch.testing.assert_close(finished(stage._replace(parts=parts)), b_TE)
    target = b_TE.clone()
    _overwrite({"rows": target}, plain, stage)
    torch.testing.assert_close(target, finished(stage))
    expected = a_TE * 1.5 * torch.rsqrt(a_TE.square().mean(1, keepdim=True) + 1e-5)
    torch.testing.assert_close(target, expected)
