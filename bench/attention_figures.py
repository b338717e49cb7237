"""The figures of an attention sweep's document: times and verdicts, or counts and a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagedraft.bench.attention_targets import verdicts
from pagedraft.bench.figure_verify import ratios
from pagedraft.bench.figures import Figure, as_json

Row = dict[str, Any]


def figures_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The list ``figures`` of a document with ``select``, ``measured``, ``rows``, ``ceiling``."""
    prefix = f"attention/{document['select']}"
    make = _measured if document["measured"] else _modelled
    return as_json(list(make(prefix, document)))


def _measured(prefix: str, document: dict[str, Any]) -> Iterator[Figure]:
    """Time and share of the floor of what has a time, then what the targets judge."""
    for row in document["rows"]:
        if "time" in row:
            name, time = f"{prefix}/{row['point']}", row["time"]
            us, low, high = (time[key] * 1e6 for key in ("median", "p20", "p80"))
            floor = row["floor"] * 1e6
            yield Figure(f"{name}/us", us, "us", "lower", "measured", low, high)
            shares = (100 * floor / us, "%", "higher", "measured")
            yield Figure(f"{name}/ceiling", *shares, 100 * floor / high, 100 * floor / low)
    for verdict in verdicts(document):
        if verdict.value is not None:
            better = "lower" if verdict.is_upper else "higher"
            name, value = f"{prefix}/target/{verdict.name}", verdict.value
            yield Figure(name, value, "x", better, "predicted", target=verdict.limit)


def _modelled(prefix: str, document: dict[str, Any]) -> Iterator[Figure]:
    """Bytes with the partials that a launch stores, floors, and what verifying adds to decoding."""
    for row in document["rows"]:
        name = f"{prefix}/{row['point']}"
        num_bytes = row["bytes"] + row["scratch"]["launched"]
        yield Figure(f"{name}/bytes", num_bytes, "B", "lower", "counted")
        yield Figure(f"{name}/floor", row["floor"] * 1e6, "us", "lower", "modelled")
    for (span, quantity), points in ratios(document).items():
        if quantity == "launched":
            for context, ratio in points:
                name = f"{prefix}/verify{span} of decode, context {context}/bytes"
                yield Figure(name, ratio, "x", "lower", "modelled")
