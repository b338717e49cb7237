"""Rows, tables, figures and the chart of the quality bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedraft.bench import quality_stats as stats
from pagedraft.bench.figures import Figure
from pagedraft.bench.plot import new_chart, save_chart
from pagedraft.bench.quality_greedy import Agreement, agreement
from pagedraft.bench.quality_modes import CONTROL, Mode
from pagedraft.bench.quality_probe import Probe, Reading
from pagedraft.bench.quality_stats import Change, Estimate
from pagedraft.bench.quality_tasks import groups
from pagedraft.bench.table import print_table

TEXT_HEADERS = (
    *("mode", "weights MB", "KV bytes/token", "perplexity", "of exact", "95 %", "aim"),
    *("verdict", "same best token", "note"),
)
GREEDY_HEADERS = ("mode", "same answers", "95 %", "shared tokens", "+-", "same best token")
TASK_HEADERS = (
    *("mode", "right", "+-", "change", "95 %", "lost", "won", "verdict"),
    *("probability of the right option", "+-"),
)


@dataclass(frozen=True)
class Row:
    """A mode beside the control.

    kv_bytes: a token. ratio: of perplexities. same_best: share of the text's positions whose most
    likely token is the control's. accuracy: share of tasks that are right; change: that less the
    control's; likelier: the right option's probability, less the control's. groups: accuracy.
    note: what must be said beside the figures.
    """

    name: str
    weight_bytes: int
    kv_bytes: int
    perplexity: float
    ratio: Estimate
    same_best: Estimate
    greedy: Agreement
    accuracy: Estimate
    change: Change
    likelier: Estimate
    groups: dict[str, Estimate]
    target: float
    note: str


@dataclass(frozen=True)
class LeftOut:
    """A mode without figures, and why."""

    name: str
    reason: str


def judge(
    mode: Mode, probe: Probe, reading: Reading, control: Reading, sizes: tuple[int, int], note: str
) -> Row:
    """sizes: bytes of the weights, and of a token's KV."""
    is_right, was_right = reading.is_right(probe), control.is_right(probe)
    change = reading.right_probability(probe) - control.right_probability(probe)
    return Row(
        name=mode.name,
        weight_bytes=sizes[0],
        kv_bytes=sizes[1],
        perplexity=float(reading.losses.mean().exp()),
        ratio=stats.perplexity_ratio(reading.losses, control.losses),
        same_best=stats.share(reading.best == control.best),
        greedy=agreement(reading.answers, reading.forced, control.answers),
        accuracy=stats.share(is_right),
        change=stats.change_of_share(is_right, was_right),
        likelier=stats.mean(change),
        groups={
            name: stats.share(is_right[torch.tensor(where)])
            for name, where in groups(probe.tasks).items()
        },
        target=mode.target,
        note=note,
    )


def verdict(estimate: Estimate, neutral: float, *, is_loss_up: bool) -> str:
    """What the interval says: a loss, a gain, or that neither can be told."""
    if estimate.around(neutral):
        return "none measurable"
    return "loss" if (estimate.low > neutral) == is_loss_up else "gain"


def show(rows: Sequence[Row | LeftOut], probe: Probe) -> None:
    """Print the four tables."""
    done = [row for row in rows if isinstance(row, Row)]
    num = len(probe.tokens) - 1
    print_table(f"Perplexity on {num} tokens", TEXT_HEADERS, [_text_cells(row) for row in rows])
    title = f"Greedy answers of {probe.num_new} tokens to {len(probe.prompt_ids)} prompts"
    print_table(f"{title}, beside exact's", GREEDY_HEADERS, [_greedy_cells(row) for row in done])
    cells = [_task_cells(row) for row in done]
    print_table(f"{len(probe.tasks)} tasks, beside exact's", TASK_HEADERS, cells)
    _show_groups(done, probe)


def _text_cells(row: Row | LeftOut) -> list[str]:
    if isinstance(row, LeftOut):
        return [row.name, *["-"] * (len(TEXT_HEADERS) - 2), row.reason]
    is_control = row.name == CONTROL
    return [
        *(row.name, f"{row.weight_bytes / 1e6:.1f}", str(row.kv_bytes), f"{row.perplexity:.3f}"),
        f"{row.ratio.value:.4f}",
        "-" if is_control else f"{row.ratio.low:.4f} to {row.ratio.high:.4f}",
        f"<= {row.target:.2f}" if row.target else "-",
        "control" if is_control else verdict(row.ratio, 1.0, is_loss_up=True),
        *(f"{100 * row.same_best.value:.1f} %", row.note),
    ]


