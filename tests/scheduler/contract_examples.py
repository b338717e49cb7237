"""Requests whose outputs are forced, and what must become of them: for the output contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.tests.model.words import words

TOKENIZER = words("byte-level")
MAX_POSITIONS = 40
PLACES = range(1, 9)
BEFORE = ["a", "Ġb", "Ã", "©", "c", "ab", "Ġ"]  # halves of a character among them
AFTER = ["b", "a", "!", "</s>", "a", "b", "c", "a"]  # accepted with the rest, and never seen


def ids(pieces: Sequence[str]) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids(list(pieces))


def id_of(piece: str) -> int:
    return TOKENIZER.convert_tokens_to_ids(piece)


@dataclass(frozen=True)
class Forced:
    """A logits processor: output number i is ``token_ids[i]``."""

    token_ids: tuple[int, ...]

    def __call__(self, output_ids: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
        if len(output_ids) < len(self.token_ids):
            logits_V[self.token_ids[len(output_ids)]] += 1000.0
        return logits_V


class Oracle:
    """Drafts what is forced, but the outputs of index ``wrong``."""

    name = "oracle"

    def __init__(self, wrong: Sequence[int] = ()) -> None:
        self.wrong = wrong

    def propose(self, sequences, num_drafts):
        return [self.row(s, k) for s, k in zip(sequences, num_drafts, strict=True)]

    def row(self, sequence, k: int) -> list[int]:
        start = len(sequence.output_ids)
        forced = sequence.processors[0].token_ids[start : start + k]
        return [t + (i in self.wrong) for i, t in enumerate(forced, start=start)]

    def on_free(self, sequence):
        pass


@dataclass(frozen=True)
class End:
    """What ends a request.

    pieces: the tokens up to the end, after those of BEFORE; contract: from the number of outputs to
    fields of SamplingParams; text: what the pieces leave; before: instead of BEFORE's pieces.
    """

    pieces: list[str]
    contract: Callable[[int], dict[str, Any]]
    finish_reason: str
    stop_reason: int | str | None
    text: str
    before: str | None = None
    fills_context: bool = False


ENDS = {
    "EOS": End(["</s>"], lambda n: {}, "stop", 2, ""),
    "EOS and max_tokens at once": End(["</s>"], lambda n: {"max_tokens": n}, "stop", 2, ""),
    "EOS ignored": End(
        ["</s>", "d"],
        lambda n: {"ignore_eos": True, "stop_token_ids": [id_of("d")]},
        "stop",
        id_of("d"),
        "d",
    ),
    "stop id": End(["d"], lambda n: {"stop_token_ids": [id_of("d")]}, "stop", id_of("d"), "d"),
    "stop string": End(["!"], lambda n: {"stop": "!"}, "stop", "!", ""),
    "kept": End(
        ["!"], lambda n: {"stop": "!", "include_stop_str_in_output": True}, "stop", "!", "!"
    ),
    "over three tokens": End(["x", "Ġ", "z"], lambda n: {"stop": ["y", "x z"]}, "stop", "x z", ""),
    "a character of two tokens": End(["y", "Ã", "©"], lambda n: {"stop": "yé"}, "stop", "yé", ""),
    "inside a token": End(["abc"], lambda n: {"stop": "bc"}, "stop", "bc", "a"),
    "string and max_tokens at once": End(
        ["!"], lambda n: {"stop": "!", "max_tokens": n}, "stop", "!", ""
    ),
    "string and context at once": End(
        ["!"], lambda n: {"stop": "!"}, "stop", "!", "", fills_context=True
    ),
    "string and id at once": End(
        ["!"], lambda n: {"stop": "!", "stop_token_ids": [id_of("!")]}, "stop", id_of("!"), ""
    ),
    "strings within min_tokens": End(
        ["!"], lambda n: {"stop": "!", "min_tokens": n - 1}, "stop", "!", "", before="!"
    ),
    "max_tokens": End(["d"], lambda n: {"max_tokens": n}, "length", None, "d"),
    "max_tokens inside a stop string": End(
        ["x"], lambda n: {"max_tokens": n, "stop": "xb"}, "length", None, "x"
    ),
    "context": End(["d"], lambda n: {}, "length", None, "d", fills_context=True),
}
SPANS = {f"{k} drafts": (k, ()) for k in range(1, 7)} | {
    "6 drafts, one is wrong": (6, (3,)),
    "3 drafts, two are wrong": (3, (1, 5)),
}


@dataclass(frozen=True)
class Example:
    """A request and what it must become."""

    prompt: list[int]
    params: SamplingParams
    token_ids: list[int]
    end: End
    text: str


def example(name: str, place: int, accept: str = "match") -> Example:
    """The first of an end's pieces is output number ``place``."""
    end = ENDS[name]
    before = BEFORE[: place - 1] if end.before is None else [end.before] * (place - 1)
    kept = ids([*before, *end.pieces])
    prompt = [5] * (MAX_POSITIONS - len(kept) if end.fills_context else 3)
    fields = {"max_tokens": 20, "temperature": 1.0, "seed": place, "logprobs": 2, "accept": accept}
    processors = (Forced((*kept, *ids(AFTER))),)
    params = SamplingParams(**{**fields, **end.contract(len(kept))}, logits_processors=processors)
    return Example(prompt, params, kept, end, TOKENIZER.decode(ids(before)) + end.text)


def examples(name: str, accept: str = "match") -> list[Example]:
    return [example(name, place, accept) for place in PLACES]
