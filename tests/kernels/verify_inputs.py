"""Rows of drafts to verify: builders, and the cases that every implementation must agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from pagedraft.kernels.philox import gumbel_noise_ref
from pagedraft.kernels.verify import Verified
from pagedraft.kernels.verify_block import verify_block, verify_block_ref
from pagedraft.kernels.verify_drafts import Drafts, proposal_seed
from pagedraft.kernels.verify_rejection import verify_rejection, verify_rejection_ref

INF, NAN = float("inf"), float("nan")
RULES = {
    "rejection": (verify_rejection, verify_rejection_ref),
    "block": (verify_block, verify_block_ref),
}
# inf - inf is the NaN that says so.
IGNORE_INFINITY = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@dataclass(frozen=True)
class Case:
    """num_drafts: of each row. q: see ``Q_KINDS``. dense: whether q speaks for a row, in turns.

    seed: of the values, chosen so that the outcomes are of the kind that the name says.
    """

    num_drafts: list[int]
    vocab_size: int = 40
    q: str = "near"
    dense: tuple[bool, ...] | None = None
    has_index: bool = False
    seed: int = 0


def _disjoint(logits_KV: torch.Tensor, noise_KV: torch.Tensor) -> torch.Tensor:
    """No token has both p and q: see ``make_rows``."""
    return noise_KV.masked_fill(torch.arange(noise_KV.shape[1]) % 2 == 0, -INF).softmax(-1)


def _partly(logits_KV: torch.Tensor, noise_KV: torch.Tensor) -> torch.Tensor:
    """A third of the tokens has no q, the drafts among them."""
    q_KV = (logits_KV + noise_KV).masked_fill(torch.arange(noise_KV.shape[1]) % 3 == 0, -INF)
    return q_KV.softmax(-1)


Q_KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None] = {
    "none": None,
    "near": lambda logits_KV, noise_KV: (logits_KV + 0.5 * noise_KV).softmax(-1),
    "medium": lambda logits_KV, noise_KV: (logits_KV + noise_KV).softmax(-1),
    "far": lambda logits_KV, noise_KV: noise_KV.softmax(-1),
    "same": lambda logits_KV, noise_KV: logits_KV.softmax(-1),
    "disjoint": _disjoint,
    "partly": _partly,
}

CASES = {
    "no_drafts": Case([0, 0]),
    "one_draft": Case([1, 1, 1]),
    "ragged": Case([2, 0, 3, 1, 0]),
    "prefixes_of_a_block": Case([1, 3, 3], q="medium", seed=2709),
    "far": Case([2, 2], q="far"),
    "p_equals_q": Case([3, 2], q="same"),
    "disjoint": Case([2, 1], q="disjoint"),
    "zeros_in_q": Case([3, 2], q="partly"),
    "deterministic": Case([2, 0, 3], q="none"),
    "mixed": Case([2, 2, 1, 1], dense=(True, False)),
    "sample_index": Case([1, 2], has_index=True),
    "one_chunk_and_a_column": Case([2, 1], vocab_size=257),
    "two_splits_five_shares": Case([2], vocab_size=4099),
    "two_splits_deterministic": Case([1], vocab_size=4099, q="none"),
}


def make_rows(name: str, device: torch.device) -> tuple[torch.Tensor, Drafts]:
    """Logits and drafts of a case, the drafts drawn from q; row 0 of several is greedy."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(case.seed + sum(map(ord, name)))
    starts_R1 = torch.tensor([0, *case.num_drafts]).cumsum(0)
    num_rows, num_drafts = len(case.num_drafts), int(starts_R1[-1])
    row_K = torch.arange(num_rows).repeat_interleave(starts_R1.diff())
    shape = (num_drafts + num_rows, case.vocab_size)
    logits_QV = 2 * torch.randn(shape, generator=generator)
    logits_QV[:, -3:] = -INF  # padding
    if case.q == "disjoint":
        logits_QV[:, 1::2] = -INF
    noise_KV = torch.randn(num_drafts, case.vocab_size, generator=generator)
    make_q = Q_KINDS[case.q]
    logits_KV = logits_QV[torch.arange(num_drafts) + row_K]
    q_KV = (make_q or Q_KINDS["near"])(logits_KV, noise_KV)
    tokens_K = q_KV.multinomial(1, generator=generator)[:, 0] if num_drafts else row_K
    if num_rows > 1:
        first = logits_QV[: case.num_drafts[0] + 1]
        best = first.argmax(-1, keepdim=True)
        first.fill_(-INF).scatter_(1, best, 0.0)
    row_R = torch.arange(num_rows)
    drafts = Drafts(
        tokens_K,
        starts_R1.int(),
        seed_R=row_R * 2**35 - 77,
        position_R=row_R + 1000,
        sample_index_R=row_R + 3 if case.has_index else None,
        q_KV=q_KV if make_q else None,
        has_q_R=torch.tensor([case.dense[r % len(case.dense)] for r in row_R])
        if case.dense
        else None,
    )
    return logits_QV.to(device), moved(drafts, device)


def moved(drafts: Drafts, device: torch.device) -> Drafts:
    """The drafts with all tensors on ``device``."""
    tensors = {name: value.to(device) for name, value in vars(drafts).items() if value is not None}
    return replace(drafts, **tensors)


def repeated_rows(
    p_LV: torch.Tensor, q_KV: torch.Tensor, num_rows: int, *, has_own_noise: bool = True
) -> tuple[torch.Tensor, Drafts]:
    """``num_rows`` seeds of one row whose drafts are drawn from q_KV, whatever was drafted before.

    has_own_noise: the drafts are drawn with ``proposal_seed``, else with the noise of sampling.
    """
    num_drafts, vocab_size = q_KV.shape
    seed_R, position_R = torch.arange(num_rows), torch.full((num_rows,), 50)
    draft_seed_R = proposal_seed(seed_R, position_R) if has_own_noise else seed_R
    tokens_RK = torch.stack(
        [
            (q_KV[k].log() + gumbel_noise_ref(vocab_size, position_R + k, draft_seed_R)).argmax(-1)
            for k in range(num_drafts)
        ],
        dim=1,
    )
    drafts = Drafts(
        tokens_RK.flatten(),
        torch.arange(num_rows + 1, dtype=torch.int32) * num_drafts,
        seed_R,
        position_R,
        q_KV=q_KV.repeat(num_rows, 1),
    )
    return p_LV.log().repeat(num_rows, 1), drafts


def chi_square(observed_n: torch.Tensor, expected_n: torch.Tensor) -> float:
    """How many standard deviations the chi-square statistic of counts lies above its mean."""
    expected_n = expected_n.double()
    assert not observed_n[expected_n == 0].any()
    kept = expected_n > 0
    statistic = ((observed_n[kept] - expected_n[kept]) ** 2 / expected_n[kept]).sum()
    freedom = int(kept.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def assert_same(out: Verified, expected: Verified) -> None:
    assert (out.num_accepted_R.dtype, out.next_token_R.dtype) == (torch.int32, torch.int64)
    assert out.num_accepted_R.tolist() == expected.num_accepted_R.tolist()
    assert out.next_token_R.tolist() == expected.next_token_R.tolist()
