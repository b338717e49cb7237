"""Verify: how many of each row's drafts the target confirms, and the token that follows them.

Match rule: the target drew its own token at every position of a row's span; a draft is accepted iff
it and all drafts before it equal those draws. The token after the accepted drafts is the target's
own draw there, so the output is the target's plain output, whatever the drafts were.

**Shapes.** draft_tokens_K int64, the drafts of all rows one after the other; draft_starts_R1 int32
prefix sums from 0: row r has k = starts[r+1] - starts[r] drafts, k >= 0; target_tokens_Q int64: row
r has k + 1 draws, from starts[r] + r on. Both token tensors may be longer than that; nothing past
the last row is read. Drafts are >= 0; a draw may be -1 (the row's logits were invalid), which no
draft matches.

**Returns** Verified(num_accepted_R int32, next_token_R int64).

**Units.** starts and num_accepted count tokens.

**Cost.** 8*K + 8*Q + 4*(R+1) bytes read, 12*R written: one launch, latency-bound.

**Grid.** (R,): a program owns a row.

**Source.** The draw-and-compare form of speculative sampling with shared noise; the target's own
draw decides. The other rules: verify_rejection.py and verify_block.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from pagedraft.kernels.check import check_same_device, check_vector
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation

_BLOCK_K = 16


class Verified(NamedTuple):
    """num_accepted_R int32; next_token_R int64, -1 where the target has no token to give."""

    num_accepted_R: torch.Tensor
    next_token_R: torch.Tensor


def verify_ref(
    draft_tokens_K: torch.Tensor, draft_starts_R1: torch.Tensor, target_tokens_Q: torch.Tensor
) -> Verified:
    """Compare row by row, draft by draft: the oracle."""
    starts = draft_starts_R1.tolist()
    drafts, draws = draft_tokens_K.tolist(), target_tokens_Q.tolist()
    num_accepted, next_tokens = [], []
    for row, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        accepted = 0
        while start + accepted < end and drafts[start + accepted] == draws[start + row + accepted]:
            accepted += 1
        num_accepted.append(accepted)
        next_tokens.append(draws[start + row + accepted])
    device = draft_tokens_K.device
    return Verified(
        torch.tensor(num_accepted, dtype=torch.int32, device=device),
        torch.tensor(next_tokens, dtype=torch.int64, device=device),
    )


def verify_cpu(
    draft_tokens_K: torch.Tensor, draft_starts_R1: torch.Tensor, target_tokens_Q: torch.Tensor
) -> Verified:
    """Compare all drafts at once, in NumPy; a row accepts up to its first mismatch."""
    starts_R1, drafts_K = draft_starts_R1.numpy(), draft_tokens_K.numpy()
    draws_Q = target_tokens_Q.numpy()
    num_drafts, num_rows = int(starts_R1[-1]), len(starts_R1) - 1
    end_R = starts_R1[1:].astype(np.int64)
    start_R = starts_R1[:-1].astype(np.int64)
    row_K = np.repeat(np.arange(num_rows), end_R - start_R)
    miss_m = (drafts_K[:num_drafts] != draws_Q[np.arange(num_drafts) + row_K]).nonzero()[0]
    # The first miss at or behind a row's start, or the row's end where that is another row's.
    first_R = np.append(miss_m, num_drafts)[np.searchsorted(miss_m, start_R)]
    accepted_R = np.minimum(first_R, end_R) - start_R
    next_token_R = draws_Q[start_R + np.arange(num_rows) + accepted_R]
    return Verified(torch.from_numpy(accepted_R.astype(np.int32)), torch.from_numpy(next_token_R))


@triton.jit
def _verify_kernel(draft_ptr, start_ptr, target_ptr, accepted_ptr, next_ptr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(start_ptr + row)
    num_drafts = tl.load(start_ptr + row + 1) - start
    accepted = num_drafts
    for first in range(0, num_drafts, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        mask_k = offs_k < num_drafts
        draft = tl.load(draft_ptr + start + offs_k, mask=mask_k, other=0)
        target = tl.load(target_ptr + start + row + offs_k, mask=mask_k, other=0)
        misses = tl.where(mask_k & (draft != target), offs_k, num_drafts)  # [BLOCK_K] int32
        accepted = tl.minimum(accepted, tl.min(misses, axis=0))
    tl.store(accepted_ptr + row, accepted)
    tl.store(next_ptr + row, tl.load(target_ptr + start + row + accepted))


def verify(
    draft_tokens_K: torch.Tensor, draft_starts_R1: torch.Tensor, target_tokens_Q: torch.Tensor
) -> Verified:
    """Return accepted counts and next tokens; see the module docstring.

    Raises ValueError or TypeError for shapes, dtypes or devices that do not fit; the values of
    draft_starts_R1 are not checked.
    """
    _check(draft_tokens_K, draft_starts_R1, target_tokens_Q)
    choice = implementation("verify", draft_tokens_K.device, has_cpu=True)
    if choice == "cpu":
        return verify_cpu(draft_tokens_K, draft_starts_R1, target_tokens_Q)
    if choice == "ref":
        return verify_ref(draft_tokens_K, draft_starts_R1, target_tokens_Q)
    num_rows = draft_starts_R1.shape[0] - 1
    accepted_R = draft_starts_R1.new_empty(num_rows)
    next_token_R = target_tokens_Q.new_empty(num_rows)
    if num_rows > 0:
        _verify_kernel[(num_rows,)](
            draft_tokens_K,
            draft_starts_R1,
            target_tokens_Q,
            accepted_R,
            next_token_R,
            BLOCK_K=_BLOCK_K,
            num_warps=1,
        )
    return Verified(accepted_R, next_token_R)


def _check(
    draft_tokens_K: torch.Tensor, draft_starts_R1: torch.Tensor, target_tokens_Q: torch.Tensor
) -> None:
    check_vector("draft_tokens_K", draft_tokens_K, torch.int64)
    check_vector("draft_starts_R1", draft_starts_R1, torch.int32)
    check_vector("target_tokens_Q", target_tokens_Q, torch.int64)
    check_same_device(
        draft_tokens_K=draft_tokens_K,
        draft_starts_R1=draft_starts_R1,
        target_tokens_Q=target_tokens_Q,
    )
    num_rows = draft_starts_R1.shape[0] - 1
    if num_rows < 0:
        raise ValueError("draft_starts_R1: expected R + 1 prefix sums, got an empty tensor")
    if target_tokens_Q.shape[0] < num_rows:
        raise ValueError(
            f"target_tokens_Q: expected at least a draw for each of {num_rows} rows, got "
            f"{target_tokens_Q.shape[0]}"
        )


def verify_cost(num_rows: int, num_drafts: int) -> Cost:
    """Bytes of one call with ``num_drafts`` drafts over all rows."""
    num_draws = num_drafts + num_rows
    num_bytes = 8 * num_drafts + 8 * num_draws + 4 * (num_rows + 1) + 12 * num_rows
    return Cost(bytes=num_bytes, flops=0)
