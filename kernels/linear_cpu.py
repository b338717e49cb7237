"""CPU formats of a linear layer's weight: pack once, then y = x Wt with row-invariant bits.

Activations are fp32 and products accumulate in fp32. Each format has its own kernels for different
row counts: ``linear_cpu_rows`` finds the multiple of rows that keeps a row's bits and pads to it.

Formats, measured on 2 AVX2 cores with weights of 576x576 to 3072x576:

* ``fbgemm_fp16``: fp16 weights at 12 to 17 GB/s for 1 to 6 rows, 150 GFLOP/s at 64; bits equal for
  every multiple of 3 rows (with AVX512 for every count).
* ``onednn_fp32``: fp32 weights, half the speed at few rows, a tie at 500; all or even counts.
* ``plain_fp32``: ``F.linear``; equal for multiples of 4 to 16, by processor, or for none.

Not taken: bf16 weights and products (oneDNN on AVX512-BF16). 3072x576 from memory on one core, time
over that of ``fbgemm_fp16``: 1.8 for 1 row, 1.9 for 2, 1.0 for 4, 0.7 for 8, 0.6 for 16; a step of
the demo model 1.9 for 1 row, 0.8 for 16 and 32. And one row's sums run in another order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pagedraft.kernels import linear_cpu_rows as rows

logger = logging.getLogger(__name__)

ROW_TILES = (16, 4, 1)


class Format(NamedTuple):
    """How one library packs a weight.

    pack: (fp32 weight [O, I], fp32 bias [O] or None) -> handle.
    run: (x [T, I] fp32, handle) -> y [T, O] fp32.
    unpack: handle -> fp32 weight [O, I].
    num_dense: the self-test tries every multiple up to this many rows (row-count specific kernels).
    is_fp16: the handle holds fp16 values.
    """

    pack: Callable[[torch.Tensor, torch.Tensor | None], Any]
    run: Callable[[torch.Tensor, Any], torch.Tensor]
    unpack: Callable[[Any], torch.Tensor]
    num_dense: int
    is_fp16: bool


def _fbgemm_pack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight_OI, bias_O)


@lru_cache(maxsize=1)
def _fbgemm_op() -> Callable[[torch.Tensor, Any], torch.Tensor]:
    return torch.ops.quantized.linear_dynamic_fp16.default  # three look-ups, 1 us each


def _fbgemm_run(x_TI: torch.Tensor, handle: Any) -> torch.Tensor:
    # Else torch looks for __torch_function__ on the handle and catches a C++ exception: 15 us.
    with torch._C.DisableTorchFunctionSubclass():
        return _fbgemm_op()(x_TI, handle)


def _fbgemm_unpack(handle: Any) -> torch.Tensor:
    return torch.ops.quantized.linear_unpack_fp16(handle)[0]


def _onednn_pack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, 16), bias_O


def _onednn_run(x_TI: torch.Tensor, handle: Any) -> torch.Tensor:
    weight, bias_O = handle
    return torch.ops.mkldnn._linear_pointwise(x_TI, weight, bias_O, "none", [], "")


def _onednn_unpack(handle: Any) -> torch.Tensor:
    return handle[0].to_dense()


def _plain_pack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Any:
    return weight_OI, bias_O


def _plain_run(x_TI: torch.Tensor, handle: Any) -> torch.Tensor:
    return F.linear(x_TI, *handle)


def _plain_unpack(handle: Any) -> torch.Tensor:
    return handle[0]


FORMATS = {
    "fbgemm_fp16": Format(_fbgemm_pack, _fbgemm_run, _fbgemm_unpack, 126, True),
    "onednn_fp32": Format(_onednn_pack, _onednn_run, _onednn_unpack, 12, False),
    "plain_fp32": Format(_plain_pack, _plain_run, _plain_unpack, rows.MAX_TEST_ROWS, False),
}


@dataclass(frozen=True)
class CpuWeight:
    """A packed weight and what its self-test found.

    handle: what the format's ``run`` takes; holds weight * 2**-log2_scale and the bias alike.
    scale: power of two that undoes it in the output; 1.0 needs no operation.
    row_multiple: row counts that are multiples of it give equal bits; others are padded.
    row_tile: 0, or the only row count that the handle is run with (when no multiple passed).
    reason: why earlier formats were not taken; empty if the first was.
    """

    format: str
    handle: Any
    scale: float
    row_multiple: int
    row_tile: int
    reason: str


def pack(
    weight_OI: torch.Tensor, bias_O: torch.Tensor | None, formats: Sequence[str] | None = None
) -> CpuWeight:
    """Pack ``weight_OI`` in the first of ``formats`` that keeps its values and its rows' bits."""
    if formats is None:
        formats = tuple(FORMATS) if weight_OI.dtype != torch.float32 else tuple(FORMATS)[1:]
    weight_OI = weight_OI.detach().float().contiguous()
    bias_O = None if bias_O is None else bias_O.detach().float()
    key = (*weight_OI.shape, bias_O is not None, torch.get_num_threads())
    reasons = []
    for name in formats:
        scale = _fp16_scale(weight_OI) if FORMATS[name].is_fp16 else 1.0
        if scale is None:
            reasons.append(f"{name}: weights do not fit fp16")
            continue
        multiple, reason = find_row_multiple(name, *key)
        if multiple == 0:
            reasons.append(f"{name}: {reason}")
            continue
        handle = _pack_scaled(name, weight_OI, bias_O, scale)
        return CpuWeight(name, handle, scale, multiple, 0, "; ".join(reasons))
    return _pack_tiles(weight_OI, bias_O, "; ".join(reasons))


