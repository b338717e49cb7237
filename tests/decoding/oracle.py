"""A drafter that knows what comes, wrong where it is told to be: acceptance is exact by design."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.sequence import Sequence


class OracleDrafter:
    """Replays the plain output of each prompt.

    outputs: prompt token ids to output token ids. wrong: indices of output tokens that are
    corrupted wherever they are drafted. A prompt that is not in ``outputs`` gets no drafts.
    """

    name = "oracle"

    def __init__(
        self, outputs: Mapping[tuple[int, ...], Seq[int]], wrong: Collection[int] = ()
    ) -> None:
        self.outputs = {
            prompt: [wrong_token(t) if i in wrong else t for i, t in enumerate(output)]
            for prompt, output in outputs.items()
        }

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        return [
            Proposal(self._following(sequence)[:k])
            for sequence, k in zip(sequences, num_drafts, strict=True)
        ]

    def on_free(self, sequence: Sequence) -> None:
        pass

    def _following(self, sequence: Sequence) -> Seq[int]:
        prompt = tuple(sequence.token_ids[: sequence.num_prompt])
        return self.outputs.get(prompt, [])[sequence.num_tokens - sequence.num_prompt :]


def wrong_token(token: int) -> int:
    """Another token id, in every vocabulary that has ``token`` and 1."""
    return token - 1 if token > 0 else 1
