"""Runs the rejection and the block rule, and launches their kernels (verify_triton.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.philox import NOISE_CHUNK
from pagedraft.kernels.verify import Verified
from pagedraft.kernels.verify_drafts import (
    Drafts,
    Judgement,
    Row,
    check_drafts,
    judge_rows,
    judge_rows_cpu,
)
from pagedraft.kernels.verify_judge import NUM_STATS
from pagedraft.kernels.verify_triton import draw_kernel, overlap_kernel, sums_kernel

# Fixed, not chosen from the number of rows: then a row's sums do not depend on it.
SPLIT_COLUMNS = 4096
_LOG_BLOCK_COLUMNS = 10
# A draw costs some 250 operations a column: short shares even for one row. Not measured yet.
DRAW_COLUMNS = 1024


def run_rule(
    judge: Callable[[Row], Judgement], logits_QV: torch.Tensor, drafts: Drafts, *, is_block: bool
) -> Verified:
    """Check the arguments and run the rule on what their device runs.

    judge: the rule on the CPU and in the reference; is_block: which one the kernels follow.
    """
    check_drafts(logits_QV, drafts)
    choice = implementation("verify", logits_QV.device, has_cpu=True)
    if choice == "cpu":
        return judge_rows_cpu(judge, logits_QV, drafts)
    if choice == "ref":
        return judge_rows(judge, logits_QV, drafts)
    return launch_verify(logits_QV, drafts, is_block=is_block)


def launch_verify(logits_QV: torch.Tensor, drafts: Drafts, *, is_block: bool) -> Verified:
    """Run the kernels over checked arguments."""
    num_rows, vocab_size = drafts.num_rows, logits_QV.shape[1]
    result = Verified(drafts.starts_R1.new_empty(num_rows), drafts.tokens_K.new_empty(num_rows))
    if num_rows == 0:
        return result
    num_drafts = drafts.tokens_K.shape[0]
    num_places = min(logits_QV.shape[0], num_drafts + num_rows)
    num_splits = triton.cdiv(vocab_size, SPLIT_COLUMNS)
    stats_Q4S = logits_QV.new_empty(num_places, NUM_STATS, num_splits)
    best_R = torch.empty_like(result.next_token_R)
    num_arrived_R = torch.empty_like(result.num_accepted_R)
    q_KV = drafts.q_KV if num_drafts > 0 else None
    stride_q = 0 if q_KV is None else q_KV.stride(0)
    has_q_R = None if q_KV is None or drafts.has_q_R is None else drafts.has_q_R.view(torch.uint8)
    strides = (logits_QV.stride(0), stride_q)
    source = (drafts.starts_R1, q_KV, has_q_R)
    columns = {"SPLIT": SPLIT_COLUMNS, "LOG_V": _LOG_BLOCK_COLUMNS, "num_warps": 4}
    log_s = (num_splits - 1).bit_length()
    sums_kernel[(num_places, num_splits)](
        *(logits_QV, *source, stats_Q4S, best_R, num_arrived_R),
        *(*strides, num_rows, vocab_size),
        **columns,
    )
    if is_block and q_KV is not None:
        overlap_kernel[(num_drafts, num_splits)](
            *(logits_QV, drafts.tokens_K, *source, stats_Q4S),
            *(*strides, num_rows, vocab_size),
            LOG_S=log_s,
            **columns,
        )
    draw_kernel[(num_rows, triton.cdiv(vocab_size, DRAW_COLUMNS))](
        *(logits_QV, drafts.tokens_K, *source),
        *(drafts.seed_R, drafts.position_R, drafts.sample_index_R),
        *(stats_Q4S, best_R, num_arrived_R, *result),
        *(*strides, vocab_size, num_splits),
        IS_BLOCK=is_block,
        TILE_CHUNKS=DRAW_COLUMNS // NOISE_CHUNK,
        LOG_S=log_s,
        num_warps=4,
        enable_fp_fusion=False,  # the same noise everywhere
    )
    return result
