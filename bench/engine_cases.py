"""The cases of the engine bench: what other engines do too, all sides in turn in every round.

The machine may be shared, so what counts is the ratio of two sides in one round, and the order in
which they run rotates. Our sides must all give the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pagedraft.bench.engine_runs import (
    Agreement,
    Clock,
    Prompts,
    Run,
    Side,
    agreement,
    check_same,
    in_groups,
)
from pagedraft.bench.figures import Figure, from_samples
from pagedraft.bench.table import print_table
from pagedraft.scheduler.metrics import percentile

SINGLE, BATCH, EDITS = "single stream", "16 requests", "code edits"
WARM_TOKENS = 4


@dataclass(frozen=True)
class Case:
    """What all sides decode: groups of prompts one after another, those of a group at once.

    modes: what peers are asked for. has_drafts: whether our sides with drafts take part.
    """

    name: str
    groups: Sequence[Prompts]
    modes: tuple[str, ...] = ("plain",)
    has_drafts: bool = False


@dataclass(frozen=True)
class Aim:
    """The least ratio of ours, with drafts where the case has them, to a peer in a mode."""

    case: str
    peer: str
    mode: str
    ratio: float

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.case} over {self.peer} {self.mode} >= {self.ratio:g}"


AIMS = (
    Aim(SINGLE, "transformers", "plain", 2.5),
    Aim(BATCH, "transformers", "plain", 2.0),
    Aim(BATCH, "llama.cpp", "plain", 1.0),
    Aim(EDITS, "transformers", "plain", 4.0),
    Aim(EDITS, "llama.cpp", "plain", 1.5),
    Aim(EDITS, "llama.cpp", "lookup", 1.0),
)


@dataclass
class CaseResult:
    """The runs of a case by side, one a round; a peer that failed has fewer."""

    case: Case
    sides: list[Side]
    runs: dict[str, list[Run]] = field(default_factory=dict)

    @property
    def ours(self) -> list[Side]:
        """Our sides, the one without drafts first."""
        return [side for side in self.sides if side.is_ours]

    @property
    def theirs(self) -> list[Side]:
        """The peers that ran at least once."""
        return [side for side in self.sides if not side.is_ours and self.runs[side.name]]

    def speeds(self, side: Side) -> list[float]:
        """Tokens a second, a round each."""
        return [run.speed for run in self.runs[side.name]]

    def ratios(self, side: Side, other: Side) -> list[float]:
        """Speed over that of another side in the same round."""
        pairs = zip(self.speeds(side), self.speeds(other), strict=False)
        return [a / b for a, b in pairs]

    def agreement(self, other: Side, eos_ids: Collection[int]) -> Agreement:
        """How far a peer's tokens of the first round are ours."""
        ours = self.runs[self.ours[0].name][0].token_ids
        return agreement(ours, self.runs[other.name][0].token_ids, eos_ids)


def measure(
    case: Case,
    sides: Sequence[Side],
    num_tokens: int,
    rounds: int,
    clock: Clock,
    share: float,
    left_out: list[str],
) -> CaseResult:
    """Run all sides in turn, ``rounds`` times, or fewer where ``share`` of the clock is used up.

    sides: the first is ours without drafts. left_out gets a line for what was not done, and why.
    Raises GateError where our outputs differ.
    """
    result = CaseResult(case, [side for side in sides if _takes_part(side, case)])
    result.runs = {side.name: [] for side in result.sides}
    active = [side for side in result.sides if _warm_up(side, case, num_tokens, left_out)]
    for index in range(rounds):
        if index and clock.is_past(share):
            left_out.append(f"{case.name}: {rounds - index} of {rounds} rounds: out of time")
            break
        for side in rotated(active, index):
            run = attempt(side, case.groups, num_tokens, case.name, left_out)
            if run is None:
                active.remove(side)
            else:
                result.runs[side.name].append(run)
        _check_ours(result)
    return result


def attempt(
    side: Side, groups: Sequence[Prompts], num_tokens: int, where: str, left_out: list[str]
) -> Run | None:
    """One run; None for a peer that failed, which is told. Ours raises."""
    try:
        return in_groups(side, groups, num_tokens)
    except Exception as error:  # whatever another engine may raise
        if side.is_ours:
            raise
        left_out.append(f"{where}, {side.name}: {_first_line(error)}")
        return None


def rotated(sides: Sequence[Side], by: int) -> list[Side]:
    """The sides beginning with another one at each round."""
    first = by % max(1, len(sides))
    return [*sides[first:], *sides[:first]]


def _takes_part(side: Side, case: Case) -> bool:
    if side.is_ours:
        return case.has_drafts or not side.has_drafts
    return side.mode in case.modes


def _warm_up(side: Side, case: Case, num_tokens: int, left_out: list[str]) -> bool:
    where = f"{case.name}, warm-up"
    return attempt(side, case.groups[:1], min(WARM_TOKENS, num_tokens), where, left_out) is not None


