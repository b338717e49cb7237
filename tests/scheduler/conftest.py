"""A tiny target model, and an engine over it."""

from __future__ import annotations

import pytest

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Transformer:
    folder = tmp_path_factory.mktemp("llm") / "target"
    save_tiny(folder, "llama")
    with use_implementation("cpu"):
        return Transformer.from_folder(folder)


@pytest.fixture
def llm(target) -> LLM:
    return LLM(target, block_size=8, kv_tokens=96, k=3)
