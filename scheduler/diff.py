"""``pagedraft diff``: run one prompt on two implementations and say where they part."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from pagedraft.decoding.diff.report import STAGE_OPS, USED_OPS, Finding, Report
from pagedraft.decoding.diff.run import Work, check_side, find_divergence
from pagedraft.decoding.diff.side import Side, swapped
from pagedraft.decoding.load import (
    check_text,
    encode,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from pagedraft.kernels.dispatch import INTERPRETED, implementation
from pagedraft.model.config import ModelConfig
from pagedraft.model.demo import resolve_model

PAIRS = ("dtype", "weights", "kv_dtype")  # options with a shorthand --name A,B
OWN_KEYS = ("model", "exact", "kv_dtype", "rev", "swap")
BOOLEANS = {"true": True, "false": False}


def add_diff_command(commands: Any) -> None:
    """Add the subparser of ``diff`` to ``commands`` (of argparse's ``add_subparsers``)."""
    diff = commands.add_parser(
        "diff",
        help="first token, layer and op where two implementations part",
        description="Runs a prompt on two sides, A and B, and reports where they part. Exit status "
        "0: nowhere beyond tolerance, 1: they do, 2: bad input.",
    )
    diff.add_argument("prompt", help='the prompt, or "-" to read standard input')
    diff.add_argument("--model", default="demo", help="local folder, hub id or demo (demo)")
    diff.add_argument("--device", default="auto", help="cpu, cuda or auto")
    diff.add_argument(
        "--swap",
        action="append",
        default=[],
        metavar="OP[=HOW]",
        help="B runs this op by ref (default), triton or cpu; several, or all; "
        f"ops: {', '.join(USED_OPS)}",
    )
    diff.add_argument("--fast", action="store_true", help="B runs with exact=False")
    diff.add_argument("--dtype", metavar="A[,B]", help="of the weights: bf16, fp16, fp32")
    diff.add_argument("--weights", metavar="A[,B]", help="formats that quantise linear weights")
    diff.add_argument("--kv-dtype", metavar="A[,B]", help="of the KV pool: int8, fp8 or auto")
    diff.add_argument("--rev-b", metavar="REV", help="B runs this git revision's code")
    diff.add_argument("--rev", nargs=2, metavar=("A", "B"), help="both run a revision's code")
    for label in ("a", "b"):
        diff.add_argument(
            f"--{label}",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help=f"any option of {label.upper()}: of loading, or one of {', '.join(OWN_KEYS)}",
        )
    diff.add_argument("--max-tokens", type=int, default=16, help="longest answer (16)")
    diff.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    diff.add_argument("--seed", type=int, default=0, help="of the sampling noise (0)")
    diff.add_argument("--chunk", type=int, default=512, help="most prompt tokens a step (512)")
    diff.add_argument(
        "--tolerance", type=float, default=None, help="for all stages, in place of their own"
    )
    diff.add_argument(
        "--raw", action="store_true", help="continue the text; do not use the chat template"
    )
    diff.add_argument(
        "--ids", action="store_true", help="the prompt is token ids, separated by commas"
    )
    diff.add_argument("--json", metavar="FILE", help="write the whole report there")
    diff.set_defaults(command=run_diff)


def run_diff(args: argparse.Namespace) -> int:
    """Compare and print; the exit status is 1 if the sides part beyond tolerance."""
    a, b = sides(args)
    for label, side in (("A", a), ("B", b)):
        check_side(label, side)
        _check_interpreted(label, side)
    folder = resolve_model(str(a.model))
    config = ModelConfig.from_folder(folder)
    tokenizer: Any = load_tokenizer(SimpleNamespace(folder=folder))  # type: ignore[arg-type]
    work = Work(
        token_ids=_token_ids(args, tokenizer),
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop_ids=frozenset(config.eos_token_ids),
        chunk_tokens=args.chunk,
        tolerance=args.tolerance,
    )
    work.check_fits(config.vocab_size, config.max_positions)
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise ValueError(f"--json: {args.json}: no such folder")
    report = find_divergence(a, b, work)
    _print(args, a, b, work, report, tokenizer)
    if args.json:
        document = {"a": _described(a), "b": _described(b), **report.to_json()}
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    return 1 if report.parts else 0


def _check_interpreted(label: str, side: Side) -> None:
    """Raise ValueError where Triton's interpreter would compute in bf16, which it gets wrong."""
    device = resolve_device(side.options.get("device", "auto"))
    with swapped(side.swaps):
        runs_triton = any(implementation(op, device, has_cpu=True) == "triton" for op in USED_OPS)
    dtype = resolve_dtype(side.options.get("dtype", "auto"))
    if device.type == "cpu" and runs_triton and dtype == torch.bfloat16:
        raise ValueError(
            f"{label}: dtype: expected fp16 or fp32 under Triton's interpreter, which computes "
            "bf16 wrongly, got bf16"
        )


def sides(args: argparse.Namespace) -> tuple[Side, Side]:
    """The two sides that the command's arguments name."""
    keys: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name in PAIRS:
        for key, value in zip(keys, _pair(name, getattr(args, name)), strict=True):
            if value is not None:
                key[name] = value
    for key, rev in zip(keys, args.rev or (None, args.rev_b), strict=True):
        key["rev"] = rev
    keys[1]["exact"] = not args.fast
    swaps: tuple[list[str], list[str]] = [], [*args.swap]
    for label, texts, key, own_swaps in zip("ab", (args.a, args.b), keys, swaps, strict=True):
        for text in texts:
            name, value = _key_value(label, text)
            if name == "swap":
                own_swaps.append(value)
            else:
                key[name] = value
    base = {"model": args.model, "device": args.device}
    a, b = (_side({**base, **key}, _swaps(texts)) for key, texts in zip(keys, swaps, strict=True))
    return a, b


def _pair(name: str, text: str | None) -> tuple[str | None, str | None]:
    """The values of A and B in "A,B"; one value is both sides'."""
    values = text.split(",") if text else [None]
    if len(values) > 2:
        option = name.replace("_", "-")
        raise ValueError(f"--{option}: expected one value or A,B, got {text!r}")
    return values[0], values[-1]


def _key_value(label: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    known = _options()
    if not equals or name not in known:
        raise ValueError(f"--{label}: expected key=value, key one of {known}, got {text!r}")
    return name, BOOLEANS.get(value, value)


def _options() -> list[str]:
    loading = list(inspect.signature(load_model).parameters)[1:]
    return sorted({*loading, *OWN_KEYS})


def _swaps(texts: Sequence[str]) -> dict[str, str]:
    swaps: dict[str, str] = {}
    for text in (part for joined in texts for part in joined.split(",")):
        op, _, choice = text.partition("=")
        swaps.update(dict.fromkeys(USED_OPS if op == "all" else (op,), choice or "ref"))
    return swaps


def _side(key: dict[str, Any], swaps: dict[str, str]) -> Side:
    own = {name: key.pop(name) for name in ("model", "exact", "kv_dtype", "rev") if name in key}
    if not isinstance(own.get("exact", True), bool):
        raise ValueError(f"exact: expected true or false, got {own['exact']!r}")
    return Side(options=key, swaps=swaps, **own)


def _token_ids(args: argparse.Namespace, tokenizer: Any) -> list[int]:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise ValueError("prompt: expected text, got none")
    check_text(text)
    if args.ids:
        try:
            return [int(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(f"--ids: expected integers and commas, got {text!r}") from None
    if tokenizer is None:
        raise ValueError(f"--model: {args.model!r} has no tokenizer; give token ids with --ids")
    if tokenizer.chat_template is None or args.raw:
        return encode(text, tokenizer)
    message = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(chat, add_special_tokens=False))


def _described(side: Side) -> dict[str, Any]:
    """What a side runs, without what is as usual."""
    described = {"model": str(side.model), **side.options}
    described.update({f"swap {op}": choice for op, choice in side.swaps.items()})
    if not side.exact:
        described["exact"] = False
    described.update(kv_dtype=side.kv_dtype, rev=side.rev)
    return {key: value for key, value in described.items() if value not in ("auto", None)}


def _print(
    args: argparse.Namespace, a: Side, b: Side, work: Work, report: Report, tokenizer: Any
) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for label, side in (("A", a), ("B", b)):
        console.print(f"{label}: " + ", ".join(f"{k} {v}" for k, v in _described(side).items()))
    for note in _notes(args, a, b):
        console.print(f"note: {note}")
    console.print(
        f"prompt of {len(work.token_ids)} tokens, {len(report.a_ids)} generated; "
        f"{report.num_equal} of {report.num_stages} results have equal bits"
    )
    console.print(f"first different bit: {_place(report.first_bit)}")
    console.print(f"first error beyond tolerance: {_place(report.first_error)}")
    console.print(f"first different token: {_token(report, tokenizer)}")
    if report.logit_error:
        console.print(f"largest logit error, errors carried along: {report.logit_error:.2g}")
    if report.worst:
        console.print(_table(report))


def _notes(args: argparse.Namespace, a: Side, b: Side) -> list[str]:
    notes = []
    if a == b:
        notes.append("the sides are alike: this shows whether a run repeats its bits")
    on_cpu = resolve_device(a.options.get("device", "auto")).type == "cpu"
    if a.exact != b.exact and on_cpu:
        notes.append("exact=False changes nothing on a CPU")
    if on_cpu and not INTERPRETED and not any("triton" in side.swaps.values() for side in (a, b)):
        notes.append(
            "on this CPU the ops' CPU paths and references ran, no Triton kernel: for these a CUDA "
            "device, or TRITON_INTERPRET=1 with --dtype fp32 and few tokens"
        )
    return notes


def _place(finding: Finding | None) -> str:
    if finding is None:
        return "none"
    ops = f" ({', '.join(finding.ops)})" if finding.ops else ""
    place = f"token {finding.token} (position {finding.position}), "
    place += f"layer {finding.layer}, {finding.stage}{ops}"
    if finding.stage == "draw":
        return f"{place}: another token from the same logits"
    if finding.nan:
        return f"{place}: NaN or infinity in {' and '.join(finding.nan)} only"
    return (
        f"{place}, {_count(finding.ulps or 0)} ULP, error {finding.error:.1e} of tolerance "
        f"{finding.tolerance:.1e}"
    )


def _token(report: Report, tokenizer: Any) -> str:
    first = report.first_token
    if first is None:
        return "none"

    def shown(token: int) -> str:
        if token < 0:
            return "none (no finite logit)"
        text = f"{tokenizer.decode([token])!r} " if tokenizer is not None else ""
        return f"{text}(id {token})"

    return (
        f"token {first.token} (position {first.position}): A {shown(first.a_id)}, "
        f"B {shown(first.b_id)}; margin of A's best two logits {first.margin:.2g}; "
        f"logit error there {first.logit_error:.2g}"
    )


def _table(report: Report) -> Table:
    title = "each stage's largest error, from equal inputs"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("stage", "token", "layer", "ULP", "max ULP", "max abs", "error", "tolerance"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage in (name for name in STAGE_OPS if name in report.worst):
        f = report.worst[stage]
        ulps = ["-" if count is None else _count(count) for count in (f.ulps, f.max_ulps)]
        numbers = [f"{f.max_abs:.1e}", f"{f.error:.1e}", f"{f.tolerance:.1e}"]
        table.add_row(stage, str(f.token), str(f.layer), *ulps, *numbers)
    return table


def _count(number: int) -> str:
    return str(number) if number < 10**6 else f"{number:.1e}"
