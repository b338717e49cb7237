"""Speculation without a model: what steps decide, draft and learn, for texts that are known."""

from __future__ import annotations

import pytest
import torch

from pagedraft.decoding.controller import DraftController
from pagedraft.decoding.drafters.base import NOTHING
from pagedraft.decoding.drafters.lookup import NgramDrafter
from pagedraft.decoding.drafters.suffix import SuffixDrafter
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.speculation import Speculation

VOCAB = 1000
MOTIF = [11, 12, 13, 14, 15, 16, 17]


class Bed:
    """Requests that decode texts which are known; a step grants ``room`` drafts a request."""

    def __init__(self, texts, drafters=(), k: int | str = 4, params=None) -> None:
        cpu = torch.device("cpu")
        self.speculation = Speculation(drafters, DraftController(k), VOCAB, cpu)
        self.texts = texts
        self.requests = [self._request(str(i), text, params or {}) for i, text in enumerate(texts)]

    def _request(self, name: str, text: list[int], params: dict) -> Request:
        sequence = Sequence(token_ids=text[:15], num_prompt=14, temperature=0.0, seed=0)
        sequence.num_written = 14
        sampling = SamplingParams(**{"max_tokens": 10_000} | params)
        request = Request(name, sequence, sampling, frozenset(), 10**6)
        request.max_total, request.row = 14 + sampling.max_tokens, 0
        self.speculation.admit(request)
        self.speculation.teach([request])  # behind its prompt
        return request

    def steps(self, num_steps: int, room: int = 100) -> list[dict[Request, int]]:
        """What each step drafted for whom."""
        return [self._step(room) for _ in range(num_steps)]

    def _step(self, room: int) -> dict[Request, int]:
        self.speculation.decide(self.requests, 0)
        scheduled = {r: 1 + min(r.num_drafts, room) for r in self.requests}
        proposals = self.speculation.propose(scheduled)
        self.speculation.teach(scheduled)
        num_fed = num_emitted = 0
        for request, text in zip(self.requests, self.texts, strict=True):
            drafts = proposals.get(request, NOTHING).tokens
            rest = text[request.num_tokens :]
            pairs = zip(drafts, rest, strict=False)
            accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafts))
            tokens = rest[: accepted + 1]
            proposal = proposals.get(request, NOTHING)
            self.speculation.settle(request, proposal, tokens, len(tokens))
            request.sequence.append(tokens)
            num_fed += 1 + len(drafts)
            num_emitted += len(tokens)
        self.speculation.record_step(scheduled, proposals, num_fed, num_emitted, 0.01)
        return {request: len(proposal.tokens) for request, proposal in proposals.items()}


def copies(n: int = 400) -> list[int]:
    return (MOTIF * n)[:n]


def fresh(n: int = 400, first: int = 100) -> list[int]:
    return list(range(first, first + n))


LOOKUPS = {"suffix": SuffixDrafter, "ngram": NgramDrafter}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_fixed_number_is_neither_weighed_nor_watched(name):
    bed = Bed([copies(), fresh()], [LOOKUPS[name]()], k=4)
    bed.steps(10)
    copying, other = (request.stats for request in bed.requests)
    assert copying.decisions == [(name, 4, 4, 4, "fixed")] * 10
    assert other.decisions == [(None, 0, 0, 0, "nothing found")] * 10
    assert (copying.drafted, copying.accepted) == ([10] * 4, [10] * 4)
    assert (copying.num_drafts, copying.drafters) == (10, {name: (40, 40)})
    assert (other.drafted, other.num_drafts, other.skipped) == ([], 0, {"nothing found": 10})
    assert not bed.speculation.acceptances.cells
    assert bed.speculation.controller.cost.num_recorded == 0


def test_a_number_of_its_own_teaches_nobody_and_needs_no_estimate():
    bed = Bed([copies(2000)], [SuffixDrafter()], k="auto")
    bed.requests += [bed._request("own", copies(), {"k": 3})]
    bed.texts += [copies()]
    bed.steps(30)
    weighed, own = bed.requests
    assert own.stats.drafted == [30] * 3
    assert not own.acceptance.cells
    assert weighed.acceptance.cells
    assert sum(weighed.stats.accepted) > 30


def test_copying_pays_and_fresh_text_does_not():
    bed = Bed([copies(2000), fresh(800)], [SuffixDrafter()], k="auto")
    drafted = bed.steps(60)[20:]
    copying, other = bed.requests
    assert sum(step.get(copying, 0) for step in drafted) > 4 * len(drafted)
    assert sum(step.get(other, 0) for step in drafted) == 0
    assert other.stats.skipped["resting"] > 0
    assert copying.acceptance.num_watches <= 4


