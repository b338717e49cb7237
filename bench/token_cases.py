"""What ``bench/kernels.py`` measures outside the layers: sampling, verification, log-probabilities,
block copies, distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pagedraft.bench.layer_cases import KernelCase, Maker, Tensors
from pagedraft.bench.static_calls import BLOCK_SIZE
from pagedraft.kernels.copy_blocks import copy_blocks, copy_blocks_cost, copy_blocks_ref
from pagedraft.kernels.distill_loss import (
    DistillSums,
    RunningLse,
    distill_terms,
    distill_terms_cost,
    update_lse,
    update_lse_cost,
)
from pagedraft.kernels.logprobs import logprobs, logprobs_cost
from pagedraft.kernels.sample import SampleBatch, sample, sample_cost
from pagedraft.kernels.verify import verify, verify_cost
from pagedraft.kernels.verify_block import verify_block, verify_block_cost
from pagedraft.kernels.verify_drafts import Drafts
from pagedraft.kernels.verify_rejection import verify_rejection, verify_rejection_cost

MAX_LOGIT_ROWS = 40
TOP_K, TOP_P = 50, 0.9


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

    def prepare_cut(t: Tensors) -> Callable[[], object]:
        top_k = torch.full_like(t["tokens"], TOP_K, dtype=torch.int32)
        top_p = torch.full_like(t["temperature"], TOP_P, dtype=torch.float32)
        parameters = t["temperature"].float(), t["seed"], t["position"]
        batch = SampleBatch(*parameters, top_k_Q=top_k, top_p_Q=top_p)
        return lambda: sample(t["logits"], batch)

    yield make.case(
        "sample",
        "sample_top_k_top_p",
        lambda: _logits(make),
        prepare_cut,
        sample_cost(rows, make.model.vocab_size, make.itemsize, num_sampled=rows, num_cut=rows),
        "sort, cumsum, draw",
        lambda t: lambda: _sorted_draw(t["logits"]),
    )


def _sorted_draw(logits_QV: torch.Tensor) -> torch.Tensor:
    """Top-k, then top-p by sorting the row, as plain PyTorch samplers do."""
    logits_QV, ids_QV = logits_QV.float().sort(-1, descending=True)
    logits_QV[:, TOP_K:] = float("-inf")
    probs_QV = logits_QV.softmax(-1)
    logits_QV[probs_QV.cumsum(-1) - probs_QV >= TOP_P] = float("-inf")
    return ids_QV.gather(1, _softmax_draw(logits_QV)[:, None])[:, 0]


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
    if step.num_tokens <= MAX_LOGIT_ROWS:
        yield from _verify_sampled(make, num_drafts)


def _verify_sampled(make: Maker, num_drafts: int) -> Iterator[KernelCase]:
    """The rules that compare distributions, each draft with its dense q."""
    step, vocab_size = make.step, make.model.vocab_size
    num_rows, total = step.num_rows, step.num_rows * num_drafts

    def inputs() -> Tensors:
        target = 3.0 * torch.randn(step.num_tokens, vocab_size, device=make.device)
        rows = torch.arange(step.num_tokens, device=make.device).view(num_rows, -1)
        logits = target[rows[:, :-1].flatten()]
        q = (logits + torch.randn_like(logits)).softmax(-1)
        starts = torch.arange(num_rows + 1, device=make.device, dtype=torch.int32) * num_drafts
        return {"target": target, "q": q, "drafts": q.multinomial(1)[:, 0], "starts": starts}

    def prepare(t: Tensors, rule: Callable[..., object]) -> Callable[[], object]:
        seeds = 1000 + torch.arange(num_rows, device=make.device)
        drafts = Drafts(t["drafts"], t["starts"], seeds, seeds, q_KV=t["q"])
        return lambda: rule(t["target"], drafts)

    def baseline(t: Tensors) -> Callable[[], object]:
        return lambda: _rejection(t["target"].view(num_rows, -1, vocab_size), t["q"], t["drafts"])

    cost = verify_rejection_cost, verify_block_cost
    for part, rule, rule_cost in zip(
        ("verify_rejection", "verify_block"), (verify_rejection, verify_block), cost, strict=True
    ):
        yield make.case(
            "verify",
            part,
            inputs,
            lambda t, rule=rule: prepare(t, rule),
            rule_cost(num_rows, total, vocab_size, has_q=True),
            "softmax, accept, multinomial",
            baseline,
        )


def _rejection(
    target_RLV: torch.Tensor, q_KV: torch.Tensor, drafts_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rejection rule in plain PyTorch: probabilities written, residual drawn from them."""
    p_RLV = target_RLV.softmax(-1)
    q_RkV = q_KV.view(p_RLV.shape[0], -1, p_RLV.shape[2])
    drafts_Rk1 = drafts_K.view(q_RkV.shape[:2])[..., None]
    ratio_Rk = (p_RLV[:, :-1].gather(2, drafts_Rk1) / q_RkV.gather(2, drafts_Rk1))[..., 0]
    accepted_R = (torch.rand_like(ratio_Rk) < ratio_Rk).int().cumprod(1).sum(1)
    residual_RLV = p_RLV.clone()
    residual_RLV[:, :-1] = (p_RLV[:, :-1] - q_RkV).clamp(min=0)
    rows_R = torch.arange(len(accepted_R), device=accepted_R.device)
    return accepted_R, residual_RLV[rows_R, accepted_R].multinomial(1)[:, 0]


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


def _distill_loss(make: Maker) -> Iterator[KernelCase]:
    """Forward KL of a tile of tokens and its gradient by the student's logits, in fp32."""
    rows, vocab_size = min(make.step.num_tokens, MAX_LOGIT_ROWS), make.model.vocab_size

    def inputs() -> Tensors:
        shape = rows, vocab_size
        names = "student", "teacher"
        return {name: make.randn(*shape, dtype=torch.float32, scale=3.0) for name in names}

    def prepare(t: Tensors) -> Callable[[], object]:
        def run() -> tuple[torch.Tensor, ...]:
            pair = t["student"], t["teacher"]
            states = [RunningLse.start(rows, make.device) for _ in pair]
            for logits_NV, state in zip(pair, states, strict=True):
                update_lse(logits_NV, state)
            sums = DistillSums.start(rows, make.device)
            lse = (state.lse() for state in states)
            distill_terms(*pair, *lse, sums, terms="forward_kl", write="gradient")
            return pair[0], sums.divergence_N, sums.alpha_N

        return run

    def baseline(t: Tensors) -> Callable[[], object]:
        def run() -> tuple[torch.Tensor, torch.Tensor]:
            log_q_NV, log_p_NV = (t[name].log_softmax(-1) for name in ("student", "teacher"))
            p_NV = log_p_NV.exp()
            return (p_NV * (log_p_NV - log_q_NV)).sum(-1), log_q_NV.exp() - p_NV

        return run

    cost = update_lse_cost(rows, vocab_size) + update_lse_cost(rows, vocab_size)
    yield make.case(
        "distill_loss",
        "distill_loss",
        inputs,
        prepare,
        cost + distill_terms_cost(rows, vocab_size, "gradient"),
        "log_softmax twice",
        baseline,
    )


TOKEN_MAKERS: dict[str, Callable[[Maker], Iterator[KernelCase]]] = {
    "sample": _sample,
    "verify": _verify,
    "logprobs": _logprobs,
    "copy_blocks": _copy_blocks,
    "distill_loss": _distill_loss,
}
