"""Training: it learns, a resumed run is the uninterrupted one, and bad input is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pagedraft.decoding.distill.batches import make_batch, plan_batches, shift
from pagedraft.decoding.distill.precision import DTYPES, resolve_dtype
from pagedraft.decoding.distill.start import start_student
from pagedraft.decoding.distill.taught import Taught, load_taught, num_output_tokens, save_taught
from pagedraft.decoding.distill.train import (
    FINAL_RATE,
    Diverged,
    Trainer,
    TrainOptions,
    read_first,
)
from pagedraft.tests.decoding.distill.lessons import random_texts, with_random_prompt
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")

CPU = torch.device("cpu")
OPTIONS = TrainOptions(batch_tokens=40, learning_rate=3e-3, warm_up=2)
LOSS = OPTIONS.loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    save_tiny(path, "qwen2")
    return path


def texts_of(folder, num_texts: int = 6) -> list[Taught]:
    """Texts whose states are those of a student with all layers: the target's."""
    student, head_VE = start_student(folder, [0, 1], CPU)
    texts = random_texts(num_texts, embed_dim=student.config.embed_dim)
    taught = []
    for text in texts:
        with torch.no_grad():
            states = student(text.token_ids[None, :-1].long())[0, text.num_prompt - 1 :]
        taught.append(
            Taught(
                text.token_ids,
                text.num_prompt,
                states.half(),
                (states.half().float() @ head_VE.T).logsumexp(-1),
                text.kind,
                text.source,
                0.0,
            )
        )
    return taught


def trainer_of(folder, texts, num_steps: int = 8, options: TrainOptions = OPTIONS) -> Trainer:
    student, head_VE = start_student(folder, [0], CPU)
    return Trainer(student, head_VE, texts, options, num_steps)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.student.tensors().items()}


@pytest.mark.parametrize(("last_loss", "is_tv"), [("tv", [7, 8, 9]), (None, [])])
def test_the_last_steps_have_a_loss_of_their_own(folder, last_loss, is_tv):
    options = replace(OPTIONS, last_loss=last_loss)
    trainer = trainer_of(folder, texts_of(folder), 10, options)
    found = [trainer.advance() for _ in range(10)]
    steps = [step for step, at in enumerate(found) if at.loss == pytest.approx(1 - at.alpha)]
    assert steps == is_tv
    assert trainer.examine(texts_of(folder)).loss != pytest.approx(
        1 - trainer.examine(texts_of(folder)).alpha
    )


def test_it_learns(folder):
    texts = texts_of(folder)
    trainer = trainer_of(folder, texts, 40)
    before = trainer.examine(texts)
    while trainer.step < 40:
        trainer.advance()
    after = trainer.examine(texts)
    assert after.loss < 0.5 * before.loss
    assert after.alpha > before.alpha
    assert before.num_tokens == num_output_tokens(texts)


def test_a_student_that_is_the_target_has_nothing_to_learn(folder):
    texts = texts_of(folder)
    student, head_VE = start_student(folder, [0, 1], CPU)
    found = Trainer(student, head_VE, texts, OPTIONS, 1).examine(texts)
    assert found.loss == pytest.approx(0.0, abs=1e-3)
    assert found.alpha == pytest.approx(1.0, abs=2e-2)


@pytest.mark.parametrize("stop", [0, 1, 3, 7])
def test_resumed_weights_are_those_of_the_uninterrupted_run(folder, tmp_path, stop):
    texts = texts_of(folder)
    whole = trainer_of(folder, texts)
    while whole.step < 8:
        whole.advance()
    first = trainer_of(folder, texts)
    while first.step < stop:
        first.advance()
    first.save(tmp_path / "checkpoint.safetensors")
    second = trainer_of(folder, texts)
    second.load(tmp_path / "checkpoint.safetensors")
    assert second.step == stop
    while second.step < 8:
        second.advance()
    for name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, weights_of(second)[name]), name


