"""The correctness gate of a bench: no speed is shown for an op whose numbers are wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedraft.kernels.dispatch import use_reference
from pagedraft.kernels.normed import Normed, finish_norm

Tensors = dict[str, torch.Tensor]
FACTOR = 2.0
# In fp32 the reference is its own best approximation, so that other orders of sums need room.
ROUNDING = {torch.float32: 8.0, torch.float16: 0.5, torch.bfloat16: 0.5}


def gate(prepare: Callable[[Tensors], Callable[[], object]], inputs: Tensors) -> str | None:
    """Return what is wrong with the op on ``inputs``, or None.

    Floats may be at most ``FACTOR`` times as far from the reference in fp32 as the reference in the
    inputs' own dtype, which counts as at least ``ROUNDING`` units in the last place of the largest
    value; integers must be equal. A coarse check of what is timed: the tests are the judge.
    """
    outs = _as_tuple(prepare(_copied(inputs))())
    with use_reference():
        same = _as_tuple(prepare(_copied(inputs))())
        exact = _as_tuple(prepare(_widened(inputs))())
    problems = [
        problem
        for index, triple in enumerate(zip(outs, same, exact, strict=True))
        if (problem := _judge(index, *triple))
    ]
    return "; ".join(problems) or None


def _judge(index: int, out: torch.Tensor, same: torch.Tensor, exact: torch.Tensor) -> str | None:
    if not out.is_floating_point():
        num_wrong = int((out != same).sum())
        return (
            f"output {index}: {num_wrong} of {out.numel()} integers differ" if num_wrong else None
        )
    if not bool(out.isfinite().all()):
        return f"output {index}: not finite"
    exact = exact.double()
    rounding = ROUNDING[out.dtype] * torch.finfo(out.dtype).eps * exact.abs().max().item()
    allowed = FACTOR * max((same.double() - exact).abs().max().item(), rounding)
    error = (out.double() - exact).abs().max().item()
    return f"output {index}: error {error:.2e}, allowed {allowed:.2e}" if error > allowed else None


def _as_tuple(out: object) -> tuple[torch.Tensor, ...]:
    """The tensors that an op returned; a Normed as the rows that its reader sees."""
    if isinstance(out, Normed):
        return (finish_norm(out),)
    if isinstance(out, (tuple, list)):
        return tuple(tensor for part in out for tensor in _as_tuple(part))
    return (out,)


def _copied(inputs: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _widened(inputs: Tensors) -> Tensors:
    # Floats of 8 bits are stored cache values: their factors, not their dtype, give the precision.
    return {
        name: tensor.float()
        if tensor.is_floating_point() and tensor.element_size() > 1
        else tensor.clone()
        for name, tensor in inputs.items()
    }
