"""A feature head drafts: one layer over the states that the target has left (feature_head.py of
``model``).

The target's pool keeps every token's state in the blocks of its KV, so states follow a sequence
wherever its blocks go. They take E numbers a token, and all tokens of a step go through the last
layer's MLP, not only those with logits.

The first pass of a call feeds what the head's KV lacks of the context, with the target's states;
later ones feed the newest draft with the head's own state, its guess. KV that was made from guesses
is not kept, ``num_draft_written`` counts what was fed with true states: accepted drafts are fed
again, now that the target has been there. That costs tokens of a first pass, not passes. How often
a draft is right depends on its place, as later ones rest on guesses: estimate_unrolled.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.drafters.draft_model import catching_up
from pagedraft.decoding.drafters.model_loop import DraftRow, draft_tokens, spans_of
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.batch import build_step_batch
from pagedraft.model.feature_head import FeatureHead, check_features, states_before
from pagedraft.model.kv_cache import KVCache


class FeatureHeadDrafter:
    """Drafts with a FeatureHead; what runs a draft model under the name "draft" runs it too.

    cache: the head's pool. target_cache: the target's, of the same blocks, which keeps states.
    catch_up_tokens: as of DraftModelDrafter. last_num_rounds: passes in the last call of
    ``propose``. reads_accepted: a first pass feeds the drafts that were accepted before.

    Raises ValueError for a target's pool without states, or with states of another width.
    """

    name = "draft"
    reads_accepted = True

    def __init__(
        self,
        model: FeatureHead,
        cache: KVCache,
        target_cache: KVCache,
        *,
        target_vocab_size: int,
        catch_up_tokens: int = 512,
    ) -> None:
        own, lent = model.config.embed_dim, check_features(target_cache).shape[-1]
        if own != lent:
            raise ValueError(f"draft: reads states of {own} numbers, the target's have {lent}")
        self.model = model
        self.cache = cache
        self.target_cache = target_cache
        self.target_vocab_size = target_vocab_size
        self.catch_up_tokens = catch_up_tokens
        self.last_num_rounds = 0

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        """Draw up to ``num_drafts[i]`` tokens a row, as a DraftModelDrafter does.

        None for a row inside its prompt, where states are still missing.
        """
        pairs = zip(sequences, num_drafts, strict=True)
        wanted = [k if sequence.num_pending == 1 else 0 for sequence, k in pairs]
        rows = catching_up(self.model.config, sequences, wanted, self.catch_up_tokens)
        self.last_num_rounds = 0
        self.last_num_rounds = draft_tokens(
            _Passes(self), list(rows.values()), self.model.config.vocab_size, self.target_vocab_size
        )
        for row in rows.values():
            row.sequence.num_draft_written = min(row.start, row.sequence.num_tokens)
        return [
            rows[index].proposal if index in rows else Proposal([])
            for index in range(len(sequences))
        ]

    def on_free(self, sequence: Sequence) -> None:
        """Nothing is kept but ``num_draft_written``, which the sequence itself drops."""


class _Passes:
    """The passes of one call: the target's states for the first, then the head's own."""

    def __init__(self, drafter: FeatureHeadDrafter) -> None:
        self._drafter = drafter
        self._states_QE: torch.Tensor | None = None
        self._places: dict[int, int] = {}  # where the state of a row is, by the row's identity

    def __call__(self, rows: Seq[DraftRow]) -> torch.Tensor:
        drafter, spans = self._drafter, spans_of(rows)
        batch = build_step_batch(
            spans,
            block_size=drafter.cache.block_size,
            device=drafter.model.device,
            row_multiple=drafter.model.row_multiple,
        )
        num_padded = batch.tokens_T.shape[0]
        if self._states_QE is None:
            features_TE = states_before(drafter.target_cache, spans, num_padded)
        else:
            features_TE = self._guesses(rows, num_padded)
        logits_QV, self._states_QE = drafter.model.forward(batch, drafter.cache, features_TE)
        drawing = [row for row in rows if row.num_drafts > 0]
        self._places = {id(row): place for place, row in enumerate(drawing)}
        return logits_QV

    def _guesses(self, rows: Seq[DraftRow], num_padded: int) -> torch.Tensor:
        """The states that the last pass left for ``rows``, then padding."""
        assert self._states_QE is not None
        places = torch.tensor([self._places[id(row)] for row in rows])
        states_TE = self._states_QE[places.to(self._states_QE.device, non_blocking=True)]
        return torch.nn.functional.pad(states_TE, (0, 0, 0, num_padded - len(rows)))
