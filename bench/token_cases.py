"""What ``bench/kernels.py`` measures outside the layers: sampling, verification, log-probabilities,
block copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pagedraft.bench.layer_cases import KernelCase, Maker, Tensors
from pagedraft.bench.static_calls import BLOCK_SIZE
from pagedraft.kernels.copy_blocks import copy_blocks, copy_blocks_cost, copy_blocks_ref
from pagedraft.kernels.logprobs import logprobs, logprobs_cost
from pagedraft.kernels.sample import SampleBatch, sample, sample_cost
from pagedraft.kernels.verify import verify, verify_cost

MAX_LOGIT_ROWS = 40


def _logits(make: Maker) -> Tensors:
    rows = min(make.step.num_tokens, MAX_LOGIT_ROWS)
    index = torch.arange(rows, device=make.device)
    return {
        "logits": make.randn(rows, make.model.vocab_size, scale=3.0),
        "temperature": torch.ones(rows, device=make.device),
        "seed": 1000 + index,
        "position": 7 + index,
        "tokens": (index * 7919) % make.model.vocab_size,
    }


def _sample(make: Maker) -> Iterator[KernelCase]:
    rows = min(make.step.num_tokens, MAX_LOGIT_ROWS)

    def prepare(t: Tensors) -> Callable[[], object]:
        batch = SampleBatch(t["temperature"], t["seed"], t["position"])
        return lambda: sample(t["logits"], batch)

    yield make.case(
        "sample",
        "sample",
        lambda: _logits(make),
        prepare,
        sample_cost(rows, make.model.vocab_size, make.itemsize, num_sampled=rows),
        "softmax, Gumbel-max",
        lambda t: lambda: _softmax_draw(t["logits"]),
    )


def _softmax_draw(logits_QV: torch.Tensor) -> torch.Tensor:
    """Draw as usual decoding loops do: probabilities over exponential noise, then argmax."""
    probs_QV = logits_QV.float().softmax(-1)
    return probs_QV.div_(torch.empty_like(probs_QV).exponential_()).argmax(-1)


def _verify(make: Maker) -> Iterator[KernelCase]:
    step = make.step
    num_drafts = step.span - 1
    if num_drafts not in range(1, 65):
        return

    def inputs() -> Tensors:
        target = torch.randint(0, 2, (step.num_tokens,), device=make.device)
        drafts = torch.randint(0, 2, (step.num_rows * num_drafts,), device=make.device)
        starts = torch.arange(step.num_rows + 1, device=make.device) * num_drafts
        return {"drafts": drafts, "starts": starts.int(), "target": target}

    def baseline(t: Tensors) -> Callable[[], object]:
        drafts = t["drafts"].view(step.num_rows, num_drafts)
        target = t["target"].view(step.num_rows, step.span)

        def run() -> torch.Tensor:
            accepted = (drafts == target[:, :-1]).int().cumprod(1).sum(1)
            return target.gather(1, accepted[:, None])

        return run

    yield make.case(
        "verify",
        "verify",
        inputs,
        lambda t: lambda: verify(t["drafts"], t["starts"], t["target"]),
        verify_cost(step.num_rows, step.num_rows * num_drafts),
        "cumprod, gather",
        baseline,
    )


def _logprobs(make: Maker) -> Iterator[KernelCase]:
    rows = min(make.step.num_tokens, MAX_LOGIT_ROWS)

    def baseline(t: Tensors) -> Callable[[], object]:
        return lambda: t["logits"].float().log_softmax(-1).topk(5)

    yield make.case(
        "logprobs",
        "logprobs",
        lambda: _logits(make),
        lambda t: lambda: logprobs(t["logits"], t["tokens"], 5),
        logprobs_cost(rows, make.model.vocab_size, make.itemsize, top_n=5),
        "log_softmax, topk",
        baseline,
    )


def _copy_blocks(make: Maker) -> Iterator[KernelCase]:
    """A fork of each row: one block of keys and one of values in a layer."""
    num_pairs = make.step.num_rows
    pool = (1 + 2 * num_pairs, make.model.num_kv_heads, BLOCK_SIZE, make.model.head_dim)
    block_bytes = 2 * make.itemsize * pool[1] * pool[2] * pool[3]

    def inputs() -> Tensors:
        pairs = 1 + torch.randperm(2 * num_pairs, device=make.device)
        return {"k": make.randn(*pool), "v": make.randn(*pool), "pairs": pairs.view(-1, 2)}

    def run(t: Tensors, copy: Callable[..., None]) -> Callable[[], object]:
        caches = (t["k"], t["v"])
        return lambda: (copy(caches, t["pairs"]), caches)[1]

    yield make.case(
        "copy_blocks",
        "copy_blocks",
        inputs,
        lambda t: run(t, copy_blocks),
        copy_blocks_cost(num_pairs, block_bytes),
        "index, index_put",
        lambda t: run(t, copy_blocks_ref),
    )


TOKEN_MAKERS: dict[str, Callable[[Maker], Iterator[KernelCase]]] = {
    "sample": _sample,
    "verify": _verify,
    "logprobs": _logprobs,
    "copy_blocks": _copy_blocks,
}
