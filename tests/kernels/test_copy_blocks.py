"""copy_blocks: exact bytes, nothing else touched, offsets past 32 bits, pairs that cannot be."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import pytest
import torch

from pagedraft.kernels.copy_blocks import BLOCK_W, copy_blocks, copy_blocks_cost, copy_blocks_ref
from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import Guarded, randn

NUM_BLOCKS = 9
FP8 = torch.float8_e4m3fn
# Shapes and dtypes of a block in each pool.
CASES = {
    "keys and values": [((2, 16, 32), torch.float32)] * 2,
    "one pool": [((1, 8, 8), torch.float16)],
    "a block larger than a program's share": [((2, 64, 72), torch.float32), ((8,), torch.int32)],
    "exactly a program's share": [((BLOCK_W,), torch.float32)],
    "int8 with scales": [
        *[((2, 16, 24), torch.int8)] * 2,
        *[((2, 16), torch.float32)] * 2,
    ],
    "fp8 and bf16": [((2, 8, 40), FP8), ((2, 8), torch.float32), ((2, 8, 40), torch.bfloat16)],
}
PAIRS = {
    "several": [[3, 5], [8, 1], [4, 2]],
    "one source, two copies": [[3, 5], [3, 8]],
    "last block": [[1, 8]],
    "none": [],
}


def as_pairs(pairs: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)


def pools(case: list, device: torch.device) -> list[Guarded]:
    """Guarded pools whose odd blocks hold random bytes, NaN among them, and whose even ones are
    poisoned."""
    made = [Guarded(NUM_BLOCKS, *shape, dtype=dtype, device=device) for shape, dtype in case]
    for seed, guard in enumerate(made):
        raw = guard.tensor.view(NUM_BLOCKS, -1).view(torch.uint8)[1::2]
        generator = torch.Generator().manual_seed(seed)
        raw.copy_(torch.randint(256, raw.shape, generator=generator, dtype=torch.uint8))
    return made


def expected_pools(guards: list[Guarded], pairs: list[list[int]]) -> list[torch.Tensor]:
    """Block by block, the plainest way."""
    copies = [guard.tensor.clone() for guard in guards]
    for copy, guard in zip(copies, guards, strict=True):
        for source, destination in pairs:
            copy[destination] = guard.tensor[source]
    return copies


@pytest.mark.parametrize("where", ["pairs on the CPU", "pairs on the device"])
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_copy_blocks(case, pairs, where, device):
    guards = pools(case, device)
    expected = expected_pools(guards, pairs)
    place = torch.device("cpu") if where == "pairs on the CPU" else device
    copy_blocks([guard.tensor for guard in guards], as_pairs(pairs, place))
    assert_pools(guards, expected)


def assert_pools(guards: list[Guarded], expected: list[torch.Tensor]) -> None:
    assert len(guards) == len(expected)
    for guard, pool in zip(guards, expected, strict=True):
        guard.assert_untouched()
        assert_same_bits(guard.tensor, pool)


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reference(case, pairs, device):
    guards = pools(case, device)
    expected = expected_pools(guards, pairs)
    copy_blocks_ref([guard.tensor for guard in guards], as_pairs(pairs, device))
    assert_pools(guards, expected)


def test_no_pools():
    copy_blocks([], as_pairs([[1, 2]], torch.device("cpu")))


def test_teeth_a_copy_that_is_not_made_is_seen(device):
    guards = pools(CASES["keys and values"], device)
    with pytest.raises(AssertionError, match="bits differ"):
        assert_pools(guards, expected_pools(guards, [[3, 5]]))


def address_space(num_bytes: int) -> torch.Tensor:
    """Bytes of zeros that take memory only where they are touched, and none of a limit."""
    no_reserve = 0x4000  # MAP_NORESERVE, which mmap does not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.int8)


@pytest.mark.skipif(not INTERPRETED, reason="9 GB of address space, not of a GPU's memory")
def test_offsets_past_2_to_the_31_words():
    num_blocks, block_bytes = 9 * 2**17, 8192
    pool = address_space(num_blocks * block_bytes).view(num_blocks, block_bytes)
    assert (num_blocks - 1) * block_bytes // 4 > 2**31
    pool[5] = torch.arange(block_bytes).to(torch.int8)
    pool[num_blocks - 2] = 7
    copy_blocks([pool], torch.tensor([[5, num_blocks - 1], [num_blocks - 2, 6]]))
    assert torch.equal(pool[num_blocks - 1], pool[5])
    assert bool((pool[6] == 7).all())
    wrapped = ((num_blocks - 1) * block_bytes // 4 % 2**31) * 4 // block_bytes
    assert not bool(pool[wrapped].any()), "a 32-bit offset would land here"


BAD = {
    "one twice": ([[1, 3], [2, 3]], "pairs_P2: expected distinct destinations"),
    "source and destination": ([[1, 3], [3, 4]], "source and destination, got 3"),
    "onto itself": ([[2, 2]], "source and destination, got 2"),
    "null block": ([[1, 0]], "pairs_P2: expected blocks from 1 to 8, got 0"),
    "past the pool": ([[1, 9]], "pairs_P2: expected blocks from 1 to 8, got 9"),
    "negative": ([[-1, 3]], "pairs_P2: expected blocks from 1 to 8, got -1"),
}


@pytest.mark.parametrize(("pairs", "error"), BAD.values(), ids=BAD)
def test_bad_pairs_are_named_and_nothing_is_copied(pairs, error, device):
    guards = pools(CASES["one pool"], device)
    with pytest.raises(ValueError, match=error):
        copy_blocks([guards[0].tensor], torch.tensor(pairs))
    assert_pools(guards, expected_pools(guards, []))


BAD_POOLS = {
    "other number of blocks": (
        lambda x: [x, torch.zeros(8, 16)],
        r"caches\[1\]: expected shape \(9, 16\)",
    ),
    "strided": (lambda x: [x[:, ::2]], r"caches\[0\]: expected a contiguous"),
    "odd block": (lambda x: [torch.zeros(9, 3)], r"caches\[0\]: .*16 bytes .*got 12 bytes"),
    "odd address": (lambda x: [torch.zeros(9 * 16 + 1)[1:].view(9, 16)], "address that 16 divides"),
}


@pytest.mark.parametrize(("make", "error"), BAD_POOLS.values(), ids=BAD_POOLS)
def test_bad_pools_are_named(make, error):
    with pytest.raises(ValueError, match=error):
        copy_blocks(make(randn(9, 16)), torch.tensor([[1, 2]]))


def test_bad_pair_shape_is_named():
    with pytest.raises(ValueError, match=r"pairs_P2: expected shape \(\*, 2\), got \(2,\)"):
        copy_blocks([randn(9, 16)], torch.tensor([1, 2]))


def test_cost():
    assert copy_blocks_cost(3, 1000) == (3 * 2016, 0)


@pytest.mark.skipif(not INTERPRETED, reason="counts interpreted launches")
def test_one_launch_stays_inside_the_pools_and_does_not_race():
    from pagedraft.tests.sanitizer import sanitize

    guards = pools(CASES["a block larger than a program's share"], torch.device("cpu"))
    caches = [guard.tensor for guard in guards]
    with sanitize(*caches) as launches:
        copy_blocks(caches, torch.tensor([[3, 5], [3, 8], [1, 2]]))
    assert [launch.name for launch in launches] == ["_copy_blocks_kernel"]
    assert launches[0].bytes_loaded(caches[0][3]) == 2 * caches[0][3].nbytes
    assert launches[0].bytes_loaded(caches[0]) == 3 * caches[0][3].nbytes


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_teeth_pools_that_nobody_named_are_out_of_bounds():
    from pagedraft.tests.sanitizer import sanitize

    cache = randn(9, 16)
    with sanitize(), pytest.raises(Exception, match="out of bounds load"):
        copy_blocks([cache], torch.tensor([[1, 2]]))
