"""Sample: draw one token a row from logits, greedily or by Gumbel-max with counter-based noise.

**Shapes.** logits_QV fp32, fp16 or bf16, unit stride in V; temperature_Q fp32; seed_Q, position_Q
and sample_index_Q int64.

**Returns** tokens_Q int64. A row with temperature below MIN_TEMPERATURE takes its largest logit,
any other the largest score ``logit / temperature + noise``, in fp32 (what overflows there counts as
infinite). Equal values: the lowest id.
Columns of -inf are never drawn; +inf wins over everything finite, the lowest id of several first. A
row that holds NaN, or nothing above -inf, yields INVALID_TOKEN.

A row's token depends on its own logits and parameters only: not on the other rows, not on how the
vocabulary is split, not on the device. The noise is a function of (seed, position, sample index,
token id), see philox.py.

**Units.** position counts tokens: the index that the drawn token takes in its context.

**Cost.** Q*V*itemsize bytes read, once; 8*Q written. Memory-bound; noise adds about 150 integer and
100 floating-point operations a logit of a sampled row, none to greedy rows.

**Grid.** (Q, splits): a program scans its share of one row's columns and writes its best score and
id; a second launch, (Q,), merges a row's partials.

**Source.** Gumbel-max: Maddison et al., "A* Sampling" (NeurIPS 2014).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from pagedraft.kernels.check import check_contiguous, check_dtype, check_same_device, check_shape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.philox import NOISE_CHUNK, gumbel_noise_jit, gumbel_noise_ref
from pagedraft.kernels.sample_cpu import Rows, draw, first_largest, largest_of_chunks

INVALID_TOKEN = -1
# Below it a row is greedy: noise would move a logit by at most 3e-4, and 1 / temperature overflow.
MIN_TEMPERATURE = 1e-5

_MAX_SPLITS = 256
_INVALID_TOKEN = tl.constexpr(INVALID_TOKEN)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_NOISE_CHUNK = tl.constexpr(NOISE_CHUNK)
_NO_ID = tl.constexpr(2**31 - 1)  # above every id: nothing above -inf was seen
_NAN_ID = tl.constexpr(-1)  # below every id


@dataclass(frozen=True)
class SampleBatch:
    """How each row draws; all tensors on the device of the logits.

    temperature_Q: fp32; 0 is greedy.
    seed_Q: int64, the request's.
    position_Q: int64, index of the drawn token in its context.
    sample_index_Q: int64, which of a request's n samples; None is 0 everywhere.
    """

    temperature_Q: torch.Tensor
    seed_Q: torch.Tensor
    position_Q: torch.Tensor
    sample_index_Q: torch.Tensor | None = None


def sample_ref(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw with dense noise: the oracle."""
    logits_QV = logits_QV.float()
    noise_QV = gumbel_noise_ref(
        logits_QV.shape[1], batch.position_Q, batch.seed_Q, _sample_index(batch)
    )
    inverse_Q1 = (1.0 / batch.temperature_Q)[:, None]
    is_greedy_Q1 = ~_is_sampled(batch)[:, None]
    scores_QV = torch.where(is_greedy_Q1, logits_QV, logits_QV * inverse_Q1 + noise_QV)
    is_valid_Q = scores_QV.amax(-1) > float("-inf")
    return scores_QV.argmax(-1).masked_fill(~is_valid_Q, INVALID_TOKEN)


