"""Taught texts without a target: random tokens, states and log-sum-exps."""

from __future__ import annotations

from dataclasses import replace

import torch

from pagedraft.decoding.distill.taught import Taught


def random_texts(
    num_texts: int,
    *,
    num_prompt: int = 3,
    num_output: int = 9,
    embed_dim: int = 32,
    vocab_size: int = 97,
    seed: int = 0,
) -> list[Taught]:
    """Texts of growing length, the first of ``num_output`` written tokens."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for index in range(num_texts):
        length = num_output + index % 5
        texts.append(
            Taught(
                torch.randint(
                    vocab_size, (num_prompt + length,), generator=generator, dtype=torch.int32
                ),
                num_prompt,
                torch.randn(length, embed_dim, generator=generator).half(),
                torch.full((length,), 6.0),
                "chat" if index % 2 else "code",
                f"source {index}",
                0.0,
            )
        )
    return texts


def with_random_prompt(text: Taught) -> Taught:
    """The text with states of its prompt's tokens, and a log-sum-exp that suits them."""
    states_PE = torch.randn(text.num_prompt - 1, text.states_NE.shape[1]).half()
    return replace(text, before_PE=states_PE, before_lse_P=torch.full((len(states_PE),), 50.0))
