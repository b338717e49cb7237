"""Model shapes and step shapes that benches and compile checks share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pagedraft.model.config import ModelConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-like model, in the axis letters E H G D F V."""

    name: str
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    num_layers: int

    @property
    def qkv_dim(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_dim(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class StepShape:
    """One step's rows: each has the same span of queries at the end of the same context."""

    name: str
    num_rows: int
    span: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.span

    @property
    def num_logits(self) -> int:
        """Rows of logits: all tokens' but for a prompt's chunk, which needs its last one's."""
        return self.num_rows if self.name.startswith("prefill") else self.num_tokens


LLAMA_8B = ModelShape("8b", 4096, 32, 8, 128, 14336, 128256, 32)
LLAMA_1B = ModelShape("1b", 2048, 32, 8, 64, 8192, 128256, 16)
SMOL_135M = ModelShape("135m", 576, 9, 3, 64, 1536, 49152, 30)
TINY = ModelShape("tiny", 64, 4, 2, 16, 128, 48, 2)
MODELS = {shape.name: shape for shape in (LLAMA_8B, LLAMA_1B, SMOL_135M, TINY)}

DECODE_1 = StepShape("decode1", 1, 1, 1024)
DECODE_8 = StepShape("decode8", 8, 1, 8192)
VERIFY_1 = StepShape("verify1", 1, 9, 1024)
VERIFY_8 = StepShape("verify8", 8, 5, 8192)
PREFILL = StepShape("prefill", 1, 512, 2048)
STEPS = {step.name: step for step in (DECODE_1, DECODE_8, VERIFY_1, VERIFY_8, PREFILL)}

_STEP_PATTERN = re.compile(
    r"(?:decode(?P<rows>\d+)|verify(?P<verified>\d+)x(?P<drafts>\d+)|prefill(?P<chunk>\d+))"
    r"@(?P<context>\d+)"
)


def parse_step(name: str) -> StepShape:
    """Return the step that ``name`` spells, each row at the end of C context tokens.

    decode<rows>@C; verify<rows>x<drafts>@C; prefill<tokens>@C, one row's chunk. Raises ValueError.
    """
    match = _STEP_PATTERN.fullmatch(name)
    if match is None:
        raise ValueError(
            f"step: expected decode8@1024, verify8x4@8192 or prefill512@2048 (rows, drafts or "
            f"tokens, @context), got {name!r}"
        )
    fields = {key: int(value) for key, value in match.groupdict().items() if value is not None}
    num_rows = fields.get("rows", fields.get("verified", 1))
    span = fields.get("chunk", fields.get("drafts", 0) + 1)
    if min(num_rows, span) < 1 or span > fields["context"]:
        raise ValueError(f"step {name!r}: expected at least a row, a token and such a context")
    return StepShape(name, num_rows, span, fields["context"])


def _config(shape: ModelShape, *, tied_head: bool, rope_theta: float, context: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        num_layers=shape.num_layers,
        embed_dim=shape.embed_dim,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        mlp_dim=shape.mlp_dim,
        vocab_size=shape.vocab_size,
        max_positions=context,
        rms_eps=1e-5,
        rope_theta=rope_theta,
        tied_head=tied_head,
        dtype=torch.bfloat16,
    )


CONFIGS: Mapping[str, ModelConfig] = {
    "llama-8b": _config(LLAMA_8B, tied_head=False, rope_theta=500000.0, context=131072),
    "llama-1b": _config(LLAMA_1B, tied_head=True, rope_theta=500000.0, context=131072),
    "smol-135m": _config(SMOL_135M, tied_head=True, rope_theta=100000.0, context=8192),
}


def cut(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Return ``config`` with its first ``num_layers`` layers only."""
    return replace(config, num_layers=min(num_layers, config.num_layers))
