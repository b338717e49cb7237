"""The demo's requests: chat questions, and code edits whose answers repeat much of the prompt."""

from typing import NamedTuple

CHAT_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in three sentences why the sky is blue.",
    "Give me a short recipe for pancakes.",
    "Write a haiku about the sea.",
)

_INVENTORY = '''\
class Inventory:
    """Keeps track of items and their quantities."""

    def __init__(self):
        self.items = {}

    def add_item(self, name, quantity):
        if quantity <= 0:
            raise ValueError("quantity must be positive")
        self.items[name] = self.items.get(name, 0) + quantity

    def remove_item(self, name, quantity):
        if name not in self.items:
            raise KeyError(name)
        if self.items[name] < quantity:
            raise ValueError("not enough items")
        self.items[name] -= quantity
        if self.items[name] == 0:
            del self.items[name]

    def total_items(self):
        return sum(self.items.values())
'''

_STATISTICS = """\
def mean(values):
    if not values:
        raise ValueError("mean of no values")
    return sum(values) / len(values)


def variance(values):
    center = mean(values)
    return sum((value - center) ** 2 for value in values) / len(values)


def normalize(values):
    center = mean(values)
    spread = variance(values) ** 0.5
    return [(value - center) / spread for value in values]
"""

_PARSER = """\
def parse_config(text):
    config = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, value = line.split("=", 1)
        config[key.strip()] = value.strip()
    return config


def format_config(config):
    lines = []
    for key, value in config.items():
        lines.append(f"{key} = {value}")
    return "\\n".join(lines)
"""

_RENAME = "Rewrite this Python code with `{}` renamed to `{}`. Change nothing else."

CODE_EDITS = tuple(
    f"{task}\n\n```python\n{code}```"
    for task, code in (
        (_RENAME.format("Inventory", "Warehouse"), _INVENTORY),
        (_RENAME.format("mean", "average"), _STATISTICS),
        (_RENAME.format("config", "settings"), _PARSER),
        ("Add type hints to this Python code:", _INVENTORY),
    )
)


class DemoRequest(NamedTuple):
    """One request of the demo; ``length`` is its share of the longest answer."""

    prompt: str
    temperature: float
    length: float


REQUESTS = (
    *(
        DemoRequest(question, temperature, 0.4)
        for question, temperature in zip(CHAT_QUESTIONS, (0.0, 0.8, 0.0, 0.8), strict=True)
    ),
    *(
        DemoRequest(edit, temperature, 1.0)
        for edit, temperature in zip(CODE_EDITS, (0.3, 0.0, 0.0, 0.0), strict=True)
    ),
)
