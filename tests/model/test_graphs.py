"""GraphRunner: replays give the bits of the steps; which shapes are captured, and which are not.

Without a GPU a capture keeps the function and a replay runs it again: on the runner's own inputs,
whatever the step was that they were captured with.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.paged_attention_launch import KVPool, shape_of
from pagedraft.kernels.score_rules import ScoreRules
from pagedraft.model import graphs
from pagedraft.model.batch import Span, StepBatch
from pagedraft.model.graph_shapes import TOKENS, AttentionChoices, GraphLimits, graph_shapes, powers
from pagedraft.model.graphs import CudaCapture, GraphRunner, Run, on_device
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.padding import StepShape, empty_batch, shape_of_batch
from pagedraft.model.transformer import Transformer
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.model.steps import all_logits, blocks_of, filled_cache, random_spans, step
from pagedraft.tests.model.tiny import save_tiny

BLOCK_SIZE = 8
LIMITS = GraphLimits(max_rows=4, max_drafts=3, max_kv_len=64)


class FakeCapture:
    """Keeps what is captured; counts replays; refuses shapes of too many tokens."""

    def __init__(self, most_tokens: int = 10**9) -> None:
        self.most_tokens = most_tokens
        self.order: list[StepShape] = []
        self.num_replays = 0

    def __call__(self, run: Run) -> Run:
        inputs = run.__closure__ and next(
            cell.cell_contents
            for cell in run.__closure__
            if isinstance(cell.cell_contents, StepBatch)
        )
        self.order.append(shape_of_batch(inputs))
        if inputs.num_tokens > self.most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore words")
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama", num_hidden_layers=1)
    return folder


@pytest.fixture
def model(folder, cpu_path) -> Transformer:
    return Transformer.from_folder(folder)


def runner_of(
    model: Transformer, cache: KVCache, capture: FakeCapture | None = None, **options: Any
) -> GraphRunner:
    runner = GraphRunner(model, cache, LIMITS, capture=capture or FakeCapture(), **options)
    runner.capture_all()
    return runner


@pytest.mark.parametrize("logits", ["some", "all", "none"])
@pytest.mark.parametrize("seed", range(8))
def test_replays_have_the_bits_of_the_step(seed, logits, model):
    spans = random_spans(seed, 1 + seed % 4, 1 + seed % 3, block_size=BLOCK_SIZE, context=50)
    other = random_spans(99, 4, 4, block_size=BLOCK_SIZE, context=50)
    if logits == "all":
        spans = all_logits(spans)
    if logits == "none":
        spans = [Span(s.token_ids, s.start, s.block_ids, 0) for s in spans]
    cache = filled_cache(model, max(blocks_of(spans), blocks_of(other)), BLOCK_SIZE)
    saved = [tensor.clone() for tensor in cache.tensors]
    expected = model.forward(step(model, spans, BLOCK_SIZE), cache)
    written = [tensor.clone() for tensor in cache.tensors]
    runner = runner_of(model, cache)
    runner.forward(
        step(model, all_logits(other), BLOCK_SIZE), cache
    )  # what is left must not matter
    for tensor, before in zip(cache.tensors, saved, strict=True):
        tensor.copy_(before)
    result = runner.forward(step(model, spans, BLOCK_SIZE), cache)
    assert runner.num_replays == 2
    assert_same_bits(result, expected)
    for tensor, after in zip(cache.tensors, written, strict=True):
        assert_same_bits(tensor, after)


def test_a_persistent_table_is_read_in_place(model):
    spans = all_logits(random_spans(5, 3, 2, block_size=BLOCK_SIZE, context=50))
    cache = filled_cache(model, blocks_of(spans), BLOCK_SIZE)
    table_RM = torch.full((6, 20), 2**31 - 1, dtype=torch.int32)  # stale entries
    runner = runner_of(model, cache, table_RM=table_RM)
    batch = step(model, spans, BLOCK_SIZE)
    expected = model.forward(batch, cache)
    num_columns = batch.block_table_RM.shape[1]
    for row, span in enumerate(spans):
        table_RM[row, : len(span.block_ids)] = torch.tensor(span.block_ids, dtype=torch.int32)
    view = vars(batch) | {"block_table_RM": table_RM[: len(spans), :num_columns]}
    assert_same_bits(runner.forward(StepBatch(**view), cache), expected)
    assert (runner.num_replays, runner.num_eager) == (1, 0)
    assert_same_bits(runner.forward(batch, cache), expected)  # with a table of its own
    assert (runner.num_replays, runner.num_eager) == (1, 1)


# name: (rows, span) of a step that no shape holds
UNHELD = {"a prompt": (1, 20), "a span beyond the drafts": (2, 5), "many rows": (5, 1)}


@pytest.mark.parametrize("name", UNHELD)
def test_steps_that_no_shape_holds_run_by_themselves(name, model):
    num_rows, length = UNHELD[name]
    spans, block = [], 1
    for _ in range(num_rows):
        spans.append(Span([5] * length, 0, [block, block + 1, block + 2], length))
        block += 3
    cache = filled_cache(model, block, BLOCK_SIZE)
    runner = runner_of(model, cache)
    expected = model.forward(step(model, spans, BLOCK_SIZE), cache)
    assert_same_bits(runner.forward(step(model, spans, BLOCK_SIZE), cache), expected)
    assert (runner.num_replays, runner.num_eager) == (0, 1)


def test_a_context_beyond_the_limit_runs_by_itself(model):
    cache = filled_cache(model, 12, BLOCK_SIZE)
    runner = runner_of(model, cache)
    runner.forward(step(model, [Span([5], 64, range(1, 10), 1)], BLOCK_SIZE), cache)
    assert (runner.num_replays, runner.num_eager) == (0, 1)


@pytest.mark.parametrize(("least", "replays"), [(1, 0), (10**12, 1)])
def test_shared_prefixes_run_by_themselves_where_that_saves_much(
    least, replays, model, monkeypatch
):
    monkeypatch.setattr(graphs, "EAGER_SHARED_BYTES", least)
    model.cos_PR, model.sin_PR = (table.repeat(4, 1) for table in (model.cos_PR, model.sin_PR))
    blocks = list(range(1, 33))
    spans = [Span([5], 256, [*blocks, 33], 1), Span([6], 257, [*blocks, 34], 1)]
    cache = filled_cache(model, 35, BLOCK_SIZE)
    batch = step(model, spans, BLOCK_SIZE)
    assert batch.shared is not None
    runner = GraphRunner(model, cache, GraphLimits(2, 0, 512), capture=FakeCapture())
    runner.capture_all()
    assert_same_bits(runner.forward(batch, cache), model.forward(batch, cache))
    assert runner.num_replays == replays


def test_a_step_takes_the_shape_that_pads_it_least(model):
    cache = filled_cache(model, 4, BLOCK_SIZE)
    runner = runner_of(model, cache)
    for shape in runner.shapes:
        batch = empty_batch(shape, shape.num_tokens, 2, model.device)
        picked = runner._pick(batch)
        assert picked is not None
        assert picked.shape == shape
    one = runner._pick(empty_batch(StepShape(1, 1, 1, 9), 1, 2, model.device))
    assert one is not None
    assert (one.shape.num_tokens, one.shape.num_rows) == (8, 1)


def test_capture_is_largest_first_and_tells_its_progress(model):
    capture, calls = FakeCapture(), []
    runner = GraphRunner(model, filled_cache(model, 3, BLOCK_SIZE), LIMITS, capture=capture)
    assert runner.captured == []
    count = runner.capture_all(lambda *call: calls.append(call))
    assert capture.order == sorted(runner.shapes, reverse=True)
    assert [done for done, _, _ in calls] == list(range(1, count + 1))
    assert {total for _, total, _ in calls} == {count}
    assert set(runner.captured) == set(runner.shapes)
    assert runner.capture_all(lambda *call: calls.append(call)) == count  # nothing is left to do
    assert len(calls) == count


def test_a_capture_that_fails_runs_by_itself_with_one_warning(model, caplog):
    spans = all_logits(random_spans(2, 4, 4, block_size=BLOCK_SIZE, context=50))
    cache = filled_cache(model, blocks_of(spans), BLOCK_SIZE)
    with caplog.at_level(logging.WARNING):
        runner = runner_of(model, cache, FakeCapture(most_tokens=8))
    failed = [shape for shape in runner.shapes if shape.num_tokens > 8]
    runner.capture_all()  # does not try again
    reason = "CUDA out of memory. Tried to allocate 2 GiB"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"no CUDA graph for {shape}: {reason}" for shape in failed]
    batch = step(model, spans, BLOCK_SIZE)
    assert batch.num_tokens > 8
    assert_same_bits(runner.forward(batch, cache), model.forward(batch, cache))
    assert (runner.num_replays, runner.num_eager) == (0, 1)


def test_before_capturing_and_on_a_cpu_steps_run_by_themselves(model):
    spans = random_spans(1, 2, 1, block_size=BLOCK_SIZE, context=20)
    cache = filled_cache(model, blocks_of(spans), BLOCK_SIZE)
    batch = step(model, spans, BLOCK_SIZE)
    plain = GraphRunner(model, cache, LIMITS)
    assert plain.capture_all() == 0
    assert plain.shapes == []
    for runner in (plain, GraphRunner(model, cache, LIMITS, capture=FakeCapture())):
        assert_same_bits(runner.forward(batch, cache), model.forward(batch, cache))
    assert (plain.device, plain.config, plain.row_multiple) == (
        model.device,
        model.config,
        model.row_multiple,
    )


def test_another_cache_is_refused(model):
    runner = runner_of(model, filled_cache(model, 3, BLOCK_SIZE))
    batch = step(model, [Span([5], 0, [1], 1)], BLOCK_SIZE)
    with pytest.raises(ValueError, match="cache: expected the one that the runner was made for"):
        runner.forward(batch, filled_cache(model, 3, BLOCK_SIZE))


BAD_LIMITS = {
    "rows": ((0, 1, 1), "max_rows: expected at least 1, got 0"),
    "drafts": ((1, -1, 1), "max_drafts: expected at least 0, got -1"),
    "context": ((1, 1, 0), "max_kv_len: expected at least 1, got 0"),
    "tokens": ((1, 1, 1, 1000), "max_tokens: expected 1 to 512, got 1000"),
}


@pytest.mark.parametrize("name", BAD_LIMITS)
def test_bad_limits(name):
    args, message = BAD_LIMITS[name]
    with pytest.raises(ValueError, match=message):
        GraphLimits(*args)


BAD_TABLES = {
    "rows": (torch.zeros(3, 20, dtype=torch.int32), "at least 4 rows and 8 columns, got"),
    "columns": (torch.zeros(4, 7, dtype=torch.int32), "at least 4 rows and 8 columns, got"),
    "dtype": (torch.zeros(4, 8), "expected int32 rows without gaps, got torch.float32"),
    "strides": (torch.zeros(8, 4, dtype=torch.int32).T, "expected int32 rows without gaps"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_bad_tables(name, model):
    table_RM, message = BAD_TABLES[name]
    with pytest.raises(ValueError, match=message):
        GraphRunner(model, filled_cache(model, 3, BLOCK_SIZE), LIMITS, table_RM=table_RM)


def choices_of(group: int, dtype: torch.dtype = torch.bfloat16) -> AttentionChoices:
    """Of a model with 8 KV heads of 128 numbers and blocks of 64 tokens."""
    device = torch.device("cpu")
    config = SimpleNamespace(num_heads=8 * group, num_kv_heads=8, head_dim=128, num_layers=1)
    target: Any = SimpleNamespace(config=config, activation_dtype=dtype, device=device)
    return AttentionChoices(target, KVCache(config, 2, 64, dtype, device))


# group -> the largest span of each kernel that 1 to 9 queries run
SPANS = {1: [9], 2: [8, 9], 4: [4, 8, 9], 5: [3, 6, 9], 8: [2, 4, 9], 16: [1, 2, 9], 40: [1, 9]}


@pytest.mark.parametrize("group", SPANS)
def test_spans_end_where_a_kernel_does(group):
    assert choices_of(group).spans(9) == SPANS[group]


@pytest.mark.parametrize("limits", [(1, 0, 1), (64, 4, 8192), (48, 8, 100_000), (600, 2, 4096)])
def test_every_step_within_the_limits_has_a_shape(limits):
    max_rows, max_drafts, max_kv_len = limits
    shapes = graph_shapes(GraphLimits(*limits), choices_of(4))
    assert len(shapes) == len(set(shapes)) <= 400
    steps = [
        StepShape(num_rows * span, num_rows, span, context)
        for num_rows in {1, min(3, max_rows), max_rows}
        for span in range(1, max_drafts + 2)
        for context in {span, max_kv_len // 2 + span, max_kv_len}
        if num_rows * span <= TOKENS[-1] and context <= max_kv_len
    ]
    assert steps
    assert all(any(shape.holds(wanted) for shape in shapes) for wanted in steps)


def test_shapes_split_keys_as_their_steps_would():
    """A padded launch has units of the size that the step's own sizes ask for, or smaller ones."""
    choices = choices_of(4)
    shapes = sorted(graph_shapes(GraphLimits(64, 4, 65536), choices))
    for context in (100, 1000, 9000, 60000):
        for num_rows in (1, 2, 4, 8):
            wanted = StepShape(num_rows, num_rows, 1, context)
            shape = next(shape for shape in shapes if shape.holds(wanted))
            own, padded = choices(wanted), choices(shape)
            assert shape.max_kv_len <= max(256, 2 * context)
            assert padded.split.unit in (own.split.unit, 256, 2048)
            assert padded.shape == own.shape