def test_texts_that_come_later_resume_too(folder, tmp_path):
    texts, file = texts_of(folder), tmp_path / "checkpoint.safetensors"

    def part(trainer: Trainer, stop: int) -> Trainer:
        while trainer.step < stop:
            trainer.advance()
        return trainer

    whole = part(trainer_of(folder, texts[:4]), 3)
    whole.use(texts, 3)
    part(whole, 8)
    first = part(trainer_of(folder, texts[:4]), 3)
    first.use(texts, 3)
    part(first, 5).save(file)
    assert read_first(file) == 3
    second = trainer_of(folder, texts[:4])
    second.use(texts, 3)
    second.load(file)
    part(second, 8)
    for name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, weights_of(second)[name]), name


def test_a_checkpoint_of_another_run_is_refused(folder, tmp_path):
    texts, file = texts_of(folder), tmp_path / "checkpoint.safetensors"
    trainer_of(folder, texts).save(file)
    other = trainer_of(folder, texts, options=replace(OPTIONS, clip=2.0))
    with pytest.raises(ValueError, match="clip 1.0, and this one has 2.0"):
        other.load(file)
    with pytest.raises(ValueError, match="num_steps 8"):
        trainer_of(folder, texts, 9).load(file)
    with pytest.raises(ValueError, match="with texts"):
        trainer_of(folder, texts[1:]).load(file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        trainer_of(folder, texts).load(file)
    save_taught(file, texts)
    with pytest.raises(ValueError, match="expected a checkpoint"):
        trainer_of(folder, texts).load(file)


def test_a_rate_that_is_too_high_is_told(folder):
    trainer = trainer_of(folder, texts_of(folder), 30, replace(OPTIONS, learning_rate=900.0))
    trainer.student.weights["final_norm"].data.fill_(math.inf)
    with pytest.raises(Diverged, match=r"step 0: .* learning rate of 900 is too high"):
        trainer.advance()


def test_an_update_that_was_interrupted_is_not_whole(folder, monkeypatch):
    trainer = trainer_of(folder, texts_of(folder))
    trainer.advance()
    assert trainer.is_whole

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer._optimizer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.advance()
    assert not trainer.is_whole


def test_a_loss_that_is_no_number_ends_the_training(folder):
    texts = texts_of(folder)
    texts[0].states_NE[0] = math.nan
    trainer = trainer_of(folder, texts[:1])
    with pytest.raises(ValueError):
        trainer.advance()


def test_the_rate_warms_up_and_falls(folder):
    rates = [TrainOptions(learning_rate=1.0, warm_up=4).rate(step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.25, rel=1e-2)
    assert max(rates) == pytest.approx(1.0, rel=1e-2)
    assert rates[-1] == pytest.approx(FINAL_RATE)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize("batch_tokens", [1, 13, 60, 10_000])
def test_every_text_is_in_one_batch_of_an_epoch(batch_tokens):
    texts = random_texts(37)
    plans = [plan_batches(texts, batch_tokens, 3, epoch, pool=8) for epoch in (0, 1, 0)]
    assert plans[0] == plans[2]
    assert plans[0] != plans[1] or batch_tokens == 10_000
    for batches in plans:
        assert sorted(i for batch in batches for i in batch) == list(range(37))
        for batch in batches:
            longest = max(len(texts[i].token_ids) for i in batch)
            assert len(batch) == 1 or len(batch) * longest <= batch_tokens


def test_a_batch_points_at_what_predicts_each_written_token():
    texts = random_texts(3)
    batch = make_batch(texts, CPU)
    flat = batch.tokens_BL.flatten()
    place = 0
    for text in texts:
        for i in range(text.num_output):
            assert flat[batch.places_N[place]] == text.token_ids[text.num_prompt - 1 + i]
            place += 1
    assert place == len(batch.places_N) == len(batch.states_NE) == len(batch.lse_N)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "kl"}, "loss: expected one of"),
        ({"last_loss": "kl"}, "last_loss: expected one of"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"learning_rate": 1e38}, "learning_rate"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"warm_up": 0}, "warm_up"),
    ],
)
def test_bad_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainOptions(**changes)


