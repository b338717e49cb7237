"""The draws and verdicts that meet every kernel of sampling: each rule with every other.

What a batch leaves out, its kernels leave out. So there is one kernel for each set of rules that
the rows of a step have between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import combinations, product
from typing import Any

import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.draw import draw_drafts
from pagedraft.decoding.logit_rules import LogitRules
from pagedraft.decoding.params import AcceptRule
from pagedraft.decoding.sequence import Sequence
from pagedraft.decoding.verify import verify_rows
from pagedraft.kernels.copy_blocks import copy_blocks
from pagedraft.kernels.logprobs import logprobs

NUM_ROWS, NUM_DRAFTS = 2, 2
Job = tuple[str, Callable[[], object]]


# What a row may have, each with or without the others; token 0 is in every vocabulary.
RULES: dict[str, dict[str, Any]] = {
    "bias": {"bias": ((0, 1.0),)},
    "ban": {"min_tokens": 9, "stop_ids": (0,)},
    "penalty": {"repetition_penalty": 1.1},
    "cut": {"top_k": 2},
    "sample": {},  # of several of one prompt
}


def _sequences(accept: AcceptRule, names: Seq[str] = ()) -> list[Sequence]:
    """Rows with the rules of these names."""
    rules = LogitRules(**{key: value for name in names for key, value in RULES[name].items()})
    index = int("sample" in names)
    return [
        Sequence([0, 0], 1, 1.0, seed, rules=rules, sample_index=index, accept=accept)
        for seed in range(NUM_ROWS)
    ]


def _all_sequences(accept: AcceptRule) -> Iterator[tuple[str, list[Sequence]]]:
    """Rows of every set of rules."""
    for count in range(len(RULES) + 1):
        for names in combinations(RULES, count):
            yield " ".join(names) or "plain", _sequences(accept, names)


def target_jobs(vocab_size: int, device: torch.device, *, has_drafts: bool) -> Iterator[Job]:
    """Draws and verdicts of the target; without drafters plain draws alone."""

    def logits(num_rows: int) -> torch.Tensor:
        return torch.zeros(num_rows, vocab_size, device=device)

    def run(sequences: list[Sequence], proposals: list[Proposal]) -> Callable[[], object]:
        count = sum(len(proposal.tokens) + 1 for proposal in proposals)
        return lambda: verify_rows(logits(count), sequences, proposals)

    plain, drafts = Proposal([]), Proposal([0] * NUM_DRAFTS)
    for name, sequences in _all_sequences("match"):
        yield f"draw: {name}", run(sequences, [plain] * NUM_ROWS)
        if has_drafts:
            yield f"verify: {name}", run(sequences, [drafts] * NUM_ROWS)
    if has_drafts:
        for name, sequences in _all_sequences("rejection"):
            yield f"process: {name}", run(sequences, [drafts] * NUM_ROWS)
        q_KV = torch.full((NUM_DRAFTS, vocab_size), 1.0 / vocab_size, device=device)
        dense = Proposal([0] * NUM_DRAFTS, q_KV)
        rules: tuple[AcceptRule, ...] = ("rejection", "block")
        for rule, pair in product(rules, ([drafts, drafts], [dense, dense], [drafts, dense])):
            yield f"judge: {rule}", run(_sequences(rule), pair)
    yield "log-probabilities", lambda: _logprobs(logits(2))
    yield "copies of blocks", lambda: _copies(device)


def draft_jobs(vocab_size: int, target_vocab_size: int, device: torch.device) -> Iterator[Job]:
    """Draws of a model that drafts, at its first draft and at later ones."""
    rules: tuple[AcceptRule, ...] = ("match", "rejection")
    for accept, num_before in product(rules, (0, 1)):
        for name, sequences in _all_sequences(accept):
            prefixes = [[0] * num_before] * NUM_ROWS

            def run(
                sequences: list[Sequence] = sequences, prefixes: list[list[int]] = prefixes
            ) -> object:
                logits_QV = torch.zeros(NUM_ROWS, vocab_size, device=device)
                return draw_drafts(logits_QV, sequences, prefixes, vocab_size=target_vocab_size)

            yield f"draft: {name}", run


def _logprobs(logits_QV: torch.Tensor) -> None:
    """Of rows at both kinds of addresses that a vocabulary's size may lead to."""
    token_Q = torch.zeros(1, dtype=torch.int64, device=logits_QV.device)
    for top_n, row in product((0, 1), (0, 1)):
        logprobs(logits_QV[row : row + 1], token_Q, min(top_n, logits_QV.shape[1]))


def _copies(device: torch.device) -> None:
    """Between blocks that nobody has: what a kernel is compiled for is alike for all pools."""
    copy_blocks([torch.zeros(3, 64, device=device)], torch.tensor([[1, 2]]))
