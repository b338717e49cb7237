"""The command line: ``pagedraft demo``, ``generate``, ``diff``, ``estimate`` and ``replay``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagedraft.decoding.detokenize import OutputText
from pagedraft.decoding.load import encode
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.demo import demo_draft_folder, resolve_model
from pagedraft.model.draft_format import read_entry
from pagedraft.model.fingerprint import fingerprint
from pagedraft.scheduler.demo import run_demo
from pagedraft.scheduler.diff import add_diff_command
from pagedraft.scheduler.distill.command import add_distill_command
from pagedraft.scheduler.estimate import add_estimate_command
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.replay import add_replay_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user's input end with one line and exit status 2."""
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except BrokenPipeError:  # the reader has seen enough; nothing is left to flush into
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, FileNotFoundError, RuntimeError, OSError) as error:
        if args.traceback:
            raise
        print(f"pagedraft: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npagedraft: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagedraft", description="Low-latency LLM decoding with exact speculation."
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="run a batch of requests with and without speculation")
    _add_model_options(demo)
    demo.add_argument("--max-tokens", type=int, default=160, help="longest answer (160)")
    demo.set_defaults(command=_demo)

    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", help='the prompt, or "-" to read standard input')
    _add_model_options(generate)
    generate.add_argument("--max-tokens", type=int, default=256, help="longest answer (256)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    generate.add_argument("--top-k", type=int, default=None, help="draw from the k likeliest")
    generate.add_argument("--top-p", type=float, default=None, help="draw from the likeliest p")
    generate.add_argument("--min-p", type=float, default=None, help="least relative probability")
    generate.add_argument(
        "--repetition-penalty", type=float, default=None, help="above 1: repeat less"
    )
    generate.add_argument(
        "--stop", action="append", default=[], help="text that ends the answer; may be repeated"
    )
    generate.add_argument(
        "--accept",
        default="match",
        help="how drafts are judged: match (as plain decoding draws), rejection, block (match)",
    )
    generate.add_argument("--seed", type=int, default=None, help="fixes the sampling noise")
    generate.add_argument(
        "--raw", action="store_true", help="continue the text; do not use the chat template"
    )
    generate.set_defaults(command=_generate)
    add_diff_command(commands)
    add_distill_command(commands)
    add_estimate_command(commands)
    add_replay_command(commands)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="local folder, hub id or demo (demo)")
    parser.add_argument(
        "--draft", default=None, help="draft model: local folder, hub id or demo-draft"
    )
    parser.add_argument(
        "--speculate",
        default="auto",
        help="auto, off, or drafters: draft, ngram, suffix, layers; more than one with + (auto)",
    )
    parser.add_argument("--k", type=_draft_length, default="auto", help="drafts a step, or auto")
    parser.add_argument("--dtype", default="auto", help="of the weights: bf16, fp16, fp32, auto")
    parser.add_argument(
        "--weights", default="auto", help="quantise linear weights: int8, int4, fp8 or auto"
    )
    parser.add_argument("--kv-dtype", default="auto", help="of the KV pool: int8, fp8 or auto")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument(
        "--kv-tokens", type=int, default=None, help="capacity of the KV pool (from free memory)"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        default=None,
        help="write all steps there, for ui.perfetto.dev and for replay",
    )


def _draft_length(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected auto or an integer, got {text!r}") from None


@contextmanager
def _loaded(args: argparse.Namespace) -> Iterator[LLM]:
    llm = LLM(
        args.model,
        args.draft,
        speculate=args.speculate,
        k=args.k,
        dtype=args.dtype,
        weights=args.weights,
        kv_dtype=args.kv_dtype,
        device=args.device,
        kv_tokens=args.kv_tokens,
        trace=args.trace,
    )
    try:
        yield llm
    finally:
        if llm.trace is not None:
            llm.trace.close()


def _demo(args: argparse.Namespace) -> int:
    print(f"Loading {args.model} ...", flush=True)
    if args.draft is None and args.model == "demo" and _has_room_for_draft(args.speculate):
        args.draft = _shipped_draft()
    with _loaded(args) as llm:
        return run_demo(llm, args.max_tokens)


def _has_room_for_draft(speculate: str) -> bool:
    names = [name.strip() for name in speculate.replace(",", "+").split("+")]
    return "auto" in names or "draft" in names


def _shipped_draft() -> str | None:
    """The demo model's draft where it is installed and made for this conversion of the model."""
    try:
        entry = read_entry(demo_draft_folder())
    except FileNotFoundError:
        return None
    if entry is None or entry.target_sha256 != fingerprint(resolve_model("demo")):
        print("demo-draft is for another conversion of the demo model: left out", flush=True)
        return None
    return "demo-draft"


def _generate(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop=tuple(args.stop),
        accept=args.accept,
        seed=args.seed,
    )
    with _loaded(args) as llm:
        _answer(args, llm, prompt, params)
    return 0


def _answer(args: argparse.Namespace, llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Print the answer as it comes."""
    if llm.tokenizer is None:
        raise ValueError(f"--model: {args.model!r} has no tokenizer, so it cannot read text")
    has_template = llm.tokenizer.chat_template is not None
    if has_template and not args.raw:
        token_ids = llm.chat_ids([{"role": "user", "content": prompt}])
    else:
        token_ids = encode(prompt, llm.tokenizer)
    text = OutputText(llm.tokenizer, stop=params.stop or (), min_tokens=params.min_tokens)
    began = time.perf_counter()
    num_tokens, num_shown = 0, 0
    for tokens in llm.stream(token_ids, params):
        num_tokens += len(tokens)
        for token in tokens:
            text.push(token)
        print(text.settled[num_shown:], end="", flush=True)
        num_shown = len(text.settled)
    print(text.text[num_shown:])
    seconds = time.perf_counter() - began
    print(
        f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tok/s",
        file=sys.stderr,
    )
