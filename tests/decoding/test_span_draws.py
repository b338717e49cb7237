"""SpanDraws: what is kept from step to step is what would be gathered anew."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch

from pagedraft.decoding.draw import rows_of_logits, sample_batch
from pagedraft.decoding.logit_rules import NEUTRAL, LogitRules
from pagedraft.decoding.sequence import Sequence
from pagedraft.decoding.span_draws import SpanDraws, changes_logits

CPU = torch.device("cpu")
RULES = {
    "neutral": [NEUTRAL],
    "cuts": [NEUTRAL, LogitRules(top_k=3), LogitRules(top_p=0.5, min_p=0.1)],
    "edits": [NEUTRAL, LogitRules(top_k=3), LogitRules(bias=((1, 2.0),))],
}


def a_sequence(rng: random.Random, rules: list[LogitRules], most_samples: int) -> Sequence:
    num_tokens = rng.randint(1, 50)
    return Sequence(
        [0] * num_tokens,
        num_tokens,
        temperature=rng.choice([0.0, 0.7, 1.0]),
        seed=rng.getrandbits(64),
        rules=rng.choice(rules),
        sample_index=rng.randrange(most_samples),
    )


def next_step(rng: random.Random, rows: list[Sequence], rules, most_samples: int) -> None:
    """Some rows end, the last one takes the place of each; others start; all get a token."""
    for _ in range(rng.choice([0, 0, 1, 3])):
        if len(rows) > 1:
            last = rows.pop()
            place = rng.randrange(len(rows) + 1)
            rows[place : place + 1] = [last]
    rows += [a_sequence(rng, rules, most_samples) for _ in range(rng.choice([0, 0, 1, 2]))]
    for sequence in rows:
        sequence.append([0])


def check_as_gathered(known: SpanDraws, sequences: list[Sequence], lengths: list[int]) -> None:
    """Against what is made for every row of logits from its sequence."""
    drafts = [[0] * (length - 1) for length in lengths]
    of_rows, positions, _ = rows_of_logits(sequences, drafts)
    expected = sample_batch(CPU, of_rows, positions)
    lengths_R = np.array(lengths) if any(drafts) else None
    batch = known.batch(CPU, sequences, lengths_R)
    for name in [field.name for field in fields(batch)]:
        got, want = getattr(batch, name), getattr(expected, name)
        assert (got is None) == (want is None), name
        assert want is None or (got.dtype == want.dtype and torch.equal(got, want)), name


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("most_samples", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_random_histories(name, most_samples, seed):
    rng = random.Random(seed)
    known, rows = SpanDraws(), [a_sequence(rng, RULES[name], most_samples)]
    for _ in range(60):
        next_step(rng, rows, RULES[name], most_samples)
        sequences = [*rows]
        is_edited = any(map(changes_logits, sequences))
        assert known.is_edited(sequences) == is_edited
        if not is_edited:
            longest = rng.choice([1, 1, 4])
            check_as_gathered(known, sequences, [rng.randint(1, longest) for _ in sequences])
