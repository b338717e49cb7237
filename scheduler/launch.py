"""A step on the device: block copies, the forward pass, draws and verdict. Nothing waits here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.span_draws import SpanDraws
from pagedraft.decoding.verify import Verification, start_verification
from pagedraft.kernels.copy_blocks import copy_blocks
from pagedraft.model.batch import StepBatch
from pagedraft.model.graphs import GraphRunner
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.graph_runners import graph_runners
from pagedraft.scheduler.logprobs import raw_logits
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.rows import Rows, Step
from pagedraft.scheduler.warm_up import Progress, WarmUpReport, warm_up

if TYPE_CHECKING:
    from pagedraft.scheduler.engine import Engine

Forward = Callable[[StepBatch, KVCache], torch.Tensor]


@dataclass(frozen=True)
class Launched:
    """A pass under way.

    raw: copies of logits that verification changes and whose values are to be reported.
    verification: None where no row ends in a draw.
    """

    step: Step
    logits_QV: torch.Tensor
    raw: Mapping[Request, torch.Tensor]
    verification: Verification | None

    def logits_of(self, index: int) -> torch.Tensor:
        """Logits of a sampled row's span, [drafts + 1, V], as the model gave them."""
        request = self.step.sampled[index]
        if request in self.raw:
            return self.raw[request]
        return self.logits_QV[self._starts[index] : self._starts[index + 1]]

    @cached_property
    def _starts(self) -> list[int]:
        """Where the logits of each sampled row begin, and where those of the last one end."""
        lengths = (len(proposal.tokens) + 1 for proposal in self.step.proposals)
        return [0, *accumulate(lengths)]

    def read(self) -> list[list[int]]:
        """Wait for the tokens of each sampled row: accepted drafts and one more."""
        return [] if self.verification is None else self.verification.read()


class Launcher:
    """Launches the steps of one engine.

    forward: what runs in place of ``target.forward``, such as captured graphs of it; None: itself.
    """

    def __init__(self, target: Transformer, caches: Seq[KVCache], rows: Rows) -> None:
        self.forward: Forward | None = None
        self._runners: list[GraphRunner] = []
        self._target = target
        self._caches = list(caches)
        self._rows = rows
        self._draws = SpanDraws()

    def warm_up(self, engine: Engine, progress: Progress | None) -> WarmUpReport:
        """See ``Engine.warm_up``. Graphs, where there are any, run the steps from then on."""
        if not self._runners:
            self._runners = graph_runners(engine, self._rows.table_RM)
        report = warm_up(engine, progress, self._runners)
        if self._runners:
            self.forward = self._runners[0].forward
            self._rows.device = torch.device("cpu")  # a runner moves a step in one copy
        return report

    def copy(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in all pools."""
        tensors = [tensor for cache in self._caches for tensor in cache.tensors]
        copy_blocks(tensors, torch.tensor(copies))

    @torch.inference_mode()
    def launch(
        self, scheduled: Mapping[Request, int], proposals: Mapping[Request, Proposal]
    ) -> Launched:
        """Launch the pass of a plan whose drafts are known."""
        step = self._rows.lay_out(scheduled, proposals)
        forward = self.forward or self._target.forward
        logits_QV = forward(step.batch, self._caches[0])
        if not step.sampled:
            return Launched(step, logits_QV, {}, None)
        raw = raw_logits(logits_QV, step.sampled, step.proposals)
        sequences = [request.sequence for request in step.sampled]
        verification = start_verification(logits_QV, sequences, step.proposals, self._draws)
        return Launched(step, logits_QV, raw, verification)
