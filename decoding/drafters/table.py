"""The drafters by name: a new one is one file and one line here (README.md in this folder)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pagedraft.decoding.drafters.base import Drafter, check_drafter
from pagedraft.decoding.drafters.draft_model import DraftModelDrafter
from pagedraft.decoding.drafters.feature_head import FeatureHeadDrafter
from pagedraft.decoding.drafters.layers import LayersDrafter
from pagedraft.decoding.drafters.lookup import NgramDrafter
from pagedraft.decoding.drafters.suffix import SuffixDrafter
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer


@dataclass(frozen=True)
class Setup:
    """What a drafter may be made from: the models that are loaded and their KV pools.

    draft, draft_cache: None without a draft model. Both pools have the same blocks, so a sequence's
    ``block_ids`` address either. A FeatureHead drafts from the states in ``target_cache``.
    """

    target: Transformer
    target_cache: KVCache
    draft: Transformer | None = None
    draft_cache: KVCache | None = None


def _draft_model(setup: Setup) -> Drafter:
    if setup.draft is None or setup.draft_cache is None:
        raise ValueError('speculate: "draft" needs a draft model, got none')
    vocab_size = setup.target.config.vocab_size
    if isinstance(setup.draft, FeatureHead):
        return FeatureHeadDrafter(
            setup.draft, setup.draft_cache, setup.target_cache, target_vocab_size=vocab_size
        )
    return DraftModelDrafter(setup.draft, setup.draft_cache, target_vocab_size=vocab_size)


DRAFTERS: dict[str, Callable[[Setup], Drafter]] = {
    "draft": _draft_model,
    "ngram": lambda setup: NgramDrafter(),
    "suffix": lambda setup: SuffixDrafter(),
    "layers": lambda setup: LayersDrafter(setup.target, setup.target_cache),
}

# What "auto" stands for. Of the two lookups "suffix" accepts 5 to 6 % more tokens a pass on edited
# text and as many elsewhere; it costs as much time and twice the memory a token, 500 bytes,
# which is little beside a token's KV (suffix_automaton.py has the numbers).
AUTO_LOOKUP = "suffix"


def drafter_names(speculate: str, *, has_draft: bool) -> list[str]:
    """The names that ``speculate`` stands for: one, several as "draft+ngram", "auto" or "off".

    has_draft: whether there is a draft model. Raises ValueError for a name that is not known, is
    given twice, or needs a draft model that is not there, and for a draft model that nobody uses
    (with "off" it may stay).
    """
    if not isinstance(speculate, str):
        raise TypeError(
            f'speculate: expected text, a name or several as "draft+ngram" or "off", got '
            f"{speculate!r}"
        )
    if speculate == "off":
        return []
    if speculate == "auto":
        return ["draft", AUTO_LOOKUP] if has_draft else [AUTO_LOOKUP]
    names = [name.strip() for name in speculate.replace(",", "+").split("+")]
    alone = next((name for name in names if name in ("auto", "off")), None)
    if alone is not None:
        raise ValueError(f"speculate: {alone!r} stands alone, got {speculate!r}")
    for name in names:
        if name not in DRAFTERS:
            known = ["auto", "off", *DRAFTERS]
            raise ValueError(
                f'speculate: expected one of {known}, or several as "draft+ngram", got {name!r}'
            )
    if len(set(names)) < len(names):
        raise ValueError(f"speculate: expected each drafter once, got {speculate!r}")
    if "draft" in names and not has_draft:
        raise ValueError('speculate: "draft" needs a draft model, got none')
    if has_draft and "draft" not in names:
        raise ValueError(
            f'draft: expected no draft model where speculate has no "draft", got one with '
            f"speculate={speculate!r}"
        )
    return names


def make_drafters(names: Seq[str], setup: Setup) -> list[Drafter]:
    """One drafter for each name of ``DRAFTERS``, in order."""
    unknown = [name for name in names if name not in DRAFTERS]
    if unknown:
        raise ValueError(f"drafters: expected names of {list(DRAFTERS)}, got {unknown[0]!r}")
    drafters = [DRAFTERS[name](setup) for name in names]
    for drafter in drafters:
        check_drafter(drafter)
    return drafters