def test_powers_end_with_the_last():
    assert powers(1, 1) == [1]
    assert powers(1, 6) == [1, 2, 4, 6]
    assert powers(256, 100) == [100]
    assert powers(256, 5000, 4) == [256, 1024, 4096, 5000]


@pytest.fixture
def cuda(monkeypatch) -> list[str]:
    """A log of what CudaCapture asks of torch.cuda."""
    log: list[str] = []
    current = ["main"]

    @contextmanager
    def stream(name: Any):
        before, current[0] = current[0], name.name
        yield
        current[0] = before

    @contextmanager
    def graph(cuda_graph, *, pool, stream, capture_error_mode):
        log.append(f"capture on {stream.name} into {pool}, {capture_error_mode}")
        current[0] = stream.name
        try:
            yield
        finally:
            if cuda_graph.fails:
                raise RuntimeError("capture_end failed")
            log.append("captured")

    def new_stream(device):
        wait = lambda other: log.append(f"side waits for {other.name}")  # noqa: E731
        return SimpleNamespace(name="side", wait_stream=wait)

    fakes = {
        "graph_pool_handle": lambda: "pool",
        "Stream": new_stream,
        "stream": stream,
        "graph": graph,
        "current_stream": lambda: SimpleNamespace(name=current[0]),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: log.append("replay"), fails=False),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    log.append("")
    return log


