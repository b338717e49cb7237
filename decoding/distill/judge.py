"""What a draft is worth on held-out texts: how often it is right, and what that comes to.

The texts are what the target wrote greedily. At every position the draft's distribution is compared
with the target's; which drafts decoding would accept follows exactly, because a draft counts if it
is the text's token. Measured costs (estimate_costs.py) turn passes into a speed-up over plain
decoding of one request at a time. n-gram lookup, which needs no training, is judged beside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch

from pagedraft.decoding.distill.figures import DrafterFigures, Figures, Judgement, Pay, Place
from pagedraft.decoding.drafters.table import DRAFTERS, Setup
from pagedraft.decoding.estimate import (
    MAX_DRAFTS,
    check_inputs,
    median_context,
    replay_texts,
    walk_texts,
)
from pagedraft.decoding.estimate_costs import REPEATS, Costs, measure_costs
from pagedraft.decoding.estimate_forced import Agreement
from pagedraft.decoding.estimate_text import Reader, Text
from pagedraft.decoding.estimate_unrolled import compare_places
from pagedraft.decoding.estimate_walk import Walk
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.transformer import Observe, Transformer

NGRAM = "ngram"


@dataclass(frozen=True)
class HeldOut:
    """What the target wrote greedily for a held-out prompt, and the prompt's kind."""

    text: Text
    kind: str


def judge(
    target: Transformer,
    drafts: Mapping[str, Transformer],
    held_out: Sequence[HeldOut],
    max_drafts: int = MAX_DRAFTS,
    *,
    kv_dtype: torch.dtype | None = None,
    repeats: int = REPEATS,
) -> Judgement:
    """Judge ``drafts`` and n-gram lookup on ``held_out``, which ``target`` wrote.

    drafts: by name, as {"before": the untrained start, "after": what training made of it}; a report
        is about the last one. Drafts of one shape cost the same, so that is measured once.
    max_drafts: the largest k, cut to what fits the longest text. kv_dtype: of the pools. repeats:
        of each timing.
    Raises ValueError for no drafts, texts that were not written greedily or have nothing to draft
    or do not fit, a draft of another vocabulary, and a model whose logits are NaN.
    """
    texts = [one.text for one in held_out]
    _check(target, drafts, held_out, max_drafts)
    max_drafts = min(max_drafts, max(len(text.output_ids) for text in texts) - 1)
    has_head = any(isinstance(draft, FeatureHead) for draft in drafts.values())
    judged = _Judge(target, held_out, max_drafts, kv_dtype, repeats, keeps_states=has_head)
    drafters = {name: judged.model(name, draft) for name, draft in drafts.items()}
    drafters[NGRAM] = judged.lookup(NGRAM)
    device = target.device
    return Judgement(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        max_drafts=max_drafts,
        subject=list(drafts)[-1],
        drafters=drafters,
    )


class _Judge:
    """The target and its texts, against which one drafter after another is held."""

    def __init__(
        self,
        target: Transformer,
        held_out: Sequence[HeldOut],
        max_drafts: int,
        kv_dtype: torch.dtype | None,
        repeats: int,
        *,
        keeps_states: bool,
    ) -> None:
        self.target = target
        self.texts = [one.text for one in held_out]
        self.kinds = [one.kind for one in held_out]
        self.max_drafts = max_drafts
        self.num_tokens = max(len(text.token_ids) for text in self.texts) + max_drafts
        self.kv_dtype = kv_dtype
        self.repeats = repeats
        self.reader = _NumbersOnly(
            target, self.num_tokens, kv_dtype, "target", keeps_states=keeps_states
        )
        self._costs: list[tuple[object, int, Costs]] = []

    def model(self, name: str, draft: Transformer) -> DrafterFigures:
        """The figures of a draft model."""
        beside: dict[str, Any] = {"target": self.reader, "num_places": self.max_drafts}
        own = _NumbersOnly(draft, self.num_tokens, self.kv_dtype, f"drafts[{name!r}]", **beside)
        # Greedy rows would keep one token each, and alpha would be the agreement once more.
        warm = [replace(text, temperature=1.0) for text in self.texts]
        agreements = [compare_places(self.reader, own, text, self.max_drafts) for text in warm]
        walks = [
            walk_texts(agreements, "greedy_n", self.texts, k) for k in range(1, self.max_drafts + 1)
        ]
        return self._figures(self._model_costs(draft, own), walks, agreements)

    def lookup(self, name: str) -> DrafterFigures:
        """The figures of a lookup."""
        setup = Setup(self.target, self.reader.cache)
        walks = [
            replay_texts(DRAFTERS[name](setup), self.texts, k, self.target)
            for k in range(1, self.max_drafts + 1)
        ]
        return self._figures(self._measure(name, setup, None), walks, None)

    def _model_costs(self, draft: Transformer, own: Reader) -> Costs:
        for config, weight_bytes, costs in self._costs:
            if config == draft.config and weight_bytes == draft.weight_bytes:
                return costs
        costs = self._measure("draft", Setup(self.target, self.reader.cache, draft, own.cache), own)
        self._costs.append((draft.config, draft.weight_bytes, costs))
        return costs

    def _measure(self, name: str, setup: Setup, own: Reader | None) -> Costs:
        drafter, (text, num_context) = DRAFTERS[name](setup), median_context(self.texts)
        return measure_costs(
            self.reader, drafter, text, num_context, self.max_drafts, own, repeats=self.repeats
        )

    def _figures(
        self, costs: Costs, walks: list[list[Walk]], agreements: list[Agreement] | None
    ) -> DrafterFigures:
        def of(indices: Sequence[int]) -> Figures:
            some = None if agreements is None else [agreements[i] for i in indices]
            totals = [reduce(add, (of_texts[i] for i in indices)) for of_texts in walks]
            return _figures(len(indices), costs, totals, some)

        every = range(len(self.texts))
        by_kind = {
            kind: of([i for i in every if self.kinds[i] == kind])
            for kind in dict.fromkeys(self.kinds)
        }
        return DrafterFigures(costs, of(every), by_kind)


