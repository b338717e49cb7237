"""Demo prompts: their mixture, what they are made of, and that nothing measured is among them."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from pagedraft.bench.quality import TEXT
from pagedraft.bench.speculation_prompts import EDITS, QUESTIONS
from pagedraft.decoding.distill.chat_prompts import TOPICS, block_topics, chat_prompts
from pagedraft.decoding.distill.code_prompts import (
    CODE_CHARS,
    code_chat_prompts,
    code_prompts,
    text_prompts,
)
from pagedraft.decoding.distill.prompt import interleave
from pagedraft.decoding.distill.prompts import MIXTURE, NUM_PROMPTS, demo_prompts
from pagedraft.decoding.distill.stdlib_code import first_sentence, read_library
from pagedraft.decoding.distill.templates import GROUPS, SHARED
from pagedraft.decoding.distill.topics import NUM_BLOCKS, SUBJECTS
from pagedraft.scheduler.demo_prompts import REQUESTS

# Questions that tests of the engine ask, besides those of the demo and the benches.
TEST_QUESTIONS = ("What is the capital of France?", "Name three rivers.")
# What the measured chat prompts are about.
MEASURED_TOPICS = (
    *("capital of france", "sky is blue", "pancake", "about the sea.", "used bicycle"),
    *("afraid of thunder", "leaves change", "autumn", "guitar"),
)


def plain(text: str) -> str:
    return " ".join(text.lower().split())


@pytest.fixture(scope="module")
def prompts():
    return demo_prompts(0)


def test_number_and_mixture_of_every_prefix(prompts):
    assert 2000 <= len(prompts) <= NUM_PROMPTS
    counts: Counter[str] = Counter()
    furthest = 0.0
    for number, prompt in enumerate(prompts, start=1):
        counts[prompt.kind] += 1
        away = [abs(counts[kind] - share * number) for kind, share in MIXTURE.items()]
        furthest = max(furthest, *away)
    assert set(counts) == set(MIXTURE)
    assert furthest < 2.5


def test_prompts_are_different_and_not_blank(prompts):
    assert len({prompt.words for prompt in prompts}) == len(prompts)
    assert all(prompt.text.strip() and not prompt.history for prompt in prompts)


def test_seed_decides(prompts):
    assert demo_prompts(0) == prompts
    other = demo_prompts(1)
    assert Counter(p.kind for p in other) == Counter(p.kind for p in prompts)
    assert len({p.words for p in other[:200]} & {p.words for p in prompts[:200]}) < 40


def test_nothing_measured_is_among_the_prompts(prompts):
    requests = [request.prompt for request in REQUESTS]
    whole = [plain(text) for text in (*requests, *EDITS, *QUESTIONS, *TEST_QUESTIONS)]
    code = [plain(block) for edit in EDITS for block in re.findall(r"```\w*\n(.*?)```", edit, re.S)]
    story = [plain(text) for text in TEXT.read_text().split("\n\n") if len(text) > 60]
    assert min(len(code), len(story)) >= 8
    reserved = {*whole, *code, *story}
    texts = [plain(prompt.text) for prompt in prompts]
    assert [text for text in texts if any(part in text for part in reserved)] == []
    orders = {plain(edit.split("\n")[0]) for edit in EDITS}
    assert [text for text in texts if any(order in text for order in orders)] == []


def test_chat_is_not_about_what_is_measured(prompts):
    chat = [plain(prompt.text) for prompt in chat_prompts(0)]
    assert [text for text in chat if any(topic in text for topic in MEASURED_TOPICS)] == []


def test_templates_and_topics_are_many_and_different():
    templates = [template for group in GROUPS.values() for template in group]
    subjects = [subject for field in SUBJECTS.values() for subject in field]
    assert len(GROUPS) >= 12
    assert len(set(templates)) == len(templates) >= 60
    assert len(SUBJECTS) >= 15
    assert len(set(subjects)) == len(subjects) >= 250
    assert {len(group) for group in GROUPS.values()} == {NUM_BLOCKS}
    assert [slot for slot, topics in TOPICS.items() if len(topics) % NUM_BLOCKS] == []
    used = {slot for template in templates for slot in re.findall(r"\{(\w+)\}", template)}
    assert used == {*TOPICS, *SHARED}


@pytest.mark.parametrize("slot", TOPICS)
def test_blocks_share_no_topic(slot):
    dealt = [topic for block in range(NUM_BLOCKS) for topic in block_topics(slot, block)]
    assert sorted(dealt) == sorted(set(TOPICS[slot]))


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_chat_prompts_have_the_template_and_topics_of_their_block(block):
    """Every one matches a template of the block, filled with the block's topics."""
    found = [p.text for p in chat_prompts(0) if p.source == f"chat/block {block}"]
    values = {slot: block_topics(slot, block) for slot in TOPICS} | SHARED
    patterns = [
        re.sub(
            r"\\{(\w+)\\}",
            lambda slot: "(?:" + "|".join(map(re.escape, values[slot[1]])) + ")",
            re.escape(group[block]),
        )
        for group in GROUPS.values()
    ]
    any_of = re.compile("|".join(patterns))
    assert len(found) > 100
    assert [text for text in found if not any_of.fullmatch(text)] == []
    unused = [pattern for pattern in patterns if not any(re.fullmatch(pattern, t) for t in found)]
    assert unused == []


