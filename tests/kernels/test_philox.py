"""Counter-based noise: published vectors, equal bits in PyTorch and Triton, right distribution."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from pagedraft.kernels import philox
from pagedraft.kernels.philox import NOISE_CHUNK, exponential, gumbel, gumbel_noise_ref, philox4x32
from pagedraft.tests.compare import assert_same_bits

# Philox4x32-10 of Random123's known-answer file: counter, key, words.
KNOWN_ANSWERS = {
    "zeros": ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, 0x0123456789ABCDEF])
POSITIONS = torch.tensor([0, 7, 131071, 2**31 + 5, 1])
INDICES = torch.tensor([0, 3, 0, 2**32 - 1, 1])
WORDS = torch.tensor([0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1])


@triton.jit
def _words_kernel(counter_ptr, key_ptr, out_ptr):
    """One call; operands and words as int64."""
    c0 = tl.load(counter_ptr).to(tl.uint32)
    c1 = tl.load(counter_ptr + 1).to(tl.uint32)
    c2 = tl.load(counter_ptr + 2).to(tl.uint32)
    c3 = tl.load(counter_ptr + 3).to(tl.uint32)
    k0 = tl.load(key_ptr).to(tl.uint32)
    k1 = tl.load(key_ptr + 1).to(tl.uint32)
    w0, w1, w2, w3 = philox.philox4x32_jit(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr, w0.to(tl.int64))
    tl.store(out_ptr + 1, w1.to(tl.int64))
    tl.store(out_ptr + 2, w2.to(tl.int64))
    tl.store(out_ptr + 3, w3.to(tl.int64))


@triton.jit
def _noise_kernel(position_ptr, seed_ptr, index_ptr, out_ptr, BLOCK_V: tl.constexpr):
    """One row's noise of BLOCK_V tokens."""
    row = tl.program_id(0)
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row).to(tl.uint32)
    index = tl.load(index_ptr + row).to(tl.uint32)
    token = tl.arange(0, BLOCK_V)
    noise = philox.gumbel_noise_jit(
        (token // 256).to(tl.uint32),
        token.to(tl.uint32),
        position,
        index,
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    tl.store(out_ptr + row * BLOCK_V + token, noise)


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_torch_words_are_the_published_ones(name: str) -> None:
    counter, key, words = KNOWN_ANSWERS[name]
    as_tensors = [torch.tensor([word]) for word in (*counter, *key)]
    out = philox4x32(tuple(as_tensors[:4]), tuple(as_tensors[4:]))
    assert tuple(int(word) for word in out) == words


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_triton_words_are_the_published_ones(name: str, device: torch.device) -> None:
    counter, key, words = KNOWN_ANSWERS[name]
    out = torch.zeros(4, dtype=torch.int64, device=device)
    _words_kernel[(1,)](torch.tensor(counter).to(device), torch.tensor(key).to(device), out)
    assert tuple(out.tolist()) == words


def test_words_broadcast_and_ignore_high_bits() -> None:
    token, row = torch.arange(5), torch.arange(3)[:, None]
    wide = philox4x32((token + 2**40, row - 2**50, 1, 2), (row + 2**33, row + 2**34))
    narrow = philox4x32((token.expand(3, 5), row, 1, 2), (row, row))
    assert torch.equal(torch.stack([*wide]), torch.stack([*narrow]))


def test_noise_has_the_same_bits_in_triton(device: torch.device) -> None:
    num_tokens = 4 * NOISE_CHUNK
    out_QV = torch.empty(len(SEEDS), num_tokens, device=device)
    rows = (POSITIONS.to(device), SEEDS.to(device), INDICES.to(device))
    _noise_kernel[(len(SEEDS),)](*rows, out_QV, BLOCK_V=num_tokens, enable_fp_fusion=False)
    assert_same_bits(out_QV.cpu(), gumbel_noise_ref(num_tokens, POSITIONS, SEEDS, INDICES))


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_or_other_rows() -> None:
    whole_QV = gumbel_noise_ref(1000, POSITIONS, SEEDS, INDICES)
    part_QV = gumbel_noise_ref(300, POSITIONS[2:3], SEEDS[2:3], INDICES[2:3])
    assert_same_bits(part_QV, whole_QV[2:3, :300])


@pytest.mark.parametrize("changed", ["seed low", "seed high", "position", "index"])
def test_every_word_of_the_counter_changes_the_noise(changed: str) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    seed = {"seed low": zero + 1, "seed high": zero + 2**32}.get(changed, zero)
    position = zero + (changed == "position")
    index = zero + (changed == "index")
    same = gumbel_noise_ref(600, zero, zero, zero) == gumbel_noise_ref(600, position, seed, index)
    assert int(same.sum()) < 3


def test_exponential_and_gumbel_are_accurate_to_two_units_in_the_last_place() -> None:
    generator = torch.Generator().manual_seed(0)
    word = torch.cat([WORDS, torch.randint(0, 2**32, (100_000,), generator=generator)])
    exact = -torch.log1p(-(word.double() + 0.5) / 2**32)
    e = exponential(word)
    assert float(((e - exact) / exact).abs().max()) < 2 * 2.0**-23
    assert float((gumbel(e) + e.double().log()).abs().max()) < 2e-6


def test_noise_range_is_the_documented_one() -> None:
    ends = exponential(torch.tensor([0, 2**32 - 1]))
    assert ends.tolist() == pytest.approx([2.0**-33, 33 * math.log(2)], rel=1e-6)
    largest = gumbel(ends[:1] / NOISE_CHUNK)
    smallest = gumbel(ends[1:] * (1 + 1 / NOISE_CHUNK))
    assert largest.item() == pytest.approx(philox.MAX_GUMBEL, rel=1e-6)
    assert smallest.item() == pytest.approx(philox.MIN_GUMBEL, rel=1e-6)


def test_noise_is_standard_gumbel_and_independent_inside_a_chunk() -> None:
    """Kolmogorov-Smirnov over all tokens; correlation of neighbours; place of a chunk's best."""
    num_rows = 2000
    row = torch.arange(num_rows)
    noise_QV = gumbel_noise_ref(NOISE_CHUNK, row, row * 7919).double()
    e_QV = torch.exp(-noise_QV)
    sorted_e = e_QV.flatten().sort().values
    expected = 1 - torch.exp(-sorted_e)
    observed = (torch.arange(len(sorted_e)) + 0.5) / len(sorted_e)
    assert float((observed - expected).abs().max()) * math.sqrt(len(sorted_e)) < 1.95  # p = 0.001
    centred_QV = e_QV - 1
    neighbours = (centred_QV[:, 1:] * centred_QV[:, :-1]).mean() * math.sqrt(num_rows * 255)
    assert abs(float(neighbours)) < 3.9
    smallest_Q = e_QV.amin(1) * NOISE_CHUNK  # standard exponential again
    assert abs(float(smallest_Q.mean()) - 1) < 3.9 / math.sqrt(num_rows)
    first_half = (e_QV.argmin(1) < NOISE_CHUNK // 2).sum() - num_rows / 2
    assert abs(float(first_half)) < 3.9 * math.sqrt(num_rows / 4)
