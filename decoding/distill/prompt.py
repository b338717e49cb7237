"""A prompt, and lists of prompts that keep a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Prompt:
    """What the target is asked, or what it continues.

    text: the user's message (chat), or the text to continue as it stands.
    kind: of text ("chat", "code-chat", "code", "text"); reports are by kind.
    source: where it comes from. Prompts that share wording or material share their source, so that
        train and held-out prompts can be kept apart by it.
    is_chat: it goes through the model's chat template.
    history: (role, content) of the messages before ``text``; only for chat.
    """

    text: str
    kind: str
    source: str
    is_chat: bool
    history: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> tuple[object, ...]:
        """What makes two prompts the same: everything the model reads, whatever its spacing."""
        said = tuple((role, " ".join(content.split())) for role, content in self.history)
        return self.is_chat, said, " ".join(self.text.split())


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts without those that repeat an earlier one."""
    first: dict[tuple[object, ...], Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.words, prompt)
    return list(first.values())


def interleave(
    queues: Mapping[str, Sequence[Item]], weights: Mapping[str, float], *, exhaust: bool = False
) -> list[Item]:
    """Items of the queues in turn, so that every prefix has the mixture of ``weights``.

    Each time the queue that is furthest behind its share gives its next item. The list ends where
    that queue is empty; with ``exhaust`` an empty queue is passed over instead, and all is taken.
    """
    taken = dict.fromkeys(queues, 0)
    names = [name for name in queues if queues[name] or not exhaust]
    items: list[Item] = []
    while names:
        name = min(names, key=lambda name: ((taken[name] + 1) / weights[name], name))
        if taken[name] < len(queues[name]):
            items.append(queues[name][taken[name]])
            taken[name] += 1
        elif not exhaust:
            break
        if exhaust and taken[name] == len(queues[name]):
            names.remove(name)
    return items
