"""The engine by batch, drafter and draft length: speeds, latencies, acceptance, and predictions.

A batch is decoded in groups of its size, all requests of a group at once. Speed-up is of steps in
which all rows of the batch decode, over those without drafts (k=0, the control) in the same round.
Outputs of all cells of a batch must be the same tokens, or nothing is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedraft.bench.engine_calibrate import WrongDrafter, new_tokens, step_times
from pagedraft.bench.engine_cell import AUTO, PLAIN, Cell
from pagedraft.bench.engine_prompts import PromptSource
from pagedraft.bench.engine_runs import Clock, Prompts, Run, check_same, in_groups, our_side
from pagedraft.bench.engine_steps import StepLog, StepTimes
from pagedraft.bench.synthetic import SyntheticDrafter
from pagedraft.decoding.controller import MAX_DRAFTS
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM

TOKEN_BUDGET = 2048  # a step's: prompts of a batch are read in few steps, so that rows run together
BLOCK, WARM_TOKENS = 64, 8


@dataclass(frozen=True)
class SweepPlan:
    """What is measured. lengths: drafts a row, PLAIN first; AUTO lets the controller choose.

    alphas: acceptances of synthetic drafters. kind: of prompts, see engine_prompts.py.
    num_prompts: the least number of a batch; more where the batch is larger. repeats: of step times
    """

    batches: Sequence[int]
    lengths: Sequence[int | str]
    drafters: Sequence[str]
    alphas: Sequence[float]
    num_tokens: int
    rounds: int
    num_prompts: int
    kind: str = "mixed"
    repeats: int = 10

    @property
    def fixed(self) -> list[int]:
        """The lengths that are numbers, in order."""
        return sorted(k for k in self.lengths if isinstance(k, int))

    @property
    def calibrated(self) -> list[int]:
        """The lengths whose step times are measured."""
        return self.fixed + [MAX_DRAFTS] * (AUTO in self.lengths and self.fixed[-1] < MAX_DRAFTS)


@dataclass
class Engines:
    """Two engines with a drafter of their own: AUTO must know only what it has seen itself."""

    fixed: LLM
    auto: LLM
    log: StepLog = field(default_factory=StepLog)

    def __post_init__(self) -> None:
        for llm in (self.fixed, self.auto):
            llm.engine.observers.append(self.log)

    def run(self, groups: Sequence[Prompts], num_tokens: int, k: int | str) -> Run:
        """Decode all groups with ``k`` drafts a row; the steps are in the log."""
        self.log.begin(len(groups[0]))
        llm = self.auto if k == AUTO else self.fixed
        changes = {"speculate": k != PLAIN, "k": None if k == AUTO else k}
        return in_groups(our_side("sweep", llm, **changes), groups, num_tokens)


class Sweep:
    """Measures a plan on one model. outputs: of each batch, without drafts; times: of its steps."""

    def __init__(
        self,
        target: Transformer,
        source: PromptSource,
        plan: SweepPlan,
        draft: Transformer | None,
        clock: Clock,
        left_out: list[str],
    ) -> None:
        self.target, self.plan, self.draft = target, plan, draft
        self.clock, self.left_out = clock, left_out
        self.groups = {batch: self._groups(source, batch) for batch in plan.batches}
        self.outputs: dict[int, list[list[int]]] = {}
        self.times: dict[int, StepTimes] = {}
        self.cells: list[Cell] = []

    def run(self, share: float) -> list[Cell]:
        """Measure everything that fits into ``share`` of the clock."""
        self._calibrate(share)
        for name, alpha in self._drafters():
            engines = None
            for batch in self.times:
                if self.clock.is_past(share):
                    self.left_out.append(f"batch {batch}, {name}: out of time")
                    continue
                engines = engines or self._engines(name, alpha)
                self._measure(batch, name, alpha, engines)
        return self.cells

    def _calibrate(self, share: float) -> None:
        """Outputs without drafts, which the gate and synthetic drafters need, and step times."""
        plain = self._llm(speculate="off")
        wrong = self._llm(drafter=WrongDrafter(0), k=0)
        log = StepLog()
        wrong.engine.observers.append(log)
        for batch, groups in self.groups.items():
            if self.clock.is_past(share):
                self.left_out.append(f"batch {batch}: out of time")
                continue
            self._record_outputs(plain, batch)
            lengths, repeats = self.plan.calibrated, self.plan.repeats
            times = step_times(wrong, log, groups[0], lengths, repeats)
            if times is None:
                self.left_out.append(f"batch {batch}: no step in which all rows decode")
                continue
            self.times[batch] = times

    def _record_outputs(self, plain: LLM, batch: int) -> None:
        """Decode without drafts. GateError if a prompt of another batch gets other tokens here."""
        groups = self.groups[batch]
        run = in_groups(our_side("control", plain), groups, self.plan.num_tokens)
        known = {tuple(prompt): output for prompt, output in self._continuations()}
        pairs = zip(_flat(groups), run.token_ids, strict=True)
        expected = [known.get(tuple(prompt), output) for prompt, output in pairs]
        check_same(f"a batch of {batch}", expected, run.token_ids)
        self.outputs[batch] = run.token_ids

    def _measure(self, batch: int, name: str, alpha: float | None, engines: Engines) -> None:
        """All lengths of one batch and drafter, in an order that rotates."""
        lengths = list(self.plan.lengths)
        cells = {k: Cell(batch, name, k, alpha) for k in lengths}
        groups, longest = self.groups[batch], self.plan.fixed[-1]
        for k in {AUTO, longest}.intersection(lengths):  # nothing that is counted: a warm-up
            engines.run(groups[:1], min(WARM_TOKENS, self.plan.num_tokens), k)
        for index in range(self.plan.rounds):
            first = index % len(lengths)
            for k in (*lengths[first:], *lengths[:first]):
                run = engines.run(groups, self.plan.num_tokens, k)
                check_same(cells[k].name, self.outputs[batch], run.token_ids)
                cells[k].add(run, engines.log.steps)
        for cell in cells.values():
            cell.finish(cells[PLAIN], cells[longest], self.times[batch])
        self.cells += cells.values()
        short = [str(k) for k, cell in cells.items() if not cell.speedups]
        if short:
            self.left_out.append(
                f"batch {batch}, {name}: speed-up of k={', '.join(short)}: no step in which all "
                "rows decode"
            )

    def _drafters(self) -> list[tuple[str, float | None]]:
        """Names and, of synthetic ones, acceptances."""
        names: list[tuple[str, float | None]] = []
        for name in self.plan.drafters:
            if name == "draft" and self.draft is None:
                self.left_out.append("drafter draft: there is no draft model (--draft)")
                continue
            names.append((name, None))
        return names + [(f"SYNTHETIC {alpha:.2f}", alpha) for alpha in self.plan.alphas]

    def _engines(self, name: str, alpha: float | None) -> Engines:
        options: dict[str, Any] = {"speculate": name}
        if name == "draft":
            options["draft"] = self.draft
        if alpha is not None:
            options = {"drafter": SyntheticDrafter(self._continuations(), alpha)}
        return Engines(self._llm(k=max(1, self.plan.fixed[-1]), **options), self._llm(**options))

    def _continuations(self) -> list[tuple[list[int], list[int]]]:
        """Every prompt with its output."""
        return [
            pair
            for batch, outputs in self.outputs.items()
            for pair in zip(_flat(self.groups[batch]), outputs, strict=True)
        ]

    def _groups(self, source: PromptSource, batch: int) -> list[Prompts]:
        """Prompts in groups of the batch's size."""
        count = batch * max(1, -(-self.plan.num_prompts // batch))
        prompts = source.of_kind(self.plan.kind, count)
        return [prompts[i : i + batch] for i in range(0, count, batch)]

    def _llm(self, **options: Any) -> LLM:
        most = max(self.plan.batches)
        llm = LLM(
            self.target,
            prefix_cache=False,
            max_rows=most,
            token_budget=max(TOKEN_BUDGET, most * (1 + MAX_DRAFTS)),
            kv_tokens=self._kv_tokens(),
            **options,
        )
        if self.target.device.type == "cuda":
            llm.engine.warm_up()
        return llm

    def _kv_tokens(self) -> int:
        """Room for the largest group, all of it at once, with all drafts."""
        more = max(
            self.plan.num_tokens + MAX_DRAFTS,
            new_tokens(self.plan.calibrated, self.plan.repeats),
        )
        sizes = [
            sum(-(-(len(prompt) + more) // BLOCK) * BLOCK for prompt in group)
            for groups in self.groups.values()
            for group in groups
        ]
        return max(sizes)


def _flat(groups: Sequence[Prompts]) -> list[list[int]]:
    return [prompt for group in groups for prompt in group]
