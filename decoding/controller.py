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

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedraft.decoding.choice import Choice, Drafts, Lineup, Row, best_drafts, lineups
from pagedraft.decoding.controller_report import ControllerReport
from pagedraft.decoding.step_cost import StepCost as StepSeconds

MAX_DRAFTS = 16
RATE_DECAY = 0.98  # a step: the rate is that of the last 50
TRIAL_SHARE = 0.01  # of the time since the last trial: what a trial may cost
TRIAL_PERIOD = 4  # steps between looks for a size worth trying
DOUBT = 1.0  # standard deviations by which a size may be cheaper than believed
LEAST_SLOPE = 0.002  # of a plain step a token: no draft is free
PLAIN_STEPS = 2  # measured before any draft
WORTH_IT, NOT_WORTH_IT, NOTHING_FOUND = "worth it", "not worth it", "nothing found"
FIXED, PROBE, LIMIT = "fixed", "probe", "limit"


class BatchController:
    """Chooses drafter and k for every row of a step.

    k: "auto", or the number of drafts of every row that has no ``fixed_k`` of its own.
    max_drafts: most drafts of a row where k is chosen.

    What is not used is not measured, so now and then something else is tried, once that is expected
    to cost less than 1 % of the time since the last trial of its kind: another size of the step,
    whose cost is in doubt, or one draft a row of a model drafter that is off. Lookups that are off
    are scored without being used.
    """

    def __init__(self, k: int | str = "auto", max_drafts: int = MAX_DRAFTS) -> None:
        if not (k == "auto" or (isinstance(k, int) and not isinstance(k, bool) and k >= 0)):
            raise ValueError(f'k: expected "auto" or an integer >= 0, got {k!r}')
        self.k = k
        self.max_drafts = max_drafts
        self.cost = StepSeconds()
        self.drafting: dict[str, StepSeconds] = {}  # seconds of a round against its rows
        self._tokens = self._time = 0.0  # decayed: tokens a row, and time in plain steps
        self._idle: dict[str, float] = {"": 0.0}  # seconds since a trial; "": of a size of the step
        self._expected: tuple[int, float] = (0, 0.0)  # of the chosen step: tokens fed, emitted
        self._drafting_seconds = 0.0  # of the step under way
        self._report = ControllerReport()

    def choose(self, rows: Seq[Row], num_other_tokens: int = 0) -> list[Choice]:
        """One choice a row. num_other_tokens: what the step feeds besides (prompt chunks)."""
        choices = [self._without_decision(row) for row in rows]
        undecided = [i for i, choice in enumerate(choices) if choice.reason == NOT_WORTH_IT]
        num_fed = len(rows) + num_other_tokens + sum(choice.k for choice in choices)
        if undecided and self.cost.num_recorded >= PLAIN_STEPS:
            self._decide(rows, undecided, choices, num_fed)
            num_fed += sum(choices[i].k for i in undecided)
        for choice in choices:
            self._report.chose(choice.drafter, choice.k, choice.reason)
            if choice.drafter in self._idle:
                self._idle[choice.drafter] = 0.0
        self._expected = (num_fed, sum(choice.expected for choice in choices))
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
        sizes = (num_rows, num_tokens)
        plain, predicted = self.cost.predict(sizes, num_rows, num_context).tolist()
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

    def _without_decision(self, row: Row) -> Choice:
        """What a row gets without weighing; "not worth it" stands for one that must be weighed."""
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
        worth = row.worth(drafter, k)
        return Choice(drafter, len(worth), FIXED, 1.0 + sum(worth))

    def _decide(
        self, rows: Seq[Row], undecided: list[int], choices: list[Choice], num_fed: int
    ) -> None:
        """Give rows the best set of drafts, or a trial. num_fed: tokens of the step without it."""
        num_context = sum(row.num_context for row in rows)
        most = min(len(undecided) * self.max_drafts, 2 * self.cost.most_tokens - num_fed)
        sizes = np.arange(num_fed - 1, num_fed + max(1, most) + 1)
        sizes[0] = len(rows)
        seconds_N = self.cost.predict(sizes, len(rows), num_context)
        plain, seconds_N = float(seconds_N[0]), seconds_N[1:]
        seconds_N = seconds_N + LEAST_SLOPE * plain * np.arange(len(seconds_N))
        gain = self._tokens / self._time if self._time > 0.0 else 1.0
        rate = max(1.0, gain) * len(rows) / plain
        ways = lineups(rows, undecided, self.max_drafts)
        drafts, reason = best_drafts(ways, seconds_N, rate, self._round_seconds), WORTH_IT
        if self.cost.num_recorded % TRIAL_PERIOD == 0:
            other = self._other_size(ways, drafts, sizes[1:], seconds_N, rate)
            if other is not None:
                drafts, reason = other, PROBE
        for candidate, k in drafts.chosen:
            expected = 1.0 + sum(candidate.worth[:k])
            choices[candidate.row] = Choice(candidate.name, k, reason, expected)
        self._probe_models(rows, undecided, choices, seconds_N)

    def _other_size(
        self,
        ways: Seq[Lineup],
        drafts: Drafts,
        sizes_N: np.ndarray,
        seconds_N: np.ndarray,
        rate: float,
    ) -> Drafts | None:
        """Drafts that would be best if a size cost less than believed, where trying is cheap."""
        doubt_N = self.cost.spread(sizes_N, int(sizes_N[0]) + drafts.total)
        hoped_N = np.maximum.accumulate(np.maximum(seconds_N - DOUBT * doubt_N, seconds_N[0]))
        other = best_drafts(ways, hoped_N, rate, self._round_seconds)
        if other.total == drafts.total:
            return None
        loss = (drafts.tokens - other.tokens) / rate
        loss += self._seconds(other, seconds_N) - self._seconds(drafts, seconds_N)
        if loss > TRIAL_SHARE * self._idle[""]:
            return None
        self._idle[""] = 0.0
        return other

    def _seconds(self, drafts: Drafts, seconds_N: np.ndarray) -> float:
        """Seconds of a step with these drafts, drafting included."""
        seconds = float(seconds_N[drafts.total])
        for name in self.drafting:
            ks = [k for candidate, k in drafts.chosen if candidate.name == name]
            seconds += max(ks, default=0) * self._round_seconds(name, len(ks))
        return seconds

    def _round_seconds(self, name: str, num_rows: int) -> float:
        """Seconds of one round of a model drafter; 0 until it ran, so that it does."""
        if name not in self.drafting or num_rows == 0:
            return 0.0
        return float(self.drafting[name].predict((num_rows,), num_rows, 0)[0])

    def _probe_models(
        self, rows: Seq[Row], undecided: list[int], choices: list[Choice], seconds_N: np.ndarray
    ) -> None:
        """Let a model drafter that nobody chose draft one token a row if that is cheap by now."""
        used = {choices[i].drafter for i in undecided}
        drafted = sum(choices[i].k for i in undecided)
        for name in dict.fromkeys(name for i in undecided for name in rows[i].models):
            off = [i for i in undecided if choices[i].k == 0 and name in rows[i].models]
            off = off[: len(seconds_N) - 1 - drafted]
            if name in used or not off:
                continue
            cost = float(seconds_N[drafted + len(off)] - seconds_N[drafted])
            cost += self._round_seconds(name, len(off))
            if cost <= TRIAL_SHARE * self._idle.setdefault(name, 0.0):
                drafted += len(off)
                for i in off:
                    choices[i] = Choice(name, 1, PROBE, 1.0 + sum(rows[i].worth(name, 1)))

    def _pass_time(self, seconds: float) -> None:
        for name in self._idle:
            self._idle[name] += seconds


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
