"""How CPU libraries pack a linear layer's weight and multiply by it.

Measured on 2 AVX2 cores with weights of 576x576 to 3072x576:

* ``onednn_bf16``: bf16 weights and products of bf16: x and y are rounded to it, as they are on a
  GPU. Only where the caller allows it and the processor multiplies bf16. One AVX512-BF16 core,
  time over that of ``fbgemm_fp16``, a layer's weights: 1.2 for 1 row, 0.8 for 4 and 5, 0.7 for
  8, 0.6 for 16, 0.5 from 32 on; bits equal for even counts, for few inputs for every count.
* ``fbgemm_fp16``: fp16 weights at 12 to 17 GB/s for 1 to 6 rows, 150 GFLOP/s at 64; bits equal for
  every multiple of 3 rows (with AVX512 for every count).
* ``onednn_fp32``: fp32 weights, half the speed at few rows, a tie at 500; all or even counts.
* ``plain_fp32``: ``F.linear``; equal for multiples of 4 to 16, by processor, or for none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pagedraft.kernels import linear_cpu_rows as rows


class Format(NamedTuple):
    """How one library packs a weight.

    pack: (fp32 weight [O, I], fp32 bias [O] or None) -> handle.
    run: (x [T, I] fp32, handle) -> y [T, O] fp32.
    unpack: handle -> fp32 weight [O, I].
    num_dense: the self-test tries every multiple up to this many rows (row-count specific kernels).
    dtype: of the values that the handle holds.
    """

    pack: Callable[[torch.Tensor, torch.Tensor | None], Any]
    run: Callable[[torch.Tensor, Any], torch.Tensor]
    unpack: Callable[[Any], torch.Tensor]
    num_dense: int
    dtype: torch.dtype


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


class Bf16Handle(NamedTuple):
    """weight: packed for oneDNN. bias_O: fp32."""

    weight: torch.Tensor
    bias_O: torch.Tensor | None


def _bf16_pack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Bf16Handle:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.bfloat16(), 16)
    return Bf16Handle(packed, bias_O)


@lru_cache(maxsize=1)
def _onednn_op() -> Callable[..., torch.Tensor]:
    return torch.ops.mkldnn._linear_pointwise.default


def _bf16_run(x_TI: torch.Tensor, handle: Bf16Handle) -> torch.Tensor:
    y_TO = _onednn_op()(x_TI.bfloat16(), handle.weight, None, "none", [], "").float()
    return y_TO if handle.bias_O is None else y_TO.add_(handle.bias_O)


def _bf16_unpack(handle: Bf16Handle) -> torch.Tensor:
    return handle.weight.to_dense().float()


def _onednn_pack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, 16), bias_O


def _onednn_run(x_TI: torch.Tensor, handle: Any) -> torch.Tensor:
    weight, bias_O = handle
    return _onednn_op()(x_TI, weight, bias_O, "none", [], "")


def _onednn_unpack(handle: Any) -> torch.Tensor:
    return handle[0].to_dense()


def _plain_pack(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Any:
    return weight_OI, bias_O


def _plain_run(x_TI: torch.Tensor, handle: Any) -> torch.Tensor:
    return F.linear(x_TI, *handle)


def _plain_unpack(handle: Any) -> torch.Tensor:
    return handle[0]


FORMATS = {
    "onednn_bf16": Format(_bf16_pack, _bf16_run, _bf16_unpack, 40, torch.bfloat16),
    "fbgemm_fp16": Format(_fbgemm_pack, _fbgemm_run, _fbgemm_unpack, 126, torch.float16),
    "onednn_fp32": Format(_onednn_pack, _onednn_run, _onednn_unpack, 12, torch.float32),
    "plain_fp32": Format(_plain_pack, _plain_run, _plain_unpack, rows.MAX_TEST_ROWS, torch.float32),
}
WIDE = tuple(name for name, form in FORMATS.items() if form.dtype != torch.bfloat16)
FP32 = tuple(name for name, form in FORMATS.items() if form.dtype == torch.float32)
BF16_FEATURES = ("avx512_bf16", "amx_bf16")  # x86 processors with one of them multiply bf16


def multiplies_bf16() -> bool:
    """Whether this processor has products of bf16 that are faster than those of fp32."""
    find = getattr(torch.cpu, "get_capabilities", None)
    if find is None:  # torch 2.11
        return bool(torch.cpu._is_avx512_bf16_supported())
    capabilities: dict[str, bool] = find()
    return any(capabilities.get(feature, False) for feature in BF16_FEATURES)


def choose_formats(dtype: torch.dtype, *, narrow: bool) -> tuple[str, ...]:
    """Formats to try for a weight of ``dtype``, the fastest first; ``narrow`` as in ``pack``."""
    if dtype == torch.float32:
        return FP32
    if narrow and dtype == torch.bfloat16 and multiplies_bf16():
        return tuple(FORMATS)
    return WIDE