class _NumbersOnly(Reader):
    """A reader that refuses NaN, which would else count as a wrong draft."""

    def __init__(
        self,
        model: Transformer,
        num_tokens: int,
        kv_dtype: torch.dtype | None,
        name: str,
        **options: Any,
    ) -> None:
        super().__init__(model, num_tokens, kv_dtype, **options)
        self.name = name

    def read(
        self, token_ids: Sequence[int], start: int, observe: Observe | None = None
    ) -> torch.Tensor:
        """As Reader; ValueError where a logit is NaN."""
        logits_QV = super().read(token_ids, start, observe)
        if bool(logits_QV.isnan().any()):
            raise ValueError(f"{self.name}: expected logits that are numbers, got NaN")
        return logits_QV


def _figures(
    num_texts: int, costs: Costs, totals: list[Walk], agreements: list[Agreement] | None
) -> Figures:
    """Of texts whose walks together are ``totals``, by k from 1 on."""

    def mean(field: str) -> float | None:
        values = [value for one in agreements or () for value in getattr(one, field)[1:]]
        return sum(values) / len(values) if values else None

    most = totals[-1]
    counts = zip(most.offered_n, most.reached_n, most.accepted_n, strict=True)
    is_any = most.num_tokens > 0
    return Figures(
        num_texts=num_texts,
        num_tokens=most.num_tokens,
        alpha=mean("alpha_n"),
        greedy=mean("greedy_n"),
        places=tuple(Place(*(round(count) for count in place)) for place in counts),
        rows=tuple(_pay(k, total, costs) for k, total in enumerate(totals, 1) if is_any),
    )


def _pay(k: int, walk: Walk, costs: Costs) -> Pay:
    num_passes, plain = walk.num_passes, costs.plain_seconds(1)
    counts = list(zip(walk.passes_n, costs.step_seconds, costs.draft_seconds, strict=False))
    return Pay(
        k=k,
        num_passes=round(num_passes),
        tokens_per_pass=walk.num_tokens / num_passes,
        drafts_per_pass=walk.num_drafts / num_passes,
        verify=math.fsum(count * step for count, step, _ in counts) / num_passes / plain,
        drafting=math.fsum(count * draft for count, _, draft in counts) / num_passes / plain,
        catch_up=costs.reading_again(walk) / num_passes / plain,
        reading=walk.num_read * costs.read_seconds / num_passes / plain,
    )


def _check(
    target: Transformer,
    drafts: Mapping[str, Transformer],
    held_out: Sequence[HeldOut],
    max_drafts: int,
) -> None:
    if not drafts:
        raise ValueError("drafts: expected at least one, got none")
    if NGRAM in drafts:
        raise ValueError(f"drafts: {NGRAM!r} is the lookup's name, call the draft something else")
    for index, one in enumerate(held_out):
        if one.text.temperature != 0:
            raise ValueError(
                f"held_out[{index}]: expected a text that was written greedily, got temperature "
                f"{one.text.temperature:g}"
            )
        if not one.kind:
            raise ValueError(f"held_out[{index}]: expected a kind, got none")
    for draft in drafts.values():
        check_inputs(target, [one.text for one in held_out], draft, "draft", max_drafts)