def test_prompts_count_where_the_teacher_has_read_them():
    texts = [with_random_prompt(text) for text in random_texts(3)]
    batch = make_batch(texts, CPU, with_prompts=True)
    length = batch.tokens_BL.shape[1]
    places = [
        row * length + i for row, text in enumerate(texts) for i in range(len(text.token_ids) - 1)
    ]
    assert batch.places_N.tolist() == places
    states_NE = torch.cat([t for text in texts for t in (text.before_PE, text.states_NE)])
    assert torch.equal(batch.states_NE, states_NE.float())
    lse_N = torch.cat([t for text in texts for t in (text.before_lse_P, text.lse_N)])
    assert torch.equal(batch.lse_N, lse_N)
    assert batch.before_BLE is None
    without = make_batch([*texts, random_texts(4)[3]], CPU, with_prompts=True)
    assert len(without.places_N) == sum(text.num_output for text in random_texts(4))


def test_a_text_without_states_of_its_prompt_is_no_lesson_for_a_head():
    with pytest.raises(ValueError, match="expected states of prompts"):
        make_batch(random_texts(2), CPU, with_states=True)


class TestFeatureHead:
    def trainer(self, folder, texts, unroll: int, **options: object) -> Trainer:
        student, head_VE = start_student(folder, [0], CPU, kind="head")
        chosen = replace(OPTIONS, unroll=unroll, prompts=False, **options)  # theirs are random
        return Trainer(student, head_VE, texts, chosen, 40)

    def texts(self, folder) -> list[Taught]:
        return [with_random_prompt(text) for text in texts_of(folder)]

    @pytest.mark.parametrize("unroll", [1, 3])
    def test_it_learns(self, folder, unroll):
        texts = self.texts(folder)
        trainer = self.trainer(folder, texts, unroll)
        before = trainer.examine(texts)
        while trainer.step < 40:
            trainer.advance()
        assert trainer.examine(texts).loss < 0.5 * before.loss

    def test_a_later_draft_reads_its_own_state_in_place_of_the_teachers(self, folder):
        texts = self.texts(folder)[:1]
        trainer = self.trainer(folder, texts, 2)
        batch = make_batch(texts, CPU, with_states=True)
        with torch.no_grad():
            own = shift(trainer.student(batch.tokens_BL, batch.before_BLE))
            second = trainer._loss(batch._replace(before_BLE=own), LOSS)
            both = trainer._loss(batch, LOSS)
            first = self.trainer(folder, texts, 1)._loss(batch, LOSS)
            alone = self.trainer(folder, texts, 1)._loss(batch._replace(before_BLE=own), LOSS)
        assert both.loss.item() == pytest.approx(first.loss.item() + 0.8 * alone.loss.item())
        assert torch.equal(both.alpha_N, first.alpha_N)
        assert second.loss.item() != pytest.approx(both.loss.item())

    def test_its_states_are_drawn_to_the_targets(self, folder):
        texts = self.texts(folder)
        batch = make_batch(texts, CPU, with_states=True)
        apart = []
        for weight in (0.0, 10.0):
            trainer = self.trainer(folder, texts, 1, state_weight=weight)
            while trainer.step < 40:
                trainer.advance()
            states_BLE = trainer.student(batch.tokens_BL, batch.before_BLE).detach()
            written_NE = states_BLE.flatten(0, 1)[batch.places_N]
            apart.append((written_NE - batch.states_NE).abs().mean().item())
        assert apart[1] < 0.7 * apart[0]

    def test_what_that_counts_is_smooth_l1_before_the_norms_weight(self, folder):
        texts = self.texts(folder)
        batch = make_batch(texts, CPU, with_states=True)
        without, with_it = (
            self.trainer(folder, texts, 1, state_weight=weight) for weight in (0.0, 3.0)
        )
        weight_E = with_it.student.weights["final_norm"].detach()
        with torch.no_grad():
            states_BLE = with_it.student(batch.tokens_BL, batch.before_BLE)
            difference_NE = states_BLE.flatten(0, 1)[batch.places_N] - batch.states_NE
            size_NE = (difference_NE / weight_E).abs()
            apart = torch.where(size_NE < 1, size_NE**2 / 2, size_NE - 0.5).mean().item()
            expected = without._loss(batch, LOSS).loss.item() + 3 * apart
            assert with_it._loss(batch, LOSS).loss.item() == pytest.approx(expected, rel=1e-5)

    def test_the_states_before_are_at_the_tokens_after(self, folder):
        texts = self.texts(folder)[:3]
        batch = make_batch(texts, CPU, with_states=True)
        for row, text in enumerate(texts):
            states_TE = torch.cat([text.before_PE, text.states_NE]).float()
            assert not batch.before_BLE[row, 0].any()
            assert torch.equal(batch.before_BLE[row, 1 : len(states_TE)], states_TE[:-1])

    def test_states_of_prompts_are_saved_for_all_texts_or_none(self, folder, tmp_path):
        texts, file = self.texts(folder), tmp_path / "texts.safetensors"
        save_taught(file, texts)
        for a, b in zip(texts, load_taught(file), strict=True):
            assert torch.equal(a.before_PE, b.before_PE)
            assert torch.equal(a.before_lse_P, b.before_lse_P)
        with pytest.raises(ValueError, match="for all texts or for none"):
            save_taught(file, [*texts, replace(texts[0], before_PE=None, before_lse_P=None)])
        with pytest.raises(ValueError, match="expected states and log-sum-exp of 2 tokens"):
            replace(texts[0], before_PE=texts[0].before_PE[1:])
        with pytest.raises(ValueError, match="or neither, got"):
            replace(texts[0], before_lse_P=None)


