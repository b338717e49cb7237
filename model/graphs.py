"""GraphRunner: the steps of one model, replayed from CUDA graphs where a captured shape holds them.

A step is padded to a captured shape (padding.py, graph_shapes.py), its inputs go to the device in
one copy from pinned memory, and one launch replays the forward pass. The bits are those of the
step run by itself: what is in a row never depends on what is beside it, and what a launch chooses
from sizes changes no sum. Steps that no shape holds run launch by launch: prompt chunks, and steps
whose rows share so many keys that reading them once pays for that.

All tokens of a captured shape have logits: few rows more through the head cost less than another
graph. What is drawn from them is no part of the graph.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any, NamedTuple

import torch

from pagedraft.kernels.paged_attention_launch import SharedPrefixes
from pagedraft.model.batch import StepBatch
from pagedraft.model.config import ModelConfig
from pagedraft.model.graph_shapes import AttentionChoices, GraphLimits, graph_shapes
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.padding import (
    PackedSizes,
    StepShape,
    empty_batch,
    fill_padded,
    packed_batch,
    shape_of_batch,
)
from pagedraft.model.staging import Staging
from pagedraft.model.transformer import Transformer

logger = logging.getLogger(__name__)

# Bytes of a layer's shared keys that reading once would save, from where a step runs without a
# graph. A model, not a measurement: at 4 TB/s they take the 100 us that a layer's launches would.
EAGER_SHARED_BYTES = 400 << 20

Progress = Callable[[int, int, StepShape], None]  # (how many are done, of how many, the shape)
Run = Callable[[], None]
Capture = Callable[[Run], Run]  # from a function to what runs its launches again


class CudaCapture:
    """Captures into CUDA graphs that share one pool of memory; they must not run at once."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        """Run ``run`` outside a graph, for what the first call sets up, then capture it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # The outer context brings the caller's stream back, also where a capture fails.
        with torch.cuda.stream(self.stream):
            run()
            options: dict[str, Any] = {"pool": self.pool, "stream": self.stream}
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
                run()
        return graph.replay


class Recorded(NamedTuple):
    """A captured shape: its inputs on the device, and what runs it."""

    shape: StepShape
    inputs: StepBatch
    replay: Run


