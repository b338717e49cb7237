"""Drawing tokens: the one place where a sequence's temperature, seed and position meet a kernel.

Draft and target call the same function, so at one position they share the noise and agree as often
as the two models do.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.sample import SampleBatch, sample

_INT64_SIGN = 2**63


def draw(logits_QV: torch.Tensor, sequences: Seq[Sequence], positions: Seq[int]) -> torch.Tensor:
    """Draw one token a row of logits: int64 [Q], -1 for a row without a finite maximum.

    sequences: whose row it is, one entry a row; positions: index of the drawn token in its context.
    """
    device = logits_QV.device
    batch = SampleBatch(
        temperature_Q=torch.tensor(
            [s.temperature for s in sequences], dtype=torch.float32, device=device
        ),
        seed_Q=torch.tensor([_signed(s.seed) for s in sequences], dtype=torch.int64, device=device),
        position_Q=torch.tensor(positions, dtype=torch.int64, device=device),
    )
    return sample(logits_QV, batch)


def _signed(seed: int) -> int:
    """The 64 bits of ``seed`` as a signed integer, which is what a tensor can hold."""
    return seed - 2 * _INT64_SIGN if seed >= _INT64_SIGN else seed