def sample_cpu(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw as ``sample_ref`` does, reading the logits about once and pruning the noise."""
    logits_QV = logits_QV.float()
    largest_QC = largest_of_chunks(logits_QV)
    top_Q = largest_QC.amax(-1)
    first_Q = first_largest(logits_QV, largest_QC)
    tokens_Q = first_Q.masked_fill(~(top_Q > float("-inf")), INVALID_TOKEN)
    row_S = (_is_sampled(batch) & top_Q.isfinite()).nonzero()[:, 0]
    if row_S.shape[0] == 0:
        return tokens_Q
    parameters = (
        1.0 / batch.temperature_Q,
        batch.position_Q,
        batch.seed_Q,
        _sample_index(batch),
    )
    rows = Rows(row_S.numpy(), *(vector[row_S].numpy() for vector in parameters))
    with np.errstate(over="ignore"):  # a quotient that overflows is infinite
        drawn_S, score_S = draw(logits_QV, largest_QC[row_S].numpy(), first_Q[row_S].numpy(), rows)
    drawn_S[score_S == float("-inf")] = INVALID_TOKEN
    tokens_Q[row_S] = torch.from_numpy(drawn_S)
    return tokens_Q


def _is_sampled(batch: SampleBatch) -> torch.Tensor:
    return batch.temperature_Q >= MIN_TEMPERATURE


def _sample_index(batch: SampleBatch) -> torch.Tensor:
    if batch.sample_index_Q is None:
        return torch.zeros_like(batch.position_Q)
    return batch.sample_index_Q


@triton.jit(do_not_specialize=["num_tiles"])
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    index_ptr,
    score_ptr,
    id_ptr,
    stride_q,
    vocab_size,
    num_tiles,
    HAS_INDEX: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    is_sampled = temperature >= _MIN_TEMPERATURE
    inverse = tl.div_rn(1.0, tl.where(is_sampled, temperature, 1.0))
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row).to(tl.uint32)
    index = tl.zeros((), tl.uint32)
    if HAS_INDEX:
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
            k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
            score = score * inverse + gumbel_noise_jit(
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


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(score_ptr, id_ptr, token_ptr, num_splits, MAX_SPLITS: tl.constexpr):
    row = tl.program_id(0)
    offs_s = tl.arange(0, MAX_SPLITS)
    mask_s = offs_s < num_splits
    score = tl.load(score_ptr + row * num_splits + offs_s, mask=mask_s, other=float("-inf"))
    token = tl.load(id_ptr + row * num_splits + offs_s, mask=mask_s, other=_NO_ID)
    top = tl.max(score, axis=0)
    top_id = tl.min(tl.where(score == top, token, _NO_ID), axis=0)
    has_nan = tl.min(token, axis=0) == _NAN_ID
    is_invalid = has_nan | (top_id == _NO_ID)
    tl.store(token_ptr + row, tl.where(is_invalid, _INVALID_TOKEN, top_id).to(tl.int64))


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


def sample(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw a token for each row; see the module docstring.

    Raises ValueError or TypeError for shapes, dtypes or devices that do not fit.
    """
    _check(logits_QV, batch)
    choice = implementation("sample", logits_QV.device, has_cpu=True)
    if choice == "cpu":
        return sample_cpu(logits_QV, batch)
    if choice == "ref":
        return sample_ref(logits_QV, batch)
    num_rows, vocab_size = logits_QV.shape
    tokens_Q = torch.empty(num_rows, dtype=torch.int64, device=logits_QV.device)
    if num_rows == 0:
        return tokens_Q
    config = sample_config(num_rows, vocab_size)
    score_QS = torch.empty(num_rows, config.num_splits, device=logits_QV.device)
    id_QS = torch.empty_like(score_QS, dtype=torch.int32)
    has_index = batch.sample_index_Q is not None
    _sample_kernel[(num_rows, config.num_splits)](
        logits_QV,
        batch.temperature_Q,
        batch.seed_Q,
        batch.position_Q,
        batch.sample_index_Q if has_index else batch.position_Q,
        score_QS,
        id_QS,
        logits_QV.stride(0),
        vocab_size,
        config.num_tiles,
        HAS_INDEX=has_index,
        TILE_CHUNKS=config.tile_chunks,
        num_warps=config.num_warps,
        enable_fp_fusion=False,  # the same bits everywhere
    )
    _merge_kernel[(num_rows,)](
        score_QS, id_QS, tokens_Q, config.num_splits, MAX_SPLITS=_MAX_SPLITS, num_warps=4
    )
    return tokens_Q


def _check(logits_QV: torch.Tensor, batch: SampleBatch) -> None:
    check_dtype("logits_QV", logits_QV, torch.float32, torch.float16, torch.bfloat16)
    check_shape("logits_QV", logits_QV, (None, None))
    num_rows, vocab_size = logits_QV.shape
    if vocab_size == 0 or logits_QV.stride(1) != 1:
        raise ValueError(
            "logits_QV: expected at least one column and unit stride in V, got shape "
            f"{tuple(logits_QV.shape)}, strides {logits_QV.stride()}"
        )
    check_dtype("temperature_Q", batch.temperature_Q, torch.float32)
    vectors = {
        "temperature_Q": batch.temperature_Q,
        "seed_Q": batch.seed_Q,
        "position_Q": batch.position_Q,
    }
    if batch.sample_index_Q is not None:
        vectors["sample_index_Q"] = batch.sample_index_Q
    for name, vector in vectors.items():
        check_shape(name, vector, (num_rows,))
        check_contiguous(name, vector)
        if name != "temperature_Q":
            check_dtype(name, vector, torch.int64)
    check_same_device(logits_QV=logits_QV, **vectors)


def sample_cost(num_rows: int, vocab_size: int, itemsize: int, num_sampled: int = 0) -> Cost:
    """Bytes of one call; operations a logit: a comparison, and 250 for noise in a sampled row."""
    num_bytes = num_rows * (vocab_size * itemsize + 28)
    return Cost(bytes=num_bytes, flops=vocab_size * (num_rows + 250 * num_sampled))
