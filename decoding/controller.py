"""How many tokens to draft, and with which drafter: what is expected to pay for itself, no more.

A step of the engine costs seconds and emits tokens. Over a whole run the fastest policy takes, in
each step, the drafts with the largest ``tokens - rate * seconds``, where ``rate`` is the tokens a
second that the run achieves: time spent on a doubtful draft is worth what it yields elsewhere. So a
run that copies most of its text drafts less in its uncertain steps than one that does not.
(Maximising tokens / seconds of each step by itself would not see the other steps.)

Probabilities come from measured acceptance (acceptance.py), seconds from measured steps
(step_cost.py), the best set of drafts of all rows from allocate.py. The output never depends on the
choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from pagedraft.decoding.acceptance import Acceptance as RequestAcceptance
from pagedraft.decoding.allocate import allocate
from pagedraft.decoding.controller_report import ControllerReport
from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.step_cost import StepCost as StepSeconds

MAX_DRAFTS = 16
RATE_DECAY = 0.98  # a step: the rate is that of the last 50
PROBE_SHARE = 0.01  # of the time since the drafter ran last
WORTH_IT, NOT_WORTH_IT, NOTHING_FOUND = "worth it", "not worth it", "nothing found"
FIXED, PROBE, LIMIT = "fixed", "probe", "limit"


@dataclass(frozen=True)
class Row:
    """What the controller knows of a request that decodes in the coming step.

    limit: drafts that could be kept (max_tokens, context). fixed_k: the request's own k, or None.
    offers: what lookups propose, by drafter. models: drafters that run a model and may be asked.
    num_context: committed tokens.
    """

    acceptance: RequestAcceptance
    limit: int
    fixed_k: int | None = None
    offers: Mapping[str, Proposal] = field(default_factory=dict)
    models: Seq[str] = ()
    num_context: int = 0


@dataclass(frozen=True)
class Choice:
    """Drafts of one row: who drafts (None: nobody), how many at most, why, tokens expected."""

    drafter: str | None
    k: int
    reason: str
    expected: float = 1.0


@dataclass(frozen=True)
class _Candidate:
    """A drafter for a row; worth[i] is the probability that drafts 0 to i are all accepted."""

    row: int
    name: str
    worth: list[float]


class BatchController:
    """Chooses drafter and k for every row of a step.

    k: "auto", or the number of drafts of every row that has no ``fixed_k`` of its own.
    max_drafts: most drafts of a row where k is chosen.

    A model drafter that is off is probed: it drafts one token for every row that it could serve as
    soon as that costs less than 1 % of the time since it last drafted. Lookups need no probes.
    """

    def __init__(self, k: int | str = "auto", max_drafts: int = MAX_DRAFTS) -> None:
        if not (k == "auto" or (isinstance(k, int) and not isinstance(k, bool) and k >= 0)):
            raise ValueError(f'k: expected "auto" or an integer >= 0, got {k!r}')
        self.k = k
        self.max_drafts = max_drafts
        self.cost = StepSeconds()
        self.drafting: dict[str, StepSeconds] = {}  # seconds of a round against its rows
        self._tokens = self._time = 0.0  # decayed: tokens a row, and time in plain steps
        self._idle: dict[str, float] = {}  # seconds since a model drafter drafted
        self._expected: tuple[int, float] = (0, 0.0)  # of the chosen step: tokens fed, emitted
        self._drafting_seconds = 0.0  # of the step under way
        self._report = ControllerReport()

    def choose(self, rows: Seq[Row], num_other_tokens: int = 0) -> list[Choice]:
        """One choice a row. num_other_tokens: what the step feeds besides (prompt chunks)."""
        choices = [self._plain_choice(row) for row in rows]
        auto = [i for i, choice in enumerate(choices) if choice.reason == NOT_WORTH_IT]
        num_fed = len(rows) + num_other_tokens
        if auto:
            fed = num_fed + sum(choice.k for choice in choices)
            self._choose_auto(rows, auto, choices, fed)
        for choice in choices:
            self._report.chose(choice.drafter, choice.k, choice.reason)
            if choice.drafter in self._idle:
                self._idle[choice.drafter] = 0.0
        fed = num_fed + sum(choice.k for choice in choices)
        self._expected = (fed, sum(choice.expected for choice in choices))
        return choices

    def record_step(
        self,
        *,
        num_tokens: int,
        num_rows: int,
        num_context: int,
        seconds: float,
        num_emitted: int | None = None,
    ) -> None:
        """Note a step without prompt chunks: what it fed and how long it took without drafting.

        num_emitted: tokens that its rows got; None takes what was expected.
        """
        sizes = (num_tokens, num_rows)
        predicted, plain = self.cost.predict(sizes, num_rows, num_context).tolist()
        fed, expected = self._expected
        emitted = expected if num_emitted is None else float(num_emitted)
        if fed == num_tokens:  # else the plan granted less than was chosen
            self._report.compare(predicted, seconds, expected, emitted)
        self._tokens = RATE_DECAY * self._tokens + emitted / num_rows
        self._time = RATE_DECAY * self._time + (predicted + self._drafting_seconds) / plain
        self._drafting_seconds = 0.0
        self.cost.record(num_tokens, num_rows, num_context, seconds)
        self._pass_time(seconds)

    def record_drafting(self, name: str, *, num_rows: int, num_rounds: int, seconds: float) -> None:
        """Note that a model drafter ran ``num_rounds`` times over at most ``num_rows`` rows."""
        if num_rounds == 0:
            return
        cost = self.drafting.setdefault(name, StepSeconds())
        cost.record(num_rows, num_rows, 0, seconds / num_rounds)
        self._drafting_seconds += seconds
        self._pass_time(seconds)

    def predicted_seconds(self, num_tokens: int, num_rows: int, num_context: int) -> float:
        """Seconds that a step is expected to take, without drafting."""
        return float(self.cost.predict((num_tokens,), num_rows, num_context)[0])

    def report(self) -> dict[str, Any]:
        """Choices and errors since the last ``clear_report`` (see ControllerReport)."""
        return self._report.as_dict()

    def clear_report(self) -> None:
        """Begin a new report; what was learnt stays."""
        self._report = ControllerReport()

    def _plain_choice(self, row: Row) -> Choice:
        """What needs no decision; "not worth it" stands for a row that does."""
        k = row.fixed_k if row.fixed_k is not None else self.k
        if k == 0:
            return Choice(None, 0, FIXED)
        if row.limit <= 0:
            return Choice(None, 0, LIMIT)
        offered = next((name for name, offer in row.offers.items() if offer.tokens), None)
        if offered is None and not row.models:
            return Choice(None, 0, NOTHING_FOUND)
        if not isinstance(k, int):
            return Choice(None, 0, NOT_WORTH_IT)
        drafter = offered if offered is not None else row.models[0]
        worth = _worth(row, drafter, min(k, row.limit))
        return Choice(drafter, len(worth), FIXED, 1.0 + sum(worth))

    def _choose_auto(
        self, rows: Seq[Row], auto: list[int], choices: list[Choice], num_fed: int
    ) -> None:
        """Replace the choices of ``auto`` rows by the best set of drafts, or by a probe."""
        num_context = sum(row.num_context for row in rows)
        sizes = np.arange(num_fed - 1, num_fed + len(auto) * self.max_drafts + 1)
        sizes[0] = len(rows)
        seconds = self.cost.predict(sizes, len(rows), num_context)
        gain = self._tokens / self._time if self._time > 0.0 else 1.0
        rate = max(1.0, gain) * len(rows) / float(seconds[0])
        lookups = {i: best for i in auto if (best := self._best_lookup(rows[i], i)) is not None}
        best_value, chosen = self._value(list(lookups.values()), seconds[1:], rate, "")
        for name in dict.fromkeys(name for i in auto for name in rows[i].models):
            mixed = self._with_model(rows, auto, lookups, name)
            value, other = self._value(mixed, seconds[1:], rate, name)
            if value > best_value:
                best_value, chosen = value, other
        for candidate, k in chosen:
            expected = 1.0 + sum(candidate.worth[:k])
            choices[candidate.row] = Choice(candidate.name, k, WORTH_IT, expected)
        self._probe(rows, auto, choices, seconds[1:])

    def _best_lookup(self, row: Row, index: int) -> _Candidate | None:
        """The lookup from which most is expected."""
        most = min(row.limit, self.max_drafts)
        found = [
            _Candidate(index, name, _worth(row, name, most))
            for name, offer in row.offers.items()
            if offer.tokens
        ]
        return max(found, key=lambda candidate: sum(candidate.worth), default=None)

    def _with_model(
        self, rows: Seq[Row], auto: list[int], lookups: Mapping[int, _Candidate], name: str
    ) -> list[_Candidate]:
        """A candidate a row, the model where more is expected from it than from a lookup."""
        mixed = []
        for i in auto:
            candidate = lookups.get(i)
            if name in rows[i].models:
                worth = _worth(rows[i], name, min(rows[i].limit, self.max_drafts))
                if candidate is None or sum(worth) > sum(candidate.worth):
                    candidate = _Candidate(i, name, worth)
            if candidate is not None:
                mixed.append(candidate)
        return mixed

    def _value(
        self, candidates: list[_Candidate], step_seconds: np.ndarray, rate: float, model: str
    ) -> tuple[float, list[tuple[_Candidate, int]]]:
        """The gain of the best drafts of these candidates, and the drafts."""
        worth = [candidate.worth for candidate in candidates]
        step_seconds = step_seconds[: sum(map(len, worth)) + 1]
        is_model = [candidate.name == model for candidate in candidates] if model else None
        round_seconds = self._round_seconds(model, sum(is_model)) if is_model else 0.0
        ks, gain = allocate(
            worth, step_seconds, rate, is_model=is_model, round_seconds=round_seconds
        )
        return gain, [pair for pair in zip(candidates, ks, strict=True) if pair[1]]

    def _round_seconds(self, name: str, num_rows: int) -> float:
        """Seconds of one round of a model drafter; 0 until it ran, so that it does."""
        if name not in self.drafting or num_rows == 0:
            return 0.0
        return float(self.drafting[name].predict((num_rows,), num_rows, 0)[0])

    def _probe(
        self, rows: Seq[Row], auto: list[int], choices: list[Choice], step_seconds: np.ndarray
    ) -> None:
        """Let a model drafter that nobody chose draft one token a row if that is cheap by now."""
        for name in dict.fromkeys(name for i in auto for name in rows[i].models):
            if any(choice.drafter == name for choice in choices):
                continue
            off = [i for i in auto if choices[i].k == 0 and name in rows[i].models]
            if not off:
                continue
            drafted = sum(choices[i].k for i in auto)
            cost = float(step_seconds[drafted + len(off)] - step_seconds[drafted])
            cost += self._round_seconds(name, len(off))
            if cost <= PROBE_SHARE * self._idle.setdefault(name, 0.0):
                for i in off:
                    choices[i] = Choice(name, 1, PROBE, 1.0 + sum(_worth(rows[i], name, 1)))

    def _pass_time(self, seconds: float) -> None:
        for name in self._idle:
            self._idle[name] += seconds


def _worth(row: Row, name: str, most: int) -> list[float]:
    """For each draft the probability that it and all before it are accepted."""
    offer = row.offers.get(name)
    evidence = 0 if offer is None else offer.evidence
    count = most if offer is None else min(most, len(offer.tokens))
    return list(accumulate(row.acceptance.estimates(name, evidence, count), mul))


PRIOR_ALPHA = 0.7  # a fresh request drafts until its own record says otherwise
DECAY = 0.8  # weight of the past against the newest verified step
RECOVERY = 0.02  # a step without drafts moves alpha this far back to the prior


@dataclass
class Acceptance:
    """Decayed acceptance record of one request."""

    accepted: float = 2.0 * PRIOR_ALPHA
    tried: float = 2.0

    @property
    def alpha(self) -> float:
        """Probability that a draft is accepted given that those before it were."""
        return min(0.98, self.accepted / self.tried)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Note a verified step; drafts behind the first rejected one say nothing."""
        if num_drafted == 0:
            return
        tried = min(num_drafted, num_accepted + 1)
        self.accepted = DECAY * self.accepted + num_accepted
        self.tried = DECAY * self.tried + tried

    def recover(self) -> None:
        """Note a step without drafts, so that a request that stopped drafting tries again."""
        self.accepted += RECOVERY * (PRIOR_ALPHA * self.tried - self.accepted)


