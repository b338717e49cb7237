"""One sequence and one drafter, round by round, without an engine."""

from __future__ import annotations

from typing import Any

from pagedraft.decoding.drafters.base import Drafter, Proposal
from pagedraft.decoding.sequence import Sequence
from pagedraft.decoding.verify import verify_rows
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer

BLOCK_SIZE = 8
NUM_BLOCKS = 32


def make_cache(model: Transformer) -> KVCache:
    return KVCache(model.config, NUM_BLOCKS, BLOCK_SIZE, model.activation_dtype, model.device)


def start(
    target: Transformer, cache: KVCache, prompt: list[int], first_block: int = 1, **fields: Any
) -> Sequence:
    """A sequence whose prompt is written but its last token, on 8 blocks of its own."""
    fields = {"temperature": 0.0, "seed": 7} | fields
    sequence = Sequence(token_ids=list(prompt), num_prompt=len(prompt), **fields)
    sequence.block_ids = list(range(first_block, first_block + 8))
    if len(prompt) > 1:
        _forward(target, cache, Span(prompt[:-1], 0, sequence.block_ids, 0))
    sequence.num_written = len(prompt) - 1
    return sequence


def verify_round(
    target: Transformer, cache: KVCache, sequence: Sequence, proposal: Proposal
) -> list[int]:
    """Verify and commit one proposal; return the tokens of the round."""
    tokens = sequence.token_ids[-1:] + proposal.tokens
    span = Span(tokens, sequence.num_written, sequence.block_ids, len(tokens))
    [emitted] = verify_rows(_forward(target, cache, span), [sequence], [proposal])
    sequence.append(emitted)
    return emitted


def run_rounds(
    target: Transformer, cache: KVCache, drafter: Drafter, sequence: Sequence, ks: list[int]
) -> list[tuple[int, int]]:
    """(drafted, accepted) of one round for each of ``ks``."""
    counts = []
    for k in ks:
        [proposal] = drafter.propose([sequence], [k])
        emitted = verify_round(target, cache, sequence, proposal)
        counts.append((len(proposal.tokens), len(emitted) - 1))
    return counts


def _forward(target: Transformer, cache: KVCache, span: Span):  # noqa: ANN202
    batch = build_step_batch(
        [span], block_size=BLOCK_SIZE, device=target.device, row_multiple=target.row_multiple
    )
    return target.forward(batch, cache)
