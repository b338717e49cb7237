"""Keys and values in one byte: int8 or fp8 (e4m3), with one factor a token and KV head.

Shapes: x [..., D] fp32 or wider; stored [..., D] in one of KV_DTYPES; scale [...] fp32.
Units: value = stored * scale. scale = amax / top, where amax is the largest magnitude of the D
    values and top the largest stored one (KV_DTYPES).
Rules: a NaN or an infinity among the D values makes their scale NaN and their stored values 0; an
    amax below TINY counts as 0: scale and stored values are 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KV_DTYPES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 2.0**-100  # above it scale and 1 / scale are normal fp32 numbers
_TINY = tl.constexpr(TINY)
_INFINITY_BITS = tl.constexpr(0x7F800000)  # of fp32; those of a NaN are larger
# Added to a small fp32 number it rounds that to an integer, ties to even, in the low bits.
_ROUND = tl.constexpr(1.5 * 2**23)


def quantize_kv(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (stored, scale); both to nearest, ties to even, whatever fp32 rounds on the way."""
    top = KV_DTYPES[dtype]
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    tops = torch.full_like(amax, top)  # CUDA would multiply by the inverse of a number
    is_used = (amax >= TINY) & amax.isfinite()
    scaled = x * (tops / amax)
    if dtype == torch.int8:
        scaled = scaled.round()
    stored = scaled.where(is_used, 0.0).to(dtype)
    scale = (amax / tops).where(amax >= TINY, 0.0).where(amax.isfinite(), torch.nan)
    return stored, scale.squeeze(-1)


def dequantize_kv(
    stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return stored * scale in ``dtype``."""
    return stored.to(dtype) * scale[..., None].to(dtype)


@triton.jit
def quantize_heads(x, dtype: tl.constexpr, TOP: tl.constexpr):
    """(stored [BLOCK_H, BLOCK_D], scale [BLOCK_H]) of fp32 heads; TOP is KV_DTYPES[dtype]."""
    # As integers magnitudes keep their order, and a NaN, which a float maximum loses, is largest.
    bits_H = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1)
    is_finite_H = bits_H < _INFINITY_BITS
    amax_H = bits_H.to(tl.float32, bitcast=True)
    is_used_H = is_finite_H & (amax_H >= _TINY)
    top_H = tl.full(amax_H.shape, TOP, tl.float32)
    inverse_H = tl.div_rn(top_H, tl.where(is_used_H, amax_H, 1.0))
    scaled = tl.where(is_used_H[:, None], x * inverse_H[:, None], 0.0)
    if dtype == tl.int8:
        stored = (scaled + _ROUND).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        stored = scaled.to(dtype)
    scale_H = tl.where(is_used_H, tl.div_rn(amax_H, top_H), 0.0)
    return stored, tl.where(is_finite_H, scale_H, float("nan"))