MODULE = (
    '''\
"""A module about sums. '''
    + "\nIt has a long text that says more than needed." * 12
    + '''"""


def total(values, start=0):
    """Return the sum of all values. Longer text follows.

    It is added to start, which is zero where it is not given, and may be any number that
    can be added to the values.
    """
    result = start
    for value in values:
        if value == 0:
            continue
        result = result + value
    return result


class Box:
    def get(self, key):
        # no docstring, and a name that is used below
        return self.items.get(key)
'''
)


@pytest.fixture
def library(tmp_path):
    (tmp_path / "sums.py").write_text(MODULE)
    (tmp_path / "package" / "test").mkdir(parents=True)
    (tmp_path / "package" / "inner.py").write_text("def f(\n    a,\n):\n    return a\n")
    for name, text in {
        **{"package/test/in_tests.py": "def f():\n    pass\n", "broken.py": "def f(:\n"},
        **{"long.py": f"def f():\n    return {'1' * 200}\n", "_sysconfigdata_x.py": MODULE},
        **{"notes.txt": "def f():\n    pass\n"},
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\ndef f():\n    pass\n")
    return read_library(tmp_path)


def test_definitions(library):
    found = [(d.name, d.noun, d.signature, d.source) for d in library.definitions]
    assert found == [
        ("f", "function", "f(a)", "stdlib/package"),
        ("total", "function", "total(values, start=0)", "stdlib/sums"),
        ("Box", "class", "Box", "stdlib/sums"),
        ("get", "method", "get(self, key)", "stdlib/sums"),
    ]
    assert [d.num_head for d in library.definitions] == [3, 6, 1, 2]
    assert library.definitions[1].sentence == "Return the sum of all values."
    assert library.definitions[3].arguments == ("key",)
    assert library.definitions[3].code.startswith("def get(self, key):\n    # no")


def test_code_is_a_beginning(library):
    (prompt,) = code_prompts(library.definitions, 0)
    code = library.definitions[1].code
    assert code.startswith(prompt.text)
    assert CODE_CHARS[0] <= len(prompt.text) < len(code)
    assert (prompt.kind, prompt.source, prompt.is_chat) == ("code", "stdlib/sums", False)


def test_documentation_is_summarised_and_continued(library):
    summed, begun = sorted(text_prompts(library.docstrings, 0), key=lambda p: not p.is_chat)
    text = library.docstrings[0].text if "A module" in library.docstrings[0].text else ""
    assert text
    assert text in summed.text
    assert text.startswith(begun.text)
    assert len(begun.text) < len(text)


def requests(library, start):
    seeds = [code_chat_prompts(library.definitions, seed) for seed in range(60)]
    return {p.text for found in seeds for p in found if p.text.startswith(start)}


def test_wishes_are_sentences(library):
    assert "Write a Python function that returns the sum of all values." in requests(library, "W")


def test_fixes_have_one_operator_changed(library):
    found = requests(library, "One operator in this function is wrong")
    broken = [re.search(r"```python\n(.*)\n```", text, re.S)[1] for text in found]
    assert broken == [library.definitions[1].code.replace("value == 0", "value != 0")]
    ast.parse(broken[0])


def test_renames_name_an_argument(library):
    found = requests(library, "Rename the argument")
    old = {re.match(r"Rename the argument `(\w+)` to `(\w+)`", text)[1] for text in found}
    new = {re.match(r"Rename the argument `(\w+)` to `(\w+)`", text)[2] for text in found}
    assert old == {"values", "start", "key"}
    assert not new & {"value", "start", "values", "key", "items"}


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected Python files with functions, got none"):
        read_library(tmp_path)


# docstring -> its first sentence
SENTENCES = {
    "Return the sum\nof them all. More.": "Return the sum of them all.",
    "Return a value without an end": "",
    "D.get(k) -> value of the key k.": "",
    "Short one. Longer text.": "",
    "Return the mean, e.g. of numbers.": "",
    "Return it as plain text.\n\nMore text.": "Return it as plain text.",
}


@pytest.mark.parametrize("doc", SENTENCES)
def test_first_sentence(doc):
    assert first_sentence(doc) == SENTENCES[doc]


def test_interleave_ends_with_the_first_empty_queue():
    queues = {"a": "aaaaaaaa", "b": "bb"}
    assert "".join(interleave(queues, {"a": 2, "b": 1})) == "aabaab" + "aa"
    assert interleave({"a": "aaa", "b": ""}, {"a": 2, "b": 1}) == ["a", "a"]


def test_interleave_takes_all_when_told():
    taken = interleave({"a": "aa", "b": "b", "c": ""}, {"a": 1, "b": 1, "c": 1}, exhaust=True)
    assert taken == ["a", "b", "a"]
