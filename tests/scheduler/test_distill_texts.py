"""Texts for distillation keep what the target's head read, at every token."""

from __future__ import annotations

import pytest
import torch

from pagedraft.decoding.distill.prompt import Prompt
from pagedraft.decoding.distill.prompt_tokens import Encoded
from pagedraft.decoding.estimate_text import Reader
from pagedraft.scheduler.distill.texts import Writer, _judge

pytestmark = pytest.mark.usefixtures("cpu_path")
LENGTHS = (1, 2, 40, 17, 64, 65, 9)


@pytest.fixture
def prompts() -> list[Encoded]:
    ids = [
        tuple((11 * i + 5 * j) % 90 + 3 for j in range(length)) for i, length in enumerate(LENGTHS)
    ]
    return [Encoded(Prompt("text", "text", "here", False), token_ids) for token_ids in ids]


@pytest.mark.parametrize("with_prompts", [True, False])
def test_states_are_those_of_a_reading(target, prompts, with_prompts):
    writer = Writer(
        target, seed=3, max_prompt_tokens=70, max_tokens=20, max_rows=3, with_prompts=with_prompts
    )
    texts = dict(writer.write(prompts))
    assert sorted(texts) == list(range(len(LENGTHS)))
    for index, text in texts.items():
        if text is None:
            continue
        prompt_ids = list(prompts[index].token_ids)
        assert text.token_ids[: text.num_prompt].tolist() == prompt_ids
        reader = Reader(target, 100)
        states_NE, lse_N = _judge(reader, prompt_ids, text.output_ids.tolist())
        assert torch.equal(text.states_NE, states_NE.half())
        assert torch.equal(text.lse_N, lse_N)
        if not with_prompts:
            assert text.before_PE is None
        elif len(prompt_ids) == 1:
            assert text.before_PE.shape == (0, target.config.embed_dim)
        else:
            expected_PE, lse_P = _judge(reader, prompt_ids[:1], prompt_ids[1:])
            assert torch.equal(text.before_PE, expected_PE.half())
            assert torch.equal(text.before_lse_P, lse_P)
    assert sum(text is not None for text in texts.values()) > 3
    writer._llm.engine.check_integrity()
