"""Demo prompts from the standard library: code to continue, requests about code, documentation.

Wordings are few and shared; what must be unseen is the code, so the source is a top-level module or
package: files of one package resemble each other too much to be apart.
"""

from __future__ import annotations

import random
import re

from pagedraft.decoding.distill import code_templates as templates
from pagedraft.decoding.distill.prompt import Prompt
from pagedraft.decoding.distill.stdlib_code import Definition, Docstring

# Characters: raw prompts of 40 to 300 tokens. With the demo model's tokenizer code has about four a
# token, documentation five.
CODE_CHARS = (170, 1000)
TEXT_CHARS = (200, 1200)
SHORT_CODE = (100, 1200)  # of a function that a request is about


def code_prompts(definitions: tuple[Definition, ...], seed: int) -> list[Prompt]:
    """Beginnings of functions and classes, to be continued; at most one each, in random order."""
    rng = random.Random(f"code {seed}")
    found = []
    for definition in definitions:
        text = _beginning(definition, rng)
        if text:
            found.append(Prompt(text, "code", definition.source, is_chat=False))
    rng.shuffle(found)
    return found


def code_chat_prompts(definitions: tuple[Definition, ...], seed: int) -> list[Prompt]:
    """Requests about functions, one or two each, in random order."""
    rng = random.Random(f"code-chat {seed}")
    found = []
    for definition in definitions:
        for text in (_wish(definition, rng), _request(definition, rng)):
            if text:
                found.append(Prompt(text, "code-chat", definition.source, is_chat=True))
    rng.shuffle(found)
    return found


def text_prompts(docstrings: tuple[Docstring, ...], seed: int) -> list[Prompt]:
    """Documentation: longer pieces to be summarised or continued, in random order."""
    rng = random.Random(f"text {seed}")
    found = []
    for docstring in docstrings:
        if len(docstring.text) < 2 * TEXT_CHARS[0] or ">>>" in docstring.text:
            continue
        summed = rng.choice(templates.SUMMARISE).format(text=_cut(docstring.text, TEXT_CHARS[1]))
        shorter = min(TEXT_CHARS[1], len(docstring.text) * 2 // 3)
        begun = _cut(docstring.text, rng.randint(TEXT_CHARS[0], shorter))
        found.append(Prompt(summed, "text", docstring.source, is_chat=True))
        found.append(Prompt(begun, "text", docstring.source, is_chat=False))
    rng.shuffle(found)
    return found


def _beginning(definition: Definition, rng: random.Random) -> str:
    """The head and some lines, with at least a quarter of the lines left to write; "" if none."""
    lines = definition.code.split("\n")
    least, most = CODE_CHARS
    wanted = rng.randint(least, most)
    text = "\n".join(lines[: definition.num_head])
    for num_lines in range(definition.num_head + 1, len(lines) * 3 // 4 + 1):
        longer = "\n".join(lines[:num_lines])
        if len(text) >= wanted or len(longer) > most:
            break
        text = longer
    return text.rstrip() if least <= len(text.rstrip()) <= most else ""


def _wish(definition: Definition, rng: random.Random) -> str:
    """A request for code, from the first sentence of the docstring; "" where there is none."""
    if not definition.sentence or definition.name.startswith("__"):
        return ""
    does = _third_person(definition.sentence)
    wording = rng.choice(templates.WRITE if does else templates.DESCRIBED)
    return _fill(wording, definition, does=does)


def _request(definition: Definition, rng: random.Random) -> str:
    """A request about the code of a short function; "" where it is long, or too short."""
    least, most = SHORT_CODE
    if not least <= len(definition.code) <= most or len(definition.code.split("\n")) < 3:
        return ""
    tasks = [*templates.ABOUT, "rename", "fix"]
    rng.shuffle(tasks)
    for task in tasks:
        text = _task(task, definition, rng)
        if text:
            return text
    return ""


def _task(task: str, definition: Definition, rng: random.Random) -> str:
    """The request of one task; "" where the code does not lend itself to it."""
    if task == "rename":
        old = [name for name in definition.arguments if len(name) > 2]
        new = [name for name in templates.NEW_NAMES if name not in definition.code]
        if not old or not new:
            return ""
        wording = rng.choice(templates.RENAME)
        return _fill(wording, definition, old=rng.choice(old), new=rng.choice(new))
    if task == "fix":
        broken = _with_bug(definition, rng)
        wording = rng.choice(templates.FIX)
        return _fill(wording, definition, broken=_fenced(broken)) if broken else ""
    return _fill(rng.choice(templates.ABOUT[task]), definition)


def _with_bug(definition: Definition, rng: random.Random) -> str:
    """The code with one operator changed; "" where it has none."""
    lines = definition.code.split("\n")
    places = [
        (n, operator)
        for n, line in enumerate(lines)
        if n >= definition.num_head and line.lstrip().startswith(templates.BUG_LINES)
        for operator in templates.BUGS
        if operator in line
    ]
    if not places:
        return ""
    n, operator = rng.choice(places)
    lines[n] = lines[n].replace(operator, templates.BUGS[operator], 1)
    return "\n".join(lines)


def _fill(wording: str, definition: Definition, **values: str) -> str:
    values = {"code": _fenced(definition.code), **values}
    names = {"noun": definition.noun, "name": definition.name, "sentence": definition.sentence}
    return wording.format(signature=definition.signature, **names, **values)


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _third_person(sentence: str) -> str:
    """ "Return the sum." as "returns the sum."; "" where no known verb begins it."""
    verb, _, rest = sentence.partition(" ")
    if verb.endswith("s") and verb[:-1] in templates.VERBS:
        return f"{verb.lower()} {rest}"
    if verb not in templates.VERBS:
        return ""
    verb = verb.lower()
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies {rest}"
    return f"{verb}{'es' if re.search('(s|sh|ch|x)$', verb) else 's'} {rest}"


def _cut(text: str, num_chars: int) -> str:
    """At most ``num_chars`` characters, ending with a whole word."""
    if len(text) <= num_chars:
        return text
    return re.sub(r"\s+\S*$", "", text[: num_chars + 1]).rstrip()
