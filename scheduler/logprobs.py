"""Log-probabilities as a request asked for them: the model's own, before the request's rules."""

from __future__ import annotations

import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.draw import changes_logits
from pagedraft.kernels.logprobs import logprobs
from pagedraft.scheduler.request import Request


def raw_logits(
    logits_QV: torch.Tensor, sampled: list[Request], drafts: list[Proposal]
) -> dict[Request, torch.Tensor]:
    """Copies of the rows that verification will change and whose values are to be reported."""
    if all(request.is_plain for request in sampled):
        return {}
    copies, first_row = {}, 0
    for request, proposal in zip(sampled, drafts, strict=True):
        end_row = first_row + len(proposal.tokens) + 1
        is_judged = bool(proposal.tokens) and request.sequence.accept != "match"
        is_scratch = is_judged or changes_logits(request.sequence)
        if request.params.logprobs is not None and is_scratch:
            copies[request] = logits_QV[first_row:end_row].clone()
        first_row = end_row
    return copies


def add_logprobs(request: Request, logits_QV: torch.Tensor, kept: list[int]) -> None:
    """Report the chosen and the most likely tokens of each kept position, a row of logits each."""
    top_n = request.params.logprobs or 0
    result = logprobs(logits_QV, torch.tensor(kept, device=logits_QV.device), top_n)
    for index, token in enumerate(kept):
        ids = result.top_ids_Qn[index].tolist()
        values = result.top_logprobs_Qn[index].tolist()
        entry = dict(zip(ids, values, strict=True))
        entry[token] = float(result.chosen_Q[index])
        request.logprobs.append(entry)
