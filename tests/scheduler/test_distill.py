"""``pagedraft distill`` on a tiny target: whole runs, interrupted ones, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pagedraft.decoding.distill import taught
from pagedraft.decoding.distill.train import Trainer, TrainOptions
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.config import ModelConfig
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.cli import main
from pagedraft.scheduler.distill import texts as distill_texts
from pagedraft.scheduler.distill import train as train_phase
from pagedraft.scheduler.distill.job import Watch
from pagedraft.scheduler.distill.options import KINDS, DistillOptions, Sizes
from pagedraft.scheduler.distill.run import DistillRun
from pagedraft.scheduler.distill.write import write
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.model.words import save_words

pytestmark = pytest.mark.usefixtures("cpu_path")

SMALL = Sizes(
    prompt_tokens=24,
    tokens=12,
    rows=4,
    shard=4,
    held_out=3,
    own=3,
    measured=1,
    measured_tokens=8,
)
WORDS = ("the", "cab", "sat", "on", "a", "mat", "and", "said", "that", "it", "was", "good")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_tiny(path, "llama-tied", vocab_size=300)
    save_words(path, "byte-level")
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    lines = [" ".join((*WORDS[i % 7 : i % 7 + 3 + i % 5], str(i))) for i in range(24)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def options(target, prompts, tmp_path) -> DistillOptions:
    return DistillOptions(
        target=str(target),
        out=tmp_path / "draft",
        layers=1,
        vocab=64,
        prompts=prompts,
        held_out=0.2,
        texts=10,
        steps=6,
        sizes=SMALL,
        train=TrainOptions(batch_tokens=64, learning_rate=3e-3, warm_up=2),
    )


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


class Stop(Watch):
    """Ctrl-C after so many calls of one of the watch's methods."""

    def __init__(self, method: str, count: int) -> None:
        self.left = count
        setattr(self, method, self._call)

    def _call(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class TestRun:
    @pytest.mark.parametrize("kind", KINDS)
    def test_makes_a_draft_that_the_engine_uses_and_a_report(self, options, target, kind):
        unroll = 2 if kind == "head" else 1
        options = replace(options, kind=kind, train=replace(options.train, unroll=unroll))
        run = DistillRun(options)
        outcome = run.run()
        verdict = run.report(outcome, "pagedraft distill")
        report = json.loads((options.out / "report.json").read_text())
        assert report["verdict"] == verdict
        assert report["facts"]["num_texts"] == 10
        assert report["facts"]["num_steps_done"] == 6
        assert report["facts"]["held_out"]["after"]["alpha"] == pytest.approx(
            outcome.facts["held_out"]["after"]["alpha"]
        )
        assert (options.out / "report.md").read_text().count(verdict)
        plain, drafted = LLM(target), LLM(target, draft=options.out, speculate="draft", k=2)
        prompt = [5, 9, 33, 7]
        [expected], [found] = plain.generate(prompt), drafted.generate(prompt)
        assert found.token_ids == expected.token_ids
        ids_U = tensors(options.out)["draft.vocab_ids"]
        assert len(ids_U) == 64

    def test_replaces_a_draft_and_its_report(self, options):
        options.out.mkdir()
        run = DistillRun(options)
        run.run()
        run.job.state.close()
        (options.out / "report.md").write_text("of the draft that was there")
        run = DistillRun(replace(options, vocab=50))
        run.run()
        assert sorted(path.name for path in options.out.iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        modes = {path.stat().st_mode for path in options.out.iterdir()}
        assert len(modes) == 1

    def test_training_changes_all_of_its_tensors(self, options):
        outcome = DistillRun(options).run()
        start, end = tensors(outcome.start), tensors(outcome.out)
        assert all(
            not torch.equal(start[name], end[name]) for name in end if name != "draft.vocab_ids"
        )

    def test_the_same_seed_gives_the_same_draft_and_another_one_another(self, options, tmp_path):
        drafts = [
            DistillRun(replace(options, out=tmp_path / name, seed=seed)).run().out
            for name, seed in (("a", 0), ("b", 0), ("c", 1))
        ]
        a, b, c = map(tensors, drafts)
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert not torch.equal(a["model.norm.weight"], c["model.norm.weight"])

    def test_time_alone_decides_where_no_numbers_are_given(self, options):
        quick = replace(options, texts=None, steps=None, minutes=0.05)
        run = DistillRun(quick)
        assert run.run().facts["num_steps"] >= 1
        assert sum(run.job.clock.seconds.values()) < 60

    def test_the_states_are_what_the_target_thinks(self, options, target):
        run = DistillRun(options)
        model = Transformer.from_folder(target, dtype=torch.bfloat16)
        for text in write(run.job)[:3]:
            probed, lse_N = distill_texts._judge(
                distill_texts.Reader(model, len(text.token_ids)),
                text.token_ids[: text.num_prompt].tolist(),
                text.output_ids.tolist(),
            )
            torch.testing.assert_close(text.states_NE, probed.half())
            torch.testing.assert_close(text.lse_N, lse_N)

    def test_greedy_texts_are_what_the_engine_writes(self, options, target):
        llm = LLM(target)
        run = DistillRun(options)
        write(run.job)
        for text in run.job.state.texts("held-out"):
            prompt = text.token_ids[: text.num_prompt].tolist()
            [answer] = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0.0))
            assert answer.token_ids == text.output_ids.tolist()


