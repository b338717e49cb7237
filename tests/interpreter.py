"""Makes Triton's CPU interpreter compute bf16 and fp8 as a GPU does, and `tl.dot` row by row alike.

The stock interpreter (3.6 to 3.9) keeps bf16 and fp8 values as raw integers and does arithmetic on
the bit patterns, truncates where a GPU rounds, and multiplies with BLAS kernels that depend on
strides and on the number of rows. `install` patches the interpreter's builder: narrow floats are
decoded to fp32, the stock operation runs, the result is rounded to nearest even. Reductions run in
fp32 throughout (a GPU rounds each step). tests/test_interpreter.py fails where an upgrade of Triton
breaks one of these promises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle


class Format(NamedTuple):
    """A float format that NumPy lacks: its torch dtype and the integers that carry its bits."""

    torch_dtype: torch.dtype
    numpy_bits: type
    torch_bits: torch.dtype


FORMATS = {
    tl.bfloat16: Format(torch.bfloat16, np.uint16, torch.uint16),
    tl.float8e4nv: Format(torch.float8_e4m3fn, np.uint8, torch.uint8),
    tl.float8e5: Format(torch.float8_e5m2, np.uint8, torch.uint8),
}
# fmt: off
NARROW = tuple(FORMATS)
ARITHMETIC_OPS = (
    "fadd", "fsub", "fmul", "fdiv", "frem", "fneg", "fma", "fabs", "clampf", "precise_divf",
    "approx_divf", "minimumf", "maximumf", "minnumf", "maxnumf", "floor", "ceil", "sqrt",
    "precise_sqrt", "rsqrt", "exp", "exp2", "log", "log2", "sin", "cos", "erf",
)
# fmt: on
COMPARISONS = tuple(
    f"fcmp{order}{test}" for order in "OU" for test in ("LT", "GT", "LE", "GE", "EQ", "NE")
)


def decode(handle: TensorHandle) -> np.ndarray:
    """Return the fp32 values of a handle in one of FORMATS."""
    form = FORMATS[handle.dtype.scalar]
    bits = np.array(handle.data, dtype=form.numpy_bits, order="C")
    values = torch.from_numpy(bits.reshape(-1)).view(form.torch_dtype).float()
    return values.numpy().reshape(bits.shape)


def encode(values: np.ndarray, dtype: tl.dtype, *, truncate: bool = False) -> TensorHandle:
    """Round fp32 ``values`` to ``dtype``: nearest even, fp8 saturating; or towards zero (bf16)."""
    form = FORMATS[dtype]
    flat = torch.from_numpy(np.array(values, dtype=np.float32, order="C").reshape(-1))
    if truncate:
        if dtype != tl.bfloat16:
            raise NotImplementedError(f"rounding towards zero to {dtype}")
        flat = (flat.view(torch.int32) & -65536).view(torch.float32)
    if dtype != tl.bfloat16:
        limits = torch.finfo(form.torch_dtype)
        flat = torch.where(flat.isnan(), flat, flat.clamp(limits.min, limits.max))
    bits = flat.to(form.torch_dtype).view(form.torch_bits).numpy()
    return TensorHandle(bits.reshape(np.shape(values)), dtype)


def is_narrow(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar in NARROW


def widen(value: Any) -> Any:
    """Decode a narrow handle to an fp32 handle; anything else passes through."""
    return TensorHandle(decode(value), tl.float32) if is_narrow(value) else value


def _wrap_float_op(stock: Callable) -> Callable:
    def run(self, *args, **options):
        narrow = [arg.dtype.scalar for arg in args if is_narrow(arg)]
        result = stock(self, *map(widen, args), **options)
        if narrow and result.data.dtype == np.float32:
            return encode(result.data, narrow[0])
        return result

    return run


def _wrap_atomic(stock: Callable) -> Callable:
    def run(self, *args):
        if any(is_narrow(arg) for arg in args):
            raise NotImplementedError("interpreted atomics on bf16 or fp8")
        return stock(self, *args)

    return run


def _wrap_reduction(stock: Callable) -> Callable:
    """Run a reduction or scan over narrow tensors in fp32 and round its results."""

    def widen_tensor(tensor: tl.tensor) -> tl.tensor:
        if not is_narrow(tensor.handle):
            return tensor
        shape = list(tensor.shape)
        return tl.tensor(
            widen(tensor.handle), tl.block_type(tl.float32, shape) if shape else tl.float32
        )

    def narrow_tensor(result: tl.tensor, source: tl.tensor) -> tl.tensor:
        if not is_narrow(source.handle):
            return result
        dtype, shape = source.dtype.scalar, list(result.shape)
        return tl.tensor(
            encode(result.handle.data, dtype), tl.block_type(dtype, shape) if shape else dtype
        )

    def run(self, inputs):
        results = stock(self, tuple(map(widen_tensor, inputs)))
        if not isinstance(results, (list, tuple)):
            return narrow_tensor(results, inputs[0])
        return tuple(map(narrow_tensor, results, inputs))

    return run


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """a @ b + d, accumulated in d's type (fp32 for narrow floats), each row by its own product.

    One product for the tile would take other BLAS kernels for other tile heights, so a row's bits
    would depend on its tile; as they may not in the engine, they must not here.
    """
    acc = widen(d).data
    product_dtype = np.float32 if np.issubdtype(acc.dtype, np.floating) else acc.dtype
    product_dtype = np.promote_types(product_dtype, acc.dtype)
    lhs, rhs = (np.ascontiguousarray(widen(h).data, dtype=product_dtype) for h in (a, b))
    result = np.matmul(lhs[..., :, None, :], rhs[..., None, :, :])[..., 0, :] + acc
    if is_narrow(d):
        return encode(result, d.dtype.scalar)
    return TensorHandle(result.astype(acc.dtype), d.dtype.scalar)


def _wrap_cast(stock: Callable) -> Callable:
    def run(self, src, dst_type):
        return _convert(self, src, dst_type, stock, truncate=False)

    return run


def _wrap_fp_to_fp(stock: Callable) -> Callable:
    def run(self, src, dst_type, rounding_mode):
        truncate = rounding_mode == ir.ROUNDING_MODE.RTZ
        numpy_floats = (tl.float16, tl.float32, tl.float64)
        if is_narrow(src) or dst_type.scalar in NARROW:
            return _convert(self, src, dst_type, None, truncate=truncate)
        if src.dtype.scalar in numpy_floats and dst_type.scalar in numpy_floats and not truncate:
            dtype = triton_interpreter._get_np_dtype(dst_type)
            return TensorHandle(src.data.astype(dtype), dst_type.scalar)
        return stock(self, src, dst_type, rounding_mode)

    return run


def _convert(builder, src, dst_type, stock, *, truncate: bool) -> TensorHandle:
    dst = dst_type.scalar
    if src.dtype.scalar == dst:
        return src
    if dst in NARROW:
        return encode(widen(src).data.astype(np.float32), dst, truncate=truncate)
    if is_narrow(src):
        return TensorHandle(decode(src).astype(triton_interpreter._get_np_dtype(dst_type)), dst)
    return stock(builder, src, dst_type)


def install() -> None:
    """Patch the interpreter of this process; a second call does nothing."""
    builder = InterpreterBuilder
    if getattr(builder, "_pagedraft_installed", False):
        return
    builder._pagedraft_installed = True
    for name in (f"create_{op}" for op in ARITHMETIC_OPS + COMPARISONS):
        if hasattr(builder, name):
            setattr(builder, name, _wrap_float_op(getattr(builder, name)))
    builder.create_dot = _dot
    builder.cast_impl = _wrap_cast(builder.cast_impl)
    builder.create_fp_to_fp = _wrap_fp_to_fp(builder.create_fp_to_fp)
    builder.create_atomic_rmw = _wrap_atomic(builder.create_atomic_rmw)
    builder.get_bf16 = lambda self, value: encode(np.array([value]), tl.bfloat16)
    for reduction in (ReduceOps, ScanOps):
        reduction.apply_impl = _wrap_reduction(reduction.apply_impl)
