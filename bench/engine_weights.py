"""The same model with quantised weights beside itself as it is, one request, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from pagedraft.bench.engine_cases import span
from pagedraft.bench.engine_runs import run_ours
from pagedraft.bench.figures import Figure, from_samples
from pagedraft.bench.table import print_table
from pagedraft.scheduler.llm import LLM

AIMS = {"int8": 1.0, "int4": 1.5}
WARM_TOKENS = 4


@dataclass
class WeightsRow:
    """Tokens a second with these weights and with the unquantised ones, a round each."""

    weights: str
    speeds: list[float] = field(default_factory=list)
    plain_speeds: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Over the unquantised model in the same round."""
        return [a / b for a, b in zip(self.speeds, self.plain_speeds, strict=True)]


def measure(
    llm: LLM, weights: str, prompt: list[int], num_tokens: int, rounds: int, options: dict[str, Any]
) -> WeightsRow:
    """llm: the unquantised model; options: of both."""
    other = LLM(llm.target.folder, weights=weights, **options)  # type: ignore[arg-type]
    run_ours(other, [prompt], min(WARM_TOKENS, num_tokens))
    row = WeightsRow(weights)
    for _ in range(rounds):
        row.speeds.append(run_ours(other, [prompt], num_tokens).speed)
        row.plain_speeds.append(run_ours(llm, [prompt], num_tokens).speed)
    return row


def figures(rows: Sequence[WeightsRow]) -> list[Figure]:
    """Speeds, and ratios beside what is aimed at."""
    found = []
    for row in rows:
        where = f"engine/{row.weights} weights"
        found.append(from_samples(f"{where}/tokens_per_s", row.speeds, "tokens/s", "higher"))
        aim = AIMS.get(row.weights)
        found.append(from_samples(f"{where}/over bf16", row.ratios, "x", "higher", target=aim))
    return found


def as_rows(rows: Sequence[WeightsRow]) -> list[dict[str, Any]]:
    """For the JSON."""
    return [{**asdict(row), "ratio": median(row.ratios)} for row in rows]


def show(rows: Sequence[WeightsRow]) -> None:
    """Print the table."""
    cells = [
        [
            row.weights,
            span(row.speeds, "{:.1f}"),
            span(row.plain_speeds, "{:.1f}"),
            span(row.ratios, "{:.2f}") + " x",
            f">= {AIMS[row.weights]:g}" if row.weights in AIMS else "-",
        ]
        for row in rows
    ]
    headers = ["weights", "tokens/s [p20 p80]", "bf16 [p20 p80]", "ratio [p20 p80]", "aim"]
    print_table("Quantised against bf16 weights, single stream", headers, cells)