class TestGoingOn:
    """A run that begins with the draft of an earlier one."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_begins_where_that_one_ended_with_texts_of_its_own(self, options, tmp_path, kind):
        options = replace(options, kind=kind, texts=6)
        first = DistillRun(options)
        outcome = first.run()
        again = DistillRun(replace(options, out=tmp_path / "on", begin=outcome.out, skip=6))
        second = again.run()
        start, end = tensors(second.start), tensors(second.out)
        for name, tensor in tensors(outcome.out).items():
            if name != "draft.vocab_ids":
                assert torch.equal(tensor, start[name]), name
                assert not torch.equal(tensor, end[name]), name
        texts = [run.job.state.texts("texts") for run in (first, again)]
        sources = [
            {text.token_ids[: text.num_prompt].numpy().tobytes() for text in some} for some in texts
        ]
        assert all(sources)
        assert not sources[0] & sources[1]
        held_out = [run.job.state.texts("held-out") for run in (first, again)]
        for a, b in zip(*held_out, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)

    def test_another_draft_than_before_trains_anew(self, options, tmp_path):
        earlier = [
            DistillRun(replace(options, out=tmp_path / name, steps=steps)).run().out
            for name, steps in (("a", 2), ("b", 3))
        ]
        with pytest.raises(KeyboardInterrupt):
            DistillRun(replace(options, begin=earlier[0]), Stop("training", 3)).run()
        assert not DistillRun(replace(options, begin=earlier[0])).job.state.is_changed
        assert DistillRun(replace(options, begin=earlier[1])).job.state.is_changed

    def test_what_does_not_fit_is_refused(self, options, target, tmp_path):
        draft = DistillRun(options).run().out
        on = replace(options, out=tmp_path / "on", begin=draft)
        for changes, message in (
            ({"kind": "head"}, "of kind head, got layers"),
            ({"layers": 2}, "of layers 2, got 1"),
            ({"begin": target}, "got a model of its own"),
            ({"begin": tmp_path / "nowhere"}, "nowhere"),
            ({"skip": 10**6}, "--skip: expected fewer than the"),
        ):
            changed = replace(on, out=tmp_path / f"on-{len(message)}", **changes)
            with pytest.raises((ValueError, FileNotFoundError), match=message):
                DistillRun(changed).run()
        config = json.loads((draft / "config.json").read_text())
        config["pagedraft_draft"]["target_sha256"] = "0" * 64
        (draft / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="of target .*, got 000000000000"):
            DistillRun(on).run()


class TestInterrupted:
    @pytest.mark.parametrize(
        ("method", "count"),
        [("writing", 3), ("writing", 6), ("training", 1), ("training", 4), ("checking", 2)],
    )
    @pytest.mark.parametrize("on_policy", [0, 2])
    def test_goes_on_to_the_weights_of_an_uninterrupted_run(
        self, options, tmp_path, method, count, on_policy
    ):
        options = replace(options, on_policy=on_policy)
        whole = DistillRun(replace(options, out=tmp_path / "whole")).run().out
        with pytest.raises(KeyboardInterrupt):
            DistillRun(options, Stop(method, count)).run()
        run = DistillRun(options)
        assert run.job.state.is_resumed
        found = tensors(run.run().out)
        for name, tensor in tensors(whole).items():
            assert torch.equal(tensor, found[name]), name

    @pytest.mark.parametrize(("method", "count"), [("writing", 5), ("training", 3)])
    def test_a_head_goes_on_too(self, options, tmp_path, method, count):
        options = replace(options, kind="head", train=replace(options.train, unroll=2))
        whole = DistillRun(replace(options, out=tmp_path / "whole")).run().out
        with pytest.raises(KeyboardInterrupt):
            DistillRun(options, Stop(method, count)).run()
        found = tensors(DistillRun(options).run().out)
        for name, tensor in tensors(whole).items():
            assert torch.equal(tensor, found[name]), name

    def test_with_other_options_is_refused(self, options):
        with pytest.raises(KeyboardInterrupt):
            DistillRun(options, Stop("training", 1)).run()
        with pytest.raises(ValueError, match=r"holds a run with seed 0, and this one has 1"):
            DistillRun(replace(options, seed=1))

    def test_inside_an_update_goes_on_from_the_save_before(self, options, tmp_path, monkeypatch):
        whole = DistillRun(replace(options, out=tmp_path / "whole")).run().out
        monkeypatch.setattr(train_phase, "SAVE_SECONDS", -1.0)
        update, left = torch.optim.AdamW.step, [9]  # five of them are timed, and forgotten

        def interrupted(self, *args):
            update(self, *args)
            left[0] -= 1
            if left[0] == 5:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                DistillRun(options).run()
        found = tensors(DistillRun(options).run().out)
        for name, tensor in tensors(whole).items():
            assert torch.equal(tensor, found[name]), name

    @pytest.mark.parametrize("place", ["before the texts", "after the texts", "after the save"])
    def test_around_a_round_of_own_texts(self, options, tmp_path, monkeypatch, place):
        options = replace(options, on_policy=2)
        whole = DistillRun(replace(options, out=tmp_path / "whole")).run().out

        def stop(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if place == "before the texts":
                patch.setattr(train_phase, "write_own", stop)
            elif place == "after the texts":
                patch.setattr(train_phase._Training, "_use_own", stop)
            else:  # saved at the round's step, before its texts; then killed
                patch.setattr(train_phase, "SAVE_SECONDS", -1.0)
                save = Trainer.save
                patch.setattr(Trainer, "save", lambda t, *a: t.step <= 2 and save(t, *a))
            watch = Stop("training", 3) if place == "after the save" else Watch()
            with pytest.raises(KeyboardInterrupt):
                DistillRun(options, watch).run()
        found = tensors(DistillRun(options).run().out)
        for name, tensor in tensors(whole).items():
            assert torch.equal(tensor, found[name]), name

    def test_other_options_of_training_keep_the_texts(self, options, tmp_path):
        other = replace(options, train=replace(options.train, learning_rate=1e-3), vocab=50)
        whole = DistillRun(replace(other, out=tmp_path / "whole")).run().out
        with pytest.raises(KeyboardInterrupt):
            DistillRun(options, Stop("training", 3)).run()
        run = DistillRun(other)
        assert run.job.state.is_changed
        assert len(run.job.state.texts("texts")) == 10
        found = tensors(run.run().out)
        for name, tensor in tensors(whole).items():
            assert torch.equal(tensor, found[name]), name

    def test_more_minutes_after_too_few(self, options):
        few = replace(options, texts=None, steps=3, minutes=1e-6)
        with pytest.raises(ValueError, match="--minutes: too few"):
            DistillRun(few).run()
        assert DistillRun(replace(few, minutes=0.05)).run().facts["num_texts"] >= 1

    def test_two_at_once_are_refused(self, options):
        first = DistillRun(options)
        with pytest.raises(ValueError, match="another process is at work"):
            DistillRun(options)
        first.job.state.close()
        DistillRun(options).job.state.close()

    def test_a_damaged_file_is_named(self, options):
        with pytest.raises(KeyboardInterrupt):
            DistillRun(options, Stop("training", 3)).run()
        for name in ("checkpoint", "texts-000000"):
            file = options.out.with_name("draft.partial") / f"{name}.safetensors"
            file.write_bytes(file.read_bytes()[:99])
            with pytest.raises(
                ValueError, match=rf"{name}\.safetensors: cannot be read.*remove it"
            ):
                DistillRun(options).run()

    def test_a_disk_that_is_full_is_told(self, options, monkeypatch):
        def full(*_: object, **__: object) -> None:
            raise SafetensorError("No space left on device")

        monkeypatch.setattr(taught, "save_file", full)
        with pytest.raises(
            OSError, match=r"held-out-000000\.safetensors: cannot be written: No sp"
        ):
            DistillRun(options).run()

    def test_with_a_target_that_changed_is_refused(self, options, target, tmp_path):
        copied = tmp_path / "copy"
        shutil.copytree(target, copied)
        options = replace(options, target=str(copied))
        with pytest.raises(KeyboardInterrupt):
            DistillRun(options, Stop("training", 1)).run()
        save_tiny(copied, "llama-tied", vocab_size=300, seed=5)
        with pytest.raises(ValueError, match="holds a run with target_sha256"):
            DistillRun(options)

    def test_a_draft_of_a_target_that_changed_is_refused(self, options, target, tmp_path):
        copied = tmp_path / "copy"
        shutil.copytree(target, copied)
        out = DistillRun(replace(options, target=str(copied))).run().out
        save_tiny(copied, "llama-tied", vocab_size=300, seed=5)
        with pytest.raises(ValueError, match="loaded target .* differs"):
            load_draft(out, Transformer.from_folder(copied))

    def test_a_folder_that_is_no_run_is_refused(self, options):
        partial = options.out.with_name("draft.partial")
        partial.mkdir()
        (partial / "thesis.txt").write_text("precious")
        with pytest.raises(ValueError, match=r"draft\.partial: expected a run's folder"):
            DistillRun(options)


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kind": "tree"}, "--kind: expected one of"),
            ({"layers": 0}, "--layers"),
            ({"layers": (1, 0)}, "--layers: expected ascending"),
            ({"layers": ()}, "--layers: expected ascending"),
            ({"vocab": 0}, "--vocab"),
            ({"minutes": 0.0}, "--minutes"),
            ({"minutes": float("nan")}, "--minutes"),
            ({"minutes": float("inf")}, "--minutes"),
            ({"texts": 0}, "--texts"),
            ({"steps": -1}, "--steps"),
            ({"on_policy": -1}, "--on-policy"),
            ({"start": "middle"}, "--start: expected one of"),
            ({"kind": "head", "layers": 2}, "--layers: a head has one layer"),
            ({"kind": "head", "layers": (0, 1)}, "--layers: a head has one layer"),
            ({"kind": "head", "on_policy": 1}, "--on-policy: a feature head"),
            ({"seed": -1}, "--seed"),
        ],
    )
    def test_options(self, options, changes, message):
        with pytest.raises(ValueError, match=message):
            replace(options, **changes)

    @pytest.mark.parametrize("layers", [3, (0, 2)])
    def test_more_layers_than_the_target_has(self, options, layers):
        with pytest.raises(ValueError, match="layers"):
            DistillRun(replace(options, layers=layers))

    @pytest.mark.parametrize("content", ["", "\n\n  \n"])
    def test_prompts_without_a_prompt(self, options, tmp_path, content):
        (tmp_path / "empty.txt").write_text(content)
        with pytest.raises(ValueError, match=r"empty\.txt"):
            DistillRun(replace(options, prompts=tmp_path / "empty.txt"))

    def test_prompts_that_are_not_there(self, options, tmp_path):
        with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
            DistillRun(replace(options, prompts=tmp_path / "nowhere"))

    @pytest.mark.parametrize("out", [".", "..", "a/..", "/"])
    def test_a_folder_without_a_name(self, options, out):
        with pytest.raises(ValueError, match="--out: expected the name of a folder"):
            replace(options, out=Path(out))

    def test_a_folder_that_holds_something_else(self, options, target):
        with pytest.raises(ValueError, match="will not be replaced"):
            DistillRun(replace(options, out=target))

    def test_a_target_without_a_tokenizer(self, options, tmp_path):
        save_tiny(tmp_path / "bare", "llama")
        with pytest.raises(ValueError, match="no tokenizer"):
            DistillRun(replace(options, target=str(tmp_path / "bare")))

    def test_the_command_says_it_in_one_line(self, target, tmp_path, capsys):
        arguments = ["distill", "--target", str(target), "--out", str(tmp_path / "d")]
        assert main([*arguments, "--layers", "9"]) == 2
        assert "layers: expected 1 to 2" in capsys.readouterr().err
        assert main([*arguments, "--loss", "kl"]) == 2
        assert "loss: expected one of" in capsys.readouterr().err


def test_the_command(target, prompts, tmp_path, capsys):
    out = tmp_path / "draft"
    arguments = f"distill --target {target} --out {out} --layers 0,1 --vocab 100 --texts 8"
    arguments += f" --steps 3 --prompts {prompts} --seed 3 --device cpu"
    assert main(arguments.split()) == 0
    assert ModelConfig.from_folder(out).num_layers == 2
    assert not out.with_name("draft.partial").exists()
    printed = capsys.readouterr().out
    assert "report.md" in printed
    assert json.loads((out / "report.json").read_text())["verdict"] in printed
