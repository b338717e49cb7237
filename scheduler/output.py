"""What a request keeps of a step's tokens: the output contract applied to it."""

from __future__ import annotations

from typing import NamedTuple

from pagedraft.decoding.commit import commit
from pagedraft.decoding.detokenize import OutputText
from pagedraft.decoding.failure import INTERRUPTS, describe
from pagedraft.scheduler.request import FinishReason, Request


class Kept(NamedTuple):
    """The tokens that a request keeps, and why it ends, if it does.

    stop_reason: the stop id or stop string. error: what went wrong where ``reason`` is "error".
    """

    tokens: list[int]
    reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


def keep(request: Request, tokens: list[int]) -> Kept:
    """Apply the output contract to a pass's tokens; -1, a failed draw, can only be the last.

    A failed draw, or a token whose text cannot be made, counts only if the tokens before it do not
    end the request: plain decoding would not get there. Those are kept.
    """
    valid = [token for token in tokens if token >= 0]
    kept: list[int] = []
    if valid:
        text = None if request.output_text is None else _Text(_output_text(request))
        try:
            result = commit(
                valid,
                num_output=request.num_output,
                num_context=request.num_tokens,
                max_tokens=request.params.max_tokens,
                max_context=request.max_context,
                stop_ids=request.stop_ids,
                push=None if text is None else text.push,
            )
        except _TextFailure as unreadable:
            assert text is not None
            return Kept(valid[: text.num_pushed], "error", error=str(unreadable))
        kept = list(result.tokens)
        if result.finish_reason is not None:
            return Kept(kept, result.finish_reason, result.stop_reason)
    if len(valid) == len(tokens):
        return Kept(kept)
    position = request.num_tokens + len(kept)
    failure = request.sequence.failures.get(position)
    error = failure or f"logits: no finite maximum at position {position} (NaN?)"
    return Kept(kept, "error", error=error)


def _output_text(request: Request) -> OutputText:
    """The text of the tokens that the request has, also after a step that was interrupted."""
    text = request.output_text
    assert text is not None
    if text.num_tokens != request.num_output:
        text = request.output_text = text.emptied()
        for token in request.sequence.output_ids:
            text.push(token)
    return text


class _TextFailure(Exception):
    """The tokenizer made no text of a token, and why."""


class _Text:
    """A request's text that counts its tokens: those before one that fails are kept."""

    def __init__(self, output_text: OutputText) -> None:
        self.num_pushed = 0
        self._output_text = output_text

    def push(self, token: int) -> str | None:
        """As ``OutputText.push``; raises _TextFailure for whatever the tokenizer raises."""
        try:
            stop = self._output_text.push(token)
        except INTERRUPTS:
            raise
        except BaseException as error:  # may be of any kind
            raise _TextFailure(f"text of token {token}: {describe(error)}") from error
        self.num_pushed += 1
        return stop


def call_back(request: Request, tokens: list[int]) -> str | None:
    """Hand tokens to the submitter; return what went wrong, which ends this request only."""
    if request.on_tokens is None:
        return None
    try:
        request.on_tokens(list(tokens))  # the submitter's to change
    except INTERRUPTS:
        raise
    except BaseException as error:  # may be of any kind
        return f"on_tokens: {describe(error)}"
    return None


def is_in_doubt(request: Request, num_tokens: int) -> bool:
    """Whether plain decoding might draw the last of a step's tokens, which could not be drawn.

    Where drafts were judged by chance, drawing again what led to a processor's failure would favour
    continuations that do not fail.
    """
    failed = request.num_tokens + num_tokens - 1 in request.sequence.failures
    return request.sequence.accept == "match" or not failed
