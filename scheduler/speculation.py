"""Speculation in the engine: who drafts how much for which request, and what became of it.

One step: lookups offer what they find (``decide``), the controller chooses a drafter and a length
for each request, the plan grants what fits, model drafters propose that much (``propose``), the
target verifies, lookups learn the contexts meanwhile (``teach``), and the outcome teaches the
controller (``settle``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

import torch

from pagedraft.decoding.acceptance import Acceptance, AcceptanceTable
from pagedraft.decoding.choice import NONE_FOUND, Row, unweighed
from pagedraft.decoding.controller import DraftController
from pagedraft.decoding.drafters.base import Drafter, Proposal, is_lookup, learns
from pagedraft.decoding.drafters.guard import (
    Contexts,
    cut,
    free_safely,
    learn_safely,
    propose_safely,
)
from pagedraft.scheduler.draft_limits import Decoding, begin_decision, reset
from pagedraft.scheduler.request import OFF, PROMPT, RESTING, Decision, Request

# Asking lookups, weighing what they offer and learning from it takes time also where it comes to
# nothing; this rest saves a tenth to a fifth of it (8 rows of text that hardly repeats). After so
# many passes without drafts a request is asked at every fourth step only, until it drafts again.
REST_AFTER, REST_STEPS = 16, 4

PLAIN_PASS = Decision(None, 0, 0, 0, OFF.reason)


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
        self._contexts = Contexts()
        self._drafting_seconds = 0.0
        self.drafters = {drafter.name: drafter for drafter in drafters}
        if len(self.drafters) < len(drafters):
            names = [drafter.name for drafter in drafters]
            raise ValueError(f"drafters: expected names that differ, got {names}")

    @property
    def drafters(self) -> dict[str, Drafter]:
        """By name, in the order in which they are asked."""
        return self._drafters

    @drafters.setter
    def drafters(self, drafters: dict[str, Drafter]) -> None:
        self._drafters = drafters
        self._lookups = [name for name, drafter in drafters.items() if is_lookup(drafter)]
        self._learners = [name for name, drafter in drafters.items() if learns(drafter)]
        self._has_models = len(self._lookups) < len(drafters)

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
        if not self.drafters:
            return
        k, most = self.controller.k, self.controller.max_drafts
        decoding = begin_decision(running, k if isinstance(k, int) else most)
        for name in self._lookups:
            self._collect_offers(name, decoding)
        if self.controller.k == "auto":
            self._weigh(decoding, num_other_tokens)
        else:
            self._give_fixed(decoding)

    def propose(self, scheduled: Mapping[Request, int]) -> dict[Request, Proposal]:
        """The drafts of requests whose span in the plan is longer than what they have pending."""
        proposals: dict[Request, Proposal] = {}
        if not self.drafters:
            return proposals
        asked: dict[str, list[Request]] = {}
        for request, num_tokens in scheduled.items():
            name = request.choice.drafter
            if name is None:
                continue
            sequence = request.sequence
            num_drafts = num_tokens - len(sequence.token_ids) + sequence.num_written
            request.num_drafts = num_drafts
            if num_drafts == 0:
                continue
            offer = request.offers.get(name)
            if offer is None:
                asked.setdefault(name, []).append(request)
            else:
                is_whole = len(offer.tokens) <= num_drafts
                proposals[request] = offer if is_whole else cut(offer, num_drafts)
        self._drafting_seconds = 0.0
        for name, requests in asked.items():
            proposals |= self._run(name, requests, [r.num_drafts for r in requests])
        return proposals

    def teach(self, scheduled: Iterable[Request]) -> None:
        """Let drafters learn the contexts of a step that is under way; nobody waits for it."""
        if not self.drafters:
            return
        for name in self._learners:
            requests = [
                request
                for request in scheduled  # a callback may have ended or preempted some
                if name in request.drafters and request.row >= 0 and not self._is_resting(request)
            ]
            if not requests:
                continue
            sequences = [request.sequence for request in requests]
            errors = learn_safely(self.drafters[name], sequences, self._contexts)
            for row, error in errors.items():
                self.turn_off(requests[row], name, error)

    def record_step(
        self,
        scheduled: Mapping[Request, int],
        proposals: Mapping[Request, Proposal],
        num_fed: int,
        num_emitted: int,
        seconds: float,
    ) -> None:
        """Teach the controller what a step took, unless prompts had a part in it."""
        if not self.drafters or self.controller.k != "auto":
            return
        num_drafts = sum([len(proposal.tokens) for proposal in proposals.values()])
        if num_fed != len(scheduled) + num_drafts:
            return
        self.controller.record_step(
            num_tokens=num_fed,
            num_rows=len(scheduled),
            num_context=sum([len(request.sequence.token_ids) for request in scheduled]),
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
        if choice is OFF and num_drafted == 0:
            request.stats.passes.append(PLAIN_PASS)
            return
        drafter, k, reason, _ = choice
        if num_drafted == 0:
            drafter = None
            request.num_plain_passes += 1
        else:
            request.num_plain_passes = 0
        if num_drafted != k:  # "no room": as many as the plan granted
            reason = "no room" if num_drafted == request.num_drafts else "nothing found"
        num_accepted = len(tokens) - 1
        num_counted = num_accepted if num_accepted < num_kept else num_kept
        request.stats.passes.append((drafter, k, num_drafted, num_counted, reason))
        if self.controller.k == "auto" and request.drafters and request.params.k is None:
            self._learn(request, proposal, tokens, drafter)

    def turn_off(self, request: Request, name: str | None, error: str) -> None:
        """Drafter ``name`` (None: all of them) failed for a request: it drafts for it no more."""
        request.drafters = tuple(n for n in request.drafters if name is not None and n != name)
        request.stats.drafter_errors.append(error)
        self.num_errors += 1

    def forget(self, request: Request) -> None:
        """The request has ended or lost its KV: nothing is planned for it any more."""
        reset(request)
        for drafter in self.drafters.values():
            error = free_safely(drafter, request.sequence)
            if error is not None:
                request.stats.drafter_errors.append(error)
                self.num_errors += 1

    def _collect_offers(self, name: str, decoding: Seq[Decoding]) -> None:
        """Ask a lookup."""
        may_rest = self.controller.k == "auto"
        asked = [
            (request, limit)
            for request, limit in decoding
            if limit > 0
            and name in request.drafters
            and not (may_rest and self._is_resting(request))
        ]
        if not asked:
            return
        requests = [request for request, _ in asked]
        proposals = self._ask(name, requests, [limit for _, limit in asked])
        for request, proposal in zip(requests, proposals, strict=True):
            if proposal.tokens:
                request.offers[name] = proposal

    def _give_fixed(self, decoding: Seq[Decoding]) -> None:
        """As many drafts as were asked for."""
        default, has_models = self.controller.k, self._has_models
        for request, limit in decoding:
            if request.drafters:
                own_k = request.params.k
                k = default if own_k is None else own_k
                models = self._models(request) if has_models else ()
                request.choice = choice = unweighed(k, limit, request.offers, models)
                request.num_drafts = choice.k

    def _weigh(self, decoding: Seq[Decoding], num_other_tokens: int) -> None:
        """As many drafts as pay, where the number is left to the controller."""
        rows = [
            Row(
                request.acceptance,
                limit,
                request.params.k if request.drafters else 0,
                request.offers,
                self._models(request) if self._has_models else (),
                len(request.sequence.token_ids),
            )
            for request, limit in decoding
        ]
        choices = self.controller.choose(rows, num_other_tokens)
        for (request, _), choice in zip(decoding, choices, strict=True):
            if request.drafters:
                rests = choice is NONE_FOUND and self._is_resting(request)
                request.choice = RESTING if rests else choice
                request.num_drafts = choice.k

    def _models(self, request: Request) -> Seq[str]:
        """The drafters that run a model and may draft for a request."""
        return [name for name in request.drafters if name not in self._lookups]

    def _is_weighed(self, request: Request) -> bool:
        """Whether the controller chooses how much is drafted for a request."""
        return request.params.k is None and self.controller.k == "auto"

    def _is_resting(self, request: Request) -> bool:
        """Whether a request whose drafts do not pay is left alone in this step."""
        passes = request.num_plain_passes
        return passes >= REST_AFTER and passes % REST_STEPS != 0 and self._is_weighed(request)

    @staticmethod
    def _learn(request: Request, proposal: Proposal, tokens: list[int], used: str | None) -> None:
        """Learn how often drafts are right: those of ``used``, and what lookups offered besides."""
        acceptance = request.acceptance
        num_drafted, num_accepted = len(proposal.tokens), len(tokens) - 1
        if used is not None:
            acceptance.record(used, proposal.evidence, num_drafted, num_accepted)
        for name, offer in request.offers.items():
            if name != used:
                acceptance.watch(name, offer)
            elif num_accepted == num_drafted:  # else what follows is known to be wrong
                acceptance.watch(name, offer, num_drafted)
        acceptance.emitted(tokens if tokens[-1] >= 0 else tokens[:-1])

    def _run(
        self, name: str, requests: list[Request], num_drafts: list[int]
    ) -> dict[Request, Proposal]:
        """Ask a model drafter and note what it took, unless rows had more than a step to read."""
        reads_accepted = getattr(self.drafters[name], "reads_accepted", False)
        most = self.controller.max_drafts + 1 if reads_accepted else 2
        is_steady = all(
            request.num_tokens - request.sequence.num_draft_written <= most for request in requests
        )
        began = time.perf_counter()
        proposals = dict(zip(requests, self._ask(name, requests, num_drafts), strict=True))
        seconds = time.perf_counter() - began
        self._drafting_seconds += seconds
        rounds = getattr(self.drafters[name], "last_num_rounds", max(num_drafts))
        if is_steady and self.controller.k == "auto":
            self.controller.record_drafting(
                name, num_rows=len(requests), num_rounds=rounds, seconds=seconds
            )
        return proposals

    def _ask(self, name: str, requests: list[Request], num_drafts: list[int]) -> Seq[Proposal]:
        proposed, errors = propose_safely(
            self.drafters[name],
            [request.sequence for request in requests],
            num_drafts,
            self.vocab_size,
            self.device,
            self._contexts,
        )
        for row, error in errors.items():
            self.turn_off(requests[row], name, error)
        return proposed
