"""ModelConfig: the few numbers of config.json that the forward pass needs, checked once.

Reads the files of transformers 4 (``rope_theta`` and ``rope_scaling``, ``torch_dtype``) and of
transformers 5 (``rope_parameters``, ``dtype``). Anything that would need a computation we do not
have is an error that names the field, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagedraft.kernels.gated_mlp import Activation
from pagedraft.model.families import family_of, has_bias
from pagedraft.model.quant_scheme import QuantScheme, parse_scheme

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Which numbers each scaling needs, besides what has a default.
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model.

    ``max_positions`` counts tokens of context; yarn extends it to factor * original context where
    that is more. ``rope_scaling`` is None for plain RoPE, else a dict with ``rope_type`` and
    complete numbers. ``attention_bias``: q, k and v carry a bias. ``activation`` is a name of
    ``gated_mlp``. ``eos_token_ids``: those of generation_config.json, then those of config.json.
    ``dtype`` is what config.json says the weights are (float32 if it says nothing).
    ``quantization``: how the linear layers are stored, None for plain tensors.
    """

    family: str
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    tied_head: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: torch.dtype = torch.float32
    quantization: QuantScheme | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads: expected a multiple of num_key_value_heads "
                f"({self.num_kv_heads}), got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number (RoPE), got {self.head_dim}")

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read ``path``/config.json and, for token ids, generation_config.json if there is one.

        Raises FileNotFoundError for a missing folder or config.json and ValueError for everything
        else; messages begin with the file and name the field.
        """
        folder = check_folder(path)
        file = folder / "config.json"
        values = read_json(file)
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else {}
        try:
            return _from_values(values, generation)
        except (ValueError, TypeError, ArithmeticError) as error:  # odd types in odd places
            raise ValueError(f"{file}: {error}") from error


def check_folder(path: str | Path) -> Path:
    """Return ``path`` as a Path, or raise unless it is a folder with a config.json."""
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a model folder, got a file")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: expected a model folder, it has no config.json")
    return folder


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``, or raise ValueError that names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON, or bytes that are no UTF-8
        raise ValueError(f"{file}: broken JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, got a {type(value).__name__}")
    return value


def _from_values(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Build the config from the two parsed files."""
    family = family_of(values.get("model_type"))
    _refuse_unsupported(values, family.must_be_false)
    rope_theta, rope_scaling = _rope(values)
    max_positions = _size(values, "max_position_embeddings")
    if rope_scaling and rope_scaling["rope_type"] == "yarn":
        extended = rope_scaling["factor"] * rope_scaling["original_max_position_embeddings"]
        max_positions = max(max_positions, int(extended))
    num_heads = _size(values, "num_attention_heads")
    attention_bias = bool(values.get("attention_bias"))
    eos = _token_ids(generation, "eos_token_id") + _token_ids(values, "eos_token_id")
    bos = _token_ids(values, "bos_token_id") + _token_ids(generation, "bos_token_id")
    return ModelConfig(
        family=values["model_type"],
        num_layers=_size(values, "num_hidden_layers"),
        embed_dim=_size(values, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=_size(values, "num_key_value_heads", default=num_heads),
        head_dim=_head_dim(values, family.head_dim),
        mlp_dim=_size(values, "intermediate_size"),
        vocab_size=_size(values, "vocab_size"),
        max_positions=max_positions,
        rms_eps=_number(values, "rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied_head=bool(values.get("tie_word_embeddings", False)),
        attention_bias=has_bias(family.qkv_bias, attention_bias),
        o_bias=has_bias(family.o_bias, attention_bias),
        qk_norm=family.qk_norm,
        activation=_choice("hidden_act", values.get("hidden_act", "silu"), ACTIVATIONS),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        dtype=_dtype(values),
        quantization=_quantization(values),
    )


def _refuse_unsupported(values: Mapping[str, Any], must_be_false: tuple[str, ...]) -> None:
    """Raise for a field that selects a computation we do not have."""
    for name in must_be_false:
        if values.get(name):
            raise ValueError(f"{name}: expected false, {values[name]!r} is not supported")
    layer_types = values.get("layer_types")
    if layer_types is None and values.get("use_sliding_window") and values.get("sliding_window"):
        first = values.get("max_window_layers", 0)
        layer_types = ["sliding_attention"] * (_size(values, "num_hidden_layers") - first)
    other = sorted({str(t) for t in layer_types or ()} - {"full_attention"})
    if other:
        name = "use_sliding_window" if values.get("use_sliding_window") else "layer_types"
        raise ValueError(f"{name}: expected full attention in every layer, got {other}")


def _rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, complete scaling or None) from either way of writing them."""
    name = "rope_parameters" if values.get("rope_parameters") is not None else "rope_scaling"
    given = values.get(name) or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}: expected an object, got {given!r}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(
            f"{name}: expected one rope for all layers, got one each for {list(given)}"
        )
    given = {key: value for key, value in given.items() if value is not None}
    theta = _number({"rope_theta": values.get("rope_theta", 10000.0), **given}, "rope_theta")
    rope_type = _choice(
        f"{name}.rope_type",
        given.get("rope_type", given.get("type", "default")),
        {key: key for key in ROPE_TYPES},
    )
    for source in (given, values):
        partial = source.get("partial_rotary_factor")
        if partial not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor: expected 1, got {partial!r}")
    if rope_type == "default":
        return theta, None
    trained = values.get("original_max_position_embeddings") or given.get(
        "original_max_position_embeddings", values.get("max_position_embeddings")
    )
    scaling = {**given, "rope_type": rope_type, "original_max_position_embeddings": trained}
    unused = ("type", "rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in scaling.items() if key not in unused}
    numbers = {key: _number(scaling, key, prefix=f"{name}.") for key in ROPE_TYPES[rope_type]}
    return theta, scaling | numbers


def _head_dim(values: Mapping[str, Any], family_default: int | None) -> int:
    if values.get("head_dim") is not None or family_default is not None:
        return _size(values, "head_dim", default=family_default)
    embed_dim, num_heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
    if embed_dim % num_heads:
        raise ValueError(
            f"hidden_size: expected a multiple of num_attention_heads ({num_heads}) where head_dim "
            f"is not given, got {embed_dim}"
        )
    return embed_dim // num_heads


def _dtype(values: Mapping[str, Any]) -> torch.dtype:
    name = values.get("dtype") or values.get("torch_dtype") or "float32"
    return _choice("dtype", str(name).removeprefix("torch."), DTYPES)


def _quantization(values: Mapping[str, Any]) -> QuantScheme | None:
    given = values.get("quantization_config") or values.get("compression_config")
    return parse_scheme(given) if given else None


def _size(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive integer; ``default`` stands in where the field is absent or null."""
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")
    return value


def _number(values: Mapping[str, Any], name: str, prefix: str = "") -> float:
    """Return a positive finite number as a float."""
    value = values.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or not is_number or not 0 < value < float("inf"):
        raise ValueError(f"{prefix}{name}: expected a positive number, got {value!r}")
    return float(value)


def _choice(name: str, value: object, choices: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {sorted(choices)}, got {value!r}")
    return choices[value]


def _token_ids(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a token id field (absent, null, an integer or a list) as a tuple."""
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"{name}: expected a token id or a list of them, got {value!r}")
    return tuple(ids)
