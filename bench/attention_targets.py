"""Measured attention against the project's targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
MIN_KV_BYTES = 64e6  # below, a launch is not long enough for bandwidth to be what it is bound by
MIN_COPY_SHARE = 0.85
MAX_VERIFY_OVER_DECODE = 1.10
VERIFY_CONTEXTS = (8192, 65536)  # from, to
MIN_MATMUL_SHARE = 0.60
PREFILL_CONTEXT = 8192


@dataclass(frozen=True)
class Verdict:
    """One judged number; ``value`` is None where it was not measured."""

    name: str
    value: float | None
    limit: float
    is_upper: bool

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.limit if self.is_upper else self.value >= self.limit

    @property
    def word(self) -> str:
        """met, MISSED, or OPEN where nothing was measured."""
        if self.value is None:
            return "OPEN"
        return "met" if self.is_met else "MISSED"

    def text(self) -> str:
        """Return one line of output."""
        value = "not measured" if self.value is None else f"{self.value:.2f}"
        sign = "<=" if self.is_upper else ">="
        return f"target {self.word:6} {value} {sign} {self.limit:.2f}  {self.name}"


def verdicts(document: dict[str, Any]) -> list[Verdict]:
    """Judge the rows of a measured document; a modelled one has nothing to judge."""
    if not document["measured"]:
        return []
    rows = document["rows"]
    judged = [_bandwidth(row, document["ceiling"]) for row in rows if _reads_much(row)]
    judged += [_ratio(rows, row) for row in rows if _is_judged_verify(row)]
    return judged + [_prefill(row, document["ceiling"]) for row in rows if _is_judged_prefill(row)]


def _reads_much(row: Row) -> bool:
    is_short_span = row["step"] == "decode" or row["step"].startswith("verify")
    return is_short_span and row["kv_bytes"] >= MIN_KV_BYTES


def _bandwidth(row: Row, ceiling: Row) -> Verdict:
    share = row["bytes"] / row["time"]["median"] / ceiling["copy_rate"] if "time" in row else None
    return Verdict(f"of copy bandwidth, {row['point']}", share, MIN_COPY_SHARE, is_upper=False)


def _is_judged_verify(row: Row) -> bool:
    first, last = VERIFY_CONTEXTS
    is_seen_whole = not {"group", "window"} & set(row["axes"])
    return row["step"] == "verify9" and first <= row["context"] <= last and is_seen_whole


def _ratio(rows: list[Row], verify: Row) -> Verdict:
    same = ("rows", "context", "axes")
    decode = next(
        (r for r in rows if r["step"] == "decode" and all(r[k] == verify[k] for k in same)), {}
    )
    is_known = "time" in verify and "time" in decode
    value = verify["time"]["median"] / decode["time"]["median"] if is_known else None
    return Verdict(f"of decode, {verify['point']}", value, MAX_VERIFY_OVER_DECODE, is_upper=True)


def _is_judged_prefill(row: Row) -> bool:
    is_prefill = row["step"] in ("prefill", "prompt")
    return is_prefill and row["context"] == PREFILL_CONTEXT and not row["axes"]


def _prefill(row: Row, ceiling: Row) -> Verdict:
    known = row["flops"] / row["time"]["median"] if "time" in row else None
    share = None if known is None else known / ceiling["matmul_rate"]
    return Verdict(f"of matmul rate, {row['point']}", share, MIN_MATMUL_SHARE, is_upper=False)