def run(x_TI: torch.Tensor, weight: CpuWeight, residual_TO: torch.Tensor | None) -> torch.Tensor:
    """Return y = x Wt (+ bias) (+ residual), [T, O] fp32; pads x where the format asks for it."""
    is_plain = weight.scale == 1.0 and not weight.row_tile
    if is_plain and rows.runs_whole(x_TI.shape[0], weight.row_multiple):
        y_TO = FORMATS[weight.format].run(x_TI, weight.handle)  # the usual case, 120 times a step
        return y_TO if residual_TO is None else y_TO.add_(residual_TO)
    call = partial(_run_tiles if weight.row_tile else _run, weight=weight)
    y_TO = rows.run_in_multiples(call, x_TI, weight.row_multiple)
    if weight.scale == 1.0:
        return y_TO if residual_TO is None else y_TO.add_(residual_TO)
    if residual_TO is None:
        return y_TO.mul_(weight.scale)
    return torch.add(residual_TO, y_TO, alpha=weight.scale)


def unpack(weight: CpuWeight) -> torch.Tensor:
    """Return the fp32 weight [O, I] that was packed."""
    return FORMATS[weight.format].unpack(weight.handle) * weight.scale


def _run(x_TI: torch.Tensor, weight: CpuWeight) -> torch.Tensor:
    return FORMATS[weight.format].run(x_TI, weight.handle)


def _run_tiles(x_TI: torch.Tensor, weight: CpuWeight) -> torch.Tensor:
    tiles = [_run(tile_XI, weight) for tile_XI in x_TI.split(weight.row_tile)]
    return torch.cat(tiles) if x_TI.shape[0] else _run(x_TI, weight)


def _pack_scaled(
    name: str, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, scale: float
) -> Any:
    if scale != 1.0:
        weight_OI = weight_OI / scale
        bias_O = None if bias_O is None else bias_O / scale
    return FORMATS[name].pack(weight_OI, bias_O)


