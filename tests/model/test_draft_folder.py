"""Drafts that share their target's embedding and head: loading, logits, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.linear import dense_weight
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.draft_format import FIELD, VOCAB_IDS
from pagedraft.model.draft_save import save_draft
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.drafts import layers_of, save_layers
from pagedraft.tests.model.packers import SIZES, save_packed
from pagedraft.tests.model.quant_cases import CASES
from pagedraft.tests.model.steps import Span, step
from pagedraft.tests.model.tiny import save_tiny

IDS = [0, 2, 3, 17, 40, 41, 95, 96]
OTHERS = [token for token in range(97) if token not in IDS]
TOKENS = [5, 9, 33, 7, 60, 61, 5, 9, 33]
BF16 = torch.bfloat16
NAMES = ("llama", "llama-tied", "llama-bias", "qwen2", "qwen3-tied")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Targets by their names, and beside each the draft "NAME-whole" and, of IDS, "NAME-cut"."""
    root = tmp_path_factory.mktemp("drafts")
    for name in NAMES:
        save_tiny(root / name, name, dtype=BF16, **(SIZES if name.startswith("llama") else {}))
        save_layers(root / f"{name}-whole", root / name)
        save_layers(root / f"{name}-cut", root / name, num_layers=1, ids=IDS)
    return root


def logits(model: Transformer, num_tokens: int = len(TOKENS)) -> torch.Tensor:
    cache = KVCache(model.config, 3, 8, model.activation_dtype, model.device)
    span = Span(TOKENS[:num_tokens], 0, [2, 1], num_tokens)
    return model.forward(step(model, [span], 8, row_multiple=model.row_multiple), cache)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("name", NAMES)
class TestSharing:
    def test_all_of_the_targets_layers_are_the_target(self, folders, name):
        target = Transformer.from_folder(folders / name)
        draft = load_draft(folders / f"{name}-whole", target)
        assert torch.equal(logits(draft), logits(target))
        assert draft.folder == folders / f"{name}-whole"

    def test_storage_is_the_targets(self, folders, name):
        target = Transformer.from_folder(folders / name, dtype=BF16)
        for _ in range(2):
            draft = load_draft(folders / f"{name}-whole", target)
            assert draft.embed_VE.data_ptr() == target.embed_VE.data_ptr()
            assert draft.head is target.head
            assert draft.dtype == target.dtype
        cut = load_draft(folders / f"{name}-cut", target)
        assert cut.embed_VE.data_ptr() == target.embed_VE.data_ptr()

    def test_a_cut_head_knows_its_tokens_alone(self, folders, name):
        target = Transformer.from_folder(folders / name)
        cut = load_draft(folders / f"{name}-cut", target)
        found, whole = logits(cut), logits(target.first_layers(1))
        assert found.shape == whole.shape
        assert bool((found[:, OTHERS] == -torch.inf).all())
        torch.testing.assert_close(found[:, IDS], whole[:, IDS], rtol=1e-5, atol=1e-5)

    def test_bytes_of_a_pass(self, folders, name):
        target = Transformer.from_folder(folders / name, dtype=BF16)
        row = target.config.embed_dim * 2
        own = sum(t.nbytes for t in layers_of(folders / name, 2).values())
        whole = load_draft(folders / f"{name}-whole", target)
        assert whole.weight_bytes == own + target.config.vocab_size * row
        own = sum(t.nbytes for t in layers_of(folders / name, 1).values())
        cut = load_draft(folders / f"{name}-cut", target)
        assert cut.weight_bytes == own + len(IDS) * row


def test_logits_are_nobody_elses(folders):
    """A caller changes them in place; the next pass must not see it."""
    with use_implementation("cpu"):
        cut = load_draft(folders / "llama-cut", Transformer.from_folder(folders / "llama"))
        first = logits(cut)
        kept = first.clone()
        with torch.inference_mode():
            first.fill_(0.0)
        assert torch.equal(logits(cut), kept)
        assert logits(cut, num_tokens=1).shape == (1, 97)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_interpreted_kernels(folders, dtype, device):
    target = Transformer.from_folder(folders / "qwen3-tied", dtype=dtype, device=device)
    whole = load_draft(folders / "qwen3-tied-whole", target)
    cut = load_draft(folders / "qwen3-tied-cut", target)
    assert torch.equal(logits(whole, 2), logits(target, 2))
    found, full = logits(cut, 2), logits(target.first_layers(1), 2)
    assert torch.equal(found[:, IDS], full[:, IDS])
    assert bool((found[:, OTHERS] == -torch.inf).all())


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("path", ["cpu", "triton"])
def test_what_layers_leave_goes_through_the_last_linear_layer(folders, tmp_path, path, weights):
    torch.manual_seed(0)
    out_EE = torch.randn(128, 128).bfloat16().float()
    folder = save_layers(tmp_path / "draft", folders / "llama", 1, ids=IDS, out_EE=out_EE)
    with use_implementation(path):
        target = Transformer.from_folder(folders / "llama", dtype=torch.float16)
        draft = load_draft(folder, target, weights=weights)
        without = load_draft(folders / "llama-cut", target, weights=weights)
        assert draft.weight_bytes > without.weight_bytes
        cache = KVCache(draft.config, 3, 8, draft.activation_dtype, draft.device)
        batch = step(draft, [Span(TOKENS, 0, [2, 1], 2)], 8, row_multiple=draft.row_multiple)
        found_QV = draft.forward(batch, cache)
        assert found_QV.shape == (2, 97)
        rows = draft._run_layers(draft._embed(batch), batch, cache)
        through_QE = rows.sum_TE.float() @ dense_weight(draft.out).float().T
        normed_QE = F.rms_norm(through_QE, (128,), draft.final_norm_E.float(), 1e-5)
        expected_QU = normed_QE[:2] @ dense_weight(draft.head.packed).float().T
    torch.testing.assert_close(found_QV[:, IDS], expected_QU, rtol=2e-2, atol=2e-2)


