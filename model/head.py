"""The last linear layer: hidden states to logits, of all tokens or of some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pagedraft.kernels.linear import PackedLinear, linear, pack_linear
from pagedraft.kernels.linear_fused import Rows
from pagedraft.kernels.weight_quant import QuantWeight, WeightFormat

HeadFormat = WeightFormat | Literal["plain"]


def num_bytes(weight: torch.Tensor | QuantWeight | Head) -> int:
    """Bytes of a weight as it is stored, with factors and zero points."""
    return weight.nbytes if isinstance(weight, torch.Tensor) else weight.num_bytes


@dataclass(frozen=True)
class Head:
    """A weight [U, E] whose outputs are logits; models may share one.

    format: what its weights are rounded to, "plain" for none.
    num_bytes: of its weights as they are stored.
    ids_U: int64, ascending: the token of each row. None where the rows are the vocabulary.
    """

    packed: PackedLinear
    format: HeadFormat
    num_bytes: int
    ids_U: torch.Tensor | None = None

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor | QuantWeight,
        dtype: torch.dtype,
        ids_U: torch.Tensor | None = None,
    ) -> Head:
        """Pack ``weight`` [U, E] for its device; dtype: of the activations of a quantised one."""
        format: HeadFormat = weight.format if isinstance(weight, QuantWeight) else "plain"
        return cls(pack_linear(weight, dtype=dtype), format, num_bytes(weight), ids_U)

    def logits(self, normed: Rows, vocab_size: int, *, exact: bool) -> torch.Tensor:
        """fp32 logits [Q, V] in memory of their own, -inf for tokens that no row stands for.

        On a CPU spreading 4 rows of 8192 logits over 49152 takes 44 us, 16 of them for the fill;
        ``index_copy_`` takes 117, and milliseconds where its threads wait for a busy core.
        """
        logits_QU = linear(normed, self.packed, exact=exact, out_dtype=torch.float32)
        if self.ids_U is None:
            return logits_QU
        logits_QV = logits_QU.new_full((logits_QU.shape[0], vocab_size), -torch.inf)
        return logits_QV.scatter_(1, self.ids_U.expand_as(logits_QU), logits_QU)
