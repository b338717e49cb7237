"""Triton side of the sample op: a scan over splits of each row, then a merge or a write.

**Grid.** ``scan``: (Q, splits); a program scans its share of one row's columns and writes its best
score and id. ``merge``: (Q,); a row's partials become its token. ``write``: (Q, column tiles); a
program merges the partials again and writes its tile of processed logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagedraft.kernels.logit_edits_triton import edit_logits_triton
from pagedraft.kernels.philox import NOISE_CHUNK, gumbel_noise_jit
from pagedraft.kernels.sample_batch import INVALID_TOKEN, SampleBatch
from pagedraft.kernels.truncate import MIN_TEMPERATURE
from pagedraft.kernels.truncate_triton import inverse_temperature_jit, truncate_triton

_MAX_SPLITS = 256
_WRITE_TILE = 4096
_INVALID_TOKEN = tl.constexpr(INVALID_TOKEN)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_NOISE_CHUNK = tl.constexpr(NOISE_CHUNK)
_NO_ID = tl.constexpr(2**31 - 1)  # above every id: nothing above -inf was seen
_NAN_ID = tl.constexpr(-1)  # below every id


@triton.jit(do_not_specialize=["num_tiles"])
def _scan_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    index_ptr,
    top_ptr,
    cut_ptr,
    score_ptr,
    id_ptr,
    stride_q,
    vocab_size,
    num_tiles,
    HAS_NOISE: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    is_sampled = temperature >= _MIN_TEMPERATURE
    inverse = inverse_temperature_jit(temperature)
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row).to(tl.uint32)
    index = tl.zeros((), tl.uint32)
    if index_ptr is not None:
        index = tl.load(index_ptr + row).to(tl.uint32)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_q
    offs_c = tl.arange(0, TILE_CHUNKS)[:, None]
    offs_l = tl.arange(0, _NOISE_CHUNK)[None, :]
    best = tl.full((TILE_CHUNKS, _NOISE_CHUNK), float("-inf"), tl.float32)
    best_id = tl.full((TILE_CHUNKS, _NOISE_CHUNK), _NO_ID, tl.int32)
    is_nan = tl.zeros((TILE_CHUNKS, _NOISE_CHUNK), tl.int32)
    for tile in range(split * num_tiles, (split + 1) * num_tiles):
        chunk = tile * TILE_CHUNKS + offs_c
        token = chunk * _NOISE_CHUNK + offs_l
        logit = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
        score = logit.to(tl.float32)  # [TILE_CHUNKS, NOISE_CHUNK]
        if is_sampled:
            score = score * inverse
            if cut_ptr is not None:
                distance = tl.load(top_ptr + row) - score
                score = tl.where(distance > tl.load(cut_ptr + row), float("-inf"), score)
            if HAS_NOISE:
                k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
                score = score + gumbel_noise_jit(
                    chunk.to(tl.uint32), token.to(tl.uint32), position, index, k0, k1
                )
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_id = tl.where(is_better, token, best_id)
        is_nan = is_nan | (score != score).to(tl.int32)
    top = tl.max(best)
    top_id = tl.min(tl.where(best == top, best_id, _NO_ID))
    has_nan = tl.max(is_nan) > 0
    partial = row * tl.num_programs(1) + split
    tl.store(score_ptr + partial, top)
    tl.store(id_ptr + partial, tl.where(has_nan, _NAN_ID, top_id))


@triton.jit
def _merged(score_ptr, id_ptr, row, num_splits, MAX_SPLITS: tl.constexpr):
    """Best score and token (INVALID_TOKEN if there is none) of a row's partials."""
    offs_s = tl.arange(0, MAX_SPLITS)
    mask_s = offs_s < num_splits
    score = tl.load(score_ptr + row * num_splits + offs_s, mask=mask_s, other=float("-inf"))
    token = tl.load(id_ptr + row * num_splits + offs_s, mask=mask_s, other=_NO_ID)
    top = tl.max(score, axis=0)
    top_id = tl.min(tl.where(score == top, token, _NO_ID), axis=0)
    has_nan = tl.min(token, axis=0) == _NAN_ID
    return top, tl.where(has_nan | (top_id == _NO_ID), _INVALID_TOKEN, top_id)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(score_ptr, id_ptr, token_ptr, num_splits, MAX_SPLITS: tl.constexpr):
    row = tl.program_id(0)
    _, token = _merged(score_ptr, id_ptr, row, num_splits, MAX_SPLITS)
    tl.store(token_ptr + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["num_splits"])