def test_a_nan_row_stays_one(folders):
    """The samplers tell it from a row of few tokens by its NaN."""
    with use_implementation("cpu"):
        target = Transformer.from_folder(folders / "llama")
        target.embed_VE[TOKENS[0]] = torch.nan
        found = logits(load_draft(folders / "llama-cut", target))
    assert bool(found[0, IDS].isnan().all())
    assert bool((found[0, OTHERS] == -torch.inf).all())


def check_rows(target: Transformer, cut: Transformer) -> None:
    assert cut.head.format == target.head.format
    assert torch.equal(dense_weight(cut.head.packed), dense_weight(target.head.packed)[IDS])


@pytest.mark.parametrize("path", ["cpu", "triton"])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_rows_of_the_cut_head_are_the_targets(folders, name, weights, path):
    with use_implementation(path):
        target = Transformer.from_folder(folders / name, dtype=torch.float16, weights=weights)
        cut = load_draft(folders / f"{name}-cut", target, weights=weights)
        check_rows(target, cut)
        own, lent = cut.layers[0].qkv, target.layers[0].qkv
        assert own.format == lent.format
        assert torch.equal(dense_weight(own), dense_weight(lent))
        assert logits(cut, 1)[:, IDS].isfinite().all()


PACKED = ("gptq", "fp8 blocks", "compressed int4 with zeros, head too")


@pytest.mark.parametrize("path", ["cpu", "triton"])
@pytest.mark.parametrize("name", PACKED)
def test_a_target_that_is_stored_quantised(tmp_path, name, path):
    case = CASES[name]
    stored, dense = save_packed(tmp_path / "target", case.packer, case.config, case.plain)
    folder = save_draft(
        tmp_path / "draft",
        stored,
        layers_of(dense, 1),
        num_layers=1,
        vocab_ids=torch.tensor(IDS),
    )
    with use_implementation(path):
        target = Transformer.from_folder(stored, dtype=torch.float16)
        cut = load_draft(folder, target)
        check_rows(target, cut)
        assert cut.head.format == ("int4" if "head" in name else "plain")
        assert isinstance(dense_weight(cut.layers[0].qkv), torch.Tensor)


def test_another_precision_for_the_draft_alone(folders):
    with use_implementation("cpu"):
        target = Transformer.from_folder(folders / "llama", dtype=BF16)
        plain = load_draft(folders / "llama-whole", target)
        rounded = load_draft(folders / "llama-whole", target, weights="int8")
    assert rounded.head is target.head
    assert rounded.weight_bytes < plain.weight_bytes


@pytest.fixture
def damaged(folders, tmp_path) -> Callable[..., Path]:
    """A function that copies the cut draft with changed tensors or a changed entry."""

    def copy(tensors: dict[str, Any] | None = None, fields: Any = None, **entry: Any) -> Path:
        folder = shutil.copytree(folders / "llama-cut", tmp_path / "damaged")
        stored = load_file(folder / "model.safetensors") | (tensors or {})
        kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
        values = json.loads((folder / "config.json").read_text()) | (fields or {})
        if isinstance(values[FIELD], dict):
            values[FIELD] |= entry
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return copy


def ids(*values: int) -> dict[str, torch.Tensor]:
    return {VOCAB_IDS: torch.tensor(values, dtype=torch.int32)}


