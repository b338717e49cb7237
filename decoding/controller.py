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
from typing import Any

import numpy as np

from pagedraft.decoding.choice import (
    FIXED,
    NO_DRAFTS,
    PROBE,
    UNDECIDED,
    WORTH_IT,
    Choice,
    Drafts,
    Lineup,
    Row,
    best_drafts,
    lineups,
    unweighed,
)
from pagedraft.decoding.controller_report import ControllerReport
from pagedraft.decoding.cost_filter import NUM_FIRST
from pagedraft.decoding.step_cost import StepCost

MAX_DRAFTS = 16
RATE_DECAY = 0.98  # a step: the rate is that of the last 50
TRIAL_SHARE = 0.01  # of the time since the last trial: what a trial may cost
TRIAL_PERIOD = 4  # steps between looks for a size worth trying
DOUBT = 0.7  # standard deviations by which a size may be cheaper than believed
LEAST_SLOPE = 0.002  # of a plain step a token: no draft is free
PLAIN_STEPS = NUM_FIRST  # measured before any draft
PLAIN, SIZE = " plain", " size"  # kinds of trials beside the names of model drafters


class DraftController:
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
        self.cost = StepCost()
        self.drafting: dict[str, StepCost] = {}  # seconds of a round against its rows
        self._tokens = self._time = 0.0  # decayed: tokens a row, and time in plain steps
        self._idle: dict[str, float] = {PLAIN: 0.0, SIZE: 0.0}  # seconds since a trial, by kind
        # Of the chosen step: tokens fed, emitted (None: not known, some k is fixed).
        self._expected: tuple[int, float | None] = (0, 0.0)
        self._drafting_seconds = 0.0  # of the step under way
        self._report = ControllerReport()

    def choose(self, rows: Seq[Row], num_other_tokens: int = 0) -> list[Choice]:
        """One choice a row. num_other_tokens: what the step feeds besides (prompt chunks)."""
        choices = [
            UNDECIDED
            if row.fixed_k is None and self.k == "auto" and row.offers and row.limit > 0
            else unweighed(
                self.k if row.fixed_k is None else row.fixed_k, row.limit, row.offers, row.models
            )
            for row in rows
        ]
        undecided = [i for i, choice in enumerate(choices) if choice is UNDECIDED]
        if undecided and self.cost.num_recorded >= PLAIN_STEPS:
            num_fed = len(rows) + num_other_tokens + sum(choice.k for choice in choices)
            self._decide(rows, undecided, choices, num_fed)
        self._note(choices, num_other_tokens)
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
        plain = self.cost.predict_one(num_rows, num_rows, num_context)
        predicted = self.cost.predict_one(num_tokens, num_rows, num_context)
        fed, expected = self._expected
        emitted = float(num_emitted) if num_emitted is not None else expected or 0.0
        is_as_chosen = fed == num_tokens and self.cost.num_recorded >= PLAIN_STEPS  # not blindly
        if is_as_chosen and expected is not None:
            self._report.compare(predicted, seconds, expected, emitted)
        self._tokens = RATE_DECAY * self._tokens + emitted / num_rows
        self._time = RATE_DECAY * self._time + (predicted + self._drafting_seconds) / plain
        self._drafting_seconds = 0.0
        self.cost.record(num_tokens, num_rows, num_context, seconds)
        if num_tokens == num_rows:
            self._idle[PLAIN] = 0.0
        self._pass_time(seconds)

    def record_drafting(self, name: str, *, num_rows: int, num_rounds: int, seconds: float) -> None:
        """Note that a model drafter ran ``num_rounds`` times over at most ``num_rows`` rows."""
        if num_rounds == 0:
            return
        cost = self.drafting.setdefault(name, StepCost())
        cost.record(num_rows, num_rows, 0, seconds / num_rounds)
        self._drafting_seconds += seconds
        self._pass_time(seconds)

    def report(self) -> dict[str, Any]:
        """Choices and errors since the last ``clear_report`` (see ControllerReport)."""
        return self._report.as_dict()

    def clear_report(self) -> None:
        """Begin a new report; what was learnt stays."""
        self._report = ControllerReport()

    def _note(self, choices: Seq[Choice], num_other_tokens: int) -> None:
        """Keep what the choices of a step lead to expect."""
        if not choices:
            return
        drafters, ks, reasons, expected = zip(*choices, strict=True)
        self._report.chose(zip(drafters, ks, reasons, strict=True))
        for name in self._idle:
            if name in drafters:
                self._idle[name] = 0.0
        num_fixed = 0
        if FIXED in reasons:
            num_fixed = sum(k for k, why in zip(ks, reasons, strict=True) if why == FIXED)
        num_fed = len(choices) + num_other_tokens + sum(ks)
        self._expected = (num_fed, sum(expected) if num_fixed == 0 else None)

    def _decide(
        self, rows: Seq[Row], undecided: list[int], choices: list[Choice], num_fed: int
    ) -> None:
        """Give rows the best set of drafts, or a trial. num_fed: tokens of the step without it."""
        num_context = sum(row.num_context for row in rows)
        gain = max(1.0, self._tokens / self._time if self._time > 0.0 else 1.0)
        ways = lineups(rows, undecided, self.max_drafts, LEAST_SLOPE * gain * len(rows))
        most = max(len(undecided), *(int(np.count_nonzero(way.worth_RK)) for way in ways))
        most = min(most, 2 * self.cost.most_tokens - len(rows))
        sizes = np.arange(num_fed - 1, num_fed + max(1, most) + 1)
        sizes[0] = len(rows)
        seconds_N = self.cost.predict(sizes, len(rows), num_context)
        plain, seconds_N = float(seconds_N[0]), seconds_N[1:]
        seconds_N = seconds_N + LEAST_SLOPE * plain * np.arange(len(seconds_N))
        rate = gain * len(rows) / plain
        drafts = best_drafts(ways, seconds_N, rate, self._round_seconds)
        trial = self._trial(ways, drafts, sizes[1:], seconds_N, rate)
        reason = WORTH_IT if trial is None else PROBE
        for row, choice in (trial or drafts).choices(reason):
            choices[row] = choice
        if trial is None:
            self._probe_models(rows, undecided, choices, seconds_N)

    def _trial(
        self,
        ways: Seq[Lineup],
        drafts: Drafts,
        sizes_N: np.ndarray,
        seconds_N: np.ndarray,
        rate: float,
    ) -> Drafts | None:
        """Something else than the best, to measure what it costs: no drafts, or another size.

        The other size is that of the drafts that were best if sizes cost less than believed, by
        DOUBT times what is not known of them.
        """
        if drafts.total and self._can_try(PLAIN, drafts, NO_DRAFTS, seconds_N, rate):
            return NO_DRAFTS
        if self.cost.num_recorded % TRIAL_PERIOD:
            return None
        doubt_N = self.cost.spread(sizes_N, int(sizes_N[0]) + drafts.total)
        hoped_N = np.maximum.accumulate(np.maximum(seconds_N - DOUBT * doubt_N, 0.0))
        other = best_drafts(ways, hoped_N, rate, self._round_seconds)
        if other.total == drafts.total:
            return None
        return other if self._can_try(SIZE, drafts, other, seconds_N, rate) else None

    def _can_try(
        self, kind: str, drafts: Drafts, other: Drafts, seconds_N: np.ndarray, rate: float
    ) -> bool:
        """Whether ``other`` in place of the best loses little enough; then the trial is noted."""
        loss = (drafts.tokens - other.tokens) / rate
        loss += self._seconds(other, seconds_N) - self._seconds(drafts, seconds_N)
        if loss > TRIAL_SHARE * self._idle[kind]:
            return False
        self._idle[kind] = 0.0
        return True

    def _seconds(self, drafts: Drafts, seconds_N: np.ndarray) -> float:
        """Seconds of a step with these drafts, drafting included."""
        seconds = float(seconds_N[drafts.total])
        for name in self.drafting:
            ks = drafts.of(name)
            seconds += max(ks, default=0) * self._round_seconds(name, len(ks))
        return seconds

    def _round_seconds(self, name: str, num_rows: int) -> float:
        """Seconds of one round of a model drafter; 0 until it ran, so that it does."""
        if name not in self.drafting or num_rows == 0:
            return 0.0
        return self.drafting[name].predict_one(num_rows, num_rows, 0)

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
                    expected = 1.0 + rows[i].acceptance.worth(name, 0, 1)[0]
                    choices[i] = Choice(name, 1, PROBE, expected)

    def _pass_time(self, seconds: float) -> None:
        for name in self._idle:
            self._idle[name] += seconds
