"""Other engines on the same weights, prompts and threads. So far: transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class TransformersPeer:
    """Greedy ``generate`` of a model folder in ``dtype``; fixed numbers of new tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model: Any = model.to(device).eval()
        self.device = device

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int, **options: Any
    ) -> list[list[int]]:
        """New token ids of a static batch, padded on the left. ``options`` go to ``generate``."""
        width = max(map(len, prompts))
        pad_id = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        mask = mask.to(self.device)
        output = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=pad_id,
            **options,
        )
        return output[:, width:].tolist()
