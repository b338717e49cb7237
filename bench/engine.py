"""The engine on a real model: beside other engines, and by batch, drafter and draft length.

    python -m pagedraft.bench.engine --quick
    python -m pagedraft.bench.engine [--peers transformers llama.cpp] [--batches 1 4 16 64] [...]

One process (peers may have their own), same weights, same threads, greedy. The machine may be
shared, so sides run in turn and ratios are those of one round. Our tokens must be the same with and
without drafts, or no speed is reported and the exit status is 1; how far those of other engines
agree with ours is counted and told. ``--quick`` ends within its --seconds: what did not fit is
named, as is everything else that was left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from pagedraft.bench import engine_cases, engine_ttft, engine_weights
from pagedraft.bench.engine_cases import BATCH, EDITS, SINGLE, Case
from pagedraft.bench.engine_charts import save_charts
from pagedraft.bench.engine_options import parse
from pagedraft.bench.engine_prompts import PromptSource
from pagedraft.bench.engine_report import Found, document, show
from pagedraft.bench.engine_runs import Clock, GateError, Side, our_side, peer_side
from pagedraft.bench.engine_sweep import Sweep, SweepPlan
from pagedraft.bench.engine_ttft import LONG, SHORT
from pagedraft.bench.peers import MODES, Peer, close_peers, open_peers
from pagedraft.bench.report import header, print_header, results_folder, write_json
from pagedraft.decoding.load import load_draft_model
from pagedraft.model.demo import resolve_model
from pagedraft.scheduler.llm import LLM

FIXED_DRAFTS = 8  # a row, where the number is not the engine's choice
CASE_KV_TOKENS = 8192
# Shares of --seconds at which a part ends, each with what the parts before it left.
SHARES = {SINGLE: 0.15, BATCH: 0.35, EDITS: 0.55, "ttft": 0.68, "sweep": 0.85, "weights": 0.87}


class Bench:
    """One model and what is measured on it."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.clock, self.found = options, Clock(options.seconds), Found()
        self.folder = resolve_model(options.model)
        self.shared: dict[str, Any] = {"dtype": "bf16", "device": device, "prefix_cache": False}
        self.shared["kv_tokens"] = CASE_KV_TOKENS
        self.plain = self._llm(self.folder, speculate="off")
        self.target = self.plain.target
        self.source = PromptSource(self.plain, options.tokens)
        self.draft = None
        if options.draft is not None:
            self.draft = load_draft_model(options.draft, self.target, dtype="bf16", device=device)
        if not self.source.has_text:
            self.left_out("text: the model has no tokenizer: prompts are random tokens")

    def left_out(self, line: str) -> None:
        """Say what is not measured, and why."""
        self.found.left_out.append(line)

    def run(self) -> None:
        """All parts that were asked for."""
        parts = self.options.parts
        if "cases" in parts:
            self._run_beside_peers()
        if "sweep" in parts:
            self._run_sweep()
        if "weights" in parts:
            self._run_weights()

    def _run_beside_peers(self) -> None:
        options = self.options
        peers, missing = open_peers(
            self.folder,
            torch.bfloat16,
            self.target.device,
            torch.get_num_threads(),
            python=options.peers_python,
            llama_server=options.llama_server,
            assistant=options.assistant,
            only=options.peers,
        )
        try:
            self.found.peers = {peer.name: dict(peer.facts) for peer in peers}
            for name, reason in missing.items():
                self.left_out(f"peer {name}: {reason}")
            self._run_cases(peers)
        finally:
            close_peers(peers)
        reasons = {name: f"{name} did not run: {reason}" for name, reason in missing.items()}
        self.found.unjudged = engine_cases.unjudged(self.found.cases, reasons)
        self.found.unjudged += engine_ttft.unjudged(self.found.first, reasons)

    def _run_cases(self, peers: Sequence[Peer]) -> None:
        """Ours and the peers in turn, then first tokens."""
        options, found = self.options, self.found
        sides = self._our_sides()
        theirs = [peer_side(peer, mode) for peer in peers for mode in MODES if mode in peer.modes]
        for case in self._cases():
            limits = (self.clock, SHARES[case.name], found.left_out)
            found.cases.append(
                engine_cases.measure(
                    case, [*sides, *theirs], options.tokens, options.rounds, *limits
                )
            )
            self._name_missing_modes(case, peers)
        beside = [sides[0], *[side for side in theirs if side.mode == "plain"]]
        for length in sorted({min(length, self.source.room) for length in (SHORT, LONG)}):
            count, num_peer = options.ttft_short if length <= SHORT else options.ttft_long
            prompts = self.source.windows(length, count)
            limits = (self.clock, SHARES["ttft"], found.left_out)
            found.first.append(engine_ttft.measure(prompts, beside, num_peer, *limits))

    def _our_sides(self) -> list[Side]:
        """Without drafts, with fixed numbers of drafts from text, and as the engine chooses."""
        sides = [our_side("plain", self.plain, speculate=False)]
        for name in ("ngram", "suffix"):
            llm = self._llm(self.target, speculate=name, k=FIXED_DRAFTS)
            sides.append(our_side(f"{name} k={FIXED_DRAFTS}", llm, has_drafts=True))
        sides.append(our_side("auto", self._llm(self.target), has_drafts=True))
        if self.draft is not None:
            llm = self._llm(self.target, self.draft)
            sides.append(our_side("auto with draft", llm, has_drafts=True))
        return sides

    def _cases(self) -> list[Case]:
        """What other engines do too."""
        edits = [[prompt] for prompt in self.source.edits(self.options.edits)]
        return [
            Case(SINGLE, [[self.source.text(SHORT)]]),
            Case(BATCH, [self.source.chat(16)], ("plain", "continuous")),
            Case(EDITS, edits, ("plain", "lookup", "assisted"), has_drafts=True),
        ]

    def _name_missing_modes(self, case: Case, peers: Sequence[Peer]) -> None:
        for mode in case.modes:
            names = [peer.name for peer in peers if mode not in peer.modes]
            if names:
                more = " (--assistant)" if mode == "assisted" else ""
                self.left_out(f"{case.name}: {mode}{more}: not a mode of {', '.join(names)} here")

    def _run_sweep(self) -> None:
        """By batch, drafter and draft length."""
        options, found = self.options, self.found
        plan = SweepPlan(
            options.batches,
            options.lengths,
            options.drafters,
            options.alphas,
            options.tokens,
            options.rounds,
            options.prompts,
            options.text,
        )
        sweep = Sweep(self.target, self.source, plan, self.draft, self.clock, found.left_out)
        found.cells, found.times = sweep.run(SHARES["sweep"]), sweep.times

    def _run_weights(self) -> None:
        """Quantised weights."""
        prompt, options = self.source.text(SHORT), {**self.shared, "speculate": "off"}
        for weights in engine_weights.AIMS:
            if self.clock.is_past(SHARES["weights"]):
                self.left_out(f"{weights} weights: out of time")
                continue
            counts = (self.options.tokens, self.options.rounds)
            row = engine_weights.measure(self.plain, weights, prompt, *counts, options)
            self.found.weights.append(row)

    def _llm(self, *models: Any, **options: Any) -> LLM:
        llm = LLM(*models, **self.shared, **options)
        if llm.target.device.type == "cuda":
            llm.engine.warm_up()
        return llm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, 1 where our output is wrong."""
    options = parse(arguments)
    device = torch.device(options.device)
    facts = header(device)
    print_header(facts)
    bench = Bench(options, device)
    try:
        bench.run()
    except GateError as error:
        print(f"FAIL  {error}")
        print(json.dumps({"bench": "engine", **facts, "error": str(error), "figures": []}))
        return 1
    eos_ids = bench.target.config.eos_token_ids
    show(bench.found, eos_ids)
    result = document(bench.found, options, facts, eos_ids)
    folder = results_folder(device) if options.out is None else options.out
    stem = folder / f"engine-{bench.folder.name if options.model != 'demo' else 'demo'}-bf16"
    write_json(stem.with_name(f"{stem.name}.json"), result)
    for path in save_charts(stem, bench.found.cells, bench.found.first, facts):
        print(f"chart  {path}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