def _greedy_cells(row: Row) -> list[str]:
    same = row.greedy.same_answers
    return [
        *(row.name, f"{100 * same.value:.0f} %", f"{100 * same.low:.0f} to {100 * same.high:.0f}"),
        *(f"{row.greedy.prefix.value:.1f}", f"{row.greedy.prefix.error:.1f}"),
        f"{100 * row.greedy.same_best.value:.1f} %",
    ]


def _task_cells(row: Row) -> list[str]:
    right = [row.name, f"{100 * row.accuracy.value:.1f} %", f"{100 * row.accuracy.error:.1f}"]
    if row.name == CONTROL:
        return [*right, *["-"] * 4, "control", "-", "-"]
    change = row.change.share
    return [
        *right,
        f"{100 * change.value:+.1f}",
        f"{100 * change.low:+.1f} to {100 * change.high:+.1f}",
        *(str(row.change.lost), str(row.change.won)),
        verdict(change, 0.0, is_loss_up=False),
        *(f"{100 * row.likelier.value:+.2f}", f"{100 * row.likelier.error:.2f}"),
    ]


def _show_groups(rows: Sequence[Row], probe: Probe) -> None:
    where = groups(probe.tasks)
    chances = [sum(probe.tasks[i].chance for i in index) / len(index) for index in where.values()]
    table = [
        ["tasks", *(str(len(index)) for index in where.values())],
        ["chance %", *(f"{100 * chance:.0f}" for chance in chances)],
        *(
            [
                row.name,
                *(f"{100 * e.value:.0f} +- {100 * e.error:.0f}" for e in row.groups.values()),
            ]
            for row in rows
        ),
    ]
    print_table("Right answers by group, %", ["", *where], table)


def figures(rows: Sequence[Row]) -> list[Figure]:
    """All figures of a document; low and high are the estimate's 20th and 80th percentile."""
    return [figure for row in rows for figure in _figures(row)]


def _figures(row: Row) -> list[Figure]:
    def of(what: str, estimate: Estimate, unit: str, better: str, target: float = 0.0) -> Figure:
        name, middle = f"quality/{row.name}/{what}", estimate.middle
        return Figure(
            name, estimate.value, unit, better, "measured", *middle, target=target or None
        )

    own = [
        Figure(f"quality/{row.name}/weights", row.weight_bytes / 1e6, "MB", "lower", "counted"),
        Figure(f"quality/{row.name}/kv", row.kv_bytes, "bytes a token", "lower", "counted"),
        Figure(f"quality/{row.name}/perplexity", row.perplexity, "", "lower", "measured"),
        of("accuracy", row.accuracy, "share", "higher"),
        *(of(f"accuracy_{name}", one, "share", "higher") for name, one in row.groups.items()),
    ]
    if row.name == CONTROL:
        return own
    return [
        *own,
        of("perplexity_ratio", row.ratio, "x exact", "lower", row.target),
        of("text_same_best_token", row.same_best, "share", "higher"),
        of("same_answers", row.greedy.same_answers, "share", "higher"),
        of("shared_tokens", row.greedy.prefix, "tokens", "higher"),
        of("answers_same_best_token", row.greedy.same_best, "share", "higher"),
        of("accuracy_change", row.change.share, "share", "higher"),
        of("right_probability_change", row.likelier, "share", "higher"),
    ]


def draw(rows: Sequence[Row], path: Path, facts: Mapping[str, Any], how: str) -> None:
    """Draw what quality costs against the bytes of weights."""
    figure, axes = new_chart(
        "What fewer bytes cost in quality",
        "weights, MB",
        "perplexity above exact's, % (bars: 95 %)",
    )
    for row in rows:
        low, middle, high = (
            100 * (x - 1) for x in (row.ratio.low, row.ratio.value, row.ratio.high)
        )
        errors = [[middle - low], [high - middle]]
        axes.errorbar(
            row.weight_bytes / 1e6, middle, yerr=errors, fmt="o", capsize=3, label=row.name
        )
    axes.axhline(0.0, color="0.6", linewidth=0.8)
    axes.legend(fontsize=7)
    save_chart(figure, path, facts, how)
