"""The forward pass, top to bottom: a step's tokens in, logits of the rows that need them out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.linear import PackedLinear, linear, pack_linear
from pagedraft.kernels.linear_fused import gated_linear, linear_add_norm
from pagedraft.kernels.normed import Rows
from pagedraft.kernels.paged_attention import AttentionPlan, paged_attention, prepare_attention
from pagedraft.kernels.rms_norm import rms_norm
from pagedraft.kernels.write_kv import WritePlan, plan_write_kv, write_kv
from pagedraft.model.batch import StepBatch
from pagedraft.model.config import ModelConfig
from pagedraft.model.draft_format import refuse_draft
from pagedraft.model.head import Head, num_bytes
from pagedraft.model.huge_pages import MIN_WEIGHT_BYTES, use_huge_pages
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.last_rows import LastRows, keep_states
from pagedraft.model.rope import rope_table
from pagedraft.model.weights import load_weights

# Called with (layer, stage, result) after each stage of a layer; layer -1 is what comes before the
# first, and num_layers what comes after the last. A caller that changes a result in place changes
# the run.
Observe = Callable[[int, str, Rows], None]
STAGES = ("embed", "input_norm", "qkv", "attention", "o_norm", "gate_up", "down_norm", "head")


def _ignore(layer: int, stage: str, result: Rows) -> None:
    """Observe nothing."""


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, linear ones packed for their device."""

    input_norm_E: torch.Tensor
    qkv: PackedLinear
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    o: PackedLinear
    post_norm_E: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Transformer:
    """A decoder of the Llama shape over a paged KV cache.

    dtype: of the stored weights. activation_dtype: of everything between them: ``dtype`` on the
    Triton kernels, fp32 on the CPU path, where narrow arithmetic is slower than wide.
    folder: where it was loaded from, None for weights made in memory.
    weight_bytes: of all weights as they are stored, with factors and zero points.
    ``weights`` (names as in weights.py) is emptied layer by layer, so that no second copy lives;
    its "head" may be a Head that is packed, another model's or one of few tokens. With an "out"
    [E, E], as a draft may have, states go through it before the final norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Any],
        *,
        exact: bool = True,
    ) -> None:
        self.config = config
        self.exact = exact
        self.folder: Path | None = None
        self.weight_bytes = sum(map(num_bytes, weights.values()))
        embed = weights["embed"]
        self.device = embed.device
        self.dtype = embed.dtype
        on_triton = implementation("linear", self.device) == "triton"
        self.activation_dtype = self.dtype if on_triton else torch.float32
        self.embed_VE = embed
        self.layers = [self._layer(weights, index) for index in range(config.num_layers)]
        self.final_norm_E = weights["final_norm"].to(self.activation_dtype)
        out = weights.pop("out", None)
        self.out = None if out is None else pack_linear(out, dtype=self.dtype)
        head = weights.pop("head", embed)
        self.head = head if isinstance(head, Head) else Head.pack(head, self.dtype)
        cos_PR, sin_PR = rope_table(config, config.max_positions)
        self.cos_PR, self.sin_PR = cos_PR.to(self.device), sin_PR.to(self.device)
        prepare_attention(self.device, self.activation_dtype, config.head_dim)
        if self.device.type == "cpu" and self.weight_bytes >= MIN_WEIGHT_BYTES:
            use_huge_pages()

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        exact: bool = True,
        weights: str = "auto",
    ) -> Transformer:
        """Load ``config.json`` and the safetensors weights of ``folder``, cast to ``dtype``.

        weights: "int8", "int4" or "fp8" rounds the linear weights; "auto" keeps what is stored.
        A draft that is no model of its own is refused (draft_folder.py loads it).
        """
        refuse_draft(folder)
        config = ModelConfig.from_folder(folder)
        loaded = load_weights(folder, config, dtype=dtype, device=device, weights=weights)
        model = cls(config, loaded, exact=exact)
        model.folder = Path(folder)
        return model

    def _layer(self, weights: dict[str, Any], index: int) -> Layer:
        def get(name: str) -> Any:
            return weights.pop(f"layers.{index}.{name}")

        def maybe(name: str) -> torch.Tensor | None:
            return weights.pop(f"layers.{index}.{name}", None)

        def head_norm(name: str) -> torch.Tensor | None:
            weight = maybe(name)
            return None if weight is None else weight.to(self.activation_dtype)

        pack = partial(pack_linear, dtype=self.dtype)
        return Layer(
            input_norm_E=get("input_norm").to(self.activation_dtype),
            qkv=pack(get("qkv"), maybe("qkv_bias")),
            q_norm_D=head_norm("q_norm"),
            k_norm_D=head_norm("k_norm"),
            o=pack(get("o"), maybe("o_bias")),
            post_norm_E=get("post_norm").to(self.activation_dtype),
            gate_up=pack(get("gate_up")),
            down=pack(get("down")),
        )

    def first_layers(self, num_layers: int) -> Transformer:
        """The model of the first ``num_layers`` layers, then the final norm and head.

        It shares the weights; ``weight_bytes`` stays that of the whole. It runs over this model's
        KV cache, whose first layers it writes as the whole model does.
        """
        if not 1 <= num_layers <= len(self.layers):
            raise ValueError(f"num_layers: expected 1 to {len(self.layers)}, got {num_layers}")
        view = copy.copy(self)
        view.layers = self.layers[:num_layers]
        view.config = replace(self.config, num_layers=num_layers)
        return view

    @property
    def row_multiple(self) -> int:
        """Pad a step's tokens to a multiple of this, so that no linear has to pad by itself."""
        layer = self.layers[0]
        packed = (layer.qkv, layer.o, layer.gate_up, layer.down, self.head.packed, self.out)
        return math.lcm(*(weight.row_multiple for weight in packed if weight is not None))

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache, observe: Observe = _ignore) -> torch.Tensor:
        """Write this step's KV into ``cache`` and return the fp32 logits [num_logits, V].

        A row's bits depend on its own tokens and positions only (with ``exact``), never on what
        else is in the batch. The last layer's MLP and the head see only the rows that need logits;
        where the cache keeps states (``features_NBE``), all tokens go through that MLP.
        ``observe`` sees each stage's result (STAGES), for comparing two runs.
        """
        residual_TE = self._embed(batch)
        observe(-1, "embed", residual_TE)
        keeps_states = cache.features_NBE is not None
        rows = self._run_layers(residual_TE, batch, cache, observe, all_rows=keeps_states)
        if keeps_states:
            assert rows is not None
            keep_states(self._states(rows), batch, cache)
            rows = rows.with_logits(batch)
        return self._logits(rows, batch, observe)

    def _states(self, rows: LastRows) -> torch.Tensor:
        return rows.states(self.final_norm_E, self.config.rms_eps)

    def _embed(self, batch: StepBatch) -> torch.Tensor:
        return F.embedding(batch.tokens_T, self.embed_VE).to(self.activation_dtype)

    def _run_layers(
        self,
        residual_TE: torch.Tensor,
        batch: StepBatch,
        cache: KVCache,
        observe: Observe = _ignore,
        *,
        all_rows: bool = False,
    ) -> LastRows | None:
        """Run the layers on what the first one reads.

        all_rows: take all tokens to the end, not only those that need logits. None where no row is
        asked for: then only KV is written.
        """
        eps, exact = self.config.rms_eps, self.exact
        normed: Rows = rms_norm(residual_TE, self.layers[0].input_norm_E, eps)
        observe(-1, "input_norm", normed)
        last = len(self.layers) - 1
        norms_E = [*(layer.input_norm_E for layer in self.layers[1:]), self.final_norm_E]
        plans = self._plan_write(batch, cache), AttentionPlan()
        for index, (layer, next_norm_E) in enumerate(zip(self.layers, norms_E, strict=True)):
            qkv_TC = linear(normed, layer.qkv, exact=exact)
            observe(index, "qkv", qkv_TC)
            heads_THD = self._attend(qkv_TC, layer, batch, cache, index, *plans)
            observe(index, "attention", heads_THD)
            if index == last and not all_rows:
                if batch.num_logits == 0:
                    return None
                if batch.num_logits < batch.num_tokens:
                    heads_THD = heads_THD[batch.logit_rows_Q]
                    residual_TE = residual_TE[batch.logit_rows_Q]
            normed, residual_TE = linear_add_norm(
                heads_THD.flatten(1), layer.o, residual_TE, layer.post_norm_E, eps, exact=exact
            )
            observe(index, "o_norm", normed)
            mlp_TF = gated_linear(normed, layer.gate_up, self.config.activation, exact=exact)
            observe(index, "gate_up", mlp_TF)
            normed, residual_TE = linear_add_norm(
                mlp_TF, layer.down, residual_TE, next_norm_E, eps, exact=exact
            )
            observe(index, "down_norm", normed)
        return LastRows(normed, residual_TE)

    def _logits(
        self, rows: LastRows | None, batch: StepBatch, observe: Observe = _ignore
    ) -> torch.Tensor:
        """fp32 logits [num_logits, V] of the rows that need them."""
        vocab_size = self.config.vocab_size
        if rows is None:
            return torch.empty(0, vocab_size, device=self.device)
        normed = rows.normed
        if self.out is not None:
            out_TE = linear(rows.sum_TE, self.out, exact=self.exact)
            normed = rms_norm(out_TE, self.final_norm_E, self.config.rms_eps)
        logits_QV = self.head.logits(normed, vocab_size, exact=self.exact)
        observe(len(self.layers), "head", logits_QV)
        return logits_QV[: batch.num_logits]

    def _plan_write(self, batch: StepBatch, cache: KVCache) -> WritePlan | None:
        """What all layers of a step share in ``write_kv``; the kernel needs no such help."""
        if implementation("write_kv", self.device, has_cpu=True) != "cpu":
            return None
        return plan_write_kv(
            self.cos_PR,
            self.sin_PR,
            batch.positions_T,
            batch.slots_T,
            self.config.num_kv_heads,
            cache.block_size,
        )

    def _attend(
        self,
        qkv_TC: torch.Tensor,
        layer: Layer,
        batch: StepBatch,
        cache: KVCache,
        index: int,
        write_plan: WritePlan | None,
        attention_plan: AttentionPlan,
    ) -> torch.Tensor:
        """Store a layer's keys and values, then attend: [T, H, D] before the output projection."""
        k_NGBD, v_NGBD = cache.k[index], cache.v[index]
        k_scale_NGB, v_scale_NGB = cache.k_scale[index], cache.v_scale[index]
        q_THD = write_kv(
            qkv_TC,
            self.cos_PR,
            self.sin_PR,
            batch.positions_T,
            batch.slots_T,
            k_NGBD,
            v_NGBD,
            self.config.num_heads,
            q_norm_D=layer.q_norm_D,
            k_norm_D=layer.k_norm_D,
            eps=self.config.rms_eps,
            k_scale_NGB=k_scale_NGB,
            v_scale_NGB=v_scale_NGB,
            plan=write_plan,
        )
        return paged_attention(
            q_THD,
            k_NGBD,
            v_NGBD,
            batch.block_table_RM,
            batch.query_starts_R1,
            batch.kv_lens_R,
            max_query_len=batch.max_query_len,
            max_kv_len=batch.max_kv_len,
            shared=batch.shared,
            k_scale_NGB=k_scale_NGB,
            v_scale_NGB=v_scale_NGB,
            plan=attention_plan,
        )
