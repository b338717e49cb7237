"""What the fuzzer draws: a case is plain data, and its repr can be kept as a regression test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from pagedraft.decoding.params import SamplingParams
from pagedraft.tests.scheduler.fuzz_drafters import REPLAYS
from pagedraft.tests.scheduler.fuzz_models import PIECES, TARGETS

VOCAB = len(PIECES)
NUM_STEMS = 3
STEM_TOKENS = 40


def _stem(number: int) -> list[int]:
    """Tokens that prompts begin with; the second half of a stem repeats the first."""
    generator = torch.Generator().manual_seed(number)
    half = torch.randint(3, VOCAB, (STEM_TOKENS // 2,), generator=generator).tolist()
    return half + half


STEMS = tuple(_stem(number) for number in range(NUM_STEMS))


def _favour_unseen(output_ids: Seq[int], logits_V: torch.Tensor) -> torch.Tensor:
    logits_V[list(set(output_ids))] -= 2.0  # in place, as users write them
    return logits_V


def _by_length(output_ids: Seq[int], logits_V: torch.Tensor) -> torch.Tensor:
    ids_V = torch.arange(len(logits_V))
    return torch.where((ids_V + len(output_ids)) % 3 == 0, logits_V - 1.5, logits_V)


def _ban_repeats(output_ids: Seq[int], logits_V: torch.Tensor) -> torch.Tensor:
    changed_V = logits_V.clone()
    changed_V[list(output_ids[-1:])] = -torch.inf
    return changed_V


def _raise_at_five(output_ids: Seq[int], logits_V: torch.Tensor) -> torch.Tensor:
    if len(output_ids) == 5:
        raise ArithmeticError("five")
    return logits_V


def _cut_at_four(output_ids: Seq[int], logits_V: torch.Tensor) -> torch.Tensor:
    return logits_V[:-1] if len(output_ids) == 4 else logits_V


def _nan_at_three(output_ids: Seq[int], logits_V: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits_V, torch.nan) if len(output_ids) == 3 else logits_V


PROCESSORS: Mapping[str, Callable[[Seq[int], torch.Tensor], torch.Tensor]] = {
    "favour unseen": _favour_unseen,
    "by length": _by_length,
    "ban repeats": _ban_repeats,
    "raise at five": _raise_at_five,
    "cut at four": _cut_at_four,
    "nan at three": _nan_at_three,
}


@dataclass(frozen=True)
class Row:
    """One submission: a prompt, its parameters, when it comes and when it is aborted.

    stem, length, tail: the prompt is ``length`` tokens of a stem and then ``tail``.
    options: of SamplingParams; "processors" names rows of PROCESSORS.
    arrival: engine steps before it comes; abort_after: steps from there until it is aborted, all
        its samples or (``abort_first_only``) the first; None: never.
    callback: what ``on_tokens`` does once it has heard so many tokens: "raise", "abort" its own
        request or "abort others", and how many.
    tenant, salt: of the request, as in Request.
    """

    stem: int = 0
    length: int = 8
    tail: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    arrival: int = 0
    priority: int = 0
    abort_after: int | None = None
    abort_first_only: bool = False
    callback: tuple[str, int] | None = None
    tenant: str | None = None
    salt: str | None = None

    @property
    def prompt(self) -> list[int]:
        """Token ids."""
        return STEMS[self.stem][: self.length] + list(self.tail)

    @property
    def params(self) -> SamplingParams:
        """What it is submitted with."""
        options = dict(self.options)
        names = options.pop("processors", ())
        return SamplingParams(**options, logits_processors=tuple(PROCESSORS[n] for n in names))


@dataclass(frozen=True)
class Case:
    """A workload and the engine that it runs on; all counts are tokens unless they say otherwise.

    model: a row of MODELS. drafter: names of drafters of the engine, or a row of REPLAYS.
    spare_blocks: blocks beyond what the largest request needs; None: enough for all requests.
    clear_at: engine step before which the prefix cache is cleared; None: never.
    preempt_at: engine steps before which a running request loses its KV, whatever the pool holds.
    fail_at: passes of the target that run out of memory, counted from 0.
    overlap: callbacks of a step run while the next one is under way. swap: KV of every preempted
        request is copied to the host and back.
    noise: seeds the LLM and whatever a replaying drafter does at random.
    """

    rows: tuple[Row, ...]
    model: str = "llama"
    drafter: str = "full"
    k: int | str = 3
    block_size: int = 8
    spare_blocks: int | None = None
    chunk_tokens: int | None = None
    token_budget: int = 512
    max_rows: int = 8
    prefix_cache: bool = True
    clear_at: int | None = None
    preempt_at: tuple[int, ...] = ()
    fail_at: tuple[int, ...] = ()
    overlap: bool = False
    swap: bool = False
    kv_dtype: str = "auto"
    noise: int = 0


# Prompt lengths with block edges among them, limits of outputs, arrivals. The second kind of case
# starts small and grows, all rows at once: in a small pool it preempts.
KINDS = (
    ((5, 1, 9, 16, 17, 19, 24, 25, 33, 40), (1, 3, 6, 9, 12, 14, 16), (0, 0, 0, 1, 2, 3, 5, 8, 13)),
    ((5, 1, 3, 8, 9, 10), (12, 14, 16, 18, 20), (0, 0, 1, 2)),
)
NUM_ROWS = (1, 2, 3, 4, 5, 6)
STYLES: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.0, "repetition_penalty": 0.8, "frequency_penalty": -0.4},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.4, "min_p": 0.05, "presence_penalty": 0.9},
    {"temperature": 0.6, "repetition_penalty": 1.3, "logit_bias": {4: 3.0, 9: -50.0}},
    {},
)
EXTRAS: tuple[Mapping[str, Any], ...] = (
    {"ignore_eos": True},
    {"stop_token_ids": (5, 11, 23)},
    {"stop": ("ab",)},
    {"stop": ("a", "bc", "abc"), "include_stop_str_in_output": True},
    {"stop": ("é", "dd d"), "min_tokens": 2},
    {"stop": ("c",), "min_tokens": 4},
    {"stop_token_ids": (7, 8, 9, 10), "min_tokens": 3},
    {"logprobs": 0},
    {"logprobs": 3},
    {"seed": 7},
    {"seed": 2**64 - 1},
    {"speculate": False},
    {"k": 1},
    {"k": 6},
    *({"n": n} for n in (2, 2, 2, 2, 2, 3, 4)),
    {"accept": "rejection"},
    {"accept": "block"},
    *({"processors": (name,)} for name in PROCESSORS),
    {"processors": ("by length", "favour unseen")},
)
CALLBACKS = (None,) * 27 + (("raise", 2), ("abort", 2), ("abort others", 3))
DRAFTERS = (
    *("ngram", "suffix", "draft", "draft-padded", "self", "layers"),
    *("draft+ngram", "layers+ngram+suffix", "auto", "head", "head+suffix"),
)


@st.composite
def rows(draw: st.DrawFn, lengths: Seq[int], max_tokens: Seq[int], arrivals: Seq[int]) -> Row:
    """One request; its shortest form is an early greedy one."""
    options = dict(draw(st.sampled_from(STYLES)), max_tokens=draw(st.sampled_from(max_tokens)))
    for extra in draw(st.lists(st.sampled_from(EXTRAS), max_size=3)):
        options |= extra
    options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
    is_aborted = draw(st.integers(0, 7)) == 7
    return Row(
        stem=draw(st.integers(0, NUM_STEMS - 1)),
        length=draw(st.sampled_from(lengths)),
        tail=tuple(draw(st.lists(st.integers(3, VOCAB - 1), max_size=3))),
        options=options,
        arrival=draw(st.sampled_from(arrivals)),
        priority=draw(st.integers(0, 1)),
        abort_after=draw(st.integers(0, 10)) if is_aborted else None,
        abort_first_only=is_aborted and draw(st.booleans()),
        callback=draw(st.sampled_from(CALLBACKS)),
        tenant=draw(st.sampled_from((None, None, None, "a", "b"))),
        salt=draw(st.sampled_from((None,) * 7 + ("a",))),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One workload."""
    kind = draw(st.sampled_from(KINDS))
    num_rows = draw(st.sampled_from(NUM_ROWS))
    return Case(
        rows=tuple(draw(rows(*kind)) for _ in range(num_rows)),
        model=draw(st.sampled_from(TARGETS)),
        drafter=draw(st.sampled_from((*REPLAYS, *DRAFTERS))),
        k=draw(st.sampled_from((3, 1, 2, 7, 0, "auto"))),
        block_size=draw(st.sampled_from((8, 8, 8, 8, 16, 16, 32, 64))),
        spare_blocks=draw(st.sampled_from((None, 0, 0, 0, 0, 0, 0, 1))),
        chunk_tokens=draw(st.sampled_from((None, None, 4, 8, 13))),
        token_budget=draw(st.sampled_from((512, 512, 64, 24, 9, 4, 2))),
        max_rows=draw(st.sampled_from((8, 8, 8, 5, 4, 3, 2, 1))),
        prefix_cache=draw(st.sampled_from((True, True, True, False))),
        preempt_at=draw(st.sampled_from(((),) * 8 + ((1, 2, 3, 4, 5), (2, 5, 8, 11, 14, 17)))),
        clear_at=draw(st.sampled_from((None,) * 9 + (5,))),
        fail_at=draw(st.sampled_from(((),) * 9 + ((2,), (0, 1, 4)))),
        overlap=draw(st.sampled_from((False, False, True))),
        swap=draw(st.sampled_from((False, False, False, True))),
        kv_dtype=draw(st.sampled_from(("auto",) * 6 + ("int8", "fp8"))),
        noise=draw(st.integers(0, 2**16)),
    )
