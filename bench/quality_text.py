"""Perplexity: the losses of a model on a text, each token predicted from those before it.

The text is fed in windows, which see nothing of each other, and each window in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer

WINDOW, CHUNK, BLOCK_SIZE = 512, 256, 64


def read_tokens(
    path: Path, encode: Callable[[str], Sequence[int]], num_tokens: int, window: int
) -> list[int]:
    """The first ``num_tokens + 1`` token ids of a text: what is fed, and the last one's target.

    Raises ValueError for an empty text and one without a whole window.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text: {path} cannot be read: {error}") from error
    if not text.strip():
        raise ValueError(f"text: expected some words, got none in {path}")
    tokens = list(encode(text))[: num_tokens + 1]
    if len(tokens) <= window:
        raise ValueError(
            f"text: expected more than {window} tokens, a window, got {len(tokens)} of {path.name}"
        )
    return tokens


def score(
    model: Transformer,
    tokens: Sequence[int],
    stored: torch.dtype,
    *,
    window: int = WINDOW,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (negative log-likelihood, most likely token) of every predicted token, on the CPU.

    stored: what the KV pool stores. Raises FloatingPointError at the first loss that is no number.
    """
    losses, best = [], []
    for first in range(0, len(tokens) - 1, window):
        fed = list(tokens[first : first + window + 1])
        for logits_QV, wanted_Q in _predictions(model, fed, stored, chunk):
            losses.append(F.cross_entropy(logits_QV, wanted_Q, reduction="none"))
            best.append(logits_QV.argmax(-1))
    all_losses = torch.cat(losses).double().cpu()
    check_finite(all_losses, "text, token")
    return all_losses, torch.cat(best).cpu()


def _predictions(
    model: Transformer, window: list[int], stored: torch.dtype, chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits and the tokens that came, chunk by chunk; the last token is only predicted."""
    num_blocks = -(-len(window) // BLOCK_SIZE)
    blocks = list(range(1, num_blocks + 1))
    pool = KVCache(model.config, 1 + num_blocks, BLOCK_SIZE, stored, model.device)
    for start in range(0, len(window) - 1, chunk):
        fed = window[start : min(start + chunk, len(window) - 1)]
        batch = build_step_batch(
            [Span(fed, start, blocks, num_logits=len(fed))],
            block_size=BLOCK_SIZE,
            device=model.device,
            row_multiple=model.row_multiple,
        )
        wanted = torch.tensor(window[start + 1 : start + 1 + len(fed)], device=model.device)
        yield model.forward(batch, pool), wanted


def check_finite(values: torch.Tensor, what: str) -> None:
    """Raise FloatingPointError naming the first value that is NaN or infinite."""
    wrong = (~values.isfinite()).nonzero()
    if len(wrong):
        place = int(wrong[0, 0])
        raise FloatingPointError(
            f"{what} {place}: expected a finite log-likelihood, got {float(values[place])}: "
            "logits hold NaN, or infinity"
        )