def _check_ours(result: CaseResult) -> None:
    """The gate: all our runs so far are the same tokens."""
    expected = result.runs[result.ours[0].name][0].token_ids
    for side in result.ours:
        where = f"{result.case.name}: {side.name}"
        check_same(where, expected, result.runs[side.name][-1].token_ids)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def figures(results: Sequence[CaseResult]) -> list[Figure]:
    """Our speeds, and their ratios to each peer and to ours without drafts."""
    found = []
    for result in results:
        for side in result.ours:
            where = f"engine/{result.case.name}, {side.name}"
            found.append(
                from_samples(f"{where}/tokens_per_s", result.speeds(side), "tokens/s", "higher")
            )
            if side.has_drafts:
                ratios = result.ratios(side, result.ours[0])
                found.append(from_samples(f"{where}/over plain", ratios, "x", "higher"))
            for other in compared(result, side):
                ratios = result.ratios(side, other)
                aim = aim_of(result.case, side, other)
                target = None if aim is None else aim.ratio
                name = f"{where}/over {other.name}"
                found.append(from_samples(name, ratios, "x", "higher", target=target))
    return found


def compared(result: CaseResult, side: Side) -> list[Side]:
    """The peers that one of our sides is set beside; without drafts only those without."""
    return [
        other
        for other in result.theirs
        if side.has_drafts or not result.case.has_drafts or other.mode == "plain"
    ]


def aim_of(case: Case, side: Side, other: Side) -> Aim | None:
    """What is aimed at for the two, if anything."""
    if side.has_drafts != case.has_drafts:
        return None
    wanted = (case.name, other.peer, other.mode)
    return next((aim for aim in AIMS if (aim.case, aim.peer, aim.mode) == wanted), None)


def unjudged(results: Sequence[CaseResult], reasons: dict[str, str]) -> list[str]:
    """The aims whose peer did not run, and why; reasons: of peers that were not opened."""
    ran = {(result.case.name, side.peer, side.mode) for result in results for side in result.theirs}
    return [
        f"{aim.text}: {reasons.get(aim.peer, f'{aim.peer} has not run it')}"
        for aim in AIMS
        if (aim.case, aim.peer, aim.mode) not in ran
    ]


def as_rows(results: Sequence[CaseResult], eos_ids: Collection[int]) -> list[dict[str, Any]]:
    """Everything for the JSON: each side's speeds, first tokens, and what peers agree in."""
    rows = []
    for result in results:
        for side in [*result.ours, *result.theirs]:
            runs = result.runs[side.name]
            row: dict[str, Any] = {"case": result.case.name, "side": side.name}
            row |= {"peer": side.peer, "mode": side.mode, "tokens_per_s": result.speeds(side)}
            row["first_seconds"] = [run.first_seconds for run in runs]
            if side.is_ours:
                row["tokens_per_pass"] = tokens_per_pass(runs)
            else:
                found = result.agreement(side, eos_ids)
                row |= {"same_outputs": found.num_same, "outputs": found.num_prompts}
                row["first_difference"] = found.first
            rows.append(row)
    return rows


def tokens_per_pass(runs: Sequence[Run]) -> float:
    """Tokens over target passes of our runs."""
    emissions = [count for run in runs for one in run.stats for _, count in one.emissions]
    return sum(emissions) / max(1, len(emissions))


def show(results: Sequence[CaseResult], eos_ids: Collection[int]) -> None:
    """Print ours alone, then ours beside the peers."""
    rows = []
    for result in results:
        for side in result.ours:
            runs = result.runs[side.name]
            first_ms = [1e3 * value for run in runs for value in run.first_seconds]
            ratio = median(result.ratios(side, result.ours[0]))
            times = [f"{percentile(first_ms, p):.0f}" for p in (50, 95)]
            cells = [result.case.name, side.name, span(result.speeds(side), "{:.1f}")]
            cells += [f"{ratio:.2f}x", f"{tokens_per_pass(runs):.2f}", *times]
            rows.append(cells)
    headers = ["case", "pagedraft", "tokens/s [p20 p80]", "over plain", "tokens/pass"]
    print_table("Cases, this engine", [*headers, "TTFT p50", "p95 ms"], rows)
    rows = []
    for result in results:
        for side in result.ours:
            for other in compared(result, side):
                aim = aim_of(result.case, side, other)
                cells = [result.case.name, side.name, other.name]
                cells += [span(result.speeds(other), "{:.1f}")]
                cells += [span(result.ratios(side, other), "{:.2f}") + " x"]
                cells += [f">= {aim.ratio:g}" if aim else "-"]
                rows.append([*cells, str(result.agreement(other, eos_ids))])
    headers = ["case", "pagedraft", "beside", "tokens/s [p20 p80]", "ratio [p20 p80]", "aim"]
    if rows:
        print_table("Cases, beside other engines", [*headers, "same outputs"], rows)


def span(values: Sequence[float], form: str) -> str:
    """Median and, of several, 20th and 80th percentile."""
    found = from_samples("span", values, "", "higher")
    text = form.format(found.value)
    if found.low is None or found.high is None:
        return text
    return f"{text} [{form.format(found.low)} {form.format(found.high)}]"
