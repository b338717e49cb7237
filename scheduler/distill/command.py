"""``pagedraft distill``: make a small draft for a target, and say what it is worth."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pagedraft.decoding.distill.losses import LOSSES
from pagedraft.decoding.distill.start import STARTS
from pagedraft.decoding.distill.train import Progress as StepProgress
from pagedraft.decoding.distill.train import TrainOptions
from pagedraft.scheduler.distill.job import Watch
from pagedraft.scheduler.distill.options import DistillOptions
from pagedraft.scheduler.distill.run import DistillRun

LEARNS = "draft learns"
STATE_WEIGHT = 10.0  # of a head, beside its loss
RATES = {"layers": 1e-3, "head": 5e-4}  # both begin as a good guess, which large steps undo


def add_distill_command(commands: Any) -> None:
    """Add the subparser of ``distill`` to ``commands`` (of argparse's ``add_subparsers``)."""
    parser = commands.add_parser(
        "distill",
        help="make a small draft model for a target",
        description="Lets the target write texts, trains a small draft on what it thought at every "
        "token, and reports how often its tokens are accepted and what that gains, on prompts of "
        "other sources. An interrupted run goes on when the same command is given again.",
    )
    parser.add_argument("--target", default="demo", help="local folder, hub id or demo (demo)")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the draft's folder")
    parser.add_argument(
        "--kind", default="layers", help="layers, or head: one layer over the target's states"
    )
    parser.add_argument(
        "--layers",
        type=_layers,
        default=None,
        help="of the draft: how many of the target's, or which: 0,14,29 (2; 1 for a head)",
    )
    parser.add_argument(
        "--start", default="first", help=f"from where they are taken: {', '.join(STARTS)} (first)"
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="begin",
        metavar="DRAFT",
        help="a draft of the same kind, size and target whose training goes on",
    )
    parser.add_argument(
        "--vocab", type=int, default=16384, help="most tokens that it may propose (16384)"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of the whole run (20)")
    parser.add_argument(
        "--prompts", type=Path, metavar="PATH", help="a text file or a folder (the demo's prompts)"
    )
    parser.add_argument(
        "--held-out", type=float, default=0.1, help="share of the prompts for the report (0.1)"
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="prompts to leave out, which it has learnt from (0)"
    )
    parser.add_argument("--texts", type=int, help="texts to write (as many as the time allows)")
    parser.add_argument("--steps", type=int, help="training steps (as many as the time allows)")
    parser.add_argument(
        "--on-policy", type=int, default=0, help="rounds in which the draft writes, too (0)"
    )
    parser.add_argument(
        "--loss", default="forward_kl", help=f"one of {', '.join(LOSSES)} (forward_kl)"
    )
    parser.add_argument(
        "--last-loss", default="tv", help="of the last third of the steps, or none (tv)"
    )
    parser.add_argument(
        "--learning-rate", type=float, help="at its highest (1e-3; 5e-4 for a head)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts, texts and batches (0)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument(
        "--dtype", default="auto", help="of products in training: fp32, bf16 or auto"
    )
    parser.add_argument("--keep", action="store_true", help="keep texts and checkpoint afterwards")
    parser.set_defaults(command=run_distill)


def _layers(text: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 2 or 0,14,29, got {text!r}") from None
    return numbers[0] if "," not in text else numbers


def _rate(args: argparse.Namespace) -> float:
    if args.learning_rate is not None:
        return float(args.learning_rate)
    return RATES.get(args.kind, RATES["layers"])


def run_distill(args: argparse.Namespace) -> int:
    """Run the command; the exit status is 0 whatever the draft is worth."""
    options = DistillOptions(
        target=args.target,
        out=args.out,
        kind=args.kind,
        layers=args.layers,
        start=args.start,
        vocab=args.vocab,
        minutes=args.minutes,
        prompts=args.prompts,
        held_out=args.held_out,
        texts=args.texts,
        steps=args.steps,
        on_policy=args.on_policy,
        begin=args.begin,
        skip=args.skip,
        seed=args.seed,
        device=args.device,
        train=TrainOptions(
            loss=args.loss,
            last_loss=None if args.last_loss == "none" else args.last_loss,
            learning_rate=_rate(args),
            seed=args.seed,
            dtype=args.dtype,
            state_weight=STATE_WEIGHT if args.kind == "head" else 0.0,
        ),
    )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with Bars(console) as bars:
        run = DistillRun(options, bars)
        try:
            outcome = run.run()
            verdict = run.report(outcome, command=command_line(sys.argv[1:]))
        except KeyboardInterrupt:
            bars.say(f"interrupted; the same command goes on from {run.job.state.path}")
            raise
        finally:
            run.job.state.close()
    if not args.keep:
        run.job.state.remove()
    console.print(f"draft in {outcome.out}: {verdict}")
    console.print(f"report in {outcome.out / 'report.md'}")
    return 0


def command_line(arguments: Sequence[str]) -> str:
    """What the user typed."""
    return shlex.join(["pagedraft", *arguments])


class Bars(Watch):
    """Shows a bar for each phase, with time left."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._alpha = ""
        self._shown: dict[str, tuple[float, str]] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """A line above the bars."""
        self._progress.console.print(line)

    def writing(self, num_texts: int, num_tokens: int, share: float) -> None:
        """The target has written so much."""
        self._show("target writes", share, f"{num_texts} texts, {num_tokens} tokens")

    def training(self, step: int, num_steps: int, progress: StepProgress) -> None:
        """A step is done."""
        facts = f"step {step}/{num_steps}, loss {progress.loss:.3f}"
        self._show(LEARNS, step / num_steps, facts)

    def checking(self, step: int, progress: StepProgress) -> None:
        """The held-out texts after a step."""
        self._alpha = f", held-out acceptance {progress.alpha:.3f}"
        if step == 0 or not self._progress.console.is_terminal:
            self.say(f"step {step}: held-out acceptance {progress.alpha:.3f}")
        for name, (share, facts) in self._shown.items():
            if name == LEARNS:
                self._show(name, share, facts)

    def _show(self, name: str, share: float, facts: str) -> None:
        self._shown[name] = share, facts
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=1.0, facts="")
        told = facts + (self._alpha if name == LEARNS else "")
        self._progress.update(self._tasks[name], completed=share, facts=told)
