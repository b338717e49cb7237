"""Logits processors: a request's own callables, run on the raw logits of each token it may draw.

They are anybody's code. One that fails leaves NaN in its row, from which no token is drawn, and
says why in ``Sequence.failures``: so it fails its own request only, and only where decoding gets to
that position.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from pagedraft.decoding.failure import INTERRUPTS, describe
from pagedraft.decoding.params import LogitsProcessor
from pagedraft.decoding.sequence import Sequence


def run_processors(
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    positions: Seq[int],
    prefixes: Seq[Seq[int]] | None = None,
) -> None:
    """Replace the rows of sequences that have processors by what these return, in place.

    sequences, positions, prefixes: as in ``draw``. A processor gets a list and an fp32 copy [V] of
    its own row, both its to change, and returns that copy or another tensor like it.
    """
    for row, sequence in enumerate(sequences):
        if not sequence.processors:
            continue
        position = positions[row]
        output_ids = [*sequence.output_ids, *(prefixes[row] if prefixes else ())]
        logits_V = logits_QV[row].to(torch.float32, copy=True)
        sequence.failures.pop(position, None)
        try:
            for processor in sequence.processors:
                logits_V = _run(processor, list(output_ids), logits_V)
        except _Failure as failure:
            sequence.failures[position] = (
                f"logits_processors: {failure.args[0]} at position {position}"
            )
            logits_V = logits_QV.new_tensor(torch.nan)
        with torch.inference_mode():  # the logits of a forward pass may be changed in it alone
            logits_QV[row].copy_(logits_V)


class _Failure(Exception):
    """Which processor failed, and how."""


def _run(processor: LogitsProcessor, output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    """Return what ``processor`` makes of the logits, or raise _Failure."""
    had_token = _has_token(logits_V)
    wanted = _describe(logits_V)
    name = type(processor).__qualname__
    try:
        name = getattr(processor, "__qualname__", name)
        out_V = processor(output_ids, logits_V)
        got = _describe(out_V)
        if got == wanted:
            out_V = _plain(out_V)
    except INTERRUPTS:
        raise
    except BaseException as error:  # may be of any kind
        raise _Failure(f"{name} raised {describe(error)}") from error
    if got != wanted:
        raise _Failure(f"{name} expected to return {wanted}, got {got}")
    if had_token and not _has_token(out_V):
        raise _Failure(f"{name} left no token to draw: NaN, or -inf alone")
    return out_V


def _plain(out_V: torch.Tensor) -> torch.Tensor:
    """Values alone: no gradient, and no subclass that runs code of its own later."""
    if type(out_V) is torch.Tensor:
        return out_V.detach()
    return torch.empty(out_V.shape, dtype=out_V.dtype, device=out_V.device).copy_(out_V.detach())


def _has_token(logits_V: torch.Tensor) -> bool:
    return bool(logits_V.amax() > -torch.inf)  # NaN is not


def _describe(value: object) -> str:
    """What a row of logits has to agree in: type, dtype, shape and device."""
    if not isinstance(value, torch.Tensor):
        return f"no tensor but {type(value).__name__}"
    dtype = str(value.dtype).removeprefix("torch.")
    layout = "" if value.layout == torch.strided else f" {value.layout}"
    return f"{dtype}{layout} of shape {tuple(value.shape)} on {value.device}"
