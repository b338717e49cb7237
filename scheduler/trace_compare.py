"""What differs between a recorded step and its replay, in words. Steps are ``step_args``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedraft.scheduler.request import Request

COUNTS = {
    "running": "requests that run",
    "waiting": "requests that wait",
    "free": "blocks that are free or evictable",
    "evictable": "blocks that are evictable",
}


def schedule_difference(
    then: Mapping[str, Any], now: Mapping[str, Any], names: Mapping[int, str]
) -> str | None:
    """The first difference of plans, of drafts, or of queues and pool after the step.

    names: what requests are called, by arrival.
    """
    for what in ("preempted", "admitted"):
        if then[what] != now[what]:
            return _differs(what, _named(then[what], names), _named(now[what], names))
    orders = [[row["request"] for row in step["rows"]] for step in (then, now)]
    if orders[0] != orders[1]:
        return _differs("rows", *(_named(order, names) for order in orders))
    for row, other in zip(then["rows"], now["rows"], strict=True):
        for what, default in (("span", 0), ("drafts", [])):
            pair = row.get(what, default), other.get(what, default)
            if pair[0] != pair[1]:
                return _differs(f"request {names.get(row['request'])!r}: {what}", *pair)
    for what, meaning in COUNTS.items():
        if then[what] != now[what]:
            return _differs(f"{meaning}, after the step", then[what], now[what])
    return None


def token_difference(
    then: Mapping[str, Any], now: Mapping[str, Any], requests: Mapping[int, Request]
) -> tuple[int, str | None]:
    """How many tokens are the same, and the first that is not.

    requests: those of the replay, after the step, by arrival.
    """
    rows = {row["request"]: row for row in now["rows"]}
    num_same = 0
    for row in then["rows"]:
        request = requests[row["request"]]
        other = rows.get(row["request"], {})
        tokens, others = row.get("tokens", []), other.get("tokens", [])
        where = f"request {request.request_id!r}"
        count = _num_equal(tokens, others)
        num_same += count
        if count < max(len(tokens), len(others)):
            position = request.num_output - len(others) + count
            pair = _token(tokens, count), _token(others, count)
            return num_same, _differs(f"{where}: output position {position}", *pair)
        if row.get("end") != other.get("end"):
            return num_same, _differs(f"{where}: its end", _end(row), _end(other))
    return num_same, None


def _differs(what: str, then: object, now: object) -> str:
    return f"{what}: recorded {then}, got {now}"


def _named(arrivals: list[int], names: Mapping[int, str]) -> str:
    return ", ".join(repr(names.get(arrival, arrival)) for arrival in arrivals) or "nobody"


def _num_equal(tokens: list[int], others: list[int]) -> int:
    pairs = enumerate(zip(tokens, others, strict=False))
    shorter = min(len(tokens), len(others))
    return next((index for index, (a, b) in pairs if a != b), shorter)


def _token(tokens: list[int], index: int) -> str:
    return f"token {tokens[index]}" if index < len(tokens) else "no token"


def _end(row: Mapping[str, Any]) -> str:
    reason = row.get("end", "none")
    return f"{reason} ({row['error']})" if row.get("error") else str(reason)
