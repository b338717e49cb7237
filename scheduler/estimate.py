"""``pagedraft estimate``: will a draft pay, with these prompts, on this machine?"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pagedraft.decoding.drafters.draft_model import check_vocabularies
from pagedraft.decoding.drafters.table import DRAFTERS
from pagedraft.decoding.estimate import MAX_DRAFTS, Estimate, Rule, estimate
from pagedraft.decoding.estimate_text import Text
from pagedraft.decoding.load import (
    default_sampling,
    load_draft_model,
    load_model,
    resolve_kv_dtype,
)
from pagedraft.decoding.params import SamplingParams, check_int, logit_rules
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.demo_prompts import CHAT_QUESTIONS, CODE_EDITS
from pagedraft.scheduler.estimate_check import Measured, measure
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.prompt_file import Prompt, read_prompts

MAX_NOISE = 0.1  # beyond it speed-ups are uncertain by about as much


def add_estimate_command(commands: Any) -> None:
    """Add the subparser of ``estimate`` to ``commands`` (of argparse's ``add_subparsers``)."""
    parser = commands.add_parser(
        "estimate",
        help="whether a draft will pay: acceptance, best k, expected speed-up",
        description="Lets the target answer prompts, compares a draft's tokens with the answers, "
        "times both models on this machine, and predicts the speed-up of one request at a time. "
        "Without --draft it judges what needs no second model.",
    )
    parser.add_argument("--model", default="demo", help="local folder, hub id or demo (demo)")
    parser.add_argument(
        "--draft", default=None, help="draft model: local folder, hub id or demo-draft"
    )
    parser.add_argument(
        "--drafter", default=None, help=f"names, with commas between: {', '.join(DRAFTERS)}"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt a line, or JSON lines with "prompt" or "messages"',
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text; do not use the chat template"
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer (96)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--top-k", type=int, default=None, help="draw from the k likeliest")
    parser.add_argument("--top-p", type=float, default=None, help="draw from the likeliest p")
    parser.add_argument("--min-p", type=float, default=None, help="least relative probability")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt's noise (0)")
    parser.add_argument(
        "--k", type=int, default=MAX_DRAFTS, help=f"most drafts a step to try ({MAX_DRAFTS})"
    )
    parser.add_argument("--dtype", default="auto", help="of the weights: bf16, fp16, fp32, auto")
    parser.add_argument(
        "--weights", default="auto", help="quantise linear weights: int8, int4, fp8 or auto"
    )
    parser.add_argument("--draft-weights", default=None, help="of the draft (as --weights)")
    parser.add_argument("--kv-dtype", default="auto", help="of the KV pool: int8, fp8 or auto")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument(
        "--check", action="store_true", help="also run the engine both ways, and compare"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.set_defaults(command=run_estimate)


def run_estimate(args: argparse.Namespace) -> int:
    """Estimate and print; the exit status is 0 whatever the verdict."""
    began = time.perf_counter()
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise ValueError(f"--json: {args.json}: no such folder")
    if args.json and Path(args.json).is_dir():
        raise ValueError(f"--json: expected a file, got the folder {args.json}")
    check_int("--max-tokens", args.max_tokens, 2)
    names = _drafters(args)
    check_int("--k", args.k, 1)
    prompts = read_prompts(args.prompts) if args.prompts else _demo_prompts()
    options = {"dtype": args.dtype, "device": args.device}
    target = load_model(args.model, weights=args.weights, **options)
    weights = args.weights if args.draft_weights is None else args.draft_weights
    draft = None
    if args.draft is not None:
        draft = load_draft_model(args.draft, target, weights=weights, **options)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if draft is not None:
        check_vocabularies(draft, target)
    texts = _texts(args, target, prompts)
    kv_dtype = resolve_kv_dtype(args.kv_dtype)
    found = [
        Judged(
            estimate(target, texts, draft=draft, drafter=name, max_drafts=args.k, kv_dtype=kv_dtype)
        )
        for name in names
    ]
    console.print(_header(texts))
    for judged in found:
        if args.check:
            judged.measured = measure(target, draft, texts, judged.estimate, args.kv_dtype)
        _print(console, judged)
    console.print(f"verdict: {_verdict([judged.estimate for judged in found])}")
    seconds = time.perf_counter() - began
    console.print(f"took {seconds:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(_document(args, texts, found, seconds), indent=2))
    return 0


@dataclass
class Judged:
    """One drafter's estimate, and what the engine then did, if it was asked."""

    estimate: Estimate
    measured: Measured | None = None


def _drafters(args: argparse.Namespace) -> list[str]:
    """The names to judge: those given, else the draft model, else all that need none."""
    if args.drafter is not None:
        parts = args.drafter.replace("+", ",").split(",")
        names = list(dict.fromkeys(name.strip() for name in parts))
    elif args.draft is not None:
        names = ["draft"]
    else:
        names = [name for name in DRAFTERS if name != "draft"]
    unknown = [name for name in names if name not in DRAFTERS]
    if unknown:
        raise ValueError(f"--drafter: expected some of {sorted(DRAFTERS)}, got {unknown[0]!r}")
    if args.draft_weights is not None and args.draft is None:
        raise ValueError("--draft-weights: there is no --draft")
    if "draft" in names and args.draft is None:
        raise ValueError('--drafter: "draft" needs --draft')
    return names


def _demo_prompts() -> list[Prompt]:
    texts = (*CHAT_QUESTIONS, *CODE_EDITS)
    return [Prompt(f"demo prompt {n}", text) for n, text in enumerate(texts, start=1)]


def _texts(args: argparse.Namespace, target: Transformer, prompts: Sequence[Prompt]) -> list[Text]:
    """What the target answers, without speculation."""
    llm = LLM(target, speculate="off", kv_dtype=args.kv_dtype)
    ids = [_token_ids(args, llm, prompt) for prompt in prompts]
    params = [
        SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed + index,
        )
        for index in range(len(prompts))
    ]
    completions = llm.generate(ids, params)
    defaults, positions = default_sampling(target.folder), target.config.max_positions
    texts: list[Text] = []
    for prompt, token_ids, row, answer in zip(prompts, ids, params, completions, strict=True):
        if answer.error is not None:
            raise RuntimeError(f"{prompt.source}: {answer.error}")
        texts.append(
            Text(
                prompt_ids=tuple(token_ids),
                output_ids=tuple(answer.token_ids),
                max_tokens=min(row.max_tokens, positions - len(token_ids)),
                temperature=args.temperature,
                seed=args.seed + len(texts),
                rules=logit_rules(row, defaults, target.config.eos_token_ids),
            )
        )
    return texts


def _token_ids(args: argparse.Namespace, llm: LLM, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, checked, so that an error names where it comes from."""
    content: Any = prompt.content
    try:
        is_text = isinstance(content, str)
        if is_text and llm.tokenizer is None:
            raise ValueError(
                f"--model: {args.model!r} has no tokenizer; give token ids in --prompts"
            )
        if is_text and llm.tokenizer.chat_template is not None and not args.raw:
            content = [{"role": "user", "content": content}]
        if isinstance(content, list) and isinstance(content[0], dict):
            content = llm.chat_ids(content)
        request = llm.submit(content, SamplingParams(max_tokens=args.max_tokens))
        llm.engine.abort(request)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{prompt.source}: {error}") from error
    return list(request.sequence.token_ids)


def _header(texts: Sequence[Text]) -> str:
    num_prompt = sum(len(text.prompt_ids) for text in texts)
    num_output = sum(len(text.output_ids) for text in texts)
    return f"{len(texts)} prompts of {num_prompt} tokens in all, answered with {num_output}"


def _print(console: Console, judged: Judged) -> None:
    found = judged.estimate
    console.print()
    console.print(f"{found.drafter}: {_agreement(found)}")
    for rule in found.rules:
        console.print(_table(found, rule))
    if found.costs.read_seconds > 0:
        milliseconds = 1e3 * found.costs.read_seconds
        console.print(f"the draft's reading of the prompts is in it: {milliseconds:.2f} ms a token")
    if found.costs.noise > MAX_NOISE:
        console.print(
            f"note: the machine is busy: half of the plain steps took {found.costs.noise:.0%} "
            "longer than the quickest fifth"
        )
    for rule in found.rules:
        best = found.best(rule)
        low, high = min(best.text_speedups), max(best.text_speedups)
        console.print(f"{found.verdict(rule)}; {low:.2f}x to {high:.2f}x by prompt")
    if judged.measured is not None:
        console.print(judged.measured.line(found.best()))


def _agreement(found: Estimate) -> str:
    if found.alpha is None or found.greedy is None:
        return f"first draft right at {found.equal:.0%} of the positions it is asked at"
    return (
        f"alpha {found.alpha:.3f} (rejection rule), draws equal at {found.equal:.1%} (match rule), "
        f"likeliest tokens at {found.greedy:.1%}"
    )


def _table(found: Estimate, rule: Rule) -> Table:
    costs = found.costs
    title = f"{rule} rule, one request at {costs.num_context} context tokens; plain step "
    title += f"{1e3 * costs.step_seconds[0]:.2f} ms"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in ("k", "tokens/pass", "drafts/pass", "step ms", "drafting ms", "speed-up"):
        table.add_column(column, justify="right")
    for row in found.of_rule(rule):
        table.add_row(
            str(row.k),
            f"{row.tokens_per_pass:.2f}",
            f"{row.drafts_per_pass:.2f}",
            f"{1e3 * costs.step_seconds[row.k]:.2f}",
            f"{1e3 * costs.draft_seconds[row.k]:.3g}",
            f"{row.speedup:.2f}x",
        )
    return table


def _verdict(found: Sequence[Estimate]) -> str:
    best = max(found, key=lambda one: one.best().speedup)
    if best.best().speedup <= 1.0 or len(found) == 1:
        return best.verdict()
    return f"{best.drafter}, {best.verdict()}"


def _document(
    args: argparse.Namespace, texts: Sequence[Text], found: Sequence[Judged], seconds: float
) -> dict[str, Any]:
    return {
        "model": str(args.model),
        "draft": args.draft,
        "prompts": args.prompts,
        "num_prompts": len(texts),
        "num_output_tokens": sum(len(text.output_ids) for text in texts),
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "seconds": seconds,
        "verdict": _verdict([judged.estimate for judged in found]),
        "drafters": [
            {
                **judged.estimate.to_json(),
                "measured": None if judged.measured is None else judged.measured.to_json(),
            }
            for judged in found
        ],
    }
