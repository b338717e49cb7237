"""A tiny target model, and an engine over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.model.words import save_words


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Transformer:
    folder = tmp_path_factory.mktemp("llm") / "target"
    save_tiny(folder, "llama")
    with use_implementation("cpu"):
        return Transformer.from_folder(folder)


@pytest.fixture
def llm(target) -> LLM:
    return LLM(target, block_size=8, kv_tokens=96, k=3)


@pytest.fixture(scope="module")
def worded_target(tmp_path_factory) -> Transformer:
    """A tinier one, with the tokenizer of contract_examples.py beside it."""
    folder = tmp_path_factory.mktemp("worded")
    tokenizer = save_words(folder, "byte-level")
    sizes = {"max_position_embeddings": 200, "num_hidden_layers": 1, "intermediate_size": 16}
    save_tiny(folder, "llama", vocab_size=len(tokenizer), **sizes)
    with use_implementation("cpu"):
        return Transformer.from_folder(folder)


@pytest.fixture
def make_worded(worded_target) -> Callable[..., LLM]:
    def make(**options) -> LLM:
        return LLM(worded_target, **({"block_size": 8, "kv_tokens": 2048, "k": 3} | options))

    return make


@pytest.fixture
def no_polling(monkeypatch) -> None:
    """An engine's thread that nobody wakes sleeps longer than any test may take."""
    monkeypatch.setattr("pagedraft.scheduler.engine_thread.ORPHAN_CHECK_SECONDS", 40.0)
