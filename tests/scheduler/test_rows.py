"""Steps laid out from rows that stay: the same as laying each step out from nothing."""

from __future__ import annotations

import random

import pytest
import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.rows import NOTHING, Rows, _decoding_spans, _spans

CPU = torch.device("cpu")
BLOCK = 128  # two blocks are a segment, the unit in which attention shares keys


def a_request(name: str, num_tokens: int, written: int, blocks: list[int]) -> Request:
    sequence = Sequence(list(range(num_tokens)), num_tokens, 0.0, 0)
    sequence.block_ids, sequence.num_written = blocks, written
    return Request(name, sequence, SamplingParams(), frozenset(), 4096)


def make_rows(max_rows: int = 8, row_multiple: int = 1) -> Rows:
    return Rows(max_rows, 32, block_size=BLOCK, device=CPU, row_multiple=row_multiple)


def from_nothing(requests, scheduled, proposals, row_multiple):
    """The same step by ``build_step_batch``; rows without tokens are left out."""
    spans = []
    for request in requests:
        if request in scheduled:
            sequence = request.sequence
            end = sequence.num_written + scheduled[request]
            drafts = proposals.get(request, NOTHING).tokens if end >= request.num_tokens else []
            tokens = sequence.token_ids[sequence.num_written : end] + drafts
            count = len(drafts) + 1 if end >= request.num_tokens else 0
            spans.append(Span(tokens, sequence.num_written, sequence.block_ids, count))
    return build_step_batch(spans, block_size=BLOCK, device=CPU, row_multiple=row_multiple)


