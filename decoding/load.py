"""Turning what a user calls a model or a prompt into what decoding works on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pagedraft.decoding.params import MODEL_DEFAULTS, SamplingParams
from pagedraft.model.demo import resolve_model
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.draft_format import read_entry
from pagedraft.model.transformer import Transformer

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name; "auto" is bf16, which on the CPU is the format of the weights."""
    if isinstance(dtype, torch.dtype):
        if dtype in DTYPES.values():
            return dtype
    elif dtype == "auto":
        return torch.bfloat16
    elif dtype in DTYPES:
        return DTYPES[dtype]
    raise ValueError(f"dtype: expected one of {['auto', *DTYPES]}, got {dtype!r}")


def resolve_kv_dtype(kv_dtype: str | torch.dtype) -> torch.dtype | None:
    """What the KV pools store; None ("auto") for the dtype of the model's activations."""
    if kv_dtype == "auto":
        return None
    if isinstance(kv_dtype, str) and kv_dtype in KV_DTYPES:
        return KV_DTYPES[kv_dtype]
    if isinstance(kv_dtype, torch.dtype) and kv_dtype in KV_DTYPES.values():
        return kv_dtype
    raise ValueError(f"kv_dtype: expected one of {['auto', *KV_DTYPES]}, got {kv_dtype!r}")


def resolve_device(device: str | torch.device) -> torch.device:
    """The torch device of a name; "auto" is CUDA where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r} was asked for, and there is no CUDA device")
    return resolved


def load_model(
    model: str | Path | Transformer,
    *,
    dtype: str | torch.dtype = "auto",
    weights: str = "auto",
    device: str | torch.device = "auto",
    exact: bool = True,
) -> Transformer:
    """A loaded model as it is; else a folder, a hub id or ``demo``, loaded.

    weights: "int8", "int4" or "fp8" quantises the linear weights; "auto" keeps what is stored.
    """
    if isinstance(model, Transformer):
        return model
    folder = resolve_model(model)
    return Transformer.from_folder(
        folder,
        dtype=resolve_dtype(dtype),
        weights=weights,
        device=resolve_device(device),
        exact=exact,
    )


def load_draft_model(
    draft: str | Path | Transformer, target: Transformer, *, weights: str = "auto", **options: Any
) -> Transformer:
    """A draft model for ``target``: what ``load_model`` takes, ``demo-draft``, or the folder of a
    draft that shares the target's embedding and head (model/draft_folder.py).

    options: of ``load_model``. A draft that shares has the target's dtype, device and exactness.
    """
    if isinstance(draft, Transformer):
        return draft
    folder = resolve_model(draft)
    if read_entry(folder) is None:
        return load_model(folder, weights=weights, **options)
    return load_draft(folder, target, weights=weights)


def load_tokenizer(model: Transformer) -> Any:
    """The tokenizer in the model's folder, or None where there is none."""
    return None if model.folder is None else read_tokenizer(model.folder)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in ``folder``, or None where there is none."""
    if not (folder / "tokenizer.json").exists():
        return None
    from transformers import AutoTokenizer  # slow to import, and not needed for token ids

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever a broken file makes the tokenizer library raise
        raise ValueError(f"{folder / 'tokenizer.json'}: cannot be read: {error}") from error


def check_text(text: str) -> None:
    """Raise ValueError for what a tokenizer cannot read: halves of characters."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("prompt: expected Unicode text, got bytes that are no valid UTF-8")


def encode(prompt: str | list[int], tokenizer: Any) -> list[int]:
    """Token ids of a prompt; ids pass as they are."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("prompt: text needs a tokenizer, and the model's folder has none")
        check_text(prompt)
        return list(tokenizer.encode(prompt))
    if not isinstance(prompt, (list, tuple)) or any(
        isinstance(token, bool) or not isinstance(token, int) for token in prompt
    ):
        raise TypeError(f"prompt: expected text or a list of token ids, got {_short(prompt)}")
    return list(prompt)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def default_sampling(folder: Path | None) -> dict[str, float]:
    """What a request leaves unset: ``generation_config.json``, else what changes nothing."""
    defaults = dict(MODEL_DEFAULTS)
    path = None if folder is None else folder / "generation_config.json"
    if path is None or not path.exists():
        return defaults
    settings = json.loads(path.read_text())
    found = {name: settings[name] for name in defaults if settings.get(name) is not None}
    try:
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}") from error
    return defaults | found