def test_without_drafters_a_pass_is_noted_and_nothing_else():
    bed = Bed([copies(), fresh()])
    assert bed.steps(5) == [{}] * 5
    decisions = [request.stats.decisions for request in bed.requests]
    assert decisions == [[(None, 0, 0, 0, "off")] * 5] * 2
    assert bed.requests[0].stats.decisions[0].reason == "off"


@pytest.mark.parametrize("params", [{"k": 0}, {"speculate": False}], ids=str)
def test_a_request_that_wants_none(params):
    bed = Bed([copies()], [SuffixDrafter()], k=4, params=params)
    assert bed.steps(5) == [{}] * 5
    assert bed.requests[0].stats.skipped == {"off": 5}


def test_less_room_than_was_wanted():
    bed = Bed([copies()], [SuffixDrafter()], k=4)
    bed.steps(3, room=2)
    bed.steps(2, room=0)
    decisions = [("suffix", 4, 2, 2, "no room")] * 3 + [(None, 4, 0, 0, "no room")] * 2
    assert bed.requests[0].stats.decisions == decisions


def test_offers_do_not_outlive_their_step():
    bed = Bed([copies()], [SuffixDrafter()], k=4)
    bed.steps(1)
    [request] = bed.requests
    assert request.offers
    request.sequence.num_written = 0  # as after a preemption
    bed.speculation.decide(bed.requests, 0)
    assert (request.offers, request.num_drafts, request.choice.reason) == ({}, 0, "prompt")


class Cuts:
    """A lookup that shortens what it is shown."""

    name, is_lookup = "cuts", True

    def propose(self, sequences, num_drafts):
        del sequences[0].token_ids[3:]
        return [[1] for _ in sequences]

    def on_free(self, sequence):
        pass


def test_a_drafter_that_shortens_a_context_is_turned_off_and_nothing_is_lost():
    bed = Bed([copies(), fresh()], [Cuts(), SuffixDrafter()], k=2)
    bed.steps(4)
    assert [request.drafters for request in bed.requests] == [("suffix",)] * 2
    assert [request.sequence.token_ids for request in bed.requests] == [
        text[: request.num_tokens] for request, text in zip(bed.requests, bed.texts, strict=True)
    ]
    assert bed.requests[0].stats.drafters == {"suffix": (8, 8)}
    assert "changed token_ids" in bed.requests[0].stats.drafter_errors[0]


class Pupil(SuffixDrafter):
    """Writes down who is taught; fails for texts with a 100."""

    name = "pupil"

    def __init__(self) -> None:
        super().__init__()
        self.taught: list[list[Sequence]] = []

    def learn(self, sequences):
        self.taught.append(list(sequences))
        if any(100 in sequence.token_ids for sequence in sequences):
            raise RuntimeError("too hard")
        super().learn(sequences)


def test_a_drafter_that_fails_to_learn_is_turned_off_for_that_request_only():
    bed = Bed([copies(), fresh()], [Pupil()], k=4)
    bed.steps(3)
    copying, other = bed.requests
    assert (copying.drafters, other.drafters) == (("pupil",), ())
    assert copying.stats.drafters == {"pupil": (12, 12)}
    assert other.stats.drafter_errors == ["learn: RuntimeError: too hard"]
    assert bed.speculation.num_errors == 1


def test_rows_that_ended_meanwhile_are_not_taught():
    drafter = Pupil()
    bed = Bed([copies(), copies(), copies()], [drafter])
    ended, off, runs = bed.requests
    bed.speculation.forget(ended)
    ended.row, off.drafters = -1, ()
    bed.speculation.teach(bed.requests)
    assert drafter.taught[-1] == [runs.sequence]
    assert id(ended.sequence) not in drafter._indexes


def test_a_request_that_rests_is_not_taught():
    drafter = Pupil()
    bed = Bed([fresh(800, first=101)], [drafter], k="auto")
    bed.steps(60)
    assert bed.requests[0].stats.skipped["resting"] == 60 - sum(map(bool, drafter.taught[1:]))


def test_drafters_may_be_exchanged():
    bed = Bed([copies()], [SuffixDrafter()], k=4)
    bed.speculation.drafters = {}
    assert bed.steps(2) == [{}] * 2
    bed.speculation.drafters = {"ngram": NgramDrafter()}
    [request] = bed.requests
    bed.speculation.admit(request)
    bed.steps(2)
    assert request.stats.drafters == {"ngram": (8, 8)}
