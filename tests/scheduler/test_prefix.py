"""Prefixes: what a waiting request starts with, from the cache or from its parent."""

from __future__ import annotations

import pytest

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.tests.scheduler.fake_engine import FakeRequest, fake_request
from pagedraft.tests.scheduler.plan_checks import BLOCK

TEXT = list(range(100, 200))


def make(is_enabled: bool = True, num_usable: int = 20) -> tuple[BlockPool, Prefixes]:
    pool = BlockPool(num_usable + 1, BLOCK)
    return pool, Prefixes(pool, is_enabled)


def start(prefixes: Prefixes, pool: BlockPool, request: FakeRequest) -> FakeRequest:
    """Admit a request, with blocks for all its tokens."""
    prefixes.attach(request)
    missing = pool.blocks_for(request.num_tokens) - len(request.block_ids)
    request.block_ids.extend(pool.allocate(request.request_id, missing))
    return request


def write(prefixes: Prefixes, request: FakeRequest, written: int, drafted: int = 0) -> None:
    """A step that leaves so many tokens written by the target and by the draft model."""
    request.sequence.num_written = written
    request.sequence.num_draft_written = drafted
    prefixes.publish(request)


def end(prefixes: Prefixes, pool: BlockPool, request: FakeRequest) -> None:
    prefixes.forget(request)
    pool.free(request.request_id, request.block_ids)
    request.block_ids.clear()
    request.sequence.drop_kv()
    request.finished = True


def written_once(num_tokens: int = 14, written: int = 13, drafted: int = 0):
    """Pool and prefixes after a request of TEXT that ran up to there and ended."""
    pool, prefixes = make()
    request = start(prefixes, pool, fake_request(0, TEXT[:num_tokens]))
    write(prefixes, request, written, drafted)
    end(prefixes, pool, request)
    prefixes.num_lookup_tokens = 0
    return pool, prefixes


# tokens, written and drafted by the first; tokens of the second -> written and drafted at its start
HITS = {
    "nothing written": (14, 3, 0, TEXT[:14], 0, 0),
    "full blocks": (14, 13, 0, TEXT[:20], 12, 0),
    "only what is written": (14, 11, 0, TEXT[:20], 8, 0),
    "the last token stays pending": (14, 13, 0, TEXT[:12], 8, 0),
    "one token more than full blocks": (14, 13, 0, TEXT[:13], 12, 0),
    "another text": (14, 13, 0, TEXT[1:14], 0, 0),
    "texts that part in a block": (14, 13, 0, [*TEXT[:6], 1, *TEXT[7:14]], 4, 0),
    "the draft model wrote all": (14, 13, 13, TEXT[:20], 12, 12),
    "the draft model wrote less": (14, 13, 7, TEXT[:20], 12, 4),
    "the draft model wrote less than a block": (14, 13, 3, TEXT[:20], 12, 0),
}


@pytest.mark.parametrize(
    "num_tokens, written, drafted, tokens, hit, hit_drafted", HITS.values(), ids=HITS
)
def test_hit(num_tokens, written, drafted, tokens, hit, hit_drafted) -> None:
    pool, prefixes = written_once(num_tokens, written, drafted)
    request = fake_request(1, tokens)
    prefixes.attach(request)
    assert (request.num_written, request.sequence.num_draft_written) == (hit, hit_drafted)
    assert len(request.block_ids) == hit // BLOCK
    assert (prefixes.num_lookup_tokens, prefixes.num_hit_tokens) == (len(tokens), hit)
    pool.check_integrity({"r1": request.block_ids})
    prefixes.check_integrity()


def test_requests_that_run_share_too() -> None:
    pool, prefixes = make()
    first = start(prefixes, pool, fake_request(0, TEXT[:14]))
    write(prefixes, first, 13)
    second = start(prefixes, pool, fake_request(1, TEXT[:14]))
    assert second.block_ids[:3] == first.block_ids[:3]
    assert second.block_ids[3] != first.block_ids[3]


def test_output_is_found_like_a_prompt() -> None:
    pool, prefixes = make()
    request = start(prefixes, pool, fake_request(0, TEXT[:14], num_prompt=2))
    write(prefixes, request, 13)
    end(prefixes, pool, request)
    assert start(prefixes, pool, fake_request(1, TEXT[:20])).num_written == 12


