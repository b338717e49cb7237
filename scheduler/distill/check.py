"""What a distilled draft does in the engine, one prompt after another, beside plain decoding.

A prompt runs plainly, with some k, plainly, with another k, and so on: every run with drafts stands
between two plain ones. Other work on the machine hurts all alike, and how far two plain runs lie
apart says how much it hurts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pagedraft.decoding.distill.figures import Measured, MeasuredGroup, MeasuredRow
from pagedraft.decoding.distill.judge import HeldOut
from pagedraft.decoding.estimate_text import Text
from pagedraft.decoding.params import check_int
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.estimate_check import request_params
from pagedraft.scheduler.llm import LLM

KS = range(1, 9)
ROUNDS = 3
BLOCK_SIZE = 64


@dataclass(frozen=True)
class _Run:
    """One text once: its tokens after the first, and what they took."""

    token_ids: tuple[int, ...]
    num_tokens: int
    num_passes: int
    num_accepted: int
    seconds: float


@dataclass(frozen=True)
class _Trio:
    """A run with drafts and the plain ones before and after it."""

    index: int
    round: int
    k: int
    before: _Run
    run: _Run
    after: _Run

    @property
    def plain_seconds(self) -> float:
        """Of a plain run."""
        return (self.before.seconds + self.after.seconds) / 2

    @property
    def is_same(self) -> bool:
        """Whether drafts changed nothing."""
        return self.before.token_ids == self.run.token_ids


def measure(
    target: str | Path | Transformer,
    draft: str | Path | Transformer,
    held_out: Sequence[HeldOut],
    ks: Sequence[int] = KS,
    *,
    rounds: int = ROUNDS,
    kv_dtype: str = "auto",
) -> Measured:
    """Write the held-out texts anew, with every k of ``ks`` and plainly, ``rounds`` times.

    The rules of a text hold its stop ids, and it may become ``max_tokens`` long. Speed-ups are
    medians over rounds. Raises ValueError where no text has a token to draft, RuntimeError where a
    request fails.
    """
    ks = list(ks)
    check_int("rounds", rounds, 1)
    for k in ks:
        check_int("ks", k, 1)
    if not ks or len(set(ks)) < len(ks):
        raise ValueError(f"ks: expected different numbers of drafts, at least one, got {ks}")
    if not any(one.text.max_tokens > 1 for one in held_out):
        raise ValueError("held_out: expected a text of at least 2 tokens, one of them to draft")
    longest = max(len(one.text.prompt_ids) + one.text.max_tokens for one in held_out)
    llm = LLM(
        target,
        draft,
        speculate="draft",
        kv_dtype=kv_dtype,
        block_size=BLOCK_SIZE,
        kv_tokens=longest + max(ks) + 2 * BLOCK_SIZE,
        prefix_cache=False,  # every run reads its prompt, with both models
    )
    warm = max((one.text for one in held_out), key=lambda text: text.max_tokens)
    for k in (0, *ks):
        _run(llm, warm, k)
    trios, rewritten = [], set()
    for number in range(rounds):
        for index, one in enumerate(held_out):
            first = (index + number) % len(ks)
            found = _trios(llm, one.text, (*ks[first:], *ks[:first]), index, number)
            trios += [trio for trio in found if trio.before.num_tokens]
            if found[0].before.token_ids != one.text.output_ids:
                rewritten.add(index)
    if not trios:
        raise ValueError("held_out: expected a text of at least 2 tokens, all end at their first")
    kinds = dict.fromkeys(held_out[trio.index].kind for trio in trios)
    return Measured(
        rounds,
        len(rewritten),
        _group(trios, ks),
        {
            kind: _group([trio for trio in trios if held_out[trio.index].kind == kind], ks)
            for kind in kinds
        },
    )


def _trios(llm: LLM, text: Text, ks: Sequence[int], index: int, number: int) -> list[_Trio]:
    """One text with each k; a plain run serves as "after" and as the next one's "before"."""
    trios = []
    before = _run(llm, text, 0)
    for k in ks:
        run, after = _run(llm, text, k), _run(llm, text, 0)
        trios.append(_Trio(index, number, k, before, run, after))
        before = after
    return trios


def _run(llm: LLM, text: Text, k: int) -> _Run:
    params = replace(request_params(text), speculate=k > 0, k=k)
    [completion] = llm.generate([list(text.prompt_ids)], params)
    if completion.error is not None:
        raise RuntimeError(f"the engine failed: {completion.error}")
    if completion.stats.drafter_errors:
        raise RuntimeError(f"the draft failed: {completion.stats.drafter_errors[0]}")
    emissions = completion.stats.emissions
    return _Run(
        tuple(completion.token_ids),
        sum(count for _, count in emissions[1:]),
        len(emissions) - 1,
        sum(completion.stats.accepted),
        emissions[-1][0] - emissions[0][0],
    )


def _group(trios: Sequence[_Trio], ks: Sequence[int]) -> MeasuredGroup:
    by_round: dict[tuple[int, int], list[_Trio]] = {}
    for trio in trios:
        by_round.setdefault((trio.k, trio.round), []).append(trio)
    differences = sorted(map(_difference, by_round.values()))
    plain = [
        sum(trio.before.num_tokens for trio in some) / sum(trio.plain_seconds for trio in some)
        for some in by_round.values()
    ]
    lengths = {trio.index: trio.before.num_tokens for trio in trios}
    return MeasuredGroup(
        num_texts=len(lengths),
        num_tokens=sum(lengths.values()),
        plain_tokens_per_second=median(plain),
        noise=differences[-(-4 * len(differences) // 5) - 1],
        rows=tuple(_row(k, [some for (of, _), some in by_round.items() if of == k]) for k in ks),
    )


def _difference(trios: Sequence[_Trio]) -> float:
    """By how much the plain runs before and after differ, as a share of the shorter ones."""
    before = sum(trio.before.seconds for trio in trios)
    after = sum(trio.after.seconds for trio in trios)
    return max(before, after) / min(before, after) - 1.0


def _row(k: int, rounds: Sequence[Sequence[_Trio]]) -> MeasuredRow:
    speeds, speedups = [], []
    for trios in rounds:
        speed = _speed([(trio.run.num_tokens, trio.run.seconds) for trio in trios])
        plain = _speed([(trio.before.num_tokens, trio.plain_seconds) for trio in trios])
        speeds.append(speed)
        speedups.append(speed / plain)
    every = [trio for trios in rounds for trio in trios]
    num_passes = max(1, sum(trio.run.num_passes for trio in every))
    others = {trio.index for trio in every if not trio.is_same}
    return MeasuredRow(
        k=k,
        tokens_per_second=median(speeds),
        tokens_per_pass=sum(trio.run.num_tokens for trio in every) / num_passes,
        accepted_per_pass=sum(trio.run.num_accepted for trio in every) / num_passes,
        speedup=median(speedups),
        round_speedups=tuple(speedups),
        num_same=len({trio.index for trio in every} - others),
    )


def _speed(runs: Sequence[tuple[int, float]]) -> float:
    """Tokens a second."""
    return sum(tokens for tokens, _ in runs) / max(sum(seconds for _, seconds in runs), 1e-9)
