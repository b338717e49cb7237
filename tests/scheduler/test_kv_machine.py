"""Windows, swapping, salts, forks and preemption together, on KV that says what it is of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.model.block_pool import IntegrityError
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.window import Window
from pagedraft.tests.scheduler.fake_engine import BLOCK, FakeRequest
from pagedraft.tests.scheduler.kv_engine import KVEngine, make_kv_engine, run_kv


def run(engine: KVEngine) -> KVEngine:
    requests = list(engine.coming)
    num_steps = sum(1 for _ in run_kv(engine))
    assert len(engine.finished) == len(requests)
    assert engine.pool.num_free == engine.pool.num_usable
    engine.pool.check_integrity({})
    assert num_steps <= 2 + sum(2 * r.num_final * (1 + r.times_preempted) for r in requests)
    swap = engine.prefixes.swap
    assert swap is None or (len(swap), swap.num_bytes) == (0, 0)
    return engine


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    window=st.sampled_from([None, 1, 2, 4, 5, 9, 16]),
    swap_blocks=st.sampled_from([0, 2, 8, 100]),
    swap_rate=st.sampled_from([1.0, 0.5]),
)
def test_random_workloads_read_their_own_kv(
    seed: int, window: int | None, swap_blocks: int, swap_rate: float
) -> None:
    run(make_kv_engine(seed, window, swap_blocks, swap_rate))


def test_workloads_reach_the_rare_paths() -> None:
    """The random workloads above are worth something."""
    engines = [run(make_kv_engine(seed, seed % 9 + 1, seed % 6 + 1, 0.8)) for seed in range(120)]
    stats = [engine.prefixes.swap.stats for engine in engines]
    assert sum(row.num_swapped_in for row in stats) > 200
    assert sum(row.num_evicted for row in stats) > 10
    assert sum(row.num_recomputed for row in stats) > 100
    assert sum(row.bytes_in < row.bytes_out for row in stats) > 50
    assert sum(engine.num_copies for engine in engines) > 15
    assert sum(engine.prefixes.num_hit_tokens for engine in engines) > 500


real_left_edge, real_release = Window.left_edge, Prefixes.release_left


def release_too_much(window: Window, num_written: int, num_draft_written: int) -> int:
    """``left_edge`` one token too far to the right."""
    return real_left_edge(window, num_written + 1, num_draft_written + 1) if num_written else 0


def forget_the_draft(window: Window, num_written: int, num_draft_written: int) -> int:
    """``left_edge`` of the target's queries alone."""
    return real_left_edge(window, num_written, num_written)


def restore_nothing(prefixes: Prefixes) -> None:
    """``restore`` that copies nothing."""
    for request in list(prefixes._resumes):
        prefixes.swap.drop(request)
    prefixes._resumes.clear()


def restore_a_block_late(prefixes: Prefixes) -> None:
    """``restore`` that is off by one block."""
    for request, first in prefixes._resumes.items():
        prefixes.swap.restore(request, first + 1)
    prefixes._resumes.clear()


def save_too_late(prefixes: Prefixes, request: FakeRequest) -> None:
    """``retire`` that copies blocks which are somebody else's by then."""
    block_ids = list(request.block_ids)
    counts = request.sequence.num_written, request.sequence.num_draft_written
    prefixes._give_back(request)
    other = prefixes._pool.allocate("other", prefixes._pool.num_free)
    for kv in engine_of[prefixes].target_kv, engine_of[prefixes].draft_kv:
        for block in other:
            kv.slots[block * BLOCK : (block + 1) * BLOCK] = -1
    request.block_ids.extend(block_ids)
    request.sequence.num_written, request.sequence.num_draft_written = counts
    prefixes.swap.save(request)
    request.block_ids.clear()
    request.drop_kv()
    prefixes._pool.free("other", other)


def fork_what_is_left(prefixes: Prefixes, request: FakeRequest) -> int:
    """``_num_forkable`` that does not ask whether the parent still has it."""
    parent = request.parent
    return -1 if parent is None or not parent.block_ids else request.sequence.num_prompt - 1


def drop_null_blocks(prefixes: Prefixes, request: FakeRequest) -> None:
    """``release_left`` that shortens the table."""
    real_release(prefixes, request)
    request.block_ids[:] = [block for block in request.block_ids if block]


engine_of: dict[Prefixes, KVEngine] = {}
BROKEN = {
    "window": (Window, "left_edge", release_too_much),
    "window of the draft": (Window, "left_edge", forget_the_draft),
    "nothing copied back": (Prefixes, "restore", restore_nothing),
    "copied a block late": (Prefixes, "restore", restore_a_block_late),
    "copied out too late": (Prefixes, "retire", save_too_late),
    "fork of released blocks": (Prefixes, "_num_forkable", fork_what_is_left),
    "shorter table": (Prefixes, "release_left", drop_null_blocks),
}


@pytest.mark.parametrize("owner, name, broken", BROKEN.values(), ids=BROKEN)
def test_the_workloads_have_teeth(owner, name, broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, broken)
    engines = [make_kv_engine(seed, seed % 9 + 1, 8) for seed in range(300)]
    engine_of.clear()
    engine_of.update((engine.prefixes, engine) for engine in engines)
    with pytest.raises((AssertionError, IntegrityError, IndexError, ValueError, RuntimeError)):
        [run(engine) for engine in engines]