def check_same(rows: Rows, requests, scheduled, proposals, row_multiple: int = 1) -> None:
    step = rows.lay_out(scheduled, proposals)
    expected = from_nothing(requests, scheduled, proposals, row_multiple)
    batch = step.batch
    for name in ("tokens_T", "positions_T", "slots_T", "logit_rows_Q"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    for name in ("num_tokens", "num_logits", "max_query_len", "max_kv_len"):
        assert getattr(batch, name) == getattr(expected, name), name
    used = [row for row, request in enumerate(requests) if request in scheduled]
    lengths = batch.query_starts_R1.diff()
    assert lengths[used].tolist() == expected.query_starts_R1.diff().tolist()
    assert int(lengths.sum()) == batch.num_tokens
    assert batch.kv_lens_R[used].tolist() == expected.kv_lens_R.tolist()
    assert all(int(batch.kv_lens_R[row]) == 0 for row in set(range(len(requests))) - set(used))
    for row, request in enumerate(requests):
        if request in scheduled:
            own = request.block_ids
            assert batch.block_table_RM[row, : len(own)].tolist() == own
    assert step.sampled == [
        r for r in requests if r in scheduled and scheduled[r] >= r.sequence.num_pending
    ]


@pytest.mark.parametrize("seed", range(30))
def test_random_histories(seed):
    rng = random.Random(seed)
    multiple = rng.choice([1, 4])
    rows, requests, next_block = make_rows(row_multiple=multiple), [], 1
    for step in range(40):
        if len(requests) < 8 and rng.random() < 0.5:
            count, written = rng.randint(1, 700), 0
            if rng.random() < 0.6:
                written = count - 1
            request = a_request(f"{step}", count, written, [])
            requests.append(request)
            rows.join(request)
        if requests and rng.random() < 0.25:
            gone = rng.choice(requests)
            rows.leave(gone)
            last = requests.pop()
            if last is not gone:
                requests[requests.index(gone)] = last
        assert [request.row for request in requests] == list(range(len(requests)))
        scheduled, proposals = {}, {}
        for request in rng.sample(requests, rng.randint(0, len(requests))):
            pending = request.sequence.num_pending
            drafts = [rng.randrange(9) for _ in range(rng.choice([0, 0, 1, 4]))]
            span = rng.choice([pending, rng.randint(1, pending)])
            if span == pending and drafts:
                proposals[request] = Proposal(drafts)
                span += len(drafts)
            scheduled[request] = span
            while len(request.block_ids) * BLOCK < request.num_written + span:
                request.block_ids.append(next_block)
                next_block = next_block % 4000 + 1
        if not scheduled:
            continue
        check_same(rows, requests, scheduled, proposals, multiple)
        for request, span in scheduled.items():
            if span < request.sequence.num_pending:
                request.sequence.num_written += span
            else:
                request.sequence.append([1])


@pytest.mark.parametrize("seed", range(30))
def test_a_step_that_only_decodes_feeds_what_any_step_feeds(seed):
    rng = random.Random(seed)
    requests = []
    for name in range(rng.randint(1, 9)):
        count = rng.randint(1, 700)
        written = count - 1 if rng.random() < 0.9 else rng.randrange(count)
        requests.append(a_request(f"{name}", count, written, []))
        requests[-1].sequence.token_ids.append(rng.randrange(9))
        requests[-1].sequence.num_written += 1
    scheduled = {request: 1 for request in requests if rng.random() < 0.95}
    proposals = {requests[0]: Proposal([1, 2])} if rng.random() < 0.1 else {}
    decodes = not proposals and len(scheduled) == len(requests)
    decodes = decodes and all(request.sequence.num_pending == 1 for request in requests)
    general = _spans(requests, scheduled, proposals)
    spans = _decoding_spans(requests, scheduled, proposals)
    assert (spans is not None) == decodes
    for one, other in zip(spans or general, general, strict=True):
        assert list(one) == list(other)


def two_alike(common: list[int], written: int = 600) -> list[Request]:
    return [a_request(f"{i}", 620, written, [*common, 50 + i]) for i in range(3)]


CASES = {
    "four_blocks": ([1, 2, 3, 4], 512),
    "one_segment": ([1, 2], 256),
    "less_than_a_segment": ([1], 0),
    "nothing": ([], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_that_begin_alike_share_keys(case):
    common, num_keys = CASES[case]
    rows, requests = make_rows(), two_alike(common)
    for request in requests:
        rows.join(request)
        request.sequence.block_ids += range(60, 65 - len(common))
        request.sequence.num_written = 619
    for _ in range(2):  # the second step from what the first has found
        shared = rows.lay_out(dict.fromkeys(requests, 1), {}).batch.shared
        assert (0 if shared is None else shared.max_keys) == num_keys


def test_a_row_that_leaves_ends_what_its_neighbours_shared():
    rows, requests = make_rows(), two_alike([1, 2, 3, 4], written=619)
    other = a_request("other", 20, 19, [70])
    for request in (*requests, other):
        rows.join(request)
    scheduled = dict.fromkeys((*requests, other), 1)
    assert rows.lay_out(scheduled, {}).batch.shared.num_saved_keys == 2 * 512
    rows.leave(requests[1])  # the other one takes its place between them
    del scheduled[requests[1]]
    assert rows.lay_out(scheduled, {}).batch.shared is None


def test_what_is_being_written_is_not_shared_yet():
    rows, requests = make_rows(), two_alike([1, 2, 3, 4], written=619)
    requests[1].sequence.num_written = 300  # its prompt goes on
    for request in requests:
        rows.join(request)
    scheduled = dict.fromkeys(requests, 1)
    assert rows.lay_out(scheduled, {}).batch.shared.max_keys == 256
    requests[1].sequence.num_written = 619
    assert rows.lay_out(scheduled, {}).batch.shared.max_keys == 512


def test_a_row_without_a_step_shares_nothing_yet():
    """Its table entries are those of a row that left."""
    rows, requests = make_rows(), two_alike([1, 2, 3, 4], written=619)
    for request in requests[:2]:
        rows.join(request)
    assert rows.lay_out(dict.fromkeys(requests[:2], 1), {}).batch.shared.max_keys == 512
    rows.leave(requests[1])
    other = a_request("other", 620, 619, [70, 71, 72, 73, 74])
    rows.join(other)  # and its step fails before it is laid out
    assert rows.lay_out({requests[0]: 1}, {}).batch.shared is None
    assert rows.lay_out({requests[0]: 1, other: 1}, {}).batch.shared is None
