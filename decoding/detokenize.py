"""A request's text, token by token: where a stop string ends it, and what may be shown of it.

The text at the end is what the tokenizer makes of all tokens at once. Decoding them one by one must
give the same, although a token's text depends on its neighbours: a character may span tokens, the
first token loses its leading space, and a run of byte tokens (``<0x0A>``) that turns out to be no
UTF-8 becomes U+FFFD as a whole, also the characters in it that were whole before.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, NamedTuple

HALF = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet one


class Detokenizer:
    """Text of tokens that come one by one; each costs what a few tokens cost to decode.

    pending: text of the last tokens that later ones may still change. Everything before it, the
        concatenation of what ``push`` returned, is part of the text for good.

    The last tokens are decoded together with those just before them, whose text is then taken off,
    so that a token never stands first where it does not. A run of byte tokens or of half characters
    is decoded again at each of its tokens. A tokenizer that removes spaces after it has decoded, or
    that is no fast one, is decoded whole at each token, and all of its text stays pending.

    Source: Hugging Face text-generation-inference, ``decode_token``. ``DecodeStream`` of the
    tokenizers library is the same in half the time (0.6 against 1.2 us a token), but raises or
    differs from the whole decode where a run of byte tokens breaks.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.pending = ""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_whole = backend is None or _cleans_up(tokenizer, backend)
        self._backend: Any = tokenizer if self._is_whole else backend
        self._window: list[int] = []  # tokens decoded together: those before, then the pending
        self._num_before = 0
        self._text_before = ""
        self._text = ""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that has become final with it, often none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        adds_text = text != self._text  # a special token adds none, and ends no run of bytes
        self._text = text
        self.pending = text[len(self._text_before) :]
        if not adds_text or text.endswith(HALF) or self._is_whole or self._is_byte(token_id):
            return ""
        final, self.pending = self.pending, ""
        self._window = self._window[self._num_before :]
        self._num_before = len(self._window)
        self._text = self._text_before = self._decode(self._window)
        return final

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)

    def _is_byte(self, token_id: int) -> bool:
        name = self._backend.id_to_token(token_id) or ""  # None: a padded column of the vocabulary
        return len(name) == len("<0x0A>") and name.startswith("<0x")


class _Match(NamedTuple):
    """A stop string in the text; in characters. The smallest of several is the one that counts."""

    begin: int
    length: int
    stop: str


class OutputText:
    """The text of one request, which ends where a stop string is complete.

    tokenizer: as transformers loads it.
    stop: the stop strings; what they cut off the text is theirs and all that follows.
    include_stop: keep the stop string itself.
    min_tokens: stop strings that are complete within as many tokens are ignored for good.

    The first token with which a stop string is complete ends the text. Of several that it completes
    the one that begins first counts, then the shorter. A token costs its own text plus the longest
    stop string.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Iterable[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._final = io.StringIO()
        self._num_final = 0  # characters in it
        self._tail = ""  # its end, as much as a stop string that is not complete may span
        self._num_tail = max(map(len, self._stop), default=1) - 1
        self._num_ignored = 0  # a stop string that ends within as many characters does not count
        self._num_kept: int | None = None  # characters, once a stop string was found
        self._is_finished = False

    def push(self, token_id: int) -> str | None:
        """Add a token; return the stop string that it completes, else None.

        Raises ValueError after the end.
        """
        if self._is_finished:
            raise ValueError(f"token {token_id}: the text has ended")
        final = self._detokenizer.push(token_id)
        self._token_ids.append(token_id)
        text = final + self._detokenizer.pending.rstrip(HALF)
        match = self._find(text)
        if len(self._token_ids) <= self._min_tokens:
            match = None
            self._num_ignored = self._num_final + len(text)
        self._final.write(final)
        self._num_final += len(final)
        tail = self._tail + final
        self._tail = tail[max(0, len(tail) - self._num_tail) :]
        if match is None:
            return None
        self._num_kept = match.begin + (match.length if self._include_stop else 0)
        self._is_finished = True
        return match.stop

    @property
    def num_tokens(self) -> int:
        """Tokens that were pushed."""
        return len(self._token_ids)

    def emptied(self) -> OutputText:
        """One like this, without tokens."""
        return OutputText(self._tokenizer, self._stop, self._include_stop, self._min_tokens)

    def finish(self) -> None:
        """No token follows: all text may be shown."""
        self._is_finished = True

    @property
    def text(self) -> str:
        """The text so far, cut at the stop string; decoded anew from all tokens."""
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=True)[: self._num_kept]

    @property
    def settled(self) -> str:
        """What a stream may show: the beginning of the text that no later token can change.

        Ends before what may become a character or a stop string; ``text`` after the end.
        """
        if self._is_finished:
            return self.text
        return self._final.getvalue()[: self._num_settled]

    def settled_from(self, start: int) -> str:
        """``settled[start:]`` at the cost of what it returns, for one who has shown the rest."""
        if self._is_finished:
            return self.text[start:]
        self._final.seek(start)
        text = self._final.read(max(0, self._num_settled - start))
        self._final.seek(0, io.SEEK_END)
        return text

    @property
    def _num_settled(self) -> int:
        """Characters that are final and do not begin a stop string."""
        held = max((_num_begun(self._tail, stop) for stop in self._stop), default=0)
        return self._num_final - held

    def _find(self, text: str) -> _Match | None:
        """The stop string that ``text``, which follows the final one, completes."""
        searched = self._tail + text
        first = self._num_final - len(self._tail)
        matches = []
        for stop in self._stop:
            start = max(0, self._num_ignored + 1 - len(stop) - first)
            begin = searched.find(stop, start)
            if begin >= 0:
                matches.append(_Match(first + begin, len(stop), stop))
        return min(matches, default=None)


def _num_begun(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while begin >= 0 and not stop.startswith(text[begin:]):
        begin = text.find(stop[0], begin + 1)
    return 0 if begin < 0 else len(text) - begin


def _cleans_up(tokenizer: Any, backend: Any) -> bool:
    """Whether ``tokenizer.decode`` removes spaces from what the backend has decoded."""
    is_bpe = type(backend.model).__name__ == "BPE"
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_exempt = is_bpe and not getattr(tokenizer, forced, False)
    return bool(tokenizer.clean_up_tokenization_spaces) and not is_exempt
