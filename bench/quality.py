"""What speed costs in quality: fast, quantised and one-byte-KV modes beside the exact one.

    python -m pagedraft.bench quality
    python -m pagedraft.bench.quality [--quick] [--model demo] [--modes int8,int4] [--tokens 4096]

Every mode (quality_modes.py) is asked the same things as the control, the model as it is stored:

* perplexity on a fixed text, and its ratio to the control's,
* greedy answers to chats and code edits: are they the control's, token by token?
* small tasks: choices by log-likelihood, words and formats written (quality_tasks.py).

Text and tasks are described in bench/data/README.md. What is compared is paired, token by token and
task by task, and comes with the interval that holds 95 %: "none measurable" says that the interval
holds "no difference", not that there is none. The control must give the same numbers when it is fed
in other portions, or nothing is printed. No time is reported: ``bench engine`` measures speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagedraft.bench import figures, quality_greedy, quality_tasks
from pagedraft.bench.quality_modes import CONTROL, MODES, Mode, Source, choose
from pagedraft.bench.quality_probe import Probe, Reading, check_control, read
from pagedraft.bench.quality_report import LeftOut, Row, draw, judge, show
from pagedraft.bench.quality_report import figures as figures_of
from pagedraft.bench.quality_tasks import Choice
from pagedraft.bench.quality_text import WINDOW, read_tokens
from pagedraft.bench.report import header, print_header, results_folder, write_json
from pagedraft.decoding.load import read_tokenizer, resolve_device, resolve_dtype
from pagedraft.model.config import ModelConfig
from pagedraft.model.demo import resolve_model

DATA = Path(__file__).parent / "data"
TEXT, TASKS = DATA / "public_domain.txt", DATA / "tasks.jsonl"
FULL = {
    **{"modes": ",".join(mode.name for mode in MODES), "tokens": 2048},
    **{"prompts": quality_greedy.MOST_PROMPTS, "every": 1},
}
QUICK = {"modes": "fast,int8,int4,kv-int8", "tokens": 1024, "prompts": 4, "every": 3}
NEW_TOKENS = 48
HOW = "measured on this text and these tasks; nothing was timed"


def measure(source: Source, probe: Probe, modes: Sequence[Mode]) -> list[Row | LeftOut]:
    """One row a mode, the control's first.

    Raises RuntimeError if the control differs from itself, or naming the mode whose logits are no
    numbers.
    """
    rows: list[Row | LeftOut] = []
    control: Reading | None = None
    for mode in modes:
        reason = source.why_not(mode)
        if reason:
            rows.append(LeftOut(mode.name, reason))
            continue
        print(f"{mode.name} ...", file=sys.stderr, flush=True)
        try:
            row, control = _measure(source, probe, mode, control)
        except (ArithmeticError, RuntimeError) as error:
            raise RuntimeError(f"mode {mode.name}: {error}") from error
        rows.append(row)
    return rows


def _measure(
    source: Source, probe: Probe, mode: Mode, control: Reading | None
) -> tuple[Row, Reading]:
    """A mode's row, and the control's reading: its own where there is none yet."""
    model, note = source.model(mode)
    stored = source.stored_kv(mode, model)
    expected = None if control is None else control.answers
    reading = read(model, probe, mode.kv_dtype, stored, expected)
    if control is None:
        check_control(model, probe, reading, stored)
        control = reading
    sizes = model.weight_bytes, source.kv_bytes(mode, model)
    return judge(mode, probe, reading, control, sizes, note), control


def make_probe(options: argparse.Namespace, folder: Path, config: ModelConfig) -> Probe:
    """What the options ask for; ValueError says what of it cannot be had."""
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"model: {folder} has no tokenizer, and the bench reads texts")
    if not 1 <= options.window < config.max_positions:
        raise ValueError(
            f"window: expected 1 to {config.max_positions - 1} tokens, got {options.window}"
        )
    path = Path(options.text)
    tokens = read_tokens(path, tokenizer.encode, options.tokens, options.window)
    tasks = quality_tasks.every(quality_tasks.read_tasks(Path(options.tasks)), options.every)
    if sum(isinstance(task, Choice) for task in tasks) < 2:
        raise ValueError(f"tasks: expected two choices or more, got fewer in {options.tasks}")
    prompt_ids = quality_greedy.prompts(tokenizer, options.prompts)
    return Probe(tokens, options.window, prompt_ids, options.new_tokens, tasks, tokenizer)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"about a minute: {QUICK}")
    parser.add_argument("--model", default="demo", help="local folder, hub id or demo")
    parser.add_argument("--dtype", default="bf16", help="of the control's weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--modes", default=None, help=f"comma-separated, of {FULL['modes']}")
    parser.add_argument("--tokens", type=_count, default=None, help="of the text")
    parser.add_argument("--window", type=_count, default=WINDOW, help="tokens that see each other")
    parser.add_argument("--prompts", type=_count, default=None, help="to answer greedily")
    parser.add_argument("--new-tokens", type=_count, default=NEW_TOKENS, help="of an answer")
    parser.add_argument("--every", type=_count, default=None, help="n: each n-th task of a group")
    parser.add_argument("--text", default=str(TEXT), help="file with another text")
    parser.add_argument("--tasks", default=str(TASKS), help="file with other tasks")
    parser.add_argument("--out", default=None, help="folder for JSON and PNG")
    return parser


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = _parser()
    options = parser.parse_args(arguments)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return parser, options


def left_out(options: argparse.Namespace, modes: Sequence[Mode]) -> str:
    """What a smaller run than the full one does not ask."""
    names = [mode.name for mode in MODES if mode not in modes]
    parts = [
        f"modes {', '.join(names)}" if names else "",
        f"the text after {options.tokens} tokens" if options.tokens < FULL["tokens"] else "",
        f"all but {options.prompts} of {FULL['prompts']} prompts"
        if options.prompts < FULL["prompts"]
        else "",
        f"all but every {options.every}. task of a group" if options.every > 1 else "",
    ]
    return "; ".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, 1 if the control fails its gate."""
    parser, options = _parse(arguments)
    try:
        modes = choose([name.strip() for name in options.modes.split(",") if name.strip()])
        device, folder = resolve_device(options.device), resolve_model(options.model)
        probe = make_probe(options, folder, ModelConfig.from_folder(folder))
        source = Source.read(folder, resolve_dtype(options.dtype), device)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    facts = header(device) | {"model": options.model, "dtype": options.dtype}
    print_header(facts)
    print(f"left out: {left_out(options, modes) or 'nothing'}")
    try:
        rows = measure(source, probe, modes)
    except RuntimeError as error:
        print(f"quality: {error}", file=sys.stderr)
        return 1
    show(rows, probe)
    path = Path(options.out) if options.out else results_folder(device)
    stem = f"quality-{Path(options.model).name}-{options.dtype}"
    document = as_document(options, facts, probe, rows)
    write_json(path / f"{stem}.json", document)
    draw([row for row in rows if isinstance(row, Row)], path / f"{stem}.png", facts, HOW)
    print(json.dumps(document))
    return 0


def as_document(
    options: argparse.Namespace,
    facts: dict[str, Any],
    probe: Probe,
    rows: Sequence[Row | LeftOut],
) -> dict[str, Any]:
    """The bench's JSON document."""
    done = [row for row in rows if isinstance(row, Row)]
    return {
        **{"bench": "quality", **facts, "control": CONTROL, "how": HOW, "quick": options.quick},
        **{"tokens": len(probe.tokens) - 1, "window": probe.window, "tasks": len(probe.tasks)},
        **{"prompts": len(probe.prompt_ids), "new_tokens": probe.num_new},
        "text": Path(options.text).name,
        "rows": [asdict(row) for row in done],
        "left_out": {row.name: row.reason for row in rows if isinstance(row, LeftOut)},
        "figures": figures.as_json(figures_of(done)),
    }


if __name__ == "__main__":
    sys.exit(main())
