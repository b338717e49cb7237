"""The texts of the speculation bench: code edits, open questions, random prompts, eight each."""

from __future__ import annotations

import random

from pagedraft.scheduler.demo_prompts import CHAT_QUESTIONS, CODE_EDITS

_QUEUE = """\
class TaskQueue:
    def __init__(self, limit):
        self.limit = limit
        self.tasks = []

    def push(self, task, priority=0):
        if len(self.tasks) >= self.limit:
            raise OverflowError("queue is full")
        self.tasks.append((priority, task))
        self.tasks.sort(key=lambda entry: entry[0])

    def pop(self):
        if not self.tasks:
            raise LookupError("queue is empty")
        priority, task = self.tasks.pop(0)
        return task

    def __len__(self):
        return len(self.tasks)
"""

_MATRIX = """\
def transpose(matrix):
    return [list(column) for column in zip(*matrix)]


def multiply(left, right):
    columns = transpose(right)
    result = []
    for row in left:
        result.append([sum(a * b for a, b in zip(row, column)) for column in columns])
    return result


def identity(size):
    return [[1 if row == column else 0 for column in range(size)] for row in range(size)]
"""

_SERVER = """\
{
  "name": "web",
  "port": 8080,
  "workers": 4,
  "timeout_seconds": 30,
  "log_level": "info",
  "database": {
    "host": "localhost",
    "port": 5432,
    "user": "reader",
    "pool_size": 10
  },
  "cache": {
    "enabled": true,
    "entries": 1000
  }
}
"""

_SQL = """\
SELECT customers.name, customers.email, SUM(orders.amount) AS total
FROM customers
JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2024-01-01'
  AND orders.status = 'paid'
GROUP BY customers.name, customers.email
HAVING SUM(orders.amount) > 100
ORDER BY total DESC
LIMIT 20;
"""

_MORE_EDITS = tuple(
    f"{task}\n\n```{language}\n{code}```"
    for task, language, code in (
        ("Rename `task` to `job` in this Python code.", "python", _QUEUE),
        ("Add a docstring to each function of this Python code:", "python", _MATRIX),
        ("Change the port of the database to 6432 and return the whole file:", "json", _SERVER),
        ("Return this query with a limit of 50 instead of 20:", "sql", _SQL),
    )
)

_MORE_QUESTIONS = (
    "What should I look at when I buy a used bicycle?",
    "Tell me a short story about a dog who is afraid of thunder.",
    "Why do leaves change their color in autumn?",
    "How can I learn to play the guitar as an adult?",
)

EDITS = (*CODE_EDITS, *_MORE_EDITS)
QUESTIONS = (*CHAT_QUESTIONS, *_MORE_QUESTIONS)


def random_prompts(vocab_size: int, count: int = 8, length: int = 64) -> list[list[int]]:
    """Prompts of random token ids, always the same ones."""
    numbers = random.Random(0)
    return [[numbers.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