@dataclass
class StepCost:
    """Seconds of a step as ``base + per_token * tokens``, fitted to decayed measurements."""

    mean_tokens: float = 0.0
    mean_seconds: float = 0.0
    var_tokens: float = 0.0
    cov: float = 0.0
    rate: float = 0.0  # committed tokens a second, decayed
    seen: int = 0

    def record(self, num_tokens: int, num_committed: int, seconds: float) -> None:
        """Add a measured step that decoded (prompt chunks would drown the small steps)."""
        self.seen += 1
        share = max(0.02, 1.0 / self.seen)
        gap_tokens, gap_seconds = num_tokens - self.mean_tokens, seconds - self.mean_seconds
        self.mean_tokens += share * gap_tokens
        self.mean_seconds += share * gap_seconds
        self.var_tokens = (1 - share) * (self.var_tokens + share * gap_tokens**2)
        self.cov = (1 - share) * (self.cov + share * gap_tokens * gap_seconds)
        self.rate += share * (num_committed / seconds - self.rate)

    @property
    def seconds_per_token(self) -> float:
        """Marginal seconds of one more token in a step; 0 until two sizes were seen."""
        if self.var_tokens < 0.25:
            return 0.0
        return max(0.0, self.cov / self.var_tokens)


class DraftController:
    """Chooses k for a request from its acceptance and the engine's step cost.

    k: an integer fixes the draft length; "auto" chooses from 0 to ``max_drafts``.
    """

    def __init__(self, k: int | str = "auto", max_drafts: int = 8) -> None:
        if not (k == "auto" or (isinstance(k, int) and not isinstance(k, bool) and k >= 0)):
            raise ValueError(f'k: expected "auto" or an integer >= 0, got {k!r}')
        self.k = k
        self.max_drafts = max_drafts
        self.cost = StepCost()

    def choose(self, acceptance: Acceptance) -> int:
        """Drafts wanted for the next step of a request."""
        if isinstance(self.k, int):
            return self.k
        threshold = self.cost.rate * self.cost.seconds_per_token
        chosen, worth = 0, acceptance.alpha
        while chosen < self.max_drafts and worth > threshold:
            chosen += 1
            worth *= acceptance.alpha
        if chosen == 0:
            acceptance.recover()
        return chosen
