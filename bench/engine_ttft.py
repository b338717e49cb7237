"""Seconds to the first token of one prompt on an idle engine, ours and theirs.

Prompts are windows of a book, each another one, so that no engine's cache knows its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pagedraft.bench.engine_cases import attempt, rotated
from pagedraft.bench.engine_runs import Clock, Prompts, Side
from pagedraft.bench.figures import Figure, from_samples
from pagedraft.bench.table import print_table
from pagedraft.scheduler.metrics import percentile

SHORT, LONG = 64, 475  # tokens of the prompts
MOST_MS, MOST_RATIO = 100.0, 1.0  # aims: p99 of SHORT, and LONG over transformers
LEAST_SAMPLES = {50: 1, 95: 20, 99: 100}  # that a percentile is told of
LEAST_REPEATS = 3


@dataclass
class FirstTokens:
    """Seconds of each side by prompt, in the order of the prompts; a peer has fewer of them.

    length: tokens of each prompt. ours: the name of our side.
    """

    length: int
    ours: str
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def theirs(self) -> list[str]:
        """The peers that told."""
        return [name for name, values in self.seconds.items() if values and name != self.ours]

    def ratios(self, other: str) -> list[float]:
        """Ours over theirs for the same prompt: below 1 ours is sooner."""
        pairs = zip(self.seconds[self.ours], self.seconds[other], strict=False)
        return [a / b for a, b in pairs]

    def percentiles_ms(self, name: str) -> dict[int, float]:
        """Milliseconds by percent, of those that there are LEAST_SAMPLES for."""
        values = self.seconds[name]
        return {
            percent: 1e3 * percentile(values, percent)
            for percent, least in LEAST_SAMPLES.items()
            if len(values) >= least
        }


def measure(
    prompts: Prompts,
    sides: Sequence[Side],
    num_peer: int,
    clock: Clock,
    share: float,
    left_out: list[str],
) -> FirstTokens:
    """Ask for one token after each prompt; peers only after the first ``num_peer``.

    sides: the first is ours, those of peers decode plainly. Stops early, after LEAST_REPEATS, where
    ``share`` of the clock is used up.
    """
    length, where = len(prompts[0]), f"TTFT of {len(prompts[0])} tokens"
    result = FirstTokens(length, sides[0].name, {side.name: [] for side in sides})
    active = [side for side in sides if attempt(side, [prompts[-1:]], 1, where, left_out)]
    for index, prompt in enumerate(prompts):
        if index >= LEAST_REPEATS and clock.is_past(share):
            left_out.append(f"{where}: {len(prompts) - index} of {len(prompts)}: out of time")
            break
        for side in rotated(active, index):
            if index >= num_peer and not side.is_ours:
                continue
            run = attempt(side, [[prompt]], 1, where, left_out)
            if run is not None and run.first_seconds:
                result.seconds[side.name] += run.first_seconds
                continue
            if run is not None:
                left_out.append(f"{where}, {side.name}: it does not tell when a token came")
            active.remove(side)
    return result


def figures(results: Sequence[FirstTokens]) -> list[Figure]:
    """Our percentiles, and the ratio to each peer."""
    found = []
    for result in results:
        where = f"engine/ttft {result.length}"
        for percent, value in result.percentiles_ms(result.ours).items():
            target = MOST_MS if (result.length, percent) == (SHORT, 99) else None
            name = f"{where}/p{percent}"
            found.append(Figure(name, value, "ms", "lower", "measured", target=target))
        for other in result.theirs:
            is_aim = result.length == LONG and other.startswith("transformers ")
            name, target = f"{where}/over {other}", MOST_RATIO if is_aim else None
            found.append(from_samples(name, result.ratios(other), "x", "lower", target=target))
    return found


def unjudged(results: Sequence[FirstTokens], reasons: dict[str, str]) -> list[str]:
    """Aims that nothing was measured for, and why."""
    by_length = {result.length: result for result in results}
    missing = [
        f"TTFT of {length} tokens: the model has no room for such a prompt"
        for length in (SHORT, LONG)
        if length not in by_length
    ]
    if SHORT in by_length and 99 not in by_length[SHORT].percentiles_ms(by_length[SHORT].ours):
        count = len(by_length[SHORT].seconds[by_length[SHORT].ours])
        aim = f"TTFT of {SHORT} tokens, p99 <= {MOST_MS:g} ms"
        missing.append(f"{aim}: {count} samples, {LEAST_SAMPLES[99]} are needed")
    beside = by_length[LONG].theirs if LONG in by_length else ["transformers "]
    if not any(other.startswith("transformers ") for other in beside):
        why = reasons.get("transformers", "transformers has not run it")
        missing.append(f"TTFT of {LONG} tokens over transformers <= {MOST_RATIO:g}: {why}")
    return missing


def as_rows(results: Sequence[FirstTokens]) -> list[dict[str, Any]]:
    """Every sample, for the JSON."""
    return [{"prompt_tokens": result.length, "seconds": result.seconds} for result in results]


def show(results: Sequence[FirstTokens]) -> None:
    """Print the table."""
    rows = []
    for result in results:
        for name in [result.ours, *result.theirs]:
            is_ours = name == result.ours
            cells = [str(result.length), "pagedraft" if is_ours else name]
            cells.append(str(len(result.seconds[name])))
            found = result.percentiles_ms(name)
            cells += [f"{found[p]:.1f}" if p in found else "-" for p in LEAST_SAMPLES]
            ratio = "-" if is_ours else f"{median(result.ratios(name)):.2f}x"
            rows.append([*cells, ratio])
    headers = ["prompt", "engine", "runs", "p50 ms", "p95", "p99", "pagedraft over it"]
    print_table("Time to the first token, one request", headers, rows)
