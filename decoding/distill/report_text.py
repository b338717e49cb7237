"""A report's Markdown, from its JSON: every number in it is one of the JSON's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NOT_MEASURED = "not measured"
NO_DRAFT = "no draft"  # came so far
MANY = 8  # entries of a list that are shown in full
Document = Mapping[str, Any]
Group = Mapping[str, Any]


def markdown(report: Document, figure: str | None) -> str:
    """The text of a report. figure: name of the PNG beside it, None where none was drawn."""
    facts, judged = report["facts"], report["judgement"]
    kinds = list(judged["drafters"][judged["subject"]]["kinds"])
    only = kinds if len(kinds) == 1 else []
    kinds = [kind for kind in kinds if kind not in only]  # one kind is all texts
    target = facts.get("target")
    parts = [
        "# Draft" if target is None else f"# Draft for {_cell(target)}",
        f"**{report['verdict']}**",
        _beside(judged),
        f"![acceptance, tokens a pass and speed-up]({figure})" if figure else "",
        "## Agreement with the target",
        _agreement(judged, kinds),
        f"All texts are of one kind: {_cell(only[0])}." if only else "",
        "alpha: mean of sum min(p, q) over the positions, both at temperature 1, each model "
        "reading the target's text. greedy: how often both hold the same token most likely.",
        *_groups(report, kinds),
        "## The arithmetic",
        *_arithmetic(report),
        "## Measured in the engine",
        *_measured(report["measured"], judged, kinds),
        "## The run",
        _table(["fact", "value"], [[name, _fact(value)] for name, value in _flat(facts)]),
        "" if figure else "The figure was not drawn: matplotlib is not installed.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _beside(judged: Document) -> str:
    """What the other drafters come to, on the same texts."""
    lines = []
    for name, found in judged["drafters"].items():
        best = max(found["total"]["rows"], key=lambda row: row["speedup"])
        lines.append(f"- {name}: at best {best['speedup']:.2f}x expected, at k={best['k']}")
    return "\n".join(lines)


def _agreement(judged: Document, kinds: Sequence[str]) -> str:
    names = list(judged["drafters"])
    models = [name for name in names if judged["drafters"][name]["total"]["alpha"] is not None]
    headers = ["texts", "number", "tokens"]
    headers += [f"{what} {name}" for what in ("alpha", "greedy") for name in models]
    headers += [f"first draft accepted, {name}" for name in names]
    rows = []
    for kind in (None, *kinds):
        groups = {name: _group(judged["drafters"][name], kind) for name in names}
        first = groups[names[0]]
        row = [_title(kind), str(first["num_texts"]), str(first["num_tokens"])]
        row += [_number(groups[name][what], 3) for what in ("alpha", "greedy") for name in models]
        places = [groups[name]["places"] for name in names]
        row += [_number(_at(some, 1, "conditional"), 3) for some in places]
        rows.append(row)
    return _table(headers, rows)


def _groups(report: Document, kinds: Sequence[str]) -> Iterator[str]:
    """Two tables for all texts and for each kind: by place of the draft, and by k."""
    judged, measured = report["judgement"], report["measured"]
    for kind in (None, *kinds):
        yield f"## Drafts on {_title(kind)}"
        groups = {name: _group(found, kind) for name, found in judged["drafters"].items()}
        if not all(group["rows"] for group in groups.values()):
            yield f"No text of this kind has a token to draft: {NOT_MEASURED}."
            continue
        yield _places(groups, judged["max_drafts"])
        yield _speeds(groups, judged, None if measured is None else _group(measured, kind))


def _places(groups: Mapping[str, Group], max_drafts: int) -> str:
    headers = ["draft"]
    headers += [f"{name}: {what}" for name in groups for what in ("accepted", "with all before")]
    rows = []
    for place in range(1, max_drafts + 1):
        row = [str(place)]
        for group in groups.values():
            values = [_at(group["places"], place, name) for name in _RATES]
            row += [NO_DRAFT if value is None else f"{value:.3f}" for value in values]
        rows.append(row)
    return _table(headers, rows)


_RATES = ("conditional", "cumulative")


def _speeds(groups: Mapping[str, Group], judged: Document, measured: Group | None) -> str:
    subject = judged["subject"]
    headers = ["k", *[f"tokens a pass, {name}" for name in groups]]
    headers += [f"speed-up expected, {name}" for name in groups]
    headers += [f"{what} measured, {subject}" for what in ("tokens a pass", "speed-up")]
    by_k = _by_k(measured)
    rows = []
    for k in sorted({*range(1, judged["max_drafts"] + 1), *by_k}):
        row = [str(k)]
        row += [_number(_at(group["rows"], k, "tokens_per_pass"), 2) for group in groups.values()]
        row += [_times(_at(group["rows"], k, "speedup")) for group in groups.values()]
        found = by_k.get(k, {})
        row += [_number(found.get("tokens_per_pass"), 2), _times(found.get("speedup"))]
        rows.append(row)
    return _table(headers, rows)


def _arithmetic(report: Document) -> Iterator[str]:
    """Costs of all drafters, then how the subject's speed-up comes about."""
    judged = report["judgement"]
    rows, most = [], judged["max_drafts"]
    for name, found in judged["drafters"].items():
        costs = found["costs"]
        row = [name, _ms(costs["step_seconds"][0])]
        row += [_ms(costs["draft_seconds"][k]) for k in (1, most)]
        row += [_number(costs["c"], 3), _ms(costs["catch_up_seconds"])]
        row += [_ms(costs["read_seconds"]), f"{costs['noise']:.1%}"]
        rows.append([*row, *[_number(ratio, 2) for ratio in costs["v"][1:]]])
    headers = ["drafter", "plain step, ms", "1 draft, ms", f"{most} drafts, ms", "c"]
    headers += ["catching up, ms", "reading a prompt token, ms", "noise"]
    headers += [f"v({k})" for k in range(1, most + 1)]
    yield _table(headers, rows)
    found = judged["drafters"][judged["subject"]]
    yield (
        f"At {found['costs']['num_context']} tokens of context. c: 1 draft over a plain step; "
        "v(k): a step that verifies k drafts over a plain step. Of each timing the quickest fifth "
        "counts; noise is by how much the median of the plain steps is above that."
    )
    names = ("verify", "drafting", "catch_up", "reading", "cost")
    yield _table(
        [
            "k",
            "tokens a pass",
            "verifying",
            "drafting",
            "catching up",
            "reading",
            "cost",
            "speed-up",
        ],
        [
            [
                str(row["k"]),
                _number(row["tokens_per_pass"], 3),
                *[_number(row[name], 3) for name in names],
                _times(row["speedup"]),
            ]
            for row in found["total"]["rows"]
        ],
    )
    yield (
        f"Of {judged['subject']}, all texts. Costs are of a pass, in plain steps; speed-up = "
        "tokens a pass / cost. Passes near the end of a text have fewer drafts. Reading: of "
        "prompts, by the draft, spread over the passes."
    )


