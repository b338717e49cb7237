"""Two models side by side over one text: how far their next tokens agree at each position.

Both are *teacher-forced*: at every position they see the text, not what they would have written.
Whether a draft is accepted depends on nothing else, because a draft counts only where all before it
became part of the text. A feature head sees more than tokens: estimate_unrolled.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from pagedraft.decoding.draw import changes_logits, draw, process
from pagedraft.decoding.estimate_text import LOGIT_ROWS, Reader, Text
from pagedraft.decoding.sequence import Sequence


@dataclass(frozen=True)
class Agreement:
    """An entry for each output token of a text that the draft can read up to.

    equal_n: whether the draft's draw, with the noise of the position, is the text's token. The text
        being the target's draws, this is what the match rule asks.
    greedy_n: whether both models hold the same token most likely.
    alpha_n: sum over the vocabulary of min(p, q), p and q being what target and draft draw from:
        how likely rejection sampling accepts a draft there.
    accept_n: min(1, q / p) at the text's token: how likely it accepted the draft, given that this
        is the token it went on with. Its mean over texts drawn from p is that of alpha.
    later: the same at the second place of a pass, the third, and so on, where a draft's chance
        depends on its place; empty where it does not. The pass began as many tokens earlier; where
        it would have begun before the output there is a wrong draft.

    Source of alpha and of the rule: Leviathan et al., "Fast Inference from Transformers via
    Speculative Decoding" (ICML 2023).
    """

    equal_n: list[bool]
    greedy_n: list[bool]
    alpha_n: list[float]
    accept_n: list[float]
    later: list[Agreement] = field(default_factory=list)

    def by_place(self, name: str) -> list[list[float]]:
        """One of the lists at each place, the last one being that of all places after it."""
        return [getattr(one, name) for one in (self, *self.later)]


@torch.inference_mode()
def compare(target: Reader, draft: Reader, text: Text) -> Agreement:
    """Read ``text`` with both models, ``LOGIT_ROWS`` positions at a time.

    The draft cannot follow a text past a token that it does not know, nor past its positions.
    """
    num_prompt, token_ids = len(text.prompt_ids), text.token_ids
    result = Agreement([], [], [], [])
    end = readable(draft, token_ids)
    if end <= num_prompt:
        return result
    for reader in (target, draft):
        reader.skip(token_ids[: num_prompt - 1])
    sequence = text.sequence(0)
    for first in range(num_prompt, end, LOGIT_ROWS):
        last = min(first + LOGIT_ROWS, end)
        fed, drawn = token_ids[first - 1 : last - 1], token_ids[first:last]
        p_logits_QV, q_logits_QV = target.read(fed, first - 1), draft.read(fed, first - 1)
        add_rows(result, p_logits_QV, q_logits_QV, sequence, drawn)
        sequence.append(drawn)
    return result


def readable(draft: Reader, token_ids: Seq[int]) -> int:
    """Index of the first token that the draft model can propose no more."""
    vocab_size, positions = draft.model.config.vocab_size, draft.model.config.max_positions
    unknown = (i for i, token in enumerate(token_ids) if token >= vocab_size)
    # What follows the last token that it can read is the last that it can propose.
    return min(len(token_ids), positions + 1, next(unknown, len(token_ids)) + 1)


def add_rows(
    result: Agreement,
    p_logits_QV: torch.Tensor,
    q_logits_QV: torch.Tensor,
    sequence: Sequence,
    drawn: list[int],
) -> None:
    """Compare the rows of one chunk; ``drawn`` are the text's tokens there."""
    num_rows, num_shared = len(drawn), min(p_logits_QV.shape[1], q_logits_QV.shape[1])
    q_logits_QV = q_logits_QV[:, :num_shared]
    rows = [sequence] * num_rows
    positions = [sequence.num_tokens + i for i in range(num_rows)]
    is_edited = changes_logits(sequence)  # then a draw uses its logits up
    prefixes = [drawn[:i] for i in range(num_rows)] if is_edited else None
    draft_Q = draw(q_logits_QV.clone() if is_edited else q_logits_QV, rows, positions, prefixes)
    for logits_QV in (p_logits_QV, q_logits_QV):
        process(logits_QV, rows, positions, prefixes)
    is_greedy_Q = (p_logits_QV.argmax(-1) == q_logits_QV.argmax(-1)) & (draft_Q >= 0)
    p_QV, q_QV = p_logits_QV.softmax(-1), q_logits_QV.softmax(-1)
    drawn_Q = torch.tensor(drawn, device=p_QV.device)
    p_Q = p_QV.gather(1, drawn_Q[:, None])[:, 0]
    q_Q = q_QV.gather(1, drawn_Q.clamp(max=num_shared - 1)[:, None])[:, 0]
    ratio_Q = (q_Q / p_Q).clamp(max=1.0).where(drawn_Q < num_shared, 0.0)
    alpha_Q = torch.minimum(p_QV[:, :num_shared], q_QV).sum(-1)
    result.equal_n.extend((draft_Q == drawn_Q).tolist())
    result.greedy_n.extend(is_greedy_Q.tolist())
    result.alpha_n.extend(alpha_Q.nan_to_num(0.0).clamp(max=1.0).tolist())
    result.accept_n.extend(ratio_Q.nan_to_num(0.0).tolist())