class GraphRunner:
    """Takes the place of ``target.forward``; on a CPU it is that and nothing else.

    limits: the largest step that is captured. table_RM: the persistent block table whose views the
        steps bring (row_table.py), at least [max_rows, blocks of max_kv_len]; None: each step
        brings one of its own, which is copied.
    capture: how launches are captured; None: CUDA graphs on a CUDA device, else not at all.

    Nothing is captured before ``capture_all``. Logits are views of memory that all graphs share,
    [tokens of the largest shape, V] fp32: read or copy them before the next step of this runner.
    """

    def __init__(
        self,
        target: Transformer,
        cache: KVCache,
        limits: GraphLimits,
        *,
        table_RM: torch.Tensor | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.target = target
        self.cache = cache
        self.table_RM = table_RM
        if capture is None and target.device.type == "cuda":
            capture = CudaCapture(target.device)
        self._capture = capture
        self._num_columns = -(-limits.max_kv_len // cache.block_size)
        self.shapes: list[StepShape] = []
        if capture is not None:
            self.shapes = graph_shapes(limits, AttentionChoices(target, cache))
        self._check_table(limits)
        self.failed: list[StepShape] = []
        self._recorded: list[Recorded] = []
        self._axes: list[list[int]] = []
        self._known: dict[tuple[int, ...], Recorded | None] = {}
        self._staging: Staging | None = None
        self._logits_TV: torch.Tensor | None = None
        self._token_bytes = 2 * cache.k[0][0, :, 0].numel() * cache.k[0].element_size()
        self.num_replays = 0
        self.num_eager = 0

    @property
    def device(self) -> torch.device:
        """The model's; with ``config`` and ``row_multiple`` what a caller of ``forward`` asks."""
        return self.target.device

    @property
    def config(self) -> ModelConfig:
        return self.target.config

    @property
    def row_multiple(self) -> int:
        return self.target.row_multiple

    @property
    def captured(self) -> list[StepShape]:
        """The shapes that are captured."""
        return [recorded.shape for recorded in self._recorded]

    def capture_all(self, progress: Progress | None = None) -> int:
        """Capture every shape that is not yet captured, largest first; return how many there are.

        A shape whose capture fails, as for want of memory, runs without a graph from then on; a
        warning names it.
        """
        if self._capture is None:
            return 0
        if self._staging is None:
            most = max(self._sizes(shape).num_bytes for shape in self.shapes)
            self._staging = Staging(most, self.device)
            size = self.shapes[0].num_tokens, self.config.vocab_size
            self._logits_TV = torch.empty(size, device=self.device)
        tried = {*self.captured, *self.failed}
        missing = [shape for shape in self.shapes if shape not in tried]
        for index, shape in enumerate(missing):
            self._record(shape)
            if progress is not None:
                progress(index + 1, len(missing), shape)
        self._recorded.sort(key=lambda recorded: recorded.shape)
        sizes = zip(*(astuple(shape) for shape in self.captured), strict=True)
        self._axes = [sorted(set(axis)) for axis in sizes]
        self._known.clear()
        return len(self._recorded)

    def forward(self, batch: StepBatch, cache: KVCache | None = None) -> torch.Tensor:
        """The fp32 logits [num_logits, V] of a step, as ``Transformer.forward`` returns them.

        batch: with tensors on the device or, which saves copies, on the host. cache: the runner's.
        """
        self._check_cache(cache)
        recorded = self._pick(batch)
        if recorded is None:
            self.num_eager += 1
            return self.target.forward(on_device(batch, self.device), self.cache)
        return self._replay(recorded, batch)

    def _check_cache(self, cache: KVCache | None) -> None:
        if cache is not None and cache is not self.cache:
            raise ValueError("cache: expected the one that the runner was made for")

    def _replay(self, recorded: Recorded, batch: StepBatch) -> torch.Tensor:
        """Run a step from a graph; its logits."""
        self.num_replays += 1
        self._feed(recorded, batch)
        recorded.replay()
        assert self._logits_TV is not None
        if batch.num_logits in (0, batch.num_tokens):
            return self._logits_TV[: batch.num_logits]
        return self._logits_TV[recorded.inputs.logit_rows_Q[: batch.num_logits]]

    def _check_table(self, limits: GraphLimits) -> None:
        table_RM = self.table_RM
        if table_RM is None:
            return
        least = (limits.max_rows, self._num_columns)
        if table_RM.ndim != 2 or table_RM.shape[0] < least[0] or table_RM.shape[1] < least[1]:
            raise ValueError(
                f"table_RM: expected at least {least[0]} rows and {least[1]} columns, "
                f"got {tuple(table_RM.shape)}"
            )
        if table_RM.dtype != torch.int32 or table_RM.stride(1) != 1:
            raise ValueError(
                f"table_RM: expected int32 rows without gaps, got {table_RM.dtype}, "
                f"strides {table_RM.stride()}"
            )

    def _sizes(self, shape: StepShape) -> PackedSizes:
        num_columns = -(-shape.max_kv_len // self.cache.block_size)
        return PackedSizes(shape, shape.num_tokens, 0 if self.table_RM is not None else num_columns)

    def _record(self, shape: StepShape) -> None:
        staging, sizes = self._staging, self._sizes(shape)
        assert staging is not None
        assert self._capture is not None
        assert self._logits_TV is not None
        table_RM = None if self.table_RM is None else self._own_table(shape)
        inputs = packed_batch(staging.device_x[: sizes.num_bytes], sizes, table_RM)
        empty = empty_batch(shape, shape.num_tokens, 1, self.device)
        fill_padded(inputs, empty, with_table=table_RM is None)
        run = self._pass_of(shape, inputs, self._logits_TV[: shape.num_tokens])
        try:
            self._recorded.append(Recorded(shape, inputs, self._capture(run)))
        except RuntimeError as error:  # also torch.OutOfMemoryError
            self.failed.append(shape)
            reason = str(error).partition("\n")[0]
            logger.warning("no CUDA graph for %s: %s", shape, reason)

    def _pass_of(self, shape: StepShape, inputs: StepBatch, logits_TV: torch.Tensor) -> Run:
        """What is captured: from the inputs to the logits."""

        def run() -> None:
            logits_TV.copy_(self.target.forward(inputs, self.cache))

        return run

    def _own_table(self, shape: StepShape) -> torch.Tensor:
        assert self.table_RM is not None
        return self.table_RM[: shape.num_rows, : -(-shape.max_kv_len // self.cache.block_size)]

    def _pick(self, batch: StepBatch) -> Recorded | None:
        """The captured shape that pads a step least: in tokens, then rows, spans, contexts."""
        if not self._recorded or not self._brings_own_table(batch):
            return None
        if batch.shared is not None and self._saves_much(batch.shared):
            return None
        step = shape_of_batch(batch)
        places = tuple(map(bisect_left, self._axes, astuple(step)))
        if places not in self._known:
            holding = (recorded for recorded in self._recorded if recorded.shape.holds(step))
            self._known[places] = next(holding, None)
        return self._known[places]

    def _brings_own_table(self, batch: StepBatch) -> bool:
        """Whether a step's block table is where the graphs read it."""
        if self.table_RM is None:
            return True
        table_RM = batch.block_table_RM
        return table_RM.data_ptr() == self.table_RM.data_ptr() and table_RM.stride(
            0
        ) == self.table_RM.stride(0)

    def _saves_much(self, shared: SharedPrefixes) -> bool:
        return shared.num_saved_keys * self._token_bytes >= EAGER_SHARED_BYTES

    def _feed(self, recorded: Recorded, batch: StepBatch) -> None:
        """Put a step's inputs where the graph reads them."""
        assert self._staging is not None
        with_table = self.table_RM is None
        if batch.tokens_T.device.type == self.device.type != "cpu":
            fill_padded(recorded.inputs, batch, with_table=with_table)
            return
        sizes = self._sizes(recorded.shape)
        with self._staging.host(sizes.num_bytes) as memory_x:
            fill_padded(packed_batch(memory_x, sizes, None), batch, with_table=with_table)


def on_device(batch: StepBatch, device: torch.device) -> StepBatch:
    """The step with all its tensors on ``device``; the same step if they are there."""

    def moved(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value.to(device, non_blocking=True)
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value.device.type != device.type
        }

    changes = moved(vars(batch))
    if batch.shared is not None:
        changes["shared"] = batch.shared._replace(**moved(batch.shared._asdict()))
    return replace(batch, **changes) if changes else batch
