"""Model shapes and step shapes that benches and compile checks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


LLAMA_8B = ModelShape("8b", 4096, 32, 8, 128, 14336, 128256, 32)
SMOL_135M = ModelShape("135m", 576, 9, 3, 64, 1536, 49152, 30)
TINY = ModelShape("tiny", 64, 4, 2, 16, 128, 48, 2)
MODELS = {shape.name: shape for shape in (LLAMA_8B, SMOL_135M, TINY)}

DECODE_1 = StepShape("decode1", 1, 1, 1024)
DECODE_8 = StepShape("decode8", 8, 1, 8192)
VERIFY_1 = StepShape("verify1", 1, 9, 1024)
VERIFY_8 = StepShape("verify8", 8, 5, 8192)
PREFILL = StepShape("prefill", 1, 512, 2048)
STEPS = {step.name: step for step in (DECODE_1, DECODE_8, VERIFY_1, VERIFY_8, PREFILL)}