NORM = "model.norm.weight"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a missing tensor": ({"tensors": {NORM: None}}, rf"draft.*missing 1 tensors: {NORM}"),
    "no ids": ({"tensors": {VOCAB_IDS: None}}, rf"missing 1 tensors: {VOCAB_IDS}"),
    "ids that nobody asked for": ({"vocab": None}, rf"left over 1 tensors: {VOCAB_IDS}"),
    "an embedding": (
        {"tensors": {"model.embed_tokens.weight": torch.zeros(97, 128)}},
        "left over 1 tensors: model.embed_tokens.weight",
    ),
    "a head": ({"tensors": {"lm_head.weight": torch.zeros(97, 128)}}, "left over 1 .*lm_head"),
    "a layer more": ({"fields": {"num_hidden_layers": 2}}, r"missing 9 tensors: .*layers\.1\."),
    "a wrong shape": ({"tensors": {NORM: torch.zeros(5)}}, rf"{NORM}: expected shape \(128,\)"),
    "ids as floats": ({"tensors": {VOCAB_IDS: torch.zeros(8)}}, "expected dtype I32, got F32"),
    "fewer ids": ({"tensors": ids(1, 2)}, rf"{VOCAB_IDS}: expected shape \(8,\).*got \(2,\)"),
    "no order": ({"tensors": ids(0, 2, 3, 40, 17, 41, 95, 96)}, r"ascending ids, got \[40, 17\]"),
    "twice": ({"tensors": ids(0, 2, 2, 17, 40, 41, 95, 96)}, r"ascending ids, got \[2, 2\] at 1"),
    "below 0": ({"tensors": ids(-1, 2, 3, 17, 40, 41, 95, 96)}, "ids from 0 to 96, got -1"),
    "beyond": ({"tensors": ids(0, 2, 3, 17, 40, 41, 95, 97)}, "ids from 0 to 96, got 97"),
    "empty": ({"tensors": ids(), "vocab": 0}, "vocab: expected null or a positive integer, got 0"),
    "a kind to come": ({"kind": "tree"}, r"kind in \['head', 'layers'\], got 'tree'"),
    "no kind": ({"kind": None}, r"pagedraft_draft\.kind: expected text, got None"),
    "no truth": ({"has_out": 1}, r"pagedraft_draft\.has_out: expected true or false, got 1"),
    "an out that is not there": ({"has_out": True}, r"missing 1 tensors: draft\.out\.weight"),
    "an out that nobody asked for": (
        {"tensors": {"draft.out.weight": torch.zeros(128, 128)}},
        r"left over 1 tensors: draft\.out\.weight",
    ),
    "a head with an out": (
        {"kind": "head", "has_out": True},
        r"draft\.out\.weight: expected none for kind",
    ),
    "no digest": ({"target_sha256": "beef"}, "target_sha256: expected 64 hexadecimal digits"),
    "no object": ({"fields": {FIELD: 3}}, "pagedraft_draft: expected an object, got 3"),
    "another width": ({"fields": {"hidden_size": 64}}, "embed_dim: expected the target's 128"),
    "another vocabulary": ({"fields": {"vocab_size": 98}}, "vocab_size: expected the target's 97"),
    "another family": (
        {"fields": {"model_type": "qwen2"}},
        "family: expected the target's 'llama'",
    ),
    "another target": ({"target_sha256": "ab" * 32}, "distilled for the target .* differs"),
}


@pytest.mark.usefixtures("cpu_path")
class TestRefusals:
    @pytest.mark.parametrize(("changes", "message"), FAULTS.values(), ids=FAULTS)
    def test_damage_is_named(self, folders, damaged, changes, message):
        folder = damaged(**changes)
        target = Transformer.from_folder(folders / "llama")
        with pytest.raises(ValueError, match=message):
            load_draft(folder, target)

    def test_a_truncated_file(self, folders, damaged):
        folder = damaged()
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(ValueError, match="expected a whole safetensors file"):
            load_draft(folder, Transformer.from_folder(folders / "llama"))

    def test_a_fine_tuned_target(self, folders, tmp_path):
        save_tiny(tmp_path / "tuned", "llama", dtype=BF16, seed=1, **SIZES)
        tuned = Transformer.from_folder(tmp_path / "tuned")
        with pytest.raises(ValueError, match="was distilled for the target .* differs"):
            load_draft(folders / "llama-whole", tuned)

    def test_a_target_made_in_memory(self, folders):
        target = Transformer.from_folder(folders / "llama")
        target.folder = None
        with pytest.raises(ValueError, match="cannot be checked, because it was made in memory"):
            load_draft(folders / "llama-whole", target)

    def test_a_draft_as_the_target(self, folders):
        with pytest.raises(ValueError, match="expected a whole model, got a draft .* the target"):
            Transformer.from_folder(folders / "llama-cut")

    def test_a_model_as_the_draft(self, folders):
        target = Transformer.from_folder(folders / "llama")
        with pytest.raises(ValueError, match="expected a draft without embedding, got a model"):
            load_draft(folders / "llama", target)

    def test_weights_by_a_name_that_is_none(self, folders):
        target = Transformer.from_folder(folders / "llama")
        with pytest.raises(ValueError, match="weights: expected one of"):
            load_draft(folders / "llama-whole", target, weights="int3")
