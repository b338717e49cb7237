"""Cache salts: tenants of different salts share no KV, and cannot find out what others asked."""

from __future__ import annotations

from itertools import product

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.tests.scheduler.fake_engine import BLOCK, FakeRequest, fake_request
from pagedraft.tests.scheduler.runs import GREEDY, random_prompts

SALTS = (None, "", "a", "b", "A")
[PROMPT] = random_prompts(97, (40,))
TEXT = list(range(100, 200))


def written(pool: BlockPool, prefixes: Prefixes, salt: str | None, **fields) -> FakeRequest:
    """A running request of 14 tokens, 13 of them written."""
    request = fake_request(len(fields), TEXT[:14], cache_salt=salt, **fields)
    prefixes.attach(request)
    request.block_ids.extend(pool.allocate(request.request_id, 4 - len(request.block_ids)))
    request.sequence.num_written = 13
    prefixes.publish(request)
    return request


@pytest.mark.parametrize("first, second", list(product(SALTS, SALTS)))
def test_only_equal_salts_share(first: str | None, second: str | None) -> None:
    pool = BlockPool(21, BLOCK)
    prefixes = Prefixes(pool)
    owner = written(pool, prefixes, first)
    other = fake_request(9, TEXT[:14], cache_salt=second)
    prefixes.attach(other)
    assert other.num_written == 12 * (first == second)
    assert prefixes.num_hit_tokens == 12 * (first == second)
    assert set(other.block_ids) <= set(owner.block_ids)


def test_a_fork_has_its_parents_salt() -> None:
    pool = BlockPool(41, BLOCK)
    prefixes = Prefixes(pool)
    parent = written(pool, prefixes, "a")
    fork = written(pool, prefixes, None, parent=parent)
    assert fork.block_ids[:3] == parent.block_ids[:3]
    fork.sequence.append([1, 2, 3])
    fork.block_ids.extend(pool.allocate(fork.request_id, 1))
    fork.sequence.num_written = 16
    prefixes.publish(fork)
    tokens = [*TEXT[:14], 1, 2, 9]
    found = [fake_request(i, tokens, cache_salt=salt) for i, salt in ((8, "a"), (9, None))]
    for request in found:
        prefixes.attach(request)
    assert [request.num_written for request in found] == [16, 0]


@pytest.fixture
def submit(target):
    llm = LLM(target, speculate="off", block_size=8, kv_tokens=512)

    def submit(salt: str | None, params: SamplingParams = GREEDY, **options):
        requests = llm.submit_all(PROMPT, params, cache_salt=salt, **options)
        while llm.engine.has_work:
            llm.engine.step()
            llm.engine.check_integrity()
        return requests

    return submit


@pytest.mark.usefixtures("cpu_path")
def test_a_hit_cannot_be_probed_across_salts(submit) -> None:
    """The other tenant's prompt costs as many steps and tokens as one that nobody asked."""
    [cold], [probe], [own] = submit("a"), submit("b"), submit("a")
    cached = [request.stats.num_cached_tokens for request in (cold, probe, own)]
    assert cached == [0, 0, 32]
    assert probe.sequence.output_ids == own.sequence.output_ids == cold.sequence.output_ids


@pytest.mark.usefixtures("cpu_path")
def test_samples_of_one_prompt_share_under_a_salt(submit) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.9, seed=1, n=3, ignore_eos=True)
    first, *others = submit("a", params)
    assert first.stats.num_cached_tokens == 0
    assert [request.stats.num_cached_tokens for request in others] == [39, 39]
    assert submit(None)[0].stats.num_cached_tokens == 0


BAD = {
    "a number as salt": ({"cache_salt": 7}, TypeError, "cache_salt: expected a string or None"),
    "bytes as salt": ({"cache_salt": b"a"}, TypeError, "cache_salt: .* got b'a'"),
    "an unhashable salt": ({"cache_salt": []}, TypeError, r"cache_salt: .* got \[\]"),
    "a number as tenant": ({"tenant": 3}, TypeError, "tenant: expected a string or None, got 3"),
}


@pytest.mark.parametrize("options, kind, message", BAD.values(), ids=BAD)
def test_bad_fields_are_named(llm, options, kind, message) -> None:
    with pytest.raises(kind, match=message):
        llm.submit(PROMPT, GREEDY, **options)
    assert not llm.engine.has_work


def fork_of(llm, parent, salt):
    [fork] = llm.prepare(PROMPT[:9], GREEDY, 1, cache_salt=salt)
    fork.parent = parent
    return fork


def test_a_fork_of_another_salt_is_refused(llm) -> None:
    parent = llm.submit(PROMPT[:9], GREEDY, cache_salt="a")
    with pytest.raises(ValueError, match="cache_salt: expected that of the parent, 'a'.* got 'b'"):
        llm.engine.add(fork_of(llm, parent, "b"))
    llm.engine.add(fork_of(llm, parent, None))
    llm.engine.abort_all()
    llm.engine.check_integrity()


def test_teeth_without_salts_tenants_share(target, monkeypatch) -> None:
    monkeypatch.setattr("pagedraft.scheduler.prefix._salt", lambda request: None)
    pool = BlockPool(21, BLOCK)
    prefixes = Prefixes(pool)
    written(pool, prefixes, "a")
    other = fake_request(9, TEXT[:14], cache_salt="b")
    prefixes.attach(other)
    assert other.num_written == 12
