"""The student computes what the engine computes, and is saved as what the engine loads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedraft.decoding.distill import fit
from pagedraft.decoding.distill.fit import fit_fusion, fit_out
from pagedraft.decoding.distill.start import (
    choose_vocabulary,
    coverage,
    pick_layers,
    save_student,
    start_student,
)
from pagedraft.decoding.distill.student import FUSE, OUT, Student
from pagedraft.decoding.distill.taught import Taught
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.tests.decoding.distill.lessons import random_texts, with_random_prompt
from pagedraft.tests.model.steps import Span, step
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")

NAMES = ("llama", "llama-tied", "llama-bias", "qwen2", "qwen3-tied")
CPU = torch.device("cpu")
TOKENS = [5, 9, 33, 7, 60, 61, 5, 9, 33]


def logits(model: Transformer) -> torch.Tensor:
    cache = KVCache(model.config, 3, 8, model.activation_dtype, model.device)
    span = Span(TOKENS, 0, [2, 1], len(TOKENS))
    return model.forward(step(model, [span], 8, row_multiple=model.row_multiple), cache)


@pytest.mark.parametrize("name", NAMES)
def test_of_all_layers_is_the_target(tmp_path, name):
    save_tiny(tmp_path / "target", name)
    target = Transformer.from_folder(tmp_path / "target")
    layers = list(range(target.config.num_layers))
    student, head_VE = start_student(tmp_path / "target", layers, CPU)
    hidden_BLE = student(torch.tensor([TOKENS]))
    torch.testing.assert_close(hidden_BLE[0] @ head_VE.T, logits(target), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_padding_at_the_end_changes_nothing_before(tmp_path, name):
    save_tiny(tmp_path / "target", name)
    student, _ = start_student(tmp_path / "target", [0], CPU)
    alone = student(torch.tensor([TOKENS[:4]]))
    padded = student(torch.tensor([TOKENS[:4] + [0] * 3, TOKENS[:7]]))
    torch.testing.assert_close(padded[:1, :4], alone)


@pytest.mark.parametrize("name", NAMES)
def test_saved_is_what_the_engine_loads(tmp_path, name):
    save_tiny(tmp_path / "target", name)
    student, head_VE = start_student(tmp_path / "target", [1], CPU)
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(0.02 * torch.randn(weight.shape)).copy_(weight.bfloat16().float())
    ids_U = torch.tensor([0, 5, 9, 33, 60, 61])
    save_student(student, tmp_path / "draft", tmp_path / "target", "a target", ids_U)
    draft = load_draft(tmp_path / "draft", Transformer.from_folder(tmp_path / "target"))
    expected_QU = student(torch.tensor([TOKENS]))[0] @ head_VE[ids_U].T
    found_QV = logits(draft)
    torch.testing.assert_close(found_QV[:, ids_U], expected_QU, atol=2e-4, rtol=2e-4)
    assert found_QV.isfinite().sum() == len(ids_U) * len(TOKENS)


def test_layers_are_the_first_the_last_or_spread():
    assert pick_layers(2, 30, "first") == [0, 1]
    assert pick_layers(2, 30, "last") == [28, 29]
    assert pick_layers(1, 30, "even") == [0]
    assert pick_layers(2, 30, "even") == [0, 29]
    assert pick_layers(4, 30, "even") == [0, 10, 19, 29]
    assert pick_layers(3, 3, "even") == [0, 1, 2]
    for wrong in (0, 4):
        with pytest.raises(ValueError, match="layers: expected 1 to 3"):
            pick_layers(wrong, 3, "even")


def test_a_target_without_so_many_layers_is_refused(tmp_path):
    save_tiny(tmp_path / "target", "llama")
    with pytest.raises(ValueError, match="layers: expected at most"):
        start_student(tmp_path / "target", [0, 50], CPU)


class TestFeatureHead:
    def head(self, folder, state_rms: float = 2.0) -> Student:
        plain, _ = start_student(folder, [0], CPU)
        tensors = {**plain.tensors(), FUSE: self.fusion(plain.config.embed_dim)}
        return Student(plain.config, tensors, plain.embed_VE, state_rms)

    def fusion(self, embed_dim: int) -> torch.Tensor:
        return torch.cat([0.1 * torch.randn(embed_dim, embed_dim), torch.eye(embed_dim)], dim=1)

    def test_its_tensors_are_what_it_was_given(self, tmp_path):
        save_tiny(tmp_path, "llama")
        torch.manual_seed(0)
        head = self.head(tmp_path)
        torch.manual_seed(0)
        torch.testing.assert_close(head.tensors()[FUSE], self.fusion(head.config.embed_dim))

    def test_without_states_it_is_a_draft_of_one_layer(self, tmp_path):
        save_tiny(tmp_path, "llama")
        plain, _ = start_student(tmp_path, [0], CPU)
        tokens_BL = torch.tensor([TOKENS])
        none_BLE = torch.zeros(1, len(TOKENS), plain.config.embed_dim)
        torch.testing.assert_close(self.head(tmp_path)(tokens_BL, none_BLE), plain(tokens_BL))

    def test_it_reads_the_state_before_and_those_before_that(self, tmp_path):
        save_tiny(tmp_path, "llama")
        head, tokens_BL = self.head(tmp_path), torch.tensor([TOKENS])
        states_BLE = torch.randn(1, len(TOKENS), head.config.embed_dim)
        hidden_BLE = head(tokens_BL, states_BLE)
        states_BLE[:, 4] += 1.0
        differs_L = (head(tokens_BL, states_BLE) - hidden_BLE).abs().amax(-1)[0] > 1e-4
        assert differs_L.tolist() == [False] * 4 + [True] * 5


class TestFitOut:
    """What small decoders begin with, where the target's state is linear in what layers leave."""

    def student(self, folder, seed: int = 3) -> tuple[Student, list[Taught], torch.Tensor]:
        student, _ = start_student(folder, [0], CPU)
        bare = {name: x for name, x in student.tensors().items() if name != OUT}
        bare["final_norm"] = 0.5 + torch.rand(student.config.embed_dim)
        bare = Student(student.config, bare, student.embed_VE)
        width = student.config.embed_dim
        out = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
        texts = []
        for text in random_texts(60, embed_dim=width):
            with torch.no_grad():
                left_BLE = bare.run_layers(bare.embed_VE[text.token_ids[None, :-1].long()])
            left_NE = left_BLE[0, text.num_prompt - 1 :]
            size_N1 = left_NE.square().mean(1, keepdim=True).sqrt()
            states_NE = (left_NE / size_N1) @ out.T * bare.weights["final_norm"].detach()
            texts.append(replace(text, states_NE=states_NE.half()))
        return bare, texts, out

    def test_the_fit_finds_the_linear_map_that_there_is(self, tmp_path):
        save_tiny(tmp_path, "llama")
        bare, texts, out = self.student(tmp_path)
        found, size = fit_out(bare, texts)
        torch.testing.assert_close(found * size, out, atol=0.2, rtol=0.05)

    def test_enough_tokens_are_enough(self, tmp_path, monkeypatch):
        save_tiny(tmp_path, "llama")
        bare, texts, _ = self.student(tmp_path)
        whole, few = fit_out(bare, texts)[0], fit_out(bare, texts[:3])[0]
        assert not torch.equal(whole, few)
        monkeypatch.setattr(fit, "MOST_TOKENS", sum(text.num_output for text in texts[:3]))
        assert torch.equal(fit_out(bare, texts)[0], few)

    def test_it_is_where_a_student_of_layers_begins(self, tmp_path):
        save_tiny(tmp_path, "llama")
        _, texts, _ = self.student(tmp_path)
        student, _ = start_student(tmp_path, [0], CPU, texts=texts)
        plain, _ = start_student(tmp_path, [0], CPU)
        assert torch.equal(plain.tensors()[OUT], torch.eye(plain.config.embed_dim))
        expected, size = fit_out(student, texts)
        assert student.left_rms == size
        torch.testing.assert_close(student.tensors()[OUT], expected)