class TestDtype:
    def test_auto_is_settled_before_a_checkpoint_knows_it(self, folder):
        trainer = trainer_of(folder, texts_of(folder), options=replace(OPTIONS, dtype="auto"))
        assert trainer.options.dtype == resolve_dtype("auto", CPU)
        assert trainer._facts()["dtype"] in DTYPES

    @pytest.mark.parametrize(
        ("features", "expected"),
        [
            ({"avx512_bf16": True}, "bf16"),
            ({"amx_bf16": False, "avx2": True}, "fp32"),
            ({}, "fp32"),
        ],
    )
    def test_auto_asks_the_processor(self, monkeypatch, features, expected):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
        assert resolve_dtype("auto", CPU) == expected
        assert resolve_dtype("fp32", CPU) == "fp32"

    @pytest.mark.parametrize("kind", ["layers", "head"])
    def test_bf16_learns_nearly_as_fp32(self, folder, kind):
        texts = texts_of(folder)
        if kind == "head":
            texts = TestFeatureHead().texts(folder)
        found = {}
        for dtype in DTYPES:
            student, head_VE = start_student(folder, [0], CPU, kind=kind)
            trainer = Trainer(student, head_VE, texts, replace(OPTIONS, dtype=dtype), 40)
            first = trainer.examine(texts).loss
            while trainer.step < 40:
                trainer.advance()
            assert all(weight.dtype == torch.float32 for weight in student.parameters())
            found[dtype] = first, trainer.examine(texts).loss
        assert found["bf16"] == pytest.approx(found["fp32"], rel=0.1)
        assert found["bf16"] != found["fp32"]
        assert found["bf16"][1] < 0.6 * found["bf16"][0]


class TestTaught:
    def test_saved_and_loaded_are_the_same(self, tmp_path):
        texts = random_texts(7)
        save_taught(tmp_path / "texts.safetensors", texts)
        found = load_taught(tmp_path / "texts.safetensors")
        assert len(found) == 7
        for a, b in zip(texts, found, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            assert torch.equal(a.states_NE, b.states_NE)
            assert torch.equal(a.lse_N, b.lse_N)
            assert (a.num_prompt, a.kind, a.source) == (b.num_prompt, b.kind, b.source)

    def test_damaged_and_other_files_are_refused(self, tmp_path):
        file = tmp_path / "texts.safetensors"
        with pytest.raises(ValueError, match="at least one text"):
            save_taught(file, [])
        save_taught(file, random_texts(2))
        file.write_bytes(file.read_bytes()[:60])
        with pytest.raises(ValueError, match="cannot be read"):
            load_taught(file)

    def test_parts_that_do_not_fit_are_refused(self):
        [text] = random_texts(1)
        with pytest.raises(ValueError, match="expected states of 9 tokens"):
            Taught(text.token_ids, 3, text.states_NE[1:], text.lse_N, "chat", "a", 0.0)
        with pytest.raises(ValueError, match="expected a prompt and a continuation"):
            Taught(text.token_ids, 0, text.states_NE, text.lse_N, "chat", "a", 0.0)
