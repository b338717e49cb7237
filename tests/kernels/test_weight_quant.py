"""Quantised weights: what rounding costs, what it keeps, the format, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedraft.kernels.weight_quant import (
    ZERO_STEPS,
    QuantWeight,
    check_weight,
    check_weight_format,
    dequantize_weight,
    pack_int4,
    quantize_weight,
    unpack_int4,
)
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import randn

# name: (format, group)
FORMATS: dict[str, tuple[Any, int | None]] = {
    "int8": ("int8", None),
    "int8_grouped": ("int8", 64),
    "fp8": ("fp8", None),
    "fp8_grouped": ("fp8", 128),
    "int4_32": ("int4", 32),
    "int4_64": ("int4", 64),
    "int4_128": ("int4", 128),
}


def steps_of(weight: QuantWeight) -> torch.Tensor:
    """The factor of each weight, [O, I]."""
    return weight.scale_CO.T.float().repeat_interleave(weight.group, dim=1)


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30], ids=["tiny", "usual", "huge"])
@pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS)
def test_rounding_stays_within_half_a_step(case: tuple[Any, Any], magnitude: float) -> None:
    weight_OI = randn(24, 256) * magnitude
    weight = quantize_weight(weight_OI, *case)
    check_weight(weight)
    values_OI, scale_OI = dequantize_weight(weight), steps_of(weight)
    error_OI = (values_OI - weight_OI).abs()
    half_OI = scale_OI / 2
    if weight.format == "fp8":  # 3 bits of mantissa; steps below 2^-6 are of one size
        half_OI = torch.maximum(weight_OI.abs() * 2**-4, scale_OI * 2**-10)
    if weight.zero_CO is not None:  # a range may be cut
        zero_OI = weight.zero_CO.T.repeat_interleave(weight.group, dim=1) / ZERO_STEPS
        top_OI = torch.where(weight_OI > 0, 15 - zero_OI, zero_OI) * scale_OI
        half_OI = torch.maximum(half_OI, weight_OI.abs() - top_OI)
    assert bool((error_OI <= half_OI * (1 + 1e-5)).all())


@pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS)
def test_zeros_stay_zero_and_groups_do_not_mix(case: tuple[Any, Any]) -> None:
    weight_OI = randn(8, 256)
    weight_OI[3] = 0
    weight_OI[5, :128] = 0
    values_OI = dequantize_weight(quantize_weight(weight_OI, *case))
    assert not values_OI[3].any()
    assert not values_OI[5, :128].any()
    assert values_OI[5, 128:].any()
    alone_OI = dequantize_weight(quantize_weight(weight_OI[6:7], *case))
    assert_same_bits(alone_OI, values_OI[6:7])


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zero", [0, 7, 8, 15, 7.125, 2.5, 12.875])
def test_int4_keeps_a_grid_whose_zero_point_is_in_eighths(group: int, zero: float) -> None:
    codes_OI = torch.randint(0, 16, (12, 256), generator=torch.Generator().manual_seed(1))
    codes_OI[:, ::32], codes_OI[:, 1::32] = 0, 15
    weight_OI = (codes_OI - zero) * torch.linspace(0.01, 3.0, 12)[:, None].bfloat16().float()
    weight = quantize_weight(weight_OI, "int4", group)
    assert_same_bits(dequantize_weight(weight), weight_OI + 0.0)
    unpacked_OI = unpack_int4(weight.codes, group).flatten(1)
    torch.testing.assert_close(unpacked_OI.long(), codes_OI, rtol=0, atol=0)


def test_int8_keeps_integers() -> None:
    weight_OI = torch.randint(-127, 128, (6, 64), generator=torch.Generator().manual_seed(1)) / 4.0
    weight_OI[:, 0] = 127 / 4
    assert_same_bits(dequantize_weight(quantize_weight(weight_OI, "int8")), weight_OI)


def test_fp8_keeps_its_own_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    weight_OI = codes[codes.isfinite()].expand(2, -1)
    assert_same_bits(dequantize_weight(quantize_weight(weight_OI, "fp8")), weight_OI.contiguous())


def squared_error(weight_OI: torch.Tensor, weight: QuantWeight) -> float:
    return (dequantize_weight(weight) - weight_OI).square().sum().item()


@pytest.mark.parametrize(("group", "share"), [(32, 0.96), (64, 0.95), (128, 0.92)])
def test_int4_search_pays(monkeypatch: pytest.MonkeyPatch, group: int, share: float) -> None:
    weight_OI = randn(400, 256)
    found = squared_error(weight_OI, quantize_weight(weight_OI, "int4", group))
    monkeypatch.setattr("pagedraft.kernels.weight_quant.RANGE_PARTS", ())
    monkeypatch.setattr("pagedraft.kernels.weight_quant._Grid.or_better", lambda grid, other: grid)
    assert found < share * squared_error(weight_OI, quantize_weight(weight_OI, "int4", group))


def test_int4_default_group_and_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI = randn(10, 96)
    weight = quantize_weight(weight_OI, "int4")
    assert weight.group == 32
    monkeypatch.setattr("pagedraft.kernels.weight_quant.SLAB_WEIGHTS", 200)
    assert_same_bits(quantize_weight(weight_OI, "int4").codes, weight.codes)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_bytes_hold_the_halves_of_a_group(group: int) -> None:
    codes_OCK = torch.arange(2 * group).remainder(16).to(torch.uint8).view(1, 2, group)
    bytes_OB = pack_int4(codes_OCK)
    assert bytes_OB.shape == (1, group)
    half = group // 2
    assert int(bytes_OB[0, half + 3]) == codes_OCK[0, 1, 3] | codes_OCK[0, 1, 3 + half] << 4
    assert_same_bits(unpack_int4(bytes_OB, group), codes_OCK)


def test_order_says_where_columns_belong() -> None:
    weight_OI, order_I = randn(6, 64), torch.randperm(64)
    weight = quantize_weight(weight_OI[:, order_I], "int8")
    natural = dequantize_weight(dataclasses.replace(weight, order_I=order_I))
    assert_same_bits(natural, dequantize_weight(quantize_weight(weight_OI, "int8")))


def test_bytes_count_factors_and_zero_points() -> None:
    assert quantize_weight(randn(8, 128), "int4", 32).bytes_per_weight == (16 + 4 + 1) / 32
    assert quantize_weight(randn(8, 128), "int8").bytes_per_weight == (128 + 4) / 128


# name: (weights, format, group, error, message)
ERRORS: dict[str, tuple[Any, ...]] = {
    "format": (randn(2, 64), "int3", None, ValueError, "format: expected one of"),
    "group": (randn(2, 64), "int8", 48, ValueError, "group: 48 does not suit int8 weights of 64"),
    "int4_group": (randn(2, 64), "int4", 16, ValueError, "group: 16 does not suit"),
    "int4_inputs": (randn(2, 48), "int4", None, ValueError, "group: 32 does not suit"),
    "nan": (torch.full((2, 64), torch.nan), "int8", None, ValueError, "got one of nan"),
    "infinity": (torch.full((2, 64), torch.inf), "fp8", None, ValueError, "got one of inf"),
    "too_large": (torch.full((2, 64), 3e38), "int4", None, ValueError, "weight_OI: expected fin"),
    "no_outputs": (randn(0, 64), "int4", None, ValueError, "expected at least one weight"),
    "no_inputs": (randn(2, 0), "int8", None, ValueError, "expected at least one weight"),
    "rank": (randn(64), "int8", None, ValueError, "weight_OI: expected shape"),
    "dtype": (torch.ones(2, 64).double(), "int8", None, TypeError, "weight_OI: expected dtype"),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_quantize_errors_name_the_argument(case: tuple[Any, ...]) -> None:
    weight_OI, format, group, error, message = case
    with pytest.raises(error, match=message):
        quantize_weight(weight_OI, format, group)


def changed(**changes: Any) -> Callable[[], QuantWeight]:
    return lambda: dataclasses.replace(quantize_weight(randn(4, 128), "int4", 64), **changes)


def fp8_with_nan() -> QuantWeight:
    weight = quantize_weight(randn(4, 128), "fp8")
    weight.codes.view(torch.uint8)[2, 3] = 0xFF
    return weight


# name: (a wrong weight, error, message)
WRONG: dict[str, tuple[Callable[[], QuantWeight], type[Exception], str]] = {
    "format": (changed(format="int5"), ValueError, "format: expected one of"),
    "codes_dtype": (changed(codes=torch.zeros(4, 64)), TypeError, "codes: expected dtype uint8"),
    "strided": (changed(codes=torch.zeros(64, 4).byte().T), ValueError, "codes: expected a cont"),
    "group": (changed(group=96), ValueError, "group: int4 of 128 inputs takes .32, 64, 128., got"),
    "scale_shape": (changed(scale_CO=torch.ones(4, 2)), ValueError, r"scale_CO: expected .*2, 4"),
    "scale_dtype": (changed(scale_CO=torch.ones(2, 4).double()), TypeError, "scale_CO: expected"),
    "no_zero": (changed(zero_CO=None), ValueError, "zero_CO: expected with int4"),
    "zero_dtype": (changed(zero_CO=torch.zeros(2, 4)), TypeError, "zero_CO: expected dtype"),
    "order": (changed(order_I=torch.arange(64)), ValueError, "order_I: expected shape"),
    "order_twice": (changed(order_I=torch.zeros(128).long()), ValueError, "each of 128 inputs"),
    "scale": (changed(scale_CO=torch.full((2, 4), torch.nan)), ValueError, "expected finite fac"),
    "zero": (changed(zero_CO=torch.full((2, 4), 129).byte()), ValueError, "0 to 128, got 129"),
    "fp8_nan": (fp8_with_nan, ValueError, "codes: expected fp8 numbers, got NaN"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_check_names_what_is_wrong(case: tuple[Any, ...]) -> None:
    make, error, message = case
    with pytest.raises(error, match=message):
        check_weight(make())


# name: (vendor, capability or name, formats that it refuses)
DEVICES: dict[str, tuple[str | None, Any, set[str]]] = {
    "sm_80": (None, (8, 0), {"fp8"}),
    "sm_86": (None, (8, 6), {"fp8"}),
    "sm_89": (None, (8, 9), set()),
    "sm_90": (None, (9, 0), set()),
    "gfx942": ("6.2", "gfx942", set()),
    "gfx90a": ("6.2", "gfx90a", {"fp8"}),
}


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("case", DEVICES.values(), ids=DEVICES)
def test_a_device_without_fp8_is_told_of_int8(
    case: tuple[Any, ...], format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor, arch, refused = case
    properties = type("Properties", (), {"gcnArchName": f"{arch}:sramecc+:xnack-"})
    monkeypatch.setattr(torch.version, "hip", vendor)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: arch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    check_weight_format(format, torch.device("cpu"))
    if format not in refused:
        check_weight_format(format, torch.device("cuda"))
        return
    with pytest.raises(ValueError, match=r"fp8 \(e4m3\) needs .* \"int8\" takes the same memory"):
        check_weight_format(format, torch.device("cuda"))
