"""What a draft begins with: the best linear guess of the target's state from what it has.

f_t, the target's state after its final norm, is asked for before that norm's weight g:
W x ~ f_t / g, so that the norm behind W gives f_t back. Normal equations give W at once.

    head     x = [f_{t-1}; e(x_t)], and layers that add nothing yet. Agrees with the demo model at a
             quarter of its tokens before its first step, and learns three times as fast from there
             as from a layer of the target over noise.
    layers   x = what the target's first layers leave of the tokens, at size 1. Agrees at a fifth
             with two layers; without W at a twentieth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedraft.decoding.distill.student import Student, rms
from pagedraft.decoding.distill.taught import Taught

RIDGE = 1e-2  # of the mean square of what is read, added to each diagonal entry
SILENT = ("o", "o_bias", "down")  # weights of a layer without which it adds nothing
RMS_TEXTS = 32  # texts that the size of states is taken from
MOST_TOKENS = 100_000  # that a fit over layers reads
TINY = 1e-12


def state_rms(texts: Sequence[Taught]) -> float:
    """Root mean square of the target's states."""
    return rms(torch.cat([text.states_NE for text in texts[:RMS_TEXTS]]))


def fit_fusion(
    texts: Sequence[Taught], embed_VE: torch.Tensor, norm_weight_E: torch.Tensor
) -> torch.Tensor:
    """The fused layer's weight [E, 2 E], fp32: columns of the state, then of the token.

    texts: with states at their prompts' tokens. Ridge regression in fp64, columns of both halves
    brought to the same size; where ``norm_weight_E`` is 0 nothing is asked for.
    """
    embed_dim = embed_VE.shape[1]
    sizes = torch.tensor([state_rms(texts), rms(embed_VE)]).repeat_interleave(embed_dim)
    fit = _Fit(2 * embed_dim, norm_weight_E)
    for text in texts:
        assert text.before_PE is not None
        states_TE = torch.cat([text.before_PE, text.states_NE]).float()
        tokens_T = text.token_ids[1 : len(states_TE)].long()
        token_TE = embed_VE[tokens_T.to(embed_VE.device)].float().cpu()
        fit.add(torch.cat([states_TE[:-1], token_TE], dim=1) / sizes, states_TE[1:])
    return fit.solve() / sizes


@torch.no_grad()
def fit_out(student: Student, texts: Sequence[Taught]) -> tuple[torch.Tensor, float]:
    """The weight [E, E] between a student's layers and its final norm, and the size of what it
    reads (root mean square).

    student: without one yet. texts: the first ``MOST_TOKENS`` written tokens of them count.
    """
    embed_VE = student.embed_VE
    fit = _Fit(embed_VE.shape[1], student.weights["final_norm"].detach())
    squares = 0.0
    for text in texts:
        tokens_BL = text.token_ids[None, :-1].long().to(embed_VE.device)
        left_BLE = student.run_layers(embed_VE[tokens_BL].float())
        left_NE = left_BLE[0, text.num_prompt - 1 :].cpu()
        squares += float(left_NE.square().mean(1).sum())
        size_N1 = left_NE.square().mean(1, keepdim=True).sqrt().clamp(min=TINY)
        fit.add(left_NE / size_N1, text.states_NE.float())
        if fit.count >= MOST_TOKENS:
            break
    size = max(TINY, (squares / fit.count) ** 0.5)
    return fit.solve() / size, size


class _Fit:
    """Ridge regression in fp64 of states, before the norm's weight, from rows of ``num_in``."""

    def __init__(self, num_in: int, norm_weight_E: torch.Tensor) -> None:
        weight_E = norm_weight_E.cpu().float()
        self.undone_E = torch.where(weight_E != 0, 1 / weight_E, 0.0)
        self.read_DD = torch.zeros(num_in, num_in, dtype=torch.float64)
        self.asked_DE = torch.zeros(num_in, len(weight_E), dtype=torch.float64)
        self.count = 0

    def add(self, read_ND: torch.Tensor, states_NE: torch.Tensor) -> None:
        """Read rows of size about 1, and what the target had in their place."""
        read_ND = read_ND.double()
        self.read_DD.addmm_(read_ND.T, read_ND)
        self.asked_DE.addmm_(read_ND.T, (states_NE * self.undone_E).double())
        self.count += len(read_ND)

    def solve(self) -> torch.Tensor:
        """The fp32 weight [E, num_in]; adds the ridge."""
        self.read_DD.diagonal().add_(RIDGE * max(1, self.count))
        return torch.linalg.solve(self.read_DD, self.asked_DE).float().T.contiguous()
