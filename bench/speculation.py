"""Draft lengths on a real model: fixed ones against "auto", each against plain decoding.

    python -m pagedraft.bench.speculation [--drafters ngram suffix] [--draft MODEL] [--tokens 64]

Three kinds of text, eight prompts each: code edits (greedy), open chat (temperature 0.8), text
after random tokens (temperature 1). A prompt is decoded with every draft length in turn, in an
order that rotates, so that all see the same machine; what counts is the ratio to plain decoding of
the same prompts in the same round. Seconds are those between the first and the last token: what
drafting can change. "auto" has an engine of its own, so that it knows only what it has seen.

No speed is printed unless all outputs of a prompt are the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pagedraft.bench.figures import Figure, as_json, from_samples
from pagedraft.bench.report import header, print_header, results_folder, write_json
from pagedraft.bench.speculation_prompts import EDITS, QUESTIONS, random_prompts
from pagedraft.bench.table import print_table
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.demo import resolve_model
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.request import RequestStats

PLAIN, AUTO = 0, "auto"
FIXED = (1, 2, 4, 8, 16)
SHARE_OF_BEST, LEAST_OF_PLAIN, EDIT_SPEED = 0.95, 0.97, 2.5  # what the project aims at


@dataclass(frozen=True)
class Text:
    """Prompts of one kind; ``at_once``: all in one batch instead of one after another."""

    name: str
    prompts: list[list[int]]
    temperature: float
    ignore_eos: bool = False
    at_once: bool = False


@dataclass
class Speeds:
    """Decode speed of one kind of text, tokens a second by draft length, a list over rounds."""

    text: str
    drafter: str
    speeds: dict[str, list[float]]
    drafted: int = 0
    accepted: int = 0
    report: dict[str, Any] = field(default_factory=dict)

    def ratio(self, k: int | str) -> float:
        """Speed over that of plain decoding, the median over rounds."""
        pairs = zip(self.speeds[str(k)], self.speeds[str(PLAIN)], strict=True)
        return median(a / b for a, b in pairs)

    @property
    def share_of_best(self) -> float:
        """Speed of "auto" over that of the best fixed length, 0 among them."""
        return self.ratio(AUTO) / max(self.ratio(k) for k in self.speeds if k != AUTO)


class Bench:
    """The engines: one for plain decoding and fixed lengths, one for "auto"."""

    def __init__(self, llm: LLM, drafter: str, num_tokens: int, options: dict[str, Any]) -> None:
        self.num_tokens = num_tokens
        self.drafter = drafter
        options = {**options, "speculate": drafter, "prefix_cache": False}
        self.fixed = LLM(llm.target, **options)
        self.auto = LLM(llm.target, **options)

    def measure(self, text: Text, rounds: int, lengths: Sequence[int | str]) -> Speeds:
        """Decode every prompt with every length, ``rounds`` times."""
        result = Speeds(text.name, self.drafter, {str(k): [] for k in lengths})
        controller = self.auto.engine.speculation.controller
        controller.clear_report()
        for round_index in range(rounds):
            seconds = dict.fromkeys(lengths, 0.0)
            tokens = dict.fromkeys(lengths, 0)
            groups = [text.prompts] if text.at_once else [[prompt] for prompt in text.prompts]
            for index, group in enumerate(groups):
                first = (index + round_index) % len(lengths)
                outputs = []
                for k in (*lengths[first:], *lengths[:first]):
                    stats, output = self._run(text, group, k)
                    outputs.append(output)
                    seconds[k] += _decode_seconds(stats)
                    tokens[k] += sum(map(len, output)) - len(group)
                    if k == AUTO:
                        result.drafted += sum(sum(s.drafted) for s in stats)
                        result.accepted += sum(sum(s.accepted) for s in stats)
                if any(output != outputs[0] for output in outputs):
                    raise RuntimeError(f"{text.name}: drafts changed the output of prompt {index}")
            for k in lengths:
                result.speeds[str(k)].append(tokens[k] / max(seconds[k], 1e-9))
        result.report = controller.report()
        return result

    def _run(
        self, text: Text, prompts: list[list[int]], k: int | str
    ) -> tuple[list[RequestStats], list[list[int]]]:
        llm = self.auto if k == AUTO else self.fixed
        params = [
            SamplingParams(
                max_tokens=self.num_tokens,
                temperature=text.temperature,
                seed=seed,
                ignore_eos=text.ignore_eos,
                speculate=k != PLAIN,
                k=None if isinstance(k, str) else k,
            )
            for seed in range(len(prompts))
        ]
        completions = llm.generate(prompts, params)
        return [c.stats for c in completions], [c.token_ids for c in completions]


def texts(llm: LLM, count: int) -> list[Text]:
    """The first ``count`` prompts of each kind one by one, then together."""

    def chat(contents: Sequence[str]) -> list[list[int]]:
        return [llm.chat_ids([{"role": "user", "content": text}]) for text in contents]

    kinds = [
        Text("code edits", chat(EDITS[:count]), 0.0),
        Text("open chat", chat(QUESTIONS[:count]), 0.8),
        Text("random text", random_prompts(llm.target.config.vocab_size, count), 1.0, True),
    ]
    together = [
        Text(f"{text.name}, {count} at once", text.prompts, text.temperature, True, True)
        for text in kinds
    ]
    return [*kinds, *together]


def run(options: argparse.Namespace, device: torch.device) -> list[Speeds]:
    """Measure all drafters on all texts."""
    folder = resolve_model(options.model)
    llm = LLM(folder, dtype="bf16", device=device, speculate="off", kv_tokens=64)
    shared: dict[str, Any] = {"dtype": "bf16", "device": device, "kv_tokens": 8192}
    drafters: dict[str, dict[str, Any]] = dict.fromkeys(options.drafters, shared)
    if options.draft is not None:
        drafters["draft"] = {**shared, "draft": resolve_model(options.draft)}
    lengths = (PLAIN, *options.fixed, AUTO)
    results = []
    for drafter, options_of in drafters.items():
        bench = Bench(llm, drafter, options.tokens, options_of)
        for text in texts(llm, options.prompts):
            results.append(bench.measure(text, options.rounds, lengths))
            print(f"{drafter}, {text.name}: done", file=sys.stderr)
    return results


def _decode_seconds(stats: Sequence[RequestStats]) -> float:
    """Seconds from the first to the last token of requests that ran together."""
    times = [when for row in stats for when, _ in row.emissions]
    return max(times) - min(times)


def figures(results: Sequence[Speeds]) -> list[Figure]:
    """Speed over plain decoding by drafter, text and draft length."""
    found = []
    for row in results:
        for k in row.speeds:
            if k == str(PLAIN):
                continue
            pairs = zip(row.speeds[k], row.speeds[str(PLAIN)], strict=True)
            name = f"speculation/{row.drafter}, {row.text}/k={k} over plain"
            target = LEAST_OF_PLAIN if k == AUTO else None
            ratios = [a / b for a, b in pairs]
            found.append(from_samples(name, ratios, "x", "higher", target=target))
        name = f"speculation/{row.drafter}, {row.text}/auto of the best"
        share = row.share_of_best
        found.append(Figure(name, share, "x", "higher", "measured", target=SHARE_OF_BEST))
    return found


def cells(row: Speeds) -> list[str]:
    """One line of the table."""
    report = row.report
    fixed = [f"{row.ratio(k):.2f}" for k in row.speeds if k not in (str(PLAIN), AUTO)]
    plain = median(row.speeds[str(PLAIN)])
    return [
        row.drafter,
        row.text,
        f"{plain:.1f}",
        *fixed,
        f"{row.ratio(AUTO):.2f}",
        f"{row.share_of_best:.2f}",
        f"{report['mean_k']:.1f}",
        f"{row.accepted / row.drafted:.2f}" if row.drafted else "-",
        f"{100 * report['seconds_error']:.0f} %",
        f"{100 * report['tokens_bias']:+.0f} %",
    ]


def show(results: Sequence[Speeds], fixed: Sequence[int]) -> None:
    """Print the table and what was aimed at."""
    headers = ["drafter", "text", "plain tok/s", *[f"k={k}" for k in fixed]]
    headers += ["auto", "of best", "k", "accepted", "s error", "tok bias"]
    print_table("Decode speed over plain decoding", headers, [cells(row) for row in results])
    print(
        f'aims: "auto" >= {SHARE_OF_BEST} of the best fixed length, 0 among them; never below '
        f"{LEAST_OF_PLAIN} of plain; code edits >= {EDIT_SPEED}\n"
        "k: chosen a row and step; s error: mean error of a step's predicted seconds\n"
        "tok bias: tokens expected over tokens emitted, less 1"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.speculation")
    parser.add_argument("--model", default="demo", help="local folder, hub id or demo")
    parser.add_argument("--draft", default=None, help="a draft model: measured as drafter too")
    parser.add_argument("--drafters", nargs="*", default=["suffix"], help="lookups: ngram, suffix")
    parser.add_argument("--fixed", nargs="*", type=int, default=FIXED, help="draft lengths")
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=1, help="times every prompt is decoded")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind, 8 at most")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a request")
    parser.add_argument("--out", default=None, help="folder for the JSON")
    options = parser.parse_args(arguments)
    where = torch.device(options.device)
    facts = header(where)
    print_header(facts)
    results = run(options, where)
    show(results, options.fixed)
    rows = [
        {
            **asdict(row),
            "ratios": {k: row.ratio(k) for k in row.speeds},
            "share_of_best": row.share_of_best,
        }
        for row in results
    ]
    document = {"bench": "speculation", **facts, "model": options.model, "rows": rows}
    document |= {"tokens": options.tokens, "prompts": options.prompts, "rounds": options.rounds}
    document["figures"] = as_json(figures(results))
    folder = Path(options.out) if options.out else results_folder(where)
    write_json(folder / f"speculation-{Path(options.model).name}.json", document)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
