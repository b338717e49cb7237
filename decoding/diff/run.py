"""Run one prompt on two sides in lockstep and find where they part.

Both sides are fed A's tokens: the prompt in chunks, then one token a step. B runs each step twice:
as it is, its errors carried along, for the tokens it would draw; and isolated (side.py), each stage
starting from A's results, so that the first stage beyond its tolerance is itself at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pagedraft.decoding.diff.compare import Difference, compare, compare_stages, tolerance_of
from pagedraft.decoding.diff.remote import ROOT, RemoteRunner, checked_out
from pagedraft.decoding.diff.report import (
    STAGE_OPS,
    USED_OPS,
    Finding,
    Report,
    TokenDifference,
)
from pagedraft.decoding.diff.side import Feed, Result, Runner, Side, Stage, load_side
from pagedraft.decoding.load import resolve_device
from pagedraft.decoding.params import SamplingParams, check_int
from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.model.transformer import Transformer

AnyRunner = Runner | RemoteRunner
IMPLEMENTATIONS = ("ref", "triton", "cpu")


@dataclass(frozen=True)
class Work:
    """What both sides run.

    token_ids: the prompt; max_tokens, temperature, seed: as in SamplingParams, and checked there.
    stop_ids: tokens of A that end the run.
    chunk_tokens: the prompt is fed in pieces of at most so many tokens.
    tolerance: replaces every stage's own.
    """

    token_ids: list[int]
    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    chunk_tokens: int = 512
    tolerance: float | None = None

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)
        check_int("chunk_tokens", self.chunk_tokens, 1)
        if not self.token_ids:
            raise ValueError("prompt: expected at least one token, got none")
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(f"tolerance: expected a number > 0, got {self.tolerance}")

    def check_fits(self, vocab_size: int, max_positions: int) -> None:
        """Raise ValueError unless a model of these sizes can run it."""
        bad = next((token for token in self.token_ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompt: expected token ids from 0 to {vocab_size - 1}, got {bad}")
        if self.max_length > max_positions:
            raise ValueError(
                f"prompt: {len(self.token_ids)} tokens and {self.max_tokens} more do not fit the "
                f"model's {max_positions} positions"
            )

    @property
    def max_length(self) -> int:
        return len(self.token_ids) + self.max_tokens


def find_divergence(a: Side, b: Side, work: Work, *, root: Path = ROOT) -> Report:
    """Run ``work`` on both sides and report where they part.

    root: the git repository of the sides' revisions. Raises ValueError for a side that cannot run
    here, for models of different shapes, and for a revision that cannot be compared.
    """
    check_side("A", a)
    check_side("B", b)
    with _runners(a, b, work, root) as (runner_a, runner_b):
        return _Comparison(runner_a, runner_b, work).run()


def check_side(label: str, side: Side) -> None:
    """Raise ValueError for swaps that this run or this machine cannot make."""
    if side.rev is not None and isinstance(side.model, Transformer):
        raise ValueError(f"{label}: a revision loads its own model, got a loaded one")
    device = (
        side.model.device
        if isinstance(side.model, Transformer)
        else resolve_device(side.options.get("device", "auto"))
    )
    for op, choice in side.swaps.items():
        if op not in USED_OPS:
            raise ValueError(f"{label}: swap {op!r}: expected one of {list(USED_OPS)}")
        if choice not in IMPLEMENTATIONS:
            raise ValueError(
                f"{label}: swap {op}={choice}: expected one of {list(IMPLEMENTATIONS)}"
            )
        if choice == "triton" and device.type == "cpu" and not INTERPRETED:
            raise ValueError(
                f"{label}: swap {op}=triton: Triton needs a CUDA device, or the interpreter "
                "(TRITON_INTERPRET=1)"
            )
        if choice == "cpu" and device.type != "cpu":
            raise ValueError(f"{label}: swap {op}=cpu: the CPU path takes no {device} tensors")


@contextmanager
def _runners(a: Side, b: Side, work: Work, root: Path) -> Iterator[tuple[AnyRunner, AnyRunner]]:
    """Both sides' runners; one model serves both where they would load the same."""
    with ExitStack() as stack:
        run = (work.max_length, work.temperature, work.seed)
        runners: list[AnyRunner] = []
        shared: Runner | None = None
        for side in (a, b):
            if side.rev is not None:
                tree, folder = stack.enter_context(checked_out(side.rev, root))
                runner: AnyRunner = RemoteRunner(side, tree, folder, *run)
            else:
                is_same = shared is not None and _loads_alike(shared.side, side)
                model = shared.model if shared is not None and is_same else load_side(side)
                config = model.config
                work.check_fits(config.vocab_size, config.max_positions)
                runner = shared = Runner(side, model, *run)
            stack.callback(runner.close)
            runners.append(runner)
        yield runners[0], runners[1]


def _loads_alike(a: Side, b: Side) -> bool:
    def packing(side: Side) -> str | None:
        return next((c for c in (side.swaps.get("linear"),) if c in ("cpu", "triton")), None)

    return (a.model, a.options, packing(a)) == (b.model, b.options, packing(b))