def test_a_preempted_request_finds_its_own_blocks() -> None:
    pool, prefixes = make()
    request = start(prefixes, pool, fake_request(0, TEXT[:14]))
    write(prefixes, request, 13, drafted=9)
    before = list(request.block_ids)
    end(prefixes, pool, request)
    prefixes.attach(request)
    assert request.block_ids == before[:3]
    assert (request.num_written, request.sequence.num_draft_written) == (12, 8)


def test_a_hit_that_the_draft_model_catches_up_on_is_marked() -> None:
    pool, prefixes = written_once(drafted=0)
    second = start(prefixes, pool, fake_request(1, TEXT[:14]))
    write(prefixes, second, 13, drafted=9)
    third = fake_request(2, TEXT[:14])
    prefixes.attach(third)
    assert third.sequence.num_draft_written == 8


def test_a_block_that_stayed_private_does_not_count_as_drafted() -> None:
    """Both wrote the same tokens at once; the known block is the first's, without draft KV."""
    pool, prefixes = make()
    first, second = (start(prefixes, pool, fake_request(i, TEXT[:14])) for i in range(2))
    write(prefixes, first, 13)
    write(prefixes, second, 13, drafted=13)
    third = fake_request(2, TEXT[:14])
    prefixes.attach(third)
    assert third.block_ids == first.block_ids[:3]
    assert third.sequence.num_draft_written == 0


def test_publishing_in_pieces_is_publishing_at_once() -> None:
    pool, prefixes = make()
    request = start(prefixes, pool, fake_request(0, TEXT[:14]))
    for written in (3, 4, 5, 9, 9, 13):
        write(prefixes, request, written, drafted=written)
    assert pool.kept == set(request.block_ids[:3])
    end(prefixes, pool, request)
    again = fake_request(1, TEXT[:14])
    prefixes.attach(again)
    assert (again.num_written, again.sequence.num_draft_written) == (12, 12)


def test_detach_gives_everything_back() -> None:
    pool, prefixes = written_once()
    request = start(prefixes, pool, fake_request(1, TEXT[:14]))
    prefixes.detach(request)
    assert (request.block_ids, request.num_written) == ([], 0)
    assert request.sequence.num_draft_written == 0
    assert (prefixes.num_lookup_tokens, prefixes.num_hit_tokens) == (0, 0)
    assert pool.num_free == pool.num_usable
    pool.check_integrity({})


def test_clear_forgets_and_running_requests_publish_no_more() -> None:
    pool, prefixes = written_once()
    running = start(prefixes, pool, fake_request(1, TEXT[50:70]))
    write(prefixes, running, 9)
    prefixes.clear()
    write(prefixes, running, 19)
    end(prefixes, pool, running)
    later = [fake_request(2, TEXT[:14]), fake_request(3, TEXT[50:70])]
    assert [(prefixes.attach(request), request.num_written)[1] for request in later] == [0, 0]
    assert (pool.num_evictable, pool.num_free) == (0, pool.num_usable)
    prefixes.check_integrity()


def test_requests_admitted_after_clear_publish() -> None:
    pool, prefixes = written_once()
    prefixes.clear()
    request = start(prefixes, pool, fake_request(1, TEXT[:14]))
    write(prefixes, request, 13)
    assert pool.kept == set(request.block_ids[:3])


def test_a_disabled_cache_keeps_nothing() -> None:
    pool, prefixes = make(is_enabled=False)
    request = start(prefixes, pool, fake_request(0, TEXT[:14]))
    write(prefixes, request, 13)
    end(prefixes, pool, request)
    again = fake_request(1, TEXT[:14])
    prefixes.attach(again)
    assert (again.block_ids, again.num_written, prefixes.num_lookup_tokens) == ([], 0, 0)
    assert (pool.kept, pool.num_evictable) == (frozenset(), 0)
    prefixes.clear()
    prefixes.check_integrity()


def parent_and_fork(
    num_prompt: int, written: int, is_enabled: bool = True, drafted: int = 0, num_output: int = 5
) -> tuple[BlockPool, Prefixes, FakeRequest, FakeRequest]:
    pool, prefixes = make(is_enabled)
    tokens = TEXT[: num_prompt + num_output]
    parent = start(prefixes, pool, fake_request(0, tokens, num_prompt=num_prompt))
    write(prefixes, parent, written, drafted)
    return pool, prefixes, parent, fake_request(1, TEXT[:num_prompt], parent=parent)


READY = {
    "nothing written": (10, 0, False),
    "not the whole prompt": (10, 8, False),
    "the prompt but its last token": (10, 9, True),
    "the prompt": (10, 10, True),
    "output, too": (10, 14, True),
    "a prompt of one token": (1, 0, True),
}