def _pack_tiles(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, reason: str) -> CpuWeight:
    """Pack for ``F.linear`` run with one fixed row count, the last resort."""
    num_out, num_in = weight_OI.shape
    sizes = (num_out, num_in, bias_O is not None)
    tile = next(n for n in ROW_TILES if n == 1 or _tile_is_uniform(n, *sizes))
    logger.warning(
        "linear %dx%d: no row multiple keeps a row's bits (%s); running fixed tiles of %d rows",
        *(num_out, num_in, reason, tile),
    )
    handle = FORMATS["plain_fp32"].pack(weight_OI, bias_O)
    return CpuWeight("plain_fp32", handle, 1.0, tile, tile, reason)


def _fp16_scale(weight_OI: torch.Tensor) -> float | None:
    """Return the power of two s for which weight / s is exact in fp16, None if there is none.

    1.0 if that works; else the largest weight moves to [2**14, 2**15), which leaves the most room
    for small ones (exact down to 2**-39 of it).
    """
    largest = float(weight_OI.abs().amax()) if weight_OI.numel() else 0.0
    if not largest < math.inf:  # the packer saturates infinities
        return None
    if torch.equal(weight_OI.half().float(), weight_OI):
        return 1.0
    scale = 2.0 ** (math.frexp(largest)[1] - 15)
    scaled_OI = weight_OI / scale
    return scale if torch.equal(scaled_OI.half().float(), scaled_OI) else None


@lru_cache(maxsize=256)
def find_row_multiple(
    name: str, num_out: int, num_in: int, has_bias: bool, num_threads: int
) -> tuple[int, str]:
    """Return (smallest row multiple that keeps bits, ""), or (0, why there is none).

    Runs the format on random weights of this shape. ``num_threads`` is part of the key because
    libraries split work by it.
    """
    weight_OI, bias_O, x_TI = _test_operands(num_out, num_in, has_bias)
    thin_OI = weight_OI[: rows.THIN].contiguous()
    thin_O = None if bias_O is None else bias_O[: rows.THIN].contiguous()
    form = FORMATS[name]
    try:
        thin, full = form.pack(thin_OI, thin_O), form.pack(weight_OI, bias_O)
        if not torch.equal(form.unpack(thin), thin_OI):
            return 0, "packing changes weights"
        calls = (partial(form.run, handle=handle) for handle in (full, thin))
        multiple = rows.find_multiple(*calls, x_TI, form.num_dense)
    except (RuntimeError, AttributeError) as error:
        return 0, str(error).splitlines()[0]
    if multiple == 0:
        return 0, f"a row's bits depend on the row count (tried multiples {rows.ROW_MULTIPLES})"
    return multiple, ""


def _tile_is_uniform(num_rows: int, num_out: int, num_in: int, has_bias: bool) -> bool:
    """Say whether ``F.linear`` on ``num_rows`` rows gives a row the same bits at each position."""
    weight_OI, bias_O, x_TI = _test_operands(num_out, num_in, has_bias)
    x_TI = x_TI[:num_rows]
    wanted_TO = F.linear(x_TI, weight_OI, bias_O)
    return all(
        torch.equal(F.linear(x_TI.roll(shift, 0), weight_OI, bias_O), wanted_TO.roll(shift, 0))
        for shift in range(1, num_rows)
    )


def _test_operands(
    num_out: int, num_in: int, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return random fp32 (weight, bias, x); weights are fp16 values, its extremes among them."""
    generator = torch.Generator().manual_seed(0)
    num_out = rows.num_test_outputs(num_out, num_in)
    weight_OI = torch.rand(num_out, num_in, generator=generator).sub_(0.5).half().float()
    extremes = torch.tensor([2.0**-24, -(2.0**-14), 65504.0])[:num_in]
    weight_OI[:1, : len(extremes)] = extremes
    x_TI = torch.rand(rows.MAX_TEST_ROWS, num_in, generator=generator).sub_(0.5)
    rows.cancel_halves(weight_OI, x_TI)
    return weight_OI, torch.rand(num_out, generator=generator) if has_bias else None, x_TI
