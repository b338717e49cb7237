"""What a feature head begins with: the best linear guess of the target's next state.

f_t, the target's state after its final norm, is nearly linear in the state before it and the token
between: W [f_{t-1}; e(x_t)] ~ f_t / g, where g is the final norm's weight, so that the norm behind
W gives f_t back. Normal equations of all texts give W at once. With layers that add nothing yet,
that head agrees with the demo model at a quarter of its tokens before its first step, and learns
three times as fast from there as from a layer of the target over noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedraft.decoding.distill.student import rms
from pagedraft.decoding.distill.taught import Taught

RIDGE = 1e-2  # of the mean square of what is read, added to each diagonal entry
SILENT = ("o", "down")  # weights of a layer without which it adds nothing
RMS_TEXTS = 32  # texts that the size of states is taken from


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
    read_DD = torch.zeros(2 * embed_dim, 2 * embed_dim, dtype=torch.float64)
    asked_DE = torch.zeros(2 * embed_dim, embed_dim, dtype=torch.float64)
    is_kept_E = norm_weight_E.cpu() != 0
    undone_E = torch.where(is_kept_E, 1 / norm_weight_E.cpu().float(), 0.0)
    count = 0
    for text in texts:
        assert text.before_PE is not None
        states_TE = torch.cat([text.before_PE, text.states_NE]).float()
        tokens_T = text.token_ids[1 : len(states_TE)].long()
        token_TE = embed_VE[tokens_T.to(embed_VE.device)].float().cpu()
        both_TD = (torch.cat([states_TE[:-1], token_TE], dim=1) / sizes).double()
        read_DD.addmm_(both_TD.T, both_TD)
        asked_DE.addmm_(both_TD.T, (states_TE[1:] * undone_E).double())
        count += len(both_TD)
    read_DD.diagonal().add_(RIDGE * max(1, count))
    fusion_DE = torch.linalg.solve(read_DD, asked_DE)
    return (fusion_DE.float() / sizes[:, None]).T.contiguous()
