"""Whether a draft will pay: acceptance on given texts, costs on this machine, and what follows.

The texts are what the target wrote. Acceptance at each of their positions gives the number of
passes that k drafts a pass take (estimate_walk.py); measured seconds of a target step and of
drafting (estimate_costs.py) turn it into a speed-up over plain decoding, one request at a time.

What is exact: tokens a pass under the match rule and for greedy decoding, on these texts. Under the
rejection rule they are the expectation given these texts, which are as likely under it as any. Its
output differs from plain decoding's, so a run of it differs too. Seconds are those of one context,
the median one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from statistics import median
from typing import Any, Literal

import torch

from pagedraft.decoding.drafters.base import Drafter, is_lookup
from pagedraft.decoding.drafters.draft_model import check_vocabularies
from pagedraft.decoding.drafters.table import DRAFTERS, Setup
from pagedraft.decoding.estimate_costs import REPEATS, Costs, measure_costs
from pagedraft.decoding.estimate_forced import Agreement
from pagedraft.decoding.estimate_text import Reader, Text
from pagedraft.decoding.estimate_unrolled import compare_places
from pagedraft.decoding.estimate_walk import Walk, replay, walk
from pagedraft.decoding.params import check_int
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.transformer import Transformer

Rule = Literal["match", "rejection"]
MAX_DRAFTS = 8


@dataclass(frozen=True)
class Row:
    """What ``k`` drafts a pass come to under one rule.

    tokens_per_pass: emitted by a pass, accepted drafts and one more; 1 without drafts.
    drafts_per_pass: drafts proposed, fewer than k where a drafter has none or the output ends.
    num_passes: over all texts, without the prompts' own passes.
    seconds_per_token: passes, drafting, and the draft model's reading of the prompts, over the
        tokens; the target's reading of them is not in it.
    speedup: over plain decoding; below 1 it is slower.
    text_speedups: of each text alone.
    """

    rule: Rule
    k: int
    tokens_per_pass: float
    drafts_per_pass: float
    num_passes: float
    seconds_per_token: float
    speedup: float
    text_speedups: tuple[float, ...]


@dataclass(frozen=True)
class Estimate:
    """The figures of one drafter; ``to_json`` for a file.

    num_tokens: of the texts, without each one's first, which no draft can be.
    equal, greedy, alpha: means over the positions, see Agreement; ``equal`` of a lookup is how
        often its first draft is right where it is asked. None where there is no draft model. Of a
        feature head they are those of first drafts: later ones, which rest on its own guesses, are
        drafted from every position, and rows count what became of them.
    rows: by rule, then by k from 1 on. No rows of "rejection" where it is the same rule: without a
        temperature, and in expectation for lookups, whose drafts are no draws.
    """

    drafter: str
    num_texts: int
    num_tokens: int
    temperatures: tuple[float, ...]
    equal: float
    greedy: float | None
    alpha: float | None
    costs: Costs
    rows: tuple[Row, ...]

    def best(self, rule: Rule = "match") -> Row:
        """The row of the largest speed-up, the smallest k on a tie."""
        return max(self.of_rule(rule), key=lambda row: row.speedup)

    def of_rule(self, rule: Rule) -> list[Row]:
        """The rows of a rule by k; those of the match rule where the two are one."""
        rows = [row for row in self.rows if row.rule == rule]
        return rows or [row for row in self.rows if row.rule == "match"]

    @property
    def rules(self) -> list[Rule]:
        """The rules that rows exist for."""
        return list(dict.fromkeys(row.rule for row in self.rows))

    def verdict(self, rule: Rule = "match") -> str:
        """One line: the best k and what to expect, or "don't"."""
        best = self.best(rule)
        if best.speedup <= 1.0:
            return f"don't: at best {best.speedup:.2f}x (k={best.k})"
        return f"k={best.k}: {best.speedup:.2f}x expected ({rule} rule, {self.sampling})"

    @property
    def sampling(self) -> str:
        """How the texts were drawn, in words."""
        low, high = min(self.temperatures), max(self.temperatures)
        if high == 0:
            return "greedy"
        return f"temperature {high:g}" if low == high else f"temperatures {low:g} to {high:g}"

    def to_json(self) -> dict[str, Any]:
        """All figures, with ``best_k`` (0 for plain decoding) and ``verdict`` of each rule."""
        best = {rule: self.best(rule) for rule in self.rules}
        best_k = {rule: row.k if row.speedup > 1.0 else 0 for rule, row in best.items()}
        verdicts = {rule: self.verdict(rule) for rule in self.rules}
        return {**asdict(self), "best_k": best_k, "verdict": verdicts}


def estimate(
    target: Transformer,
    texts: Sequence[Text],
    *,
    draft: Transformer | None = None,
    drafter: str | None = None,
    max_drafts: int = MAX_DRAFTS,
    kv_dtype: torch.dtype | None = None,
    repeats: int = REPEATS,
) -> Estimate:
    """Judge a drafter on ``texts``, which ``target`` wrote.

    draft: the draft model, if any. drafter: a name of ``DRAFTERS``; None is "draft" with a draft
    model, else "ngram". max_drafts: the largest k, cut to what fits the longest text. kv_dtype: of
    the pools. repeats: of each timing.
    Raises ValueError for a draft of another vocabulary, an unknown drafter, a text beyond the
    target's context, or texts without a token to draft.
    """
    name = drafter or ("draft" if draft is not None else "ngram")
    check_inputs(target, texts, draft, name, max_drafts)
    max_drafts = min(max_drafts, max(len(text.output_ids) for text in texts) - 1)
    num_tokens = max(len(text.token_ids) for text in texts) + max_drafts
    reader = Reader(target, num_tokens, kv_dtype, keeps_states=isinstance(draft, FeatureHead))
    beside: dict[str, Any] = {"target": reader, "num_places": max_drafts}
    own = None if draft is None else Reader(draft, num_tokens, kv_dtype, **beside)
    setup = Setup(target, reader.cache, draft, None if own is None else own.cache)
    made = DRAFTERS[name](setup)
    text, num_context = median_context(texts)
    if getattr(made, "model", None) is not draft:
        own = None  # another drafter, which the draft model's reading costs nothing
    costs = measure_costs(reader, made, text, num_context, max_drafts, own, repeats=repeats)
    ks = range(1, max_drafts + 1)
    if is_lookup(made):
        walks = {k: replay_texts(DRAFTERS[name](setup), texts, k, target) for k in ks}
        return _finish(name, texts, costs, _rows("match", walks, costs), walks)
    model = getattr(made, "model", None)
    if not isinstance(model, Transformer):
        raise ValueError(f"drafter: {name!r} is neither a lookup nor drafts with a model")
    second = own or Reader(model, num_tokens, kv_dtype)
    agreements = [compare_places(reader, second, text, max_drafts) for text in texts]
    walks = {k: walk_texts(agreements, "equal_n", texts, k) for k in ks}
    rows = _rows("match", walks, costs)
    if any(text.temperature > 0 for text in texts):
        chances = {k: walk_texts(agreements, "accept_n", texts, k) for k in ks}
        rows += _rows("rejection", chances, costs)
    return _finish(name, texts, costs, rows, walks, agreements)


def check_inputs(
    target: Transformer,
    texts: Sequence[Text],
    draft: Transformer | None,
    name: str,
    max_drafts: int,
) -> None:
    """Raise ValueError for what ``estimate`` cannot judge."""
    check_int("max_drafts", max_drafts, 1)
    if name not in DRAFTERS:
        raise ValueError(f"drafter: expected one of {sorted(DRAFTERS)}, got {name!r}")
    if name == "draft" and draft is None:
        raise ValueError('drafter: "draft" needs a draft model, got none')
    if draft is not None:
        check_vocabularies(draft, target)
    if not any(len(text.output_ids) > 1 for text in texts):
        raise ValueError("texts: expected an output of at least 2 tokens, one of them to draft")
    room = target.config.max_positions
    for index, text in enumerate(texts):
        if len(text.token_ids) > room:
            raise ValueError(
                f"texts[{index}]: {len(text.token_ids)} tokens do not fit a context of {room}"
            )


def median_context(texts: Sequence[Text]) -> tuple[Text, int]:
    """The text whose context half-way through its output is the median, and that context."""
    halves = [len(text.prompt_ids) + max(1, len(text.output_ids) // 2) for text in texts]
    middle = median(halves)
    index = min(range(len(texts)), key=lambda i: abs(halves[i] - middle))
    return texts[index], min(halves[index], len(texts[index].token_ids))


def replay_texts(
    drafter: Drafter, texts: Sequence[Text], k: int, target: Transformer
) -> list[Walk]:
    """The walk of a lookup over each text."""
    return [replay(drafter, text, k, target.config.vocab_size) for text in texts]


def walk_texts(
    agreements: Sequence[Agreement], field: str, texts: Sequence[Text], k: int
) -> list[Walk]:
    """The walk over each text of a model that is right as ``field`` of the agreements says."""
    walks = []
    for agreement, text in zip(agreements, texts, strict=True):
        (accept_n, *later), num_output = agreement.by_place(field), len(text.output_ids)
        reach = len(accept_n) if len(accept_n) < num_output else None
        one = walk(accept_n, k, num_output, text.max_tokens, reach, later)
        walks.append(replace(one, num_read=len(text.prompt_ids) if one.num_tokens else 0))
    return walks


def _rows(rule: Rule, walks: dict[int, list[Walk]], costs: Costs) -> list[Row]:
    rows = []
    for k, of_texts in walks.items():
        total = reduce(add, of_texts)
        seconds = costs.walk_seconds(total)
        rows.append(
            Row(
                rule,
                k,
                tokens_per_pass=total.num_tokens / total.num_passes,
                drafts_per_pass=total.num_drafts / total.num_passes,
                num_passes=total.num_passes,
                seconds_per_token=seconds / total.num_tokens,
                speedup=costs.plain_seconds(total.num_tokens) / seconds,
                text_speedups=tuple(
                    costs.plain_seconds(one.num_tokens) / costs.walk_seconds(one)
                    for one in of_texts
                    if one.num_tokens
                ),
            )
        )
    return rows


def _finish(
    name: str,
    texts: Sequence[Text],
    costs: Costs,
    rows: list[Row],
    walks: dict[int, list[Walk]],
    agreements: Sequence[Agreement] = (),
) -> Estimate:
    def mean(field: str) -> float | None:
        values = [value for one in agreements for value in getattr(one, field)[1:]]
        return sum(values) / len(values) if values else None

    single = reduce(add, walks[1])
    equal = mean("equal_n")
    return Estimate(
        drafter=name,
        num_texts=len(texts),
        num_tokens=single.num_tokens,
        temperatures=tuple(text.temperature for text in texts),
        equal=single.num_accepted / single.num_passes if equal is None else equal,
        greedy=mean("greedy_n"),
        alpha=mean("alpha_n"),
        costs=costs,
        rows=tuple(rows),
    )
