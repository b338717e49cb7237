"""The task set of the quality bench: small tasks for small models, written for this project.

A file has one JSON object a line; which keys it has says what kind of task it is
(bench/data/README.md has an example of each):

* a choice: ``context`` and ``options``, texts that may follow it; ``answer`` is the index of the
  right one. Nothing is generated: the most likely option counts.
* a cloze: ``context`` and ``words``; the first word that greedy decoding goes on with, an article
  aside, is one of them, in any case.
* an order: ``ask``, what a user says in a chat, and ``pattern``, a regular expression that the
  greedy answer begins with.

Each has an ``id``, and a ``group`` under which it is counted.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

CLOZE_TOKENS, ORDER_TOKENS = 4, 32


@dataclass(frozen=True)
class Choice:
    """options: at least two, none the beginning of another; answer: the index of the right one."""

    id: str
    group: str
    context: str
    options: tuple[str, ...]
    answer: int

    @property
    def chance(self) -> float:
        """The share that guessing gets right."""
        return 1 / len(self.options)


@dataclass(frozen=True)
class Written:
    """A task whose answer is generated: the answer begins with ``pattern``, or it is wrong.

    is_chat: the prompt is what a user says, to be put in the chat template.
    """

    id: str
    group: str
    prompt: str
    pattern: re.Pattern[str]
    is_chat: bool

    @property
    def chance(self) -> float:
        """Guessing writes nothing right."""
        return 0.0

    @property
    def num_tokens(self) -> int:
        """The longest answer."""
        return ORDER_TOKENS if self.is_chat else CLOZE_TOKENS

    def is_right(self, text: str) -> bool:
        """Whether a generated text counts."""
        return self.pattern.match(text.strip()) is not None


Task = Choice | Written


def read_tasks(path: Path) -> list[Task]:
    """All tasks of a file, in order; ValueError names the line that is none."""
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            task = parse(json.loads(line))
            if task.id in seen:
                raise ValueError(f"id: {task.id!r} is that of line {seen[task.id]} too")
        except ValueError as error:  # json.JSONDecodeError is one
            raise ValueError(f"{path.name}:{number}: {error}") from None
        seen[task.id] = number
        tasks.append(task)
    if not tasks:
        raise ValueError(f"tasks: expected at least one, got none in {path}")
    return tasks


def parse(row: Any) -> Task:
    """The task of a JSON object; ValueError says what is wrong with it."""
    keys = sorted(row) if isinstance(row, dict) else type(row).__name__
    make = next((make for known, make in _KINDS.items() if keys == sorted(known)), None)
    if make is None:
        kinds = " or ".join(str(sorted(known)) for known in _KINDS)
        raise ValueError(f"expected the keys {kinds}, got {keys}")
    for name in ("id", "group", *({"context", "ask"} & row.keys())):
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{name}: expected a text, got {row[name]!r}")
    return make(row)


def _choice(row: Mapping[str, Any]) -> Choice:
    options, answer = _texts(row, "options", least=2), row["answer"]
    for one, other in pairwise(sorted(options)):
        if other.startswith(one):
            raise ValueError(f"options: {one!r} is the beginning of {other!r}, and always likelier")
    if type(answer) is not int or not 0 <= answer < len(options):
        raise ValueError(f"answer: expected an index below {len(options)}, got {answer!r}")
    return Choice(row["id"], row["group"], row["context"], options, answer)


def _cloze(row: Mapping[str, Any]) -> Written:
    words = "|".join(map(re.escape, _texts(row, "words", least=1)))
    pattern = re.compile(rf"\W*((a|an|the)\W+)?({words})\b", re.IGNORECASE)
    return Written(row["id"], row["group"], row["context"], pattern, is_chat=False)


def _order(row: Mapping[str, Any]) -> Written:
    try:
        pattern = re.compile(row["pattern"])
    except (re.error, TypeError) as error:
        raise ValueError(
            f"pattern: expected a regular expression, got {row['pattern']!r}: {error}"
        ) from None
    return Written(row["id"], row["group"], row["ask"], pattern, is_chat=True)


def _texts(row: Mapping[str, Any], name: str, *, least: int) -> tuple[str, ...]:
    texts = row[name]
    is_list = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not is_list or len(texts) < least or len(set(texts)) < len(texts):
        raise ValueError(f"{name}: expected {least} or more different texts, got {texts!r}")
    return tuple(texts)


_KINDS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], Task]] = {
    ("id", "group", "context", "options", "answer"): _choice,
    ("id", "group", "context", "words"): _cloze,
    ("id", "group", "ask", "pattern"): _order,
}


def every(tasks: Sequence[Task], step: int) -> list[Task]:
    """Every ``step``-th task of each group, from its first one on."""
    seen: defaultdict[str, int] = defaultdict(int)
    kept = []
    for task in tasks:
        if seen[task.group] % step == 0:
            kept.append(task)
        seen[task.group] += 1
    return kept


def groups(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """The indices of each group's tasks."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        found[task.group].append(index)
    return dict(found)
