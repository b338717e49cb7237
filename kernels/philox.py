"""Counter-based noise: Philox4x32-10 words and the Gumbel noise of token draws, bit-identical in
plain PyTorch, NumPy and Triton.

**Counter.** A call takes a 128-bit counter and a 64-bit key and gives four 32-bit words. The key is
the request's seed; the counter is (vocabulary id or chunk number, position, purpose, sample index).
Noise therefore never depends on batch order, on step count or on the size of the vocabulary.

**Noise.** Token v's noise is ``-log(E_v)`` with E_v standard exponential, which is standard Gumbel:
``argmax(z + noise)`` draws from softmax(z). The E of a chunk's NOISE_CHUNK tokens are made smallest
first, as the exponential is memoryless: the smallest of n is exponential / n, it is at a uniform
place (the slot), and all others exceed it by independent standard exponentials. So one call a chunk
bounds the noise of NOISE_CHUNK tokens exactly, and most tokens need no call of their own:

    E_v = E(chunk word 0) / NOISE_CHUNK + (0 if v is the chunk's slot else E(token word 0))

**Range.** A word x gives E = -log1p(-(x + 1/2) / 2^32), in [2^-33, 33 log 2]. Small values, which
win, keep full fp32 precision. The noise of a token lies in [MIN_GUMBEL, MAX_GUMBEL] =
[-log(33 log 2 * (1 + 1/256)), 41 log 2] = [-3.14, 28.42]; beyond that a tail of 2^-41 is cut off.

**Bits.** Only IEEE fp32 multiplications and additions are used, in a fixed order and without fused
multiply-add (launch with ``enable_fp_fusion=False``), so all devices agree on every bit.

**Source.** Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

# Third counter word. A draft's proposal, its acceptance and its residual never share a stream.
SAMPLE = 0
SAMPLE_CHUNK = 1
ACCEPT = 2
RESIDUAL = 3
DRAFT = 4

NOISE_CHUNK = 256
MIN_GUMBEL = -math.log(33 * math.log(2) * (1 + 1 / NOISE_CHUNK))
MAX_GUMBEL = 41 * math.log(2)

_SAMPLE = tl.constexpr(SAMPLE)
_SAMPLE_CHUNK = tl.constexpr(SAMPLE_CHUNK)
_NOISE_CHUNK = tl.constexpr(NOISE_CHUNK)

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)

# -log(1 - w) = w + w^2 * polynomial(w) on [0, 1/2], within 2 ulp in fp32; lowest power first.
_POLYNOMIAL = (
    0.49999547004699707,
    0.33362236618995667,
    0.243826761841774,
    0.2626364827156067,
    -0.17671623826026917,
    1.1991932392120361,
    -1.6283584833145142,
    1.4091312885284424,
)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7 = (tl.constexpr(c) for c in _POLYNOMIAL)
_LOG_2 = 0.6931471824645996  # the nearest fp32 number
_LOG_2_JIT = tl.constexpr(_LOG_2)

# The functions below take either; small arrays cost a quarter of the time in NumPy.
Array = torch.Tensor | np.ndarray


def philox4x32(
    counter: tuple[Array | int, ...], key: tuple[Array, ...]
) -> tuple[Array, Array, Array, Array]:
    """Return the four words of Philox4x32-10, int64 values below 2^32.

    counter: four words, key: two; int64 arrays that broadcast against each other, of which the low
    32 bits count. Counter words after the first may be integers below 2^31.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    c0, c2 = c0 & _MASK, c2 & _MASK
    for _ in range(10):
        # Products and c1, c3, k0, k1 carry stray bits above 32, which the masks below drop.
        product_0 = c0 * _MULTIPLIERS[0]
        product_1 = c2 * _MULTIPLIERS[1]
        c0 = ((product_1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((product_0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = product_1, product_0
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0, c1 & _MASK, c2, c3 & _MASK


def _float(x: Array) -> Array:
    return x.float() if isinstance(x, torch.Tensor) else x.astype(np.float32)


def _where(condition: Array, x: Array, y: Array) -> Array:
    module = torch if isinstance(condition, torch.Tensor) else np
    return module.where(condition, x, y)


def _polynomial(w: Array) -> Array:
    """-log(1 - w) for fp32 w in [0, 1/2]."""
    total = w * _POLYNOMIAL[-1]
    for coefficient in _POLYNOMIAL[-2:0:-1]:
        total += coefficient
        total *= w
    total += _POLYNOMIAL[0]
    total *= w
    total *= w
    total += w
    return total


def _split(t: Array) -> tuple[Array, Array]:
    """Return (1 - m, e) with t = m * 2^e and m in [1/2, 1), for normal positive fp32 t."""
    is_torch = isinstance(t, torch.Tensor)
    bits = t.view(torch.int32 if is_torch else np.int32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).view(torch.float32 if is_torch else np.float32)
    return 1.0 - mantissa, _float((bits >> 23) - 126)


def exponential(word: Array) -> Array:
    """Standard exponential fp32 of a 32-bit word (int64): -log1p(-(word + 1/2) / 2^32)."""
    is_low = word < 2**31
    half = _float(_where(is_low, word, _MASK - word)) * 2.0**-32 + 2.0**-33
    upper_w, exponent = _split(half)
    value = _polynomial(_where(is_low, half, upper_w))
    return _where(is_low, value, value - exponent * _LOG_2)


def gumbel(e: Array) -> Array:
    """-log(e) for fp32 e > 0."""
    w, exponent = _split(e)
    return _polynomial(w) - exponent * _LOG_2


def gumbel_noise_ref(
    num_tokens: int,
    position_Q: torch.Tensor,
    seed_Q: torch.Tensor,
    sample_index_Q: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Return the fp32 noise of tokens 0..num_tokens-1 in every row, [Q, num_tokens]."""
    token_V = torch.arange(num_tokens, device=seed_Q.device)
    position_Q1, seed_Q1 = position_Q[:, None], seed_Q[:, None]
    index_Q1 = sample_index_Q if isinstance(sample_index_Q, int) else sample_index_Q[:, None]
    chunk_C = torch.arange(-(-num_tokens // NOISE_CHUNK), device=seed_Q.device)
    key = (seed_Q1, seed_Q1 >> 32)
    words = philox4x32((chunk_C, position_Q1, SAMPLE_CHUNK, index_Q1), key)
    smallest_QC = exponential(words[0]) * (1.0 / NOISE_CHUNK)
    slot_QC = words[1] & (NOISE_CHUNK - 1)
    smallest_QV = smallest_QC.repeat_interleave(NOISE_CHUNK, dim=1)[:, :num_tokens]
    slot_QV = slot_QC.repeat_interleave(NOISE_CHUNK, dim=1)[:, :num_tokens]
    words = philox4x32((token_V, position_Q1, SAMPLE, index_Q1), key)
    own_QV = exponential(words[0]).masked_fill_(slot_QV == token_V % NOISE_CHUNK, 0.0)
    return gumbel(smallest_QV + own_QV)


def derived_seed(
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
    purpose: int,
    sample_index_R: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Return the int64 seed of an independent stream: the first words at (0, position, purpose)."""
    zero_R = torch.zeros_like(seed_R)
    words = philox4x32((zero_R, position_R, purpose, sample_index_R), (seed_R, seed_R >> 32))
    return words[0] | words[1] << 32


@triton.jit
def philox4x32_jit(c0, c1, c2, c3, k0, k1):
    """The four words of Philox4x32-10; all operands uint32 tensors that broadcast."""
    for _ in tl.static_range(10):
        low_0 = c0 * _MULTIPLIER_0
        low_1 = c2 * _MULTIPLIER_1
        high_0 = tl.umulhi(c0, _MULTIPLIER_0)
        high_1 = tl.umulhi(c2, _MULTIPLIER_1)
        c0 = high_1 ^ c1 ^ k0
        c2 = high_0 ^ c3 ^ k1
        c1 = low_1
        c3 = low_0
        k0 = k0 + _KEY_STEP_0
        k1 = k1 + _KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def _polynomial_jit(w):
    total = w * _P7 + _P6
    total = total * w + _P5
    total = total * w + _P4
    total = total * w + _P3
    total = total * w + _P2
    total = total * w + _P1
    total = total * w + _P0
    return total * w * w + w


@triton.jit
def _split_jit(t):
    bits = t.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    return 1.0 - mantissa, ((bits >> 23) - 126).to(tl.float32)


@triton.jit
def exponential_jit(word):
    """Standard exponential fp32 of a uint32 word."""
    is_low = word < 0x80000000
    half = tl.where(is_low, word, word ^ 0xFFFFFFFF).to(tl.float32) * 2.3283064365386963e-10
    half = half + 1.1641532182693481e-10
    upper_w, exponent = _split_jit(half)
    value = _polynomial_jit(tl.where(is_low, half, upper_w))
    return tl.where(is_low, value, value - exponent * _LOG_2_JIT)


@triton.jit
def gumbel_jit(e):
    """-log(e) for fp32 e > 0."""
    w, exponent = _split_jit(e)
    return _polynomial_jit(w) - exponent * _LOG_2_JIT


@triton.jit
def gumbel_noise_jit(chunk, token, position, sample_index, k0, k1):
    """Noise of a tile of tokens; chunk broadcasts against token; uint32 operands."""
    sample = tl.full((), _SAMPLE, tl.uint32)
    sample_chunk = tl.full((), _SAMPLE_CHUNK, tl.uint32)
    word_0, word_1, _, _ = philox4x32_jit(chunk, position, sample_chunk, sample_index, k0, k1)
    own_word, _, _, _ = philox4x32_jit(token, position, sample, sample_index, k0, k1)
    is_slot = (word_1 & (_NOISE_CHUNK - 1)) == (token & (_NOISE_CHUNK - 1))
    own = tl.where(is_slot, 0.0, exponential_jit(own_word))
    return gumbel_jit(exponential_jit(word_0) * (1.0 / _NOISE_CHUNK) + own)