class TestFit:
    """What a head begins with, where the target's next state is linear in what the head reads."""

    def texts(self, embed_VE: torch.Tensor, fusion: torch.Tensor, weight_E: torch.Tensor):
        texts = random_texts(40, num_prompt=5, num_output=12, embed_dim=embed_VE.shape[1])
        fitting = []
        for text in texts:
            states = [torch.randn(embed_VE.shape[1])]
            for token_id in text.token_ids[1:-1].tolist():
                read = torch.cat([states[-1], embed_VE[token_id]])
                states.append((fusion @ read) * weight_E)
            states_TE = torch.stack(states).half()
            fitting.append(
                replace(
                    text,
                    before_PE=states_TE[:4],
                    before_lse_P=torch.zeros(4),
                    states_NE=states_TE[4:],
                )
            )
        return fitting

    def test_the_fit_finds_the_linear_map_that_there_is(self):
        torch.manual_seed(1)
        embed_VE, weight_E = torch.randn(97, 16), 0.5 + torch.rand(16)
        fusion = torch.cat([0.2 * torch.randn(16, 16), torch.randn(16, 16)], dim=1)
        found = fit_fusion(self.texts(embed_VE, fusion, weight_E), embed_VE, weight_E)
        torch.testing.assert_close(found, fusion, atol=0.06, rtol=0.05)

    def test_nothing_is_asked_where_the_norms_weight_is_0(self):
        torch.manual_seed(1)
        embed_VE, weight_E = torch.randn(97, 16), torch.ones(16)
        weight_E[3] = 0.0
        fusion = torch.cat([0.2 * torch.randn(16, 16), torch.randn(16, 16)], dim=1)
        found = fit_fusion(self.texts(embed_VE, fusion, weight_E), embed_VE, weight_E)
        assert found.isfinite().all()
        assert not found[3].any()

    @pytest.mark.parametrize("name", NAMES)
    def test_a_head_that_was_fitted_is_its_fit_before_its_first_step(self, tmp_path, name):
        save_tiny(tmp_path, name)
        plain, _ = start_student(tmp_path, [0], CPU)
        width = plain.config.embed_dim
        texts = [with_random_prompt(text) for text in random_texts(12, embed_dim=width)]
        student, _ = start_student(tmp_path, [0], CPU, kind="head", texts=texts)
        weight_E = student.weights["final_norm"].detach()
        fusion = fit_fusion(texts, plain.embed_VE, weight_E)
        states_BLE, tokens_BL = torch.randn(1, len(TOKENS), width), torch.tensor([TOKENS])
        read_BLD = torch.cat([states_BLE, plain.embed_VE[tokens_BL].float()], dim=-1)
        expected_BLE = torch.nn.functional.rms_norm(
            read_BLD @ fusion.T, (width,), weight_E, plain.config.rms_eps
        )
        torch.testing.assert_close(student(tokens_BL, states_BLE), expected_BLE)


class TestVocabulary:
    def test_what_was_written_counts_then_what_was_read_then_low_ids(self):
        [text] = random_texts(1, num_prompt=2, num_output=6)
        text.token_ids[:] = torch.tensor([90, 90, 7, 7, 7, 50, 50, 30])
        assert choose_vocabulary([text], 1, 97).tolist() == [7]
        assert choose_vocabulary([text], 3, 97).tolist() == [7, 30, 50]
        assert choose_vocabulary([text], 6, 97).tolist() == [0, 1, 7, 30, 50, 90]
        assert choose_vocabulary([text], 97, 97) is None

    def test_coverage_is_the_share_of_written_tokens(self):
        [text] = random_texts(1, num_prompt=2, num_output=4)
        text.token_ids[:] = torch.tensor([1, 1, 7, 7, 8, 9])
        assert coverage([text], torch.tensor([1, 7])) == 0.5
        assert coverage([text], None) == 1.0
        assert coverage([], torch.tensor([1])) == 0.0
