"""Quantised linear kernels in machine code: the count, and what counts as wrong."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedraft.bench.control_flow import Instruction
from pagedraft.bench.quant_static import is_quant_linear, quant_products, weights_per_instruction
from pagedraft.bench.shapes import SMOL_135M
from pagedraft.bench.static_calls import linear_sizes
from pagedraft.bench.static_quant_calls import FORMS, empty_weight, quant_calls
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.linear_quant import quant_tile
from pagedraft.kernels.weight_quant import check_weight


def launch(form: tuple[Any, int], num_rows: int = 8, kind: str = "*bf16") -> Any:
    tile = quant_tile(num_rows, empty_weight(*form, 64, 1024), 2)
    source = SimpleNamespace(signature={"x_ptr": kind})
    return SimpleNamespace(constants={"tile": tile}, source=source)


def loop(num_products: int, num_others: int) -> list[Instruction]:
    """A loop of so many products and other instructions, between others."""
    body = [Instruction("HMMA.16816.F32")] * num_products + [Instruction("LDS")] * num_others
    first = Instruction(body[0].name, labels=("top",))
    jump = Instruction("BRA", targets=("top",))
    return [Instruction("MOV"), first, *body[1:], jump, Instruction("EXIT", falls_through=False)]


# name: (form, products of a step and warp)
PRODUCTS: dict[str, tuple[Any, int]] = {
    "int8": (("int8", 0), 4),
    "int4_128": (("int4", 128), 8),
    "int4_32_twice": (("int4", 32), 16),
}


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_weights_of_the_steps_in_the_loop(case: tuple[Any, int], num_steps: int) -> None:
    form, products = case
    instructions = loop(products * num_steps, 99 - products * num_steps)
    found = weights_per_instruction(launch(form), instructions, 4)
    weights = 32 * (256 if form[0] == "int4" else 128) * num_steps
    assert found == weights / (4 * 100)


def test_a_kernel_without_a_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a loop with products"):
        weights_per_instruction(launch(("int8", 0)), [Instruction("HMMA.16816.F32")], 4)


# name: (spill bytes, products, on NVIDIA, message or None)
KERNELS: dict[str, tuple[int, dict[str, int], bool, str | None]] = {
    "good": (0, {"HMMA": 4}, True, None),
    "good_amd": (0, {"MFMA": 4}, False, None),
    "spill": (8, {"HMMA": 4}, True, "spills 8 bytes a thread"),
    "other_class": (0, {"HGMMA": 4}, True, "products in .'HGMMA'."),
    "none": (0, {}, True, "expected .'HMMA'. for every tile"),
}


@pytest.mark.parametrize("case", KERNELS.values(), ids=KERNELS)
def test_what_counts_as_wrong(case: tuple[Any, ...]) -> None:
    spill_bytes, mma, is_nvidia, message = case
    code = SimpleNamespace(spill_bytes=spill_bytes, mma=mma)
    compiled: Any = SimpleNamespace(launch=launch(("int8", 0)), code=code, is_nvidia=is_nvidia)
    found = "; ".join(quant_products(compiled))
    assert re.search(message, found) if message else not found


def test_only_16_bit_quantised_launches_are_judged() -> None:
    assert is_quant_linear(launch(("int8", 0)))
    assert not is_quant_linear(launch(("int8", 0), kind="*fp32"))
    dense: Any = SimpleNamespace(constants={"tile": object()}, source=SimpleNamespace(signature={}))
    assert not is_quant_linear(dense)


@pytest.mark.parametrize("form", [form for forms in FORMS.values() for form in forms])
def test_calls_make_weights_that_hold(form: tuple[Any, int]) -> None:
    with torch.device("meta"):
        weight = empty_weight(*form, 8, 256)
    check_weight(weight, reads_values=False)
    assert weight.group == (form[1] or 256)


def test_every_form_is_called_and_fits_the_demo_model() -> None:
    sizes = linear_sizes(SMOL_135M)
    calls = [call for dtype in FORMS for call in quant_calls(sizes, 1, dtype)]
    names = {name.removeprefix("-qkv-").removeprefix("-down-") for name, _ in calls}
    assert names == {"int8", "int8_128", "fp8", "fp8_128", "int4_32", "int4_64", "int4_128"}
    with use_implementation("ref", "linear"):
        calls[-1][1]()
