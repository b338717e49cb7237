"""What the real-size bench says of its rows: what follows from several, figures, tables, charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pagedraft.bench.figures import Figure
from pagedraft.bench.plot import new_chart, save_chart
from pagedraft.bench.synthetic import SYNTHETIC, expected_tokens_per_pass
from pagedraft.bench.table import print_table

Row = dict[str, Any]
Document = dict[str, Any]
STEP_TARGET = 80.0  # % of the floor: decoding one row of the 8B model with graphs
ANSWER_TARGETS = {("8b", "p50"): 100.0, ("1b", "p99"): 50.0}  # ms, plain decoding with graphs
LINEAR_TARGET = 50.0  # % of the measured matmul rate at 2048 rows
ENGINE_HEADERS = (
    *("rows", "k", "drafts", "ms a step [p20 p80]", "floor", "of floor", "forward", "waits"),
    *("launch", "step/plain", "tok/s", "tok/pass", "accepted", "speed-up", "predicted"),
)
PASS_HEADERS = (
    "step",
    "context",
    "ms [p20 p80]",
    "floor",
    "of floor",
    "over decode",
    "GB",
    "TFLOP",
)
ANSWER_HEADERS = ("answer", "ms p50 [p20 p80]", "p99", "TTFT p50", "p99")
LINEAR_HEADERS = ("linear", "rows", "us [p20 p80]", "TFLOP/s", "of ceiling", "over F.linear")


def is_timed(row: Row) -> bool:
    """Whether a row has times: neither wrong nor left out."""
    return not row.get("problem") and "left_out" not in row


def derive(document: Document) -> None:
    """Add to the rows what follows from several of them; what they need and is missing stays out.

    over_decode: a pass over that of one token a row. forward_ms: an engine row's pass. waits: the
    share of a step in which the device runs no forward pass. step_over_plain, speedup: over the
    row without drafts. predicted_speedup: from passes and the set acceptance.
    """
    passes = {(r["batch"], r["span"]): r for r in document["passes"] if is_timed(r)}
    for (batch, _), row in passes.items():
        if (batch, 1) in passes and row["context"] == passes[batch, 1]["context"]:
            row["over_decode"] = _median(row) / _median(passes[batch, 1])
    rows = [row for row in document["rows"] if is_timed(row)]
    plain = {(r["graphs"], r["batch"]): r for r in rows if r["k"] == 0}
    for row in rows:
        forward = passes.get((row["batch"], row["drafts"] + 1))
        if forward is not None:
            row["forward_ms"] = 1e3 * _median(forward)
            row["waits"] = max(0.0, 1.0 - row["forward_ms"] / row["step_ms"][1])
        control = plain.get((row["graphs"], row["batch"]))
        if control is not None:
            row["step_over_plain"] = row["step_ms"][1] / control["step_ms"][1]
            row["speedup"] = row["tokens_per_second"] / control["tokens_per_second"]
        if forward is not None and row["drafts"] and "over_decode" in forward:
            tokens = expected_tokens_per_pass(document["alpha"], row["drafts"])
            row["predicted_speedup"] = tokens / forward["over_decode"]


def _median(row: Row) -> float:
    return row["time"]["median"]


def figures_of(document: Document) -> list[Figure]:
    """Every timed row as figures; empty for a dry run, whose times mean nothing."""
    if document["dry"]:
        return []
    prefix = f"real_sizes/{document['model']}-{document['dtype']}"
    return [
        *_engine_figures(prefix, document),
        *_pass_figures(prefix, document),
        *_answer_figures(prefix, document),
        *_linear_figures(prefix, document),
        Figure(
            *(f"{prefix}/kernels compiled after warm-up", document["compiled_after_warm_up"]),
            *("kernels", "lower", "counted"),
            target=0,
        ),
    ]


def _engine_figures(prefix: str, document: Document) -> Iterator[Figure]:
    for row in filter(is_timed, document["rows"]):
        name, how = f"{prefix}/{row['name']}", "synthetic" if row["drafts"] else "measured"
        low, middle, high = row["step_ms"]
        is_judged = document["model"] == "8b" and row["name"] == "graphs/batch 1/k 0"
        target = STEP_TARGET if is_judged else None
        floor = 100 * row["floor_ms"]
        yield Figure(f"{name}/step", middle, "ms", "lower", how, low, high)
        yield Figure(
            *(f"{name}/of floor", floor / middle, "%", "higher", how, floor / high, floor / low),
            target,
        )
        yield Figure(f"{name}/speed", row["tokens_per_second"], "tok/s", "higher", how)
        if "waits" in row:
            yield Figure(f"{name}/device waits", 100 * row["waits"], "%", "lower", how)
        if "predicted_speedup" in row:
            speedup = row["predicted_speedup"]
            yield Figure(f"{name}/predicted speed-up", speedup, "x", "higher", "predicted")


def _pass_figures(prefix: str, document: Document) -> Iterator[Figure]:
    for row in filter(is_timed, document["passes"]):
        name, floor = f"{prefix}/pass/{row['step']}", 1e5 * row["floor"]
        low, middle, high = _milliseconds(row)
        yield Figure(f"{name}/time", middle, "ms", "lower", "measured", low, high)
        yield Figure(
            *(f"{name}/of floor", floor / middle, "%", "higher", "measured"),
            *(floor / high, floor / low),
        )
        if row["span"] > 1 and "over_decode" in row:
            yield Figure(f"{name}/over decode", row["over_decode"], "x", "lower", "measured")


def _answer_figures(prefix: str, document: Document) -> Iterator[Figure]:
    for row in filter(is_timed, document["answers"]):
        how = "synthetic" if row["k"] else "measured"
        times = row["seconds_ms"]
        is_judged = row["graphs"] and row["k"] == 0
        for key in ("p50", "p99"):
            target = ANSWER_TARGETS.get((document["model"], key)) if is_judged else None
            spread = (times["p20"], times["p80"]) if key == "p50" else (None, None)
            name = f"{prefix}/{row['name']}/{key}"
            yield Figure(name, times[key], "ms", "lower", how, *spread, target)
        yield Figure(f"{prefix}/{row['name']}/ttft", row["ttft_ms"]["p50"], "ms", "lower", how)


def _linear_figures(prefix: str, document: Document) -> Iterator[Figure]:
    for row in filter(is_timed, document["linears"]):
        share = 100 * row["tflop_s"] * 1e12 / document["ceiling"]["matmul_rate"]
        name = f"{prefix}/linear {row['part']} at {row['rows']} rows/of matmul rate"
        yield Figure(name, share, "%", "higher", "measured", target=LINEAR_TARGET)


def print_tables(document: Document) -> None:
    """Print what is there; wrong rows and those left out say so."""
    title = f"{document['model']} {document['dtype']}, random weights"
    title += " (DRY: a trial of the script, its times mean nothing)" if document["dry"] else ""
    for graphs in (True, False):
        rows = [row for row in document["rows"] if row["graphs"] == graphs]
        kind = "with CUDA graphs" if graphs else "without graphs"
        label = f"drafts: SYNTHETIC acceptance {document['alpha']:.2f}"
        cells = [_engine_cells(row) for row in rows]
        print_table(f"{title}: engine {kind}, ms; {label}", ENGINE_HEADERS, cells)
    cells = [_pass_cells(row) for row in document["passes"]]
    print_table(f"{title}: forward passes on the device, ms", PASS_HEADERS, cells)
    prompt, new = document["answer"]
    cells = [_answer_cells(row) for row in document["answers"]]
    print_table(f"{title}: {prompt}-token prompt + {new} tokens", ANSWER_HEADERS, cells)
    if document["linears"]:
        cells = [_linear_cells(row) for row in document["linears"]]
        print_table(f"{title}: exact linear ops of a long prompt", LINEAR_HEADERS, cells)


def _unmeasured(row: Row, names: Sequence[str], num_cells: int) -> list[str]:
    why = f"WRONG: {row['problem']}" if row.get("problem") else f"left out: {row['left_out']}"
    return [*names, why, *["-"] * (num_cells - len(names) - 1)]


def _number(row: Row, key: str, form: str, scale: float = 1.0) -> str:
    return format(scale * row[key], form) if row.get(key) is not None else "-"


def _spread(low: float, middle: float, high: float) -> str:
    return f"{middle:.2f} [{low:.2f} {high:.2f}]"


def _milliseconds(row: Row) -> tuple[float, float, float]:
    low, middle, high = (1e3 * row["time"][key] for key in ("p20", "median", "p80"))
    return low, middle, high


def _engine_cells(row: Row) -> list[str]:
    label = f"{row['k']} SYNTHETIC" if row["k"] else "0"
    names = [str(row["batch"]), label, _number(row, "drafts", ".0f")]
    if not is_timed(row):
        return _unmeasured(row, names, len(ENGINE_HEADERS))
    return [
        *names,
        _spread(*row["step_ms"]),
        f"{row['floor_ms']:.2f}",
        f"{100 * row['share_of_floor']:.0f} %",
        _number(row, "forward_ms", ".2f"),
        "-" if "waits" not in row else f"{100 * row['waits']:.0f} %",
        f"{row['launch_ms']:.2f}",
        _number(row, "step_over_plain", ".2f"),
        f"{row['tokens_per_second']:.0f}",
        f"{row['tokens_per_pass']:.2f}",
        _number(row, "accepted", ".2f"),
        _number(row, "speedup", ".2f"),
        _number(row, "predicted_speedup", ".2f"),
    ]


def _pass_cells(row: Row) -> list[str]:
    if not is_timed(row):
        return _unmeasured(row, [row["step"]], len(PASS_HEADERS))
    return [
        row["step"],
        str(row["context"]),
        _spread(*_milliseconds(row)),
        f"{1e3 * row['floor']:.2f}",
        f"{100 * row['share_of_floor']:.0f} %",
        _number(row, "over_decode", ".2f"),
        f"{row['bytes'] / 1e9:.2f}",
        f"{row['flops'] / 1e12:.2f}",
    ]


def _answer_cells(row: Row) -> list[str]:
    name = f"{row['name']}{' SYNTHETIC' if row['k'] else ''}"
    if not is_timed(row):
        return _unmeasured(row, [name], len(ANSWER_HEADERS))
    times, ttft = row["seconds_ms"], row["ttft_ms"]
    spread = _spread(times["p20"], times["p50"], times["p80"])
    return [name, spread, f"{times['p99']:.2f}", f"{ttft['p50']:.2f}", f"{ttft['p99']:.2f}"]


def _linear_cells(row: Row) -> list[str]:
    names = [row["part"], str(row["rows"])]
    if not is_timed(row):
        return _unmeasured(row, names, len(LINEAR_HEADERS))
    share = f"{100 * row['share_of_ceiling']:.0f} %"
    return [*names, row["text"], f"{row['tflop_s']:.1f}", share, _number(row, "speedup", ".2f")]


def save_charts(document: Document, folder: Path) -> list[Path]:
    """Speed-up against rows and k beside its prediction, and steps beside their floor, as PNG."""
    name = Path(document["file"]).stem
    dry = "DRY RUN: " if document["dry"] else ""
    title = f"{dry}{document['model']} {document['dtype']}, random weights"
    rows = [row for row in document["rows"] if is_timed(row) and row["graphs"]]
    drafting = [row for row in rows if row["drafts"] and "speedup" in row]
    paths = []
    if drafting:
        paths.append(folder / f"{name}-speedup.png")
        _speedup_chart(f"{title}, SYNTHETIC acceptance", document, drafting, paths[-1])
    if rows:
        paths.append(folder / f"{name}-step.png")
        _step_chart(title, document, rows, paths[-1])
    return paths


def _speedup_chart(title: str, document: Document, rows: list[Row], path: Path) -> None:
    figure, axes = new_chart(
        f"{title} {document['alpha']:.2f}", "rows at once", "speed over no drafts"
    )
    for k in dict.fromkeys(row["k"] for row in rows):
        same = [row for row in rows if row["k"] == k]
        batches = [row["batch"] for row in same]
        [line] = axes.plot(batches, [row["speedup"] for row in same], "o-", label=f"k = {k}")
        known = [row for row in same if "predicted_speedup" in row]
        values = [row["predicted_speedup"] for row in known]
        color = line.get_color()
        axes.plot([r["batch"] for r in known], values, "--", color=color, label=f"k = {k}, model")
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set_xscale("log", base=2)
    batches = sorted({row["batch"] for row in rows})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.legend(frameon=False)
    save_chart(figure, path, document, f"{SYNTHETIC}; model: passes alone and 1 + a + ... + a^k")


def _step_chart(title: str, document: Document, rows: list[Row], path: Path) -> None:
    figure, axes = new_chart(title, "rows at once / drafts a row", "ms a step, with CUDA graphs")
    names = [f"{row['batch']} / {row['drafts']}" for row in rows]
    axes.bar(names, [row["step_ms"][1] for row in rows], color="0.8", label="engine step")
    known = [row for row in rows if "forward_ms" in row]
    places = [names[rows.index(row)] for row in known]
    axes.plot(places, [row["forward_ms"] for row in known], "o", label="forward pass alone")
    axes.plot(names, [row["floor_ms"] for row in rows], "_", ms=18, label="floor")
    axes.legend(frameon=False)
    how = "steps and passes measured, those with drafts at SYNTHETIC acceptance; floor: bytes and "
    rates = "made up, this is a dry run" if document["dry"] else "measured"
    save_chart(figure, path, document, f"{how}flops at rates that are {rates}")
