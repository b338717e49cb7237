"""The demo's requests: chat questions, and code edits whose answers repeat much of the prompt."""

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

CODE_EDITS = tuple(
    f"{task}\n\n```python\n{code}```"
    for task, code in (
        ("Repeat this Python code, but rename `Inventory` to `Warehouse`:", _INVENTORY),
        ("Repeat this Python code, but rename `mean` to `average`:", _STATISTICS),
        ("Repeat this Python code, but rename `config` to `settings`:", _PARSER),
        ("Add a docstring to each function of this code:", _STATISTICS),
    )
)
