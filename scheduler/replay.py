"""``pagedraft replay``: run a trace again, step by step, and say where the runs part.

Submissions, aborts and preemptions come at the step boundaries, or inside the callbacks, where they
came then. Drafts, prompt budgets and urgent requests are the recorded ones, so no drafter runs and
no clock decides. What the engine then schedules and draws is compared with what it did.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pagedraft.decoding.failure import describe
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.player import DAMAGE, Player, Report
from pagedraft.scheduler.step_limit import is_out_of_memory
from pagedraft.scheduler.trace_check import Outline, outline
from pagedraft.scheduler.trace_format import read_events
from pagedraft.scheduler.trace_settings import (
    device_name,
    difference,
    engine_args,
    is_fresh,
    model_args,
)

DRAFTING = ("draft", "drafter", "speculate", "k")  # options of LLM that a trace stands in for


def add_replay_command(commands: Any) -> None:
    """Add the subparser of ``replay`` to ``commands`` (of argparse's ``add_subparsers``)."""
    parser = commands.add_parser(
        "replay",
        help="run a trace again and say where the runs part",
        description="Runs what --trace recorded: the same requests at the same steps with the same "
        "drafts. Exit status 0: same schedule and tokens, 1: they differ, 2: bad input.",
    )
    parser.add_argument("trace", metavar="FILE", help="what --trace wrote")
    parser.add_argument("--model", default=None, help="where the model is now (as recorded)")
    parser.add_argument("--device", default=None, help="cpu, cuda or auto (as recorded)")
    parser.set_defaults(command=run_replay)


def run_replay(args: argparse.Namespace) -> int:
    """Replay and print; the exit status is 1 if the runs part."""
    report = replay(args.trace, model=args.model, device=args.device)
    print("\n".join(report.lines()))
    return 0 if report.is_identical else 1


def replay(
    path: str | Path,
    llm: LLM | None = None,
    *,
    model: str | Path | None = None,
    device: str | torch.device | None = None,
) -> Report:
    """Replay the trace in ``path`` and compare.

    llm: on which; nothing has run on it yet. None: one that is made as recorded, with ``model`` and
        ``device`` in place of the recorded ones.
    Raises OSError for a file that cannot be read, and ValueError, naming it, for one that is no
    whole trace of this format or is damaged, where the model or a size of the engine is not the
    recorded one, and where a request has logits processors, which no file can hold.
    """
    try:
        found = outline(path)
        return _replay(path, found, llm or _make_llm(found.settings, model, device))
    except DAMAGE as error:
        words = str(error) if isinstance(error, (ValueError, TypeError)) else describe(error)
        if is_out_of_memory(error) or words.startswith(f"{path}:"):
            raise
        raise ValueError(f"{path}: {words}") from error


def _replay(path: str | Path, found: Outline, llm: LLM) -> Report:
    engine, swap = llm.engine, llm.engine.prefixes.swap
    if not is_fresh(engine):
        raise ValueError("llm: expected one on which nothing has run")
    own = engine.overlap, None if swap is None else swap.max_bytes
    try:
        engine.overlap = found.settings["engine"].get("overlap", False)
        _check_settings(found.settings, llm)
        _fit_swap(found.settings.get("swap"), llm)
        report = Report(notes=[*found.notes, *_notes(found.settings, llm)])
        Player(llm, report).play(event for _, event in read_events(path))
        return report
    finally:
        engine.overlap = own[0]
        if swap is not None and own[1] is not None:
            swap.max_bytes = own[1]


def _make_llm(
    settings: Mapping[str, Any], model: str | Path | None, device: str | torch.device | None
) -> LLM:
    """An LLM as recorded, but for what drafts."""
    options = {k: v for k, v in settings["options"].items() if k not in (*DRAFTING, "trace")}
    unknown = sorted(options.keys() - inspect.signature(LLM).parameters.keys())
    if unknown:
        raise ValueError(f"settings: LLM has no option {unknown[0]!r}; it had when it was recorded")
    sizes = settings["engine"]
    options["kv_tokens"] = (sizes["num_blocks"] - 1) * sizes["block_size"]
    options["swap_bytes"] = (settings.get("swap") or {}).get("bytes", 0)
    options["model"] = model or options.get("model")
    if options["model"] is None:
        raise ValueError("model: the recorded one was made in memory; name one (--model)")
    if device is not None:
        options["device"] = device
    return LLM(**options, speculate="off")


def _check_settings(settings: Mapping[str, Any], llm: LLM) -> None:
    own = {"engine": engine_args(llm.engine), "model": model_args(llm.target)}
    for part in ("model", "engine"):
        found = difference(settings[part], own[part], part)
        if found is not None:
            raise ValueError(found)


def _fit_swap(recorded: Mapping[str, int] | None, llm: LLM) -> None:
    """Let as many blocks be swapped as then, when a draft model may have been part of them."""
    swap = llm.engine.prefixes.swap
    if (recorded is None) != (swap is None):
        words = [("none" if one is None else "some") for one in (recorded, swap)]
        raise ValueError(f"swap_bytes: expected {words[0]} as recorded, got {words[1]}")
    if recorded is not None and swap is not None:
        swap.max_bytes = recorded["bytes"] * swap.block_bytes // recorded["block_bytes"]


def _notes(settings: Mapping[str, Any], llm: LLM) -> list[str]:
    """What may change bits, and so tokens."""
    own = {"torch": torch.__version__, "device": device_name(llm.target.device)}
    return [
        f"recorded with {name} {settings.get(name)}, replayed with {value}"
        for name, value in own.items()
        if settings.get(name) != value
    ]