@pytest.mark.parametrize("num_prompt, written, ready", READY.values(), ids=READY)
def test_a_fork_waits_for_its_parents_prompt(num_prompt: int, written: int, ready: bool) -> None:
    _, prefixes, parent, fork = parent_and_fork(num_prompt, written)
    assert prefixes.is_ready(parent)
    assert prefixes.is_ready(fork) is ready


@pytest.mark.parametrize("written", [0, 12])
def test_a_fork_waits_no_longer_when_its_parent_has_ended(written: int) -> None:
    """It finds in the cache what the parent got done."""
    pool, prefixes, parent, fork = parent_and_fork(13, written)
    end(prefixes, pool, parent)
    assert prefixes.is_ready(fork)
    prefixes.attach(fork)
    assert (fork.num_written, prefixes.take_copies()) == (written, [])


def test_a_fork_waits_for_a_preempted_parent_to_come_back() -> None:
    pool, prefixes, parent, fork = parent_and_fork(10, 12)
    end(prefixes, pool, parent)
    parent.finished = False
    assert not prefixes.is_ready(fork)


# prompt tokens; written and drafted by the parent -> full blocks, whether one is copied, drafted
FORKS = {
    "a block in part": (10, 12, 0, 2, True, 0),
    "full blocks alone": (9, 12, 0, 2, False, 0),
    "less than a block": (3, 2, 0, 0, True, 0),
    "one token": (1, 2, 0, 0, False, 0),
    "the draft model is further": (10, 12, 11, 2, True, 9),
    "the draft model is behind": (10, 12, 5, 2, True, 5),
}


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize(
    "num_prompt, written, drafted, num_full, is_copied, fork_drafted", FORKS.values(), ids=FORKS
)
def test_fork(is_enabled, num_prompt, written, drafted, num_full, is_copied, fork_drafted) -> None:
    pool, prefixes, parent, fork = parent_and_fork(num_prompt, written, is_enabled, drafted)
    start(prefixes, pool, fork)
    assert (fork.num_written, fork.sequence.num_draft_written) == (num_prompt - 1, fork_drafted)
    assert fork.block_ids[:num_full] == parent.block_ids[:num_full]
    assert not set(fork.block_ids[num_full:]) & set(parent.block_ids)
    pair = (parent.block_ids[num_full], fork.block_ids[num_full])
    assert prefixes.take_copies() == [pair] * is_copied
    assert prefixes.take_copies() == []
    assert prefixes.num_lookup_tokens == is_enabled * (num_prompt + 5)  # the parent's
    pool.check_integrity({"r0": parent.block_ids, "r1": fork.block_ids})
    prefixes.check_integrity()


def test_detaching_one_fork_leaves_the_copy_of_another() -> None:
    pool, prefixes, parent, fork = parent_and_fork(10, 12)
    start(prefixes, pool, fork)
    other = start(prefixes, pool, fake_request(2, TEXT[:10], parent=parent))
    prefixes.detach(other)
    assert (other.block_ids, other.num_written) == ([], 0)
    assert prefixes.take_copies() == [(parent.block_ids[2], fork.block_ids[2])]


def test_a_fork_publishes_its_own_continuation() -> None:
    pool, prefixes, _, fork = parent_and_fork(10, 12)
    start(prefixes, pool, fork)
    fork.sequence.append([1, 2, 3])
    fork.block_ids.extend(pool.allocate("r1", 1))
    prefixes.publish(fork)
    found = fake_request(2, [*TEXT[:10], 1, 2, 9])
    prefixes.attach(found)
    assert found.block_ids == fork.block_ids[:3]
    assert found.num_written == 12


def test_a_preempted_fork_takes_its_own_output_from_the_cache() -> None:
    pool, prefixes, _, fork = parent_and_fork(10, 12)
    start(prefixes, pool, fork)
    prefixes.take_copies()
    fork.sequence.append([1, 2, 3])
    fork.block_ids.extend(pool.allocate("r1", 1))
    prefixes.publish(fork)
    end(prefixes, pool, fork)
    prefixes.attach(fork)
    assert (fork.num_written, prefixes.take_copies()) == (12, [])


def test_a_fork_of_a_request_that_ran_at_clear_publishes_nothing() -> None:
    """Its blocks are older than the call, so they are not to be found any more."""
    pool, prefixes, _, fork = parent_and_fork(10, 12)
    prefixes.clear()
    start(prefixes, pool, fork)
    write(prefixes, fork, 9)
    assert pool.kept == frozenset()
