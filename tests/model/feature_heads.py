"""Feature heads for the tiny models, and what they draft by definition: no cache, no batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from pagedraft.model.draft_format import FUSE_WEIGHT
from pagedraft.model.draft_save import save_draft
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.drafts import layers_of
from pagedraft.tests.model.tiny import tiny_model

BLOCK_SIZE = 8


def head_tensors(target: Path, seed: int, states: float, tokens: float) -> dict[str, torch.Tensor]:
    """The target's first layer and norm behind a fusion of so much of both, and noise.

    Without states and with tokens alone a head of a one-layer target is the target itself.
    """
    tensors = layers_of(target, 1)
    size = next(iter(tensors.values())).shape[-1]
    noise_ED = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(seed))
    noise_ED *= size**-0.5
    noise_ED[:, :size] *= states
    noise_ED[:, size:] = tokens * torch.eye(size)
    return tensors | {FUSE_WEIGHT: noise_ED}


def save_head(
    folder: Path,
    target: Path,
    *,
    seed: int = 0,
    states: float = 0.5,
    tokens: float = 1.0,
    ids: Sequence[int] | None = None,
) -> Path:
    """Save a head that reads states and tokens as strongly as they say; ids: what it proposes."""
    return save_draft(
        folder,
        target,
        head_tensors(target, seed, states, tokens),
        num_layers=1,
        kind="head",
        target="the target",
        vocab_ids=None if ids is None else torch.tensor(ids),
    )


def pool(model: Transformer, *, keeps_states: bool, num_blocks: int = 6) -> KVCache:
    """A pool full of NaN."""
    dtype = model.activation_dtype
    cache = KVCache(
        *(model.config, num_blocks, BLOCK_SIZE, dtype, model.device),
        features_dtype=dtype if keeps_states else None,
    )
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    return cache


class Definition:
    """A head as its definition reads, in fp32 and from the first token on each time.

    family: of ``tiny.TINY``, whose layer it has.
    """

    def __init__(self, family: str, target: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        config = self.target.config
        changes = {name: getattr(config, name) for name in config.to_dict() if name in SIZES}
        self.head = tiny_model(family, **changes | {"num_hidden_layers": 1})
        stored = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
        self.fuse_ED = stored.pop(FUSE_WEIGHT)
        left = self.head.load_state_dict(stored, strict=False)
        assert not left.unexpected_keys

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The target's, fp32 [tokens, E]."""
        return self.target.model(torch.tensor([list(token_ids)])).last_hidden_state[0]

    @torch.inference_mode()
    def guesses(self, token_ids: Sequence[int], before_TE: torch.Tensor) -> torch.Tensor:
        """The head's states at all tokens; before_TE: the state before each."""
        token_TE = self.target.get_input_embeddings()(torch.tensor(list(token_ids)))
        fused_TE = F.linear(torch.cat((before_TE, token_TE), dim=1), self.fuse_ED)
        return self.head.model(inputs_embeds=fused_TE[None]).last_hidden_state[0]

    @torch.inference_mode()
    def draft(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        """Greedy drafts after a context whose states are known but the last token's."""
        tokens = list(token_ids)
        states_TE = self.states(tokens)[:-1]
        for _ in range(num_drafts):
            before_TE = torch.cat((torch.zeros_like(states_TE[:1]), states_TE))[: len(tokens)]
            if len(tokens) == 1:
                before_TE = torch.zeros(1, self.fuse_ED.shape[0])
            last_E = self.guesses(tokens, before_TE)[-1]
            tokens.append(int(self.target.lm_head(last_E).argmax()))
            states_TE = torch.cat((states_TE, last_E[None]))
        return tokens[len(token_ids) :]


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
