"""The calls whose launches ``bench/static.py`` compiles: public ops at real shapes.

Tensors are CPU memory that nobody reads or writes (``torch.empty`` maps pages lazily), so even 8B
shapes cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pagedraft.bench.record import Call
from pagedraft.bench.shapes import (
    DECODE_1,
    DECODE_8,
    DTYPES,
    LLAMA_8B,
    PREFILL,
    SMOL_135M,
    VERIFY_1,
    VERIFY_8,
    ModelShape,
    StepShape,
)
from pagedraft.bench.static_attention_calls import CACHE_DTYPES, FP8_TARGETS, attention_calls
from pagedraft.bench.static_linear_calls import linear_calls
from pagedraft.bench.static_quant_calls import quant_calls
from pagedraft.kernels.dispatch import OPS

BLOCK_SIZE = 64
MAX_POSITIONS = 131072
QUICK_CASES = (
    (LLAMA_8B, DECODE_8, "bf16"),
    (LLAMA_8B, VERIFY_8, "bf16"),
    (LLAMA_8B, PREFILL, "bf16"),
    (SMOL_135M, DECODE_8, "fp16"),
    (SMOL_135M, VERIFY_1, "fp32"),
)
# Ops whose kernels have no tiles to choose: a step's shape changes nothing but the grid.
SHAPELESS_OPS = frozenset(OPS) - {"linear", "paged_attention", "verify"}
SHAPELESS_CASES = (QUICK_CASES[0], QUICK_CASES[-1])
FULL_CASES = tuple(
    (model, step, dtype)
    for model in (LLAMA_8B, SMOL_135M)
    for step in (DECODE_1, DECODE_8, VERIFY_1, VERIFY_8, PREFILL)
    for dtype in DTYPES
)


def calls(*, quick: bool = False, ops: tuple[str, ...] = OPS) -> Iterator[Call]:
    """Yield the calls of ``ops``; ``quick`` keeps a few shapes of each kind."""
    for op in ops:
        if op == "paged_attention":
            yield from attention_calls(quick=quick)
            continue
        make = CALLS[op]
        few = SHAPELESS_CASES if op in SHAPELESS_OPS else QUICK_CASES
        for model, step, dtype in few if quick else FULL_CASES:
            case = f"{model.name}-{step.name}-{dtype}"
            for suffix, run in make(model, step, DTYPES[dtype]):
                targets = FP8_TARGETS if "fp8" in suffix else ()
                yield Call(op, case + suffix, run, targets=targets)


Runs = Iterator[tuple[str, Callable[[], object]]]


def _rms_norm(model: ModelShape, step: StepShape, dtype: torch.dtype) -> Runs:
    def tensors() -> list[torch.Tensor]:
        shape = (step.num_tokens, model.embed_dim)
        return [torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)]

    def plain() -> None:
        from pagedraft.kernels.rms_norm import rms_norm

        rms_norm(tensors()[0], torch.empty(model.embed_dim, dtype=dtype), 1e-5)

    def add() -> None:
        from pagedraft.kernels.rms_norm import add_rms_norm

        add_rms_norm(*tensors(), torch.empty(model.embed_dim, dtype=dtype), 1e-5)

    yield "", plain
    yield "-add", add


def linear_sizes(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (out, in) features of a layer's projections by name."""
    return {
        "qkv": (model.qkv_dim, model.embed_dim),
        "o": (model.embed_dim, model.attention_dim),
        "gate_up": (2 * model.mlp_dim, model.embed_dim),
        "down": (model.embed_dim, model.mlp_dim),
    }


