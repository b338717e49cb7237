"""What the engine bench decodes: one text, chat questions, code edits, windows of a book.

A model without a tokenizer gets random tokens instead, and the bench says so.
"""

from __future__ import annotations

import random
from itertools import cycle, islice
from pathlib import Path

from pagedraft.bench.speculation_prompts import EDITS, QUESTIONS, random_prompts
from pagedraft.scheduler.llm import LLM

TEXT = """\
The lighthouse keeper had lived on the island for thirty years. Every evening he climbed the stairs,
lit the lamp and watched the ships pass on their way to the harbour. One night a storm came up from
the west, and the lamp went out. He took his tools, climbed the stairs once more, and then he saw"""
BOOK = Path(__file__).parent / "data" / "public_domain.txt"
KINDS = ("mixed", "edits", "chat")
STRIDE = 61  # tokens between the beginnings of two windows: no two begin alike
RANDOM_TOKENS, RANDOM_LENGTH = 4096, 48


class PromptSource:
    """Prompts as token ids of one model.

    room: the longest prompt in tokens, so that the answer fits the model's positions.
    """

    def __init__(self, llm: LLM, num_new: int) -> None:
        self._llm = llm
        self.vocab_size = llm.target.config.vocab_size
        self.room = llm.target.config.max_positions - num_new
        if self.room < 1:
            positions = llm.target.config.max_positions
            raise ValueError(f"tokens: expected less than {positions} positions, got {num_new}")
        self._book: list[int] = []

    @property
    def has_text(self) -> bool:
        """Whether prompts are text; else they are random tokens."""
        return self._llm.tokenizer is not None

    def text(self, length: int) -> list[int]:
        """The beginning of TEXT."""
        if not self.has_text:
            return self._random(1, length)[0]
        return self._llm.tokenizer.encode(TEXT)[: min(length, self.room)]

    def chat(self, count: int) -> list[list[int]]:
        """Questions, numbered where they come again."""
        return self._numbered(QUESTIONS, count, 0)

    def edits(self, count: int) -> list[list[int]]:
        """Code to be given back with small changes."""
        return self._numbered(EDITS, count, 1)

    def of_kind(self, kind: str, count: int) -> list[list[int]]:
        """``count`` prompts of one of KINDS; "mixed": edits and questions in turn."""
        if kind == "edits":
            return self.edits(count)
        if kind == "chat":
            return self.chat(count)
        pairs = zip(self.edits(-(-count // 2)), self.chat(-(-count // 2)), strict=True)
        return [prompt for pair in pairs for prompt in pair][:count]

    def windows(self, length: int, count: int) -> list[list[int]]:
        """Spans of a book that begin at different places, so that nobody's cache knows them."""
        length = min(length, self.room)
        if not self._book:
            self._book = self._read_book()
        starts = [i * STRIDE % (len(self._book) - length) for i in range(count)]
        return [self._book[start : start + length] for start in starts]

    def _read_book(self) -> list[int]:
        if self.has_text:
            return self._llm.tokenizer.encode(BOOK.read_text(encoding="utf-8"))
        numbers = random.Random(1)
        return [numbers.randrange(self.vocab_size) for _ in range(RANDOM_TOKENS)]

    def _numbered(self, texts: tuple[str, ...], count: int, seed: int) -> list[list[int]]:
        if not self.has_text:
            return self._random(count, RANDOM_LENGTH, seed)
        times = [f" ({i // len(texts) + 1})" if i >= len(texts) else "" for i in range(count)]
        pairs = zip(islice(cycle(texts), count), times, strict=True)
        return [self._tokens(text + number) for text, number in pairs]

    def _tokens(self, text: str) -> list[int]:
        tokenizer = self._llm.tokenizer
        if tokenizer.chat_template is None:
            return tokenizer.encode(text)[-self.room :]
        return self._llm.chat_ids([{"role": "user", "content": text}])[-self.room :]

    def _random(self, count: int, length: int, seed: int = 0) -> list[list[int]]:
        length = min(length, self.room)
        return random_prompts(self.vocab_size, (1 + seed) * count, length)[seed * count :]
