"""The command line of the engine bench: what a quick and a full run measure, and checks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from pagedraft.bench.engine_cell import AUTO, PLAIN
from pagedraft.bench.engine_prompts import KINDS
from pagedraft.bench.peers.base import MODULES
from pagedraft.decoding.drafters.table import DRAFTERS

PARTS = ("cases", "sweep", "weights")
# Option: with --quick, without. ttft: repeats of ours, and of each peer.
DEFAULTS = {
    "rounds": (3, 3),
    "tokens": (32, 64),
    "edits": (2, 8),
    "prompts": (2, 8),
    "batches": ([1, 4], [1, 4, 16, 64]),
    "lengths": ([PLAIN, 2, 8, AUTO], [PLAIN, 1, 2, 4, 8, AUTO]),
    "drafters": (["suffix"], ["suffix", "ngram", "draft"]),
    "alphas": ([0.8], [0.6, 0.8]),
    "ttft_short": ((100, 10), (200, 30)),
    "ttft_long": ((5, 5), (15, 15)),
    "seconds": (170.0, None),
}


def parser() -> argparse.ArgumentParser:
    """The options; those left out are filled by ``parse``."""
    made = argparse.ArgumentParser(
        prog="python -m pagedraft.bench.engine",
        description="The engine on a real model: beside other engines (same weights and threads), "
        "and by batch, drafter and draft length.",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = made.add_argument
    add("--quick", action="store_true", help="a small selection that ends within 170 seconds")
    add("--seconds", type=float, help="what is not done by then is left out (no limit; quick: 170)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (all)")
    add("--model", default="demo", help="local folder, hub id or demo (demo)")
    add("--draft", help="draft model, or none (for the demo model demo-draft, else none)")
    add("--device", default=device, choices=("cuda", "cpu"))
    add("--rounds", type=int, help="times that every side runs (3)")
    add("--tokens", type=int, help="new tokens a request (64; quick: 32)")
    add("--edits", type=int, help="code edits, one after another (8; quick: 2)")
    add("--batches", nargs="+", type=int, help="requests at once (1 4 16 64; quick: 1 4)")
    add("--lengths", nargs="+", type=_length, help="drafts a row, or auto; 0 is always measured")
    add("--drafters", nargs="*", help=f"of {list(DRAFTERS)} (suffix ngram draft; quick: suffix)")
    add("--alphas", nargs="*", type=float, help="acceptances of SYNTHETIC drafters (0.6 0.8)")
    add("--prompts", type=int, help="least number of prompts a batch (8; quick: 2)")
    add("--text", default=KINDS[0], choices=KINDS, help="of the batches (mixed: edits and chat)")
    add("--peers", nargs="*", help=f"of {list(MODULES)}; none for no peers (all that run here)")
    add("--peers-python", type=Path, help="interpreter of the environment of make bench-peers")
    add("--llama-server", type=Path, help="llama.cpp's server (from PATH or that environment)")
    add("--assistant", type=Path, help="folder of a small model for transformers' assisted mode")
    add("--out", type=Path, help="folder for JSON and charts (bench/results/<device>)")
    return made


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, whole and checked; exits as argparse does where one is wrong."""
    made = parser()
    options = made.parse_args(arguments)
    for name, (quick, full) in DEFAULTS.items():
        if getattr(options, name, None) is None:
            setattr(options, name, quick if options.quick else full)
    if options.draft is None and options.model == "demo":
        options.draft = "demo-draft"
    options.draft = None if options.draft == "none" else options.draft
    if options.peers is not None and options.peers in (["none"], []):
        options.peers = []
    for name in ("rounds", "tokens", "edits", "prompts"):
        if getattr(options, name) < 1:
            made.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    if options.tokens < 2:
        made.error("--tokens: expected at least 2, one of them after the first, got 1")
    if min(options.batches) < 1:
        made.error(f"--batches: expected at least 1 each, got {options.batches}")
    if options.seconds is not None and options.seconds <= 0:
        made.error(f"--seconds: expected more than 0, got {options.seconds:g}")
    wrong = [alpha for alpha in options.alphas if not 0.0 <= alpha <= 1.0]
    if wrong:
        made.error(f"--alphas: expected probabilities from 0 to 1, got {wrong[0]:g}")
    _check_names(made, "--drafters", options.drafters, DRAFTERS)
    _check_names(made, "--peers", options.peers or [], MODULES)
    options.batches = sorted(set(options.batches))
    options.lengths = _lengths(options.lengths)
    return options


def _check_names(
    made: argparse.ArgumentParser, option: str, names: Sequence[str], known: Sequence[str]
) -> None:
    wrong = [name for name in names if name not in known]
    if wrong:
        made.error(f"{option}: expected some of {list(known)}, got {wrong[0]!r}")


def _length(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of drafts or auto, got {text!r}")
    return int(text)


def _lengths(lengths: Sequence[int | str]) -> list[int | str]:
    """The control, the other numbers in order, then AUTO; each once."""
    numbers = sorted({PLAIN, *(k for k in lengths if isinstance(k, int))})
    return [*numbers, *[AUTO] * (AUTO in lengths)]