def model_weights(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (out, in) features of those, of half of gate_up and of the head."""
    others = {"up": (model.mlp_dim, model.embed_dim), "head": (model.vocab_size, model.embed_dim)}
    return linear_sizes(model) | others


def _linear(model: ModelShape, step: StepShape, dtype: torch.dtype) -> Runs:
    yield from linear_calls(model_weights(model), step.num_tokens, dtype)
    yield from quant_calls(linear_sizes(model), step.num_tokens, dtype)


def step_tensors(model: ModelShape, step: StepShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return unread tensors of one attention step over a pool of just enough blocks."""
    blocks_a_row = -(-step.context // BLOCK_SIZE)
    pool = (1 + step.num_rows * blocks_a_row, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    rows, tokens = step.num_rows, step.num_tokens
    return {
        "q_THD": torch.empty(tokens, model.num_heads, model.head_dim, dtype=dtype),
        "k_cache_NGBD": torch.empty(pool, dtype=dtype),
        "v_cache_NGBD": torch.empty(pool, dtype=dtype),
        "block_table_RM": torch.empty(rows, blocks_a_row, dtype=torch.int32),
        "query_starts_R1": torch.empty(rows + 1, dtype=torch.int32),
        "kv_lens_R": torch.empty(rows, dtype=torch.int32),
    }


def _write_kv(model: ModelShape, step: StepShape, dtype: torch.dtype) -> Runs:
    half = model.head_dim // 2

    def run(
        *, num_freqs: int = half, has_qk_norm: bool = False, cache: str = "", **options: Any
    ) -> None:
        from pagedraft.kernels.write_kv import write_kv

        pools = step_tensors(model, step, CACHE_DTYPES.get(cache, dtype))
        caches = pools["k_cache_NGBD"], pools["v_cache_NGBD"]
        scales = dict.fromkeys(("k_scale_NGB", "v_scale_NGB"), torch.empty(caches[0].shape[:3]))
        norm_D = torch.empty(model.head_dim, dtype=dtype) if has_qk_norm else None
        table_PR = torch.empty(MAX_POSITIONS, num_freqs, dtype=torch.float32)
        write_kv(
            torch.empty(step.num_tokens, model.qkv_dim, dtype=dtype),
            table_PR,
            torch.empty_like(table_PR),
            torch.empty(step.num_tokens, dtype=torch.int32),
            torch.empty(step.num_tokens, dtype=torch.int64),
            *caches,
            model.num_heads,
            q_norm_D=norm_D,
            k_norm_D=norm_D,
            **(scales if cache else {}),
            **options,
        )

    yield "", run
    yield "-qk_norm", lambda: run(has_qk_norm=True)
    yield "-partial", lambda: run(num_freqs=half // 4)
    yield "-interleaved", lambda: run(interleaved=True)
    yield "-int8-qk_norm", lambda: run(has_qk_norm=True, cache="int8")
    yield "-fp8", lambda: run(cache="fp8")


def _gated_mlp(model: ModelShape, step: StepShape, dtype: torch.dtype) -> Runs:
    def run(activation: str) -> None:
        from pagedraft.kernels.gated_mlp import gated_mlp

        gated_mlp(torch.empty(step.num_tokens, 2 * model.mlp_dim, dtype=dtype), activation)

    yield "-silu", lambda: run("silu")
    yield "-gelu_tanh", lambda: run("gelu_tanh")


def _num_logit_rows(step: StepShape) -> int:
    return min(step.num_tokens, 40)


def _sample(model: ModelShape, step: StepShape, dtype: torch.dtype) -> Runs:
    rows = _num_logit_rows(step)

    def run(name: str = "sample", dtype: torch.dtype = dtype, **options: Any) -> None:
        from pagedraft.kernels import sample as op

        floats, longs = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        batch = op.SampleBatch(floats, longs, longs, **options)
        getattr(op, name)(torch.empty(rows, model.vocab_size, dtype=dtype), batch)

    everything = _everything(rows, model.vocab_size)
    cuts = {name: everything[name] for name in ("top_k_Q", "top_p_Q", "min_p_Q")}
    yield "", run
    yield "-cuts", lambda: run(**cuts)
    yield "-everything", lambda: run(dtype=torch.float32, **everything)
    yield "-process", lambda: run("process_logits", torch.float32, **everything)


def _everything(rows: int, vocab_size: int) -> dict[str, Any]:
    """Return a SampleBatch's optional fields, all used."""
    from pagedraft.kernels.sample_batch import BannedIds, DraftPrefix, LogitBias, Penalties

    ints, floats = torch.empty(rows, dtype=torch.int32), torch.empty(rows)
    longs, starts = torch.empty(rows, dtype=torch.int64), torch.empty(rows + 1, dtype=torch.int32)
    prefix = DraftPrefix(longs, ints, ints)
    return {
        "sample_index_Q": longs,
        **{"top_k_Q": ints, "top_p_Q": floats, "min_p_Q": floats, "request_Q": ints},
        "bias": LogitBias(starts, ints, floats),
        "banned": BannedIds(starts, ints),
        "penalties": Penalties(floats, floats, floats, starts, ints, ints, prefix),
        "allowed_QW": torch.empty(rows, -(-vocab_size // 32), dtype=torch.int32),
    }


def _verify(model: ModelShape, step: StepShape, dtype: torch.dtype) -> Runs:
    def run() -> None:
        from pagedraft.kernels.verify import verify

        num_drafts = step.num_rows * (step.span - 1)
        verify(
            torch.empty(num_drafts, dtype=torch.int64),
            torch.empty(step.num_rows + 1, dtype=torch.int32),
            torch.empty(step.num_tokens, dtype=torch.int64),
        )

    def judge(rule: str, has_q: bool) -> None:
        from pagedraft.kernels.verify_block import verify_block
        from pagedraft.kernels.verify_drafts import Drafts
        from pagedraft.kernels.verify_rejection import verify_rejection

        num_drafts = step.num_rows * (step.span - 1)
        row_R = torch.empty(step.num_rows, dtype=torch.int64)
        drafts = Drafts(
            torch.empty(num_drafts, dtype=torch.int64),
            torch.empty(step.num_rows + 1, dtype=torch.int32),
            row_R,
            row_R,
            q_KV=torch.empty(num_drafts, model.vocab_size) if has_q else None,
        )
        logits_QV = torch.empty(step.num_tokens, model.vocab_size)
        {"rejection": verify_rejection, "block": verify_block}[rule](logits_QV, drafts)

    if 1 < step.span <= 64:
        yield "", run
        for rule in ("rejection", "block"):
            yield f"-{rule}", lambda r=rule: judge(r, has_q=True)
            yield f"-{rule}-deterministic", lambda r=rule: judge(r, has_q=False)


def _logprobs(model: ModelShape, step: StepShape, dtype: torch.dtype) -> Runs:
    def run(top_n: int) -> None:
        from pagedraft.kernels.logprobs import logprobs

        rows = _num_logit_rows(step)
        logits_QV = torch.empty(rows, model.vocab_size, dtype=dtype)
        logprobs(logits_QV, torch.empty(rows, dtype=torch.int64), top_n)

    for top_n in (0, 5):
        yield f"-top{top_n}", lambda n=top_n: run(n)


def _copy_blocks(model: ModelShape, step: StepShape, dtype: torch.dtype) -> Runs:
    def run() -> None:
        from pagedraft.kernels.copy_blocks import copy_blocks

        pools = step_tensors(model, step, dtype)
        # CPU pairs are read: a block that exists, copied to another.
        pairs_P2 = torch.tensor([[1, 2]])
        copy_blocks([pools["k_cache_NGBD"], pools["v_cache_NGBD"]], pairs_P2)

    yield "", run


def _distill_loss(model: ModelShape, step: StepShape, dtype: torch.dtype) -> Runs:
    def run(terms: str, write: str) -> None:
        from pagedraft.kernels import distill_loss as op

        rows = step.num_tokens
        student_NV, teacher_NV = torch.empty(2, rows, model.vocab_size)  # fp32 in every model
        state = op.RunningLse.start(rows, student_NV.device)
        op.update_lse(student_NV, state)
        sums = op.DistillSums.start(rows, student_NV.device)
        lse = state.max_N, state.sum_N
        op.distill_terms(student_NV, teacher_NV, *lse, sums, terms=terms, write=write)

    for terms in ("forward_kl", "reverse_kl", "jsd", "overlap"):
        yield f"-{terms}", lambda t=terms: run(t, "gradient")
    yield "-jsd-parts", lambda: run("jsd", "parts")


CALLS: dict[str, Callable[[ModelShape, StepShape, torch.dtype], Runs]] = {
    "rms_norm": _rms_norm,
    "linear": _linear,
    "write_kv": _write_kv,
    "gated_mlp": _gated_mlp,
    "sample": _sample,
    "verify": _verify,
    "logprobs": _logprobs,
    "copy_blocks": _copy_blocks,
    "distill_loss": _distill_loss,
}