@dataclass
class _Comparison:
    """One run of ``work`` on two runners."""

    a: AnyRunner
    b: AnyRunner
    work: Work
    report: Report = field(default_factory=Report)

    def run(self) -> Report:
        if self.a.shape != self.b.shape:
            raise ValueError(f"models: A has the sizes {self.a.shape}, B {self.b.shape}")
        pending, start = self.work.token_ids, 0
        for index in range(self.work.max_tokens):
            for feed in self._feeds(pending, start):
                self._step(feed, index)
            start += len(pending)
            token = self.report.a_ids[-1]
            if token < 0 or token in self.work.stop_ids:
                break
            pending = [token]
        return self.report

    def _feeds(self, tokens: list[int], start: int) -> Iterator[Feed]:
        """``tokens`` in chunks, the last of which wants logits."""
        size = self.work.chunk_tokens
        for first in range(0, len(tokens), size):
            is_last = first + size >= len(tokens)
            yield Feed(tokens[first : first + size], start + first, num_logits=int(is_last))

    def _step(self, feed: Feed, index: int) -> None:
        a = self.a.step(feed)
        carried = self.b.step(replace(feed, only_logits=True))
        isolated = self.b.step(replace(feed, isolated=True, inputs=a.stages))
        if len(a.stages) != len(isolated.stages):
            raise ValueError(f"stages: A has {len(a.stages)}, B {len(isolated.stages)}")
        for pair in zip(a.stages, isolated.stages, strict=True):
            self._compare_stage(feed, index, a, *pair)
        if feed.num_logits:
            self._compare_tokens(feed, index, a, carried)
            self._compare_draws(feed, index, a, isolated)

    def _compare_stage(self, feed: Feed, index: int, a: Result, own: Stage, other: Stage) -> None:
        report = self.report
        report.num_stages += 1
        difference = compare_stages(own, other)
        if difference is None:
            report.num_equal += 1
            return
        tolerance = self.work.tolerance or tolerance_of(own, self.a.formats, self.b.formats)

        def found(is_row_R: torch.Tensor) -> Finding:
            row = int(is_row_R.int().argmax())  # the first
            position = feed.start + len(feed.tokens) - len(is_row_R) + row
            return _finding(own, difference, index, position, tolerance)

        finding = found(difference.error_R > tolerance)
        report.note(finding)
        if report.first_bit is None:
            first = found(difference.differs_R)
            report.first_bit = replace(first, ops=self._blame(feed, a, own, 0.0))
        if report.first_error is None and finding.is_beyond:
            report.first_error = replace(finding, ops=self._blame(feed, a, own, tolerance))

    def _blame(self, feed: Feed, a: Result, stage: Stage, tolerance: float) -> tuple[str, ...]:
        """The ops of ``stage`` whose reference on both sides brings its error to ``tolerance``."""
        ops = STAGE_OPS.get(stage.name, ())
        if len(ops) <= 1:
            return ops
        again = replace(feed, inputs=a.stages)
        guilty = []
        for op in ops:
            with_reference = replace(again, references=(op,))
            results = (
                self.a.step(with_reference),
                self.b.step(replace(with_reference, isolated=True)),
            )
            pair = [_stage_of(result, stage) for result in results]
            difference = compare_stages(*pair)
            if difference is None or float(difference.error_R.max()) <= tolerance:
                guilty.append(op)
        self.a.step(again)  # leaves in the pools what was there before
        self.b.step(replace(again, isolated=True))
        return tuple(guilty) or ops

    def _compare_tokens(self, feed: Feed, index: int, a: Result, b: Result) -> None:
        report = self.report
        assert a.token is not None
        assert b.token is not None
        logits_1V, other_1V = (result.stages[-1].parts["rows"] for result in (a, b))
        difference = compare(logits_1V, other_1V)
        error = 0.0 if difference is None else difference.max_abs
        report.logit_error = max(report.logit_error, error)
        report.a_ids.append(a.token)
        report.b_ids.append(b.token)
        if a.token != b.token and report.first_token is None:
            best, second = logits_1V[0].topk(2).values.tolist()
            position = feed.start + len(feed.tokens)
            report.first_token = TokenDifference(
                index, position, a.token, b.token, best - second, error
            )

    def _compare_draws(self, feed: Feed, index: int, a: Result, isolated: Result) -> None:
        """Tokens drawn from the same logits: only ``sample`` can part them, and must not."""
        if a.token == isolated.token:
            return
        drawn = Stage(a.stages[-1].layer, "draw", {})
        no_row = torch.zeros(1)
        difference = Difference(no_row, no_row + torch.inf, "", torch.inf, None, None)
        finding = _finding(drawn, difference, index, feed.start + len(feed.tokens), 0.0)
        self.report.note(finding)
        self.report.first_bit = self.report.first_bit or finding
        self.report.first_error = self.report.first_error or finding


def _finding(
    stage: Stage, difference: Difference, token: int, position: int, tolerance: float
) -> Finding:
    return Finding(
        token=token,
        position=position,
        layer=stage.layer,
        stage=stage.name,
        ops=STAGE_OPS.get(stage.name, ()),
        error=float(difference.error_R.max()),
        tolerance=tolerance,
        max_abs=difference.max_abs,
        ulps=difference.ulps,
        max_ulps=difference.max_ulps,
        nan=difference.nan,
    )


def _stage_of(result: Result, wanted: Stage) -> Stage:
    return next(stage for stage in result.stages if stage[:2] == wanted[:2])
