"""Demo chat prompts: templates filled with topics.

What a draft learns must not be the wording of held-out prompts, nor their topics, and yet every
group and every field should be on both sides. So templates *and* topics are dealt out to
``NUM_BLOCKS`` blocks: block b has the b-th template of every group and every eighth topic of every
list, and prompts combine within a block only. The block is the source: blocks share no template and
no topic. (Sources by group or by field would hold out whole tasks or fields; sources by topic alone
would leave the wording the same.)
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pagedraft.decoding.distill import passages, topics
from pagedraft.decoding.distill.prompt import Prompt, interleave
from pagedraft.decoding.distill.templates import GROUPS, SHARED
from pagedraft.decoding.distill.topics import NUM_BLOCKS

TOPICS: dict[str, tuple[str, ...]] = {
    "subject": tuple(topic for field in topics.SUBJECTS.values() for topic in field),
    "pair": topics.PAIRS,
    "dish": topics.DISHES,
    "task": topics.TASKS,
    "recipient": topics.RECIPIENTS,
    "plan": topics.PLANS,
    "sentence": passages.SENTENCES,
    "passage": passages.PASSAGES,
    "character": passages.CHARACTERS,
    "event": passages.EVENTS,
}
NUM_FILLS = 3  # prompts of one template with the same topics; they differ in length, audience ...


def chat_prompts(seed: int) -> list[Prompt]:
    """All prompts of a seed, each once; groups and blocks take turns."""
    queues = {
        f"{group}/{block}": _filled(group, block, seed)
        for group in GROUPS
        for block in range(NUM_BLOCKS)
    }
    return interleave(queues, _weights(queues, seed), exhaust=True)


def block_topics(slot: str, block: int) -> tuple[str, ...]:
    """The topics of a block that a slot can be filled with."""
    return TOPICS[slot][block::NUM_BLOCKS]


def _weights(queues: dict[str, list[Prompt]], seed: int) -> dict[str, float]:
    """Equal but for a trifle, which puts queues in another order for another seed."""
    rng = random.Random(f"order of chat prompts {seed}")
    return {name: 1 + 1e-6 * rng.random() for name in queues}


def _filled(group: str, block: int, seed: int) -> list[Prompt]:
    """The prompts of a group in a block, in random order."""
    template = GROUPS[group][block]
    rng = random.Random(f"{group}/{block}/{seed}")
    slots = re.findall(r"\{(\w+)\}", template)
    shared = [slot for slot in slots if slot in SHARED]
    texts: dict[str, None] = {}
    for values in _choices([slot for slot in slots if slot in TOPICS], block):
        for _ in range(NUM_FILLS):
            values |= {slot: rng.choice(SHARED[slot]) for slot in shared}
            texts[template.format(**values)] = None
    order = list(texts)
    rng.shuffle(order)
    source = f"chat/block {block}"
    return [Prompt(text, "chat", source, is_chat=True) for text in order]


def _choices(slots: Sequence[str], block: int) -> list[dict[str, str]]:
    """Every combination of the block's topics for the slots."""
    found: list[dict[str, str]] = [{}]
    for slot in slots:
        found = [{**values, slot: topic} for values in found for topic in block_topics(slot, block)]
    return found
