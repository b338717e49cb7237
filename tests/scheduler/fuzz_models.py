"""Models of the fuzzer: tiny, of several families, with a vocabulary that reads as text."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pagedraft.model.draft_folder import load_draft
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.feature_heads import save_head
from pagedraft.tests.model.tiny import save_tiny

# Few letters, so that stop strings are met by chance and often run over several tokens; the bytes
# of two characters, so that some tokens are halves of one.
LETTERS = "abcd"
PIECES = (
    *("<pad>", "<s>", "</s>"),
    *LETTERS,
    *(first + second for first in LETTERS for second in LETTERS),
    *(" " + letter for letter in LETTERS),
    *("<0xC3>", "<0xA9>", "<0xE2>", "<0x82>", "<0xAC>"),  # é, €
    *(f"{letter}{letter}{letter}." for letter in LETTERS),
    *("ab ab", "ba ba", "c d", "d c"),
)
SIZES: Mapping[str, Any] = {
    "vocab_size": len(PIECES),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
# name -> (family, what differs from SIZES). Draft models stand behind the targets.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-short": ("llama-bias", {"max_position_embeddings": 48}),
    "qwen2": ("qwen2-tied", {"num_hidden_layers": 2}),
    "qwen3": ("qwen3", {"num_hidden_layers": 2, "num_key_value_heads": 2}),
    "draft": ("llama", {"hidden_size": 16, "intermediate_size": 16}),
    "draft-padded": ("llama-tied", {"vocab_size": len(PIECES) + 4, "max_position_embeddings": 32}),
}
TARGETS = ("llama", "llama-short", "qwen2", "qwen3")


@cache
def load(name: str, dtype: torch.dtype) -> Transformer:
    """The model of a name; the folder that it was read from is gone afterwards."""
    family, changes = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(Path(folder), family, seed=list(MODELS).index(name), **{**SIZES, **changes})
        model = Transformer.from_folder(Path(folder), dtype=dtype)
    model.folder = None
    return model


@cache
def load_head(name: str, dtype: torch.dtype) -> Transformer:
    """A feature head of the target of a name."""
    family, changes = MODELS[name]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "target"
        save_tiny(folder, family, seed=list(MODELS).index(name), **{**SIZES, **changes})
        target = Transformer.from_folder(folder, dtype=dtype)
        return load_draft(save_head(Path(root) / "head", folder, states=0.2), target)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Reads and writes ``PIECES``; three of them are special and leave no text."""
    words = Tokenizer(models.WordLevel({p: i for i, p in enumerate(PIECES)}, unk_token="<pad>"))
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    words.add_special_tokens(list(PIECES[:3]))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