def _measured(measured: Document | None, judged: Document, kinds: Sequence[str]) -> Iterator[str]:
    if measured is None:
        yield f"Speed in the engine: {NOT_MEASURED}."
        return
    headers = ["texts", "k", "tokens/s", "tokens a pass", "accepted a pass"]
    rows = []
    for kind in (None, *kinds):
        group = _group(measured, kind)
        if group is None:
            rows.append([_title(kind), *[NOT_MEASURED] * 7])
            continue
        plain = _number(group["plain_tokens_per_second"], 1)
        rows.append([_title(kind), "plain", plain, "1.00", "0.00", "1.00x", "", ""])
        for row in group["rows"]:
            low, high = min(row["round_speedups"]), max(row["round_speedups"])
            rows.append(
                [
                    _title(kind),
                    str(row["k"]),
                    _number(row["tokens_per_second"], 1),
                    _number(row["tokens_per_pass"], 2),
                    _number(row["accepted_per_pass"], 2),
                    _times(row["speedup"]),
                    f"{low:.2f}x to {high:.2f}x",
                    f"{row['num_same']} of {group['num_texts']}",
                ]
            )
    yield _table([*headers, "speed-up", "of rounds", "same output"], rows)
    total = measured["total"]
    yield (
        f"One prompt after another, rounds: {measured['rounds']}, medians over rounds, each run "
        "with drafts between two plain ones; seconds count from the first token on. Plain decoding "
        f"of all texts differed from itself by {total['noise']:.1%} (four fifths of the "
        "comparisons at most): a gain has to be more."
    )
    expected = judged["drafters"][judged["subject"]]["total"]["num_tokens"]
    if total["num_tokens"] != expected:
        yield (
            f"Measured on {total['num_texts']} texts of {total['num_tokens']} tokens in all, "
            f"expected of texts of {expected}: the two differ by that, too."
        )
    if measured["num_rewritten"]:
        yield (
            f"Plain decoding wrote {measured['num_rewritten']} of the texts otherwise than they "
            "were held out, so what was expected is of other texts."
        )


def _group(found: Document, kind: str | None) -> Any:
    """Figures of all texts (None) or of a kind, None where there are none."""
    return found["total"] if kind is None else found["kinds"].get(kind)


def _title(kind: str | None) -> str:
    return "all texts" if kind is None else kind


def _at(entries: Sequence[Any], number: int, name: str) -> float | None:
    """A value of entry ``number``, counted from 1; None where there is no such entry."""
    return entries[number - 1][name] if number <= len(entries) else None


def _by_k(measured: Group | None) -> dict[int, Any]:
    return {} if measured is None else {row["k"]: row for row in measured["rows"]}


def _number(value: float | None, digits: int) -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}x"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _flat(facts: Document, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of nested facts, as ("seconds.train", 12.0)."""
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _fact(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = value if len(value) <= MANY else [value[0], "..", value[-1]]
        text = ", ".join(map(_fact, shown)) or "none"
        return text if len(value) <= MANY else f"{text} ({len(value)} values)"
    return "none" if value == {} else str(value)


def _cell(value: Any) -> str:
    """Text that does not break out of a table or line."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in lines)