def test_cuda_capture_runs_once_before_it_captures(cuda):
    capture = CudaCapture(torch.device("cuda"))
    replay = capture(lambda: cuda.append(f"run on {torch.cuda.current_stream().name}"))
    replay()
    assert cuda[1:] == [
        "side waits for main",
        "run on side",
        "capture on side into pool, thread_local",
        "run on side",
        "captured",
        "replay",
    ]
    assert torch.cuda.current_stream().name == "main"


def test_on_device_moves_nothing_that_is_there(model):
    batch = step(model, [Span([5], 0, [1], 1)], BLOCK_SIZE)
    assert on_device(batch, torch.device("cpu")) is batch
    moved = on_device(batch, torch.device("meta"))
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert shape_of_batch(moved) == shape_of_batch(batch)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU a capture itself would fail")
def test_a_padded_step_reads_no_device_value_on_the_host(folder, monkeypatch):
    """What a capture asks of the forward pass, here on interpreted kernels."""
    model = Transformer.from_folder(folder)
    cache = filled_cache(model, 3, BLOCK_SIZE)
    batch = empty_batch(StepShape(8, 2, 2, 64), 8, 2, model.device)
    for name in ("item", "tolist", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, None)
    logits_QV = model.forward(batch, cache)
    monkeypatch.undo()
    assert logits_QV.shape == (8, 97)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 12, 40])
def test_what_is_compiled_follows_from_the_shape(group):
    """Also the options, so that warm spans of one shape stand for all of it."""
    seen: dict[Any, Any] = {}
    for head_dim, is_wide, window in product((64, 80, 128, 256), (False, True), (None, 9)):
        pool = KVPool(*[torch.empty(2, 2, 64, head_dim, dtype=torch.bfloat16)] * 2)
        rules = ScoreRules(1.0, window)
        for span in range(1, 80):
            q_THD = torch.empty(span, 2 * group, head_dim, dtype=torch.bfloat16, device="meta")
            shape, options = shape_of(q_THD, pool, span, rules, is_wide)
            assert seen.setdefault((shape, head_dim, is_wide, window), options) == options
