"""The draft while it is trained: the engine's arithmetic in plain differentiable torch.

Axes: B texts of one batch, L their tokens, E width, H query heads, G key/value heads, D head size,
C = (H + 2 G) D, F width of the MLP. Parameters carry the names of the engine's weights
(model/weights.py), so what is trained is what is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from pagedraft.model.config import ModelConfig
from pagedraft.model.rope import rope_table

LAYER_WEIGHTS = ("input_norm", "qkv", "o", "post_norm", "gate_up", "down")
FUSE = "fuse"  # of a feature head, [E, 2 E]: of the state before and the token, what layers read
OUT = "out"  # of a small decoder, [E, E]: of what its layers leave, what the final norm reads
OPTIONAL_WEIGHTS = ("qkv_bias", "o_bias", "q_norm", "k_norm")
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class Student(nn.Module):
    """A small decoder over the target's embedding; the head is not part of it.

    cos_PR, sin_PR: rotation of each position, see model/rope.py.

    tensors: fp32, by name: "final_norm" and "layers.{i}.{name}" for ``config.num_layers`` layers,
        and FUSE for a feature head or OUT; they are copied. embed_VE: the target's, frozen, any
        dtype.
    state_rms: root mean square of a feature head's states. Both halves of what it fuses are brought
        to 1, so that one learning rate suits both. left_rms: of what OUT reads, for the same end.
    """

    embed_VE: torch.Tensor
    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        embed_VE: torch.Tensor,
        state_rms: float = 1.0,
        left_rms: float = 1.0,
    ) -> None:
        super().__init__()
        self.left_rms = left_rms
        self.config = config
        self.state_rms = state_rms
        self.embed_rms = rms(embed_VE)
        self.register_buffer("embed_VE", embed_VE, persistent=False)
        self.weights = nn.ParameterDict(
            {_key(name): nn.Parameter(tensor.float().clone()) for name, tensor in tensors.items()}
        )
        if FUSE in self.weights:
            with torch.no_grad():
                self.weights[FUSE].mul_(self._scale(embed_VE.shape[1]))
        if OUT in self.weights:
            with torch.no_grad():
                self.weights[OUT].mul_(left_rms)
        cos_PR, sin_PR = rope_table(config, config.max_positions)
        self.register_buffer("cos_PR", cos_PR, persistent=False)
        self.register_buffer("sin_PR", sin_PR, persistent=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by their names in the engine."""
        named = {name.replace("-", "."): weight.detach() for name, weight in self.weights.items()}
        if FUSE in named:
            named[FUSE] = named[FUSE] / self._scale(self.embed_VE.shape[1])
        if OUT in named:
            named[OUT] = named[OUT] / self.left_rms
        return named

    def forward(
        self, tokens_BL: torch.Tensor, states_BLE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states after the final norm, fp32 [B, L, E]; texts shorter than L end in padding,
        whose states are meaningless and which no other token sees.

        states_BLE: for a feature head, fp32: at each token the state of the one before it, zeros at
            the first.
        """
        residual_BLE = F.embedding(tokens_BL, self.embed_VE).float()
        if FUSE in self.weights:
            assert states_BLE is not None
            both = (states_BLE / self.state_rms, residual_BLE / self.embed_rms)
            residual_BLE = F.linear(torch.cat(both, dim=-1), self.weights[FUSE]).float()
        residual_BLE = self.run_layers(residual_BLE)
        if OUT in self.weights:
            residual_BLE = F.linear(residual_BLE / self.left_rms, self.weights[OUT]).float()
        return self._norm(residual_BLE, self.weights["final_norm"])

    def run_layers(self, residual_BLE: torch.Tensor) -> torch.Tensor:
        """What the layers leave of what they read."""
        for index in range(self.config.num_layers):
            residual_BLE = self._layer(index, residual_BLE)
        return residual_BLE

    def _scale(self, embed_dim: int) -> torch.Tensor:
        """What the columns of FUSE are multiplied by while it is trained: [2 E]."""
        rates = torch.tensor([self.state_rms, self.embed_rms])
        return rates.repeat_interleave(embed_dim).to(self.embed_VE.device)

    def _layer(self, index: int, residual_BLE: torch.Tensor) -> torch.Tensor:
        config = self.config

        def get(name: str) -> torch.Tensor:
            return self.weights[_key(f"layers.{index}.{name}")]

        def maybe(name: str) -> torch.Tensor | None:
            key = _key(f"layers.{index}.{name}")
            return self.weights.get(key, None)

        normed_BLE = self._norm(residual_BLE, get("input_norm"))
        qkv_BLC = F.linear(normed_BLE, get("qkv"), maybe("qkv_bias"))
        heads = rearrange(qkv_BLC, "b l (h d) -> b h l d", d=config.head_dim)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q_BHLD, k_BGLD, v_BGLD = heads.split(sizes, dim=1)
        q_BHLD, k_BGLD = (
            self._rotate(x if scale is None else self._norm(x, scale))
            for x, scale in ((q_BHLD, maybe("q_norm")), (k_BGLD, maybe("k_norm")))
        )
        attended_BHLD = F.scaled_dot_product_attention(
            q_BHLD, k_BGLD, v_BGLD, is_causal=True, enable_gqa=True
        )
        heads_BLO = rearrange(attended_BHLD, "b h l d -> b l (h d)")
        residual_BLE = residual_BLE + F.linear(heads_BLO, get("o"), maybe("o_bias"))
        normed_BLE = self._norm(residual_BLE, get("post_norm"))
        gate_BLF, up_BLF = F.linear(normed_BLE, get("gate_up")).chunk(2, dim=-1)
        mlp_BLF = ACTIVATIONS[config.activation](gate_BLF) * up_BLF
        return residual_BLE + F.linear(mlp_BLF, get("down"))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_eps)

    def _rotate(self, x_BHLD: torch.Tensor) -> torch.Tensor:
        """RoPE at positions 0 to L - 1; columns beyond the table's pass."""
        length = x_BHLD.shape[2]
        cos_LR, sin_LR = self.cos_PR[:length], self.sin_PR[:length]
        num_rotated = 2 * cos_LR.shape[1]
        first, second = x_BHLD[..., :num_rotated].chunk(2, dim=-1)
        rotated = (first * cos_LR - second * sin_LR, second * cos_LR + first * sin_LR)
        return torch.cat([*rotated, x_BHLD[..., num_rotated:]], dim=-1)


def first_tensors(
    target_tensors: Mapping[str, torch.Tensor], layers: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The weights that a draft begins with: those of the target's ``layers``, and its final norm.

    target_tensors: as ``load_weights`` returns them, unquantised.
    """
    tensors = {}
    for place, layer in enumerate(layers):
        for name in (*LAYER_WEIGHTS, *OPTIONAL_WEIGHTS):
            weight = target_tensors.get(f"layers.{layer}.{name}")
            if weight is not None:
                tensors[f"layers.{place}.{name}"] = weight
    tensors["final_norm"] = target_tensors["final_norm"]
    return tensors


def rms(values: torch.Tensor) -> float:
    """Root mean square."""
    return float(values.float().square().mean().sqrt())


def _key(name: str) -> str:
    return name.replace(".", "-")  # modules take no dots in names
