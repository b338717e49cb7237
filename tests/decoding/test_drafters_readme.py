"""The page that shows how to add a drafter: its code runs as it stands, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pagedraft.decoding.drafters.table as table
import pagedraft.scheduler
from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny

PAGE = Path(table.__file__).with_name("README.md")
MAX_LINES = 39
PROMPT = [5, 6, 5, 6]
PLAIN = SamplingParams(max_tokens=16, temperature=0, speculate=False)


@pytest.fixture
def run(tmp_path, monkeypatch, cpu_path):
    """Runs the page's code, the demo model being a tiny one and prompts being token ids."""
    save_tiny(tmp_path, "llama")
    with use_implementation("cpu"):
        target = Transformer.from_folder(tmp_path)

    class TinyLLM(LLM):
        def __init__(self, model, **options):
            assert model == "demo"
            super().__init__(target, kv_tokens=96, **options)

        def generate(self, prompts, params=None):
            return super().generate(PROMPT if isinstance(prompts, str) else prompts, params)

    monkeypatch.setattr(table, "DRAFTERS", dict(table.DRAFTERS))
    monkeypatch.setattr(pagedraft.scheduler, "LLM", TinyLLM)

    def run(code: str) -> dict:
        scope: dict = {"__name__": "page"}
        exec(compile(code, str(PAGE), "exec"), scope)
        return scope

    return run


def code_of(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))


def test_the_code_runs_and_drafts(run, capsys):
    answer = run(code_of(PAGE.read_text()))["answer"]
    assert len(answer.token_ids) > 0
    assert sum(answer.stats.drafted) > 0
    assert answer.stats.drafters.keys() == {"echo"}
    assert str(answer.stats.accepted) in capsys.readouterr().out


def test_the_output_is_the_plain_one(run):
    code = code_of(PAGE.read_text()).replace("max_tokens=64", "max_tokens=16")
    scope = run(code)
    assert scope["answer"].token_ids == scope["llm"].generate(PROMPT, PLAIN)[0].token_ids


def test_short_enough_to_read():
    assert len(PAGE.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", ["draft", "ngram", "suffix", "layers"])
def test_the_drafters_that_exist_are_on_the_page(name):
    assert name in table.DRAFTERS
    assert f"`{name}`" in PAGE.read_text()