def _write_kernel(
    logits_ptr,
    temperature_ptr,
    cut_ptr,
    score_ptr,
    id_ptr,
    stride_q,
    num_columns,
    vocab_size,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    top, token = _merged(score_ptr, id_ptr, row, num_splits, MAX_SPLITS)
    temperature = tl.load(temperature_ptr + row)
    is_point = (temperature < _MIN_TEMPERATURE) | (top == float("inf"))
    offs_v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_q
    logit = tl.load(row_ptr + offs_v, mask=offs_v < vocab_size, other=float("-inf"))
    x = logit * inverse_temperature_jit(temperature)
    if cut_ptr is not None:
        x = tl.where(top - x > tl.load(cut_ptr + row), float("-inf"), x)
    value = tl.where(is_point, tl.where(offs_v == token, 0.0, float("-inf")), x)
    value = tl.where(token == _INVALID_TOKEN, float("nan"), value)
    tl.store(row_ptr + offs_v, value, mask=offs_v < num_columns)


@dataclass(frozen=True)
class SampleConfig:
    """A tile is tile_chunks * NOISE_CHUNK columns; num_splits programs a row do num_tiles each."""

    tile_chunks: int
    num_tiles: int
    num_splits: int
    num_warps: int


def sample_config(num_rows: int, vocab_size: int) -> SampleConfig:
    """Choose splits for about two waves of programs on 132 multiprocessors; not measured yet.

    The choice never changes a token.
    """
    tile_chunks = 4
    total_tiles = triton.cdiv(vocab_size, tile_chunks * NOISE_CHUNK)
    wanted = max(1, min(total_tiles, _MAX_SPLITS, 264 // max(1, num_rows)))
    num_tiles = triton.cdiv(total_tiles, wanted)
    return SampleConfig(tile_chunks, num_tiles, triton.cdiv(total_tiles, num_tiles), num_warps=4)


@dataclass(frozen=True)
class Scan:
    """Partials of all rows, [Q, splits]: best score fp32 and its id int32."""

    score_QS: torch.Tensor
    id_QS: torch.Tensor

    @property
    def num_splits(self) -> int:
        """Partials a row."""
        return self.score_QS.shape[1]


def _scan(
    logits_QV: torch.Tensor,
    batch: SampleBatch,
    cuts: tuple[torch.Tensor, torch.Tensor] | tuple[None, None],
    *,
    has_noise: bool,
) -> Scan:
    num_rows, num_columns = logits_QV.shape
    vocab_size = batch.num_tokens(num_columns)
    config = sample_config(num_rows, vocab_size)
    score_QS = torch.empty(num_rows, config.num_splits, device=logits_QV.device)
    id_QS = torch.empty_like(score_QS, dtype=torch.int32)
    _scan_kernel[(num_rows, config.num_splits)](
        logits_QV,
        batch.temperature_Q,
        batch.seed_Q,
        batch.position_Q,
        batch.sample_index_Q,
        *cuts,
        score_QS,
        id_QS,
        logits_QV.stride(0),
        vocab_size,
        config.num_tiles,
        HAS_NOISE=has_noise,
        TILE_CHUNKS=config.tile_chunks,
        num_warps=config.num_warps,
        enable_fp_fusion=False,  # the same bits everywhere
    )
    return Scan(score_QS, id_QS)


def _edit_and_cut(
    logits_QV: torch.Tensor, batch: SampleBatch
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Edit logits in place and find the cuts, where the batch asks for either."""
    if batch.has_edits:
        edit_logits_triton(logits_QV, batch)
    return truncate_triton(logits_QV, batch) if batch.has_cut else (None, None)


def sample_triton(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw from checked logits: two launches, one more for edits and one more for cuts."""
    tokens_Q = torch.empty(logits_QV.shape[0], dtype=torch.int64, device=logits_QV.device)
    if tokens_Q.shape[0] == 0:
        return tokens_Q
    scan = _scan(logits_QV, batch, _edit_and_cut(logits_QV, batch), has_noise=True)
    _merge_kernel[tokens_Q.shape](
        scan.score_QS, scan.id_QS, tokens_Q, scan.num_splits, MAX_SPLITS=_MAX_SPLITS, num_warps=4
    )
    return tokens_Q


def process_logits_triton(logits_QV: torch.Tensor, batch: SampleBatch) -> None:
    """Process checked fp32 logits in place: two launches, one more for edits and one for cuts."""
    num_rows, num_columns = logits_QV.shape
    if num_rows == 0:
        return
    cuts = _edit_and_cut(logits_QV, batch)
    scan = _scan(logits_QV, batch, cuts, has_noise=False)
    _write_kernel[(num_rows, triton.cdiv(num_columns, _WRITE_TILE))](
        logits_QV,
        batch.temperature_Q,
        cuts[1],
        scan.score_QS,
        scan.id_QS,
        logits_QV.stride(0),
        num_columns,
        batch.num_tokens(num_columns),
        scan.num_splits,
        MAX_SPLITS=_MAX_SPLITS,
        TILE=_WRITE_TILE,
        num_warps=8,
        enable_fp_fusion=False,  # the same bits everywhere
    )
