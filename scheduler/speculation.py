"""Speculation in the engine: who drafts how much for which request, and what became of it.

One step: lookups offer what they find (``decide``), the controller chooses a drafter and a length
for each request, the plan grants what fits, model drafters propose that much (``propose``), the
target verifies, and the outcome teaches the controller (``settle``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from pagedraft.decoding.acceptance import Acceptance, AcceptanceTable
from pagedraft.decoding.commit import max_drafts
from pagedraft.decoding.controller import NOTHING_FOUND, DraftController, Row
from pagedraft.decoding.drafters.base import Drafter, Proposal, is_lookup
from pagedraft.decoding.drafters.guard import cut, free_safely, propose_safely
from pagedraft.scheduler.request import OFF, PROMPT, RESTING, Decision, Request

NOTHING = Proposal([])
# Asking lookups, weighing what they offer and learning from it takes time also where it comes to
# nothing: 0.45 ms a step of 8 rows on 2 AVX512 cores, 0.17 ms with this rest. After so many passes
# without drafts a request is asked at every fourth step only, until it drafts again.
REST_AFTER, REST_STEPS = 16, 4


class Speculation:
    """The drafters of an engine and the controller that chooses among them.

    num_errors: how often a drafter failed; each failure turns it off for that request.
    """

    def __init__(
        self,
        drafters: Seq[Drafter],
        controller: DraftController,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.controller = controller
        self.vocab_size = vocab_size
        self.device = device
        self.num_errors = 0
        self.acceptances = AcceptanceTable()
        self._drafting_seconds = 0.0
        self.drafters = {drafter.name: drafter for drafter in drafters}
        if len(self.drafters) < len(drafters):
            names = [drafter.name for drafter in drafters]
            raise ValueError(f"drafters: expected names that differ, got {names}")

    def admit(self, request: Request) -> None:
        """Say which drafters a new request may use."""
        wants = bool(self.drafters) and request.params.speculate and request.params.k != 0
        request.drafters = tuple(self.drafters) if wants else ()
        request.choice = PROMPT if wants else OFF
        request.acceptance = Acceptance(self.acceptances)

    def decide(self, running: Seq[Request], num_other_tokens: int) -> None:
        """Choose every running request's drafts of the next step: none inside a prompt.

        num_other_tokens: tokens of prompts and recomputation that will share the step.
        """
        for request in running:
            self._reset(request)
        if not self.drafters:
            return
        decoding = [request for request in running if request.sequence.num_pending == 1]
        limits = {r: self._limit(r) if r.drafters else 0 for r in decoding}
        self._collect_offers(limits)
        rows = [self._row(request, limit) for request, limit in limits.items()]
        choices = self.controller.choose(rows, num_other_tokens)
        for request, choice in zip(decoding, choices, strict=True):
            if request.drafters:
                rests = choice.reason == NOTHING_FOUND and self._is_resting(request)
                request.choice = RESTING if rests else choice
                request.num_drafts = choice.k

    def propose(self, scheduled: Mapping[Request, int]) -> dict[Request, Proposal]:
        """The drafts of requests whose span in the plan is longer than what they have pending."""
        proposals: dict[Request, Proposal] = {}
        asked: dict[str, list[Request]] = {}
        for request, num_tokens in scheduled.items():
            request.num_drafts = max(0, num_tokens - request.sequence.num_pending)
            name = request.choice.drafter
            if request.num_drafts == 0 or name is None:
                continue
            if name in request.offers:
                proposals[request] = cut(request.offers[name], request.num_drafts)
            else:
                asked.setdefault(name, []).append(request)
        self._drafting_seconds = 0.0
        for name, requests in asked.items():
            proposals |= self._run(name, requests, [r.num_drafts for r in requests])
        return proposals

    def record_step(
        self,
        scheduled: Mapping[Request, int],
        proposals: Mapping[Request, Proposal],
        num_fed: int,
        num_emitted: int,
        seconds: float,
    ) -> None:
        """Teach the controller what a step took, unless prompts had a part in it."""
        num_drafts = sum(len(proposal.tokens) for proposal in proposals.values())
        if not self.drafters or num_fed != len(scheduled) + num_drafts:
            return
        self.controller.record_step(
            num_tokens=num_fed,
            num_rows=len(scheduled),
            num_context=sum(request.num_tokens for request in scheduled),
            seconds=seconds - self._drafting_seconds,
            num_emitted=num_emitted,
        )

    def settle(
        self, request: Request, proposal: Proposal, tokens: list[int], num_kept: int
    ) -> None:
        """Learn from a verified pass: ``tokens`` are the accepted drafts and one more.

        Statistics count the tokens that the request keeps, of which there may be fewer.
        """
        choice, num_drafted = request.choice, len(proposal.tokens)
        num_accepted = len(tokens) - 1
        drafter = choice.drafter if num_drafted else None
        reason, num_counted = self._reason(request, proposal), min(num_accepted, num_kept)
        request.stats.record(Decision(drafter, choice.k, num_drafted, num_counted, reason))
        request.num_plain_passes = 0 if num_drafted else request.num_plain_passes + 1
        acceptance = request.acceptance
        if drafter is not None:
            acceptance.record(drafter, proposal.evidence, num_drafted, num_accepted)
        for name, offer in request.offers.items():
            acceptance.watch(name, offer, num_drafted if name == drafter else 0)
        acceptance.emitted([token for token in tokens if token >= 0])

    def turn_off(self, request: Request, name: str | None, error: str) -> None:
        """Drafter ``name`` (None: all of them) failed for a request: it drafts for it no more."""
        request.drafters = tuple(n for n in request.drafters if name is not None and n != name)
        request.stats.drafter_errors.append(error)
        self.num_errors += 1

    def forget(self, request: Request) -> None:
        """The request has ended or lost its KV: nothing is planned for it any more."""
        self._reset(request)
        for drafter in self.drafters.values():
            error = free_safely(drafter, request.sequence)
            if error is not None:
                request.stats.drafter_errors.append(error)
                self.num_errors += 1

    @staticmethod
    def _reset(request: Request) -> None:
        request.num_drafts = 0
        request.offers = {}
        request.choice = PROMPT if request.drafters else OFF

    def _limit(self, request: Request) -> int:
        """Drafts that could be kept, at most as many as anybody asks for."""
        k = self.controller.k if request.params.k is None else request.params.k
        return max_drafts(
            k if isinstance(k, int) else self.controller.max_drafts,
            num_output=request.num_output,
            max_tokens=request.params.max_tokens,
            num_context=request.num_tokens,
            max_context=request.max_context,
        )

    def _row(self, request: Request, limit: int) -> Row:
        models = [name for name in request.drafters if not is_lookup(self.drafters[name])]
        return Row(
            acceptance=request.acceptance,
            limit=limit,
            fixed_k=request.params.k if request.drafters else 0,
            offers=request.offers,
            models=models,
            num_context=request.num_tokens,
        )

    def _collect_offers(self, limits: Mapping[Request, int]) -> None:
        """Ask the lookups."""
        awake = [r for r, limit in limits.items() if limit > 0 and not self._is_resting(r)]
        for name, drafter in self.drafters.items():
            asked = [request for request in awake if name in request.drafters]
            if not asked or not is_lookup(drafter):
                continue
            for request, proposal in self._ask(name, asked, [limits[r] for r in asked]).items():
                if proposal.tokens:
                    request.offers[name] = proposal

    def _is_resting(self, request: Request) -> bool:
        """Whether a request whose drafts do not pay is left alone in this step."""
        is_chosen = request.params.k is None and not isinstance(self.controller.k, int)
        passes = request.num_plain_passes
        return is_chosen and passes >= REST_AFTER and passes % REST_STEPS != 0

    def _run(
        self, name: str, requests: list[Request], num_drafts: list[int]
    ) -> dict[Request, Proposal]:
        """Ask a model drafter and note what it took, unless rows had more than a step to read."""
        is_steady = all(
            request.num_tokens - request.sequence.num_draft_written <= 2 for request in requests
        )
        began = time.perf_counter()
        proposals = self._ask(name, requests, num_drafts)
        seconds = time.perf_counter() - began
        self._drafting_seconds += seconds
        rounds = getattr(self.drafters[name], "last_num_rounds", max(num_drafts))
        if is_steady:
            self.controller.record_drafting(
                name, num_rows=len(requests), num_rounds=rounds, seconds=seconds
            )
        return proposals

    def _ask(
        self, name: str, requests: list[Request], num_drafts: list[int]
    ) -> dict[Request, Proposal]:
        sequences = [request.sequence for request in requests]
        proposed, errors = propose_safely(
            self.drafters[name], sequences, num_drafts, self.vocab_size, self.device
        )
        for row, error in errors.items():
            self.turn_off(requests[row], name, error)
        return dict(zip(requests, proposed, strict=True))

    @staticmethod
    def _reason(request: Request, proposal: Proposal) -> str:
        """Why a pass had so many drafts; other than the controller's where it got fewer."""
        if len(proposal.tokens) == request.choice.k:
            return request.choice.reason
        if request.num_drafts == 0:  # set to what the plan granted
            return "no room"
        return "no room" if len(proposal.tokens) == request.num_drafts else "nothing found"
