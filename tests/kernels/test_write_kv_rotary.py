"""Rotation and norms against transformers' own attention modules, caught at their attention call.

Each module gets a step's queries, keys and values through projections that pick columns, rotates
them its own way, and hands them to an attention function that keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    AttentionInterface,
    GlmConfig,
    GPTJConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    StableLmConfig,
)
from transformers.models.glm.modeling_glm import GlmAttention, GlmRotaryEmbedding
from transformers.models.gptj.modeling_gptj import GPTJAttention, GPTJRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiAttention, PhiRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.stablelm.modeling_stablelm import (
    StableLmAttention,
    StableLmRotaryEmbedding,
)

from pagedraft.kernels.write_kv import write_kv, write_kv_ref
from pagedraft.tests.kernels.write_kv_inputs import CPU, Case, Inputs


class Caught(Exception):
    """Carries what the attention function was given."""

    def __init__(self, *heads_1XTD: torch.Tensor) -> None:
        super().__init__()
        self.heads = [heads[0].transpose(0, 1) for heads in heads_1XTD]


def catch(module, query, key, value, *arguments, **options):
    raise Caught(query, key, value)


AttentionInterface.register("catch", catch)


class Columns(torch.nn.Module):
    """Picks columns where a module projects."""

    def __init__(self, start: int, count: int) -> None:
        super().__init__()
        self.columns = slice(start, start + count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., self.columns]


class Oracle(NamedTuple):
    """A module, its rotary embedding, and the case that write_kv should treat alike."""

    attention: Callable[..., torch.nn.Module]
    rotary: Callable[..., torch.nn.Module]
    config: Callable[..., PreTrainedConfig]
    case: Case
    options: dict[str, Any] = {}


def rope(partial: float = 1.0) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": partial,
        }
    }


ORACLES = {
    "Llama": Oracle(LlamaAttention, LlamaRotaryEmbedding, LlamaConfig, Case(4), rope()),
    "Qwen3, norms": Oracle(
        Qwen3Attention,
        LlamaRotaryEmbedding,
        Qwen3Config,
        Case(4, qk_norm=True),
        {**rope(), "head_dim": 32, "rms_norm_eps": 1e-6},
    ),
    "Phi, 0.4 of 80": Oracle(
        PhiAttention, PhiRotaryEmbedding, PhiConfig, Case(4, head_dim=80, num_freqs=16), rope(0.4)
    ),
    "StableLM, quarter of 80": Oracle(
        StableLmAttention,
        StableLmRotaryEmbedding,
        StableLmConfig,
        Case(4, head_dim=80, num_freqs=10),
        rope(0.25),
    ),
    "GPT-J, 16 of 32": Oracle(
        GPTJAttention,
        GPTJRotaryEmbedding,
        GPTJConfig,
        Case(4, heads=4, kv_heads=4, num_freqs=8, interleaved=True),
        {"rotary_dim": 16},
    ),
    "GLM, half of 32": Oracle(
        GlmAttention,
        GlmRotaryEmbedding,
        GlmConfig,
        Case(4, num_freqs=8, interleaved=True),
        {**rope(0.5), "head_dim": 32},
    ),
}


def caught_heads(oracle: Oracle, inputs: Inputs) -> list[torch.Tensor]:
    """(q_THD, k_TGD, v_TGD) that the module hands to its attention function."""
    case = oracle.case
    config = oracle.config(
        hidden_size=case.heads * case.head_dim,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        max_position_embeddings=512,
        **oracle.options,
    )
    config._attn_implementation = "catch"
    module = oracle.attention(config, layer_idx=0)
    num_q, num_kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    module.q_proj = Columns(0, num_q)
    module.k_proj, module.v_proj = Columns(num_q, num_kv), Columns(num_q + num_kv, num_kv)
    if case.qk_norm:
        module.q_norm.weight.data.copy_(inputs.norms[0])
        module.k_norm.weight.data.copy_(inputs.norms[1])
    x_1TC = inputs.qkv_TC[None]
    angles = oracle.rotary(config)(x_1TC, inputs.tables[2][None])
    with torch.no_grad(), pytest.raises(Caught) as caught:
        module(x_1TC, position_embeddings=angles, attention_mask=None)
    return caught.value.heads


@pytest.mark.parametrize("path", ["triton", "cpu", "reference"])
@pytest.mark.parametrize("name", ORACLES)
def test_rotation_is_transformers(name, path, request):
    oracle = ORACLES[name]
    if path == "cpu":
        request.getfixturevalue("cpu_path")
    inputs = Inputs(oracle.case, CPU)
    expected = caught_heads(oracle, inputs)
    q_THD = inputs.run(write_kv_ref if path == "reference" else write_kv)
    torch.testing.assert_close([q_THD, *inputs.values()], expected, rtol=1e-5, atol=1e-5)
