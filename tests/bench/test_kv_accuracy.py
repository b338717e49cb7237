"""The accuracy table: the control is exact, quantised pools differ a little, faults are seen."""

from __future__ import annotations

import json

import pytest
import torch

from pagedraft.bench import kv_accuracy
from pagedraft.bench.kv_accuracy import HEADERS, _cells, measure, shared_prefix
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.runs import random_prompts

pytestmark = pytest.mark.usefixtures("cpu_path")
PROMPTS = random_prompts(97, (5, 12, 20))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Transformer:
    folder = tmp_path_factory.mktemp("kv") / "target"
    save_tiny(folder, "llama")
    with use_implementation("cpu"):
        return Transformer.from_folder(folder)


def test_rows(model):
    control, int8, fp8 = measure(model, PROMPTS, 12, ["int8", "fp8"])
    assert control.largest_error == control.mean_error == 0
    assert control.same_best == 1
    assert control.same_answers == control.num_answers == 3
    assert control.shared_tokens == 12
    assert 0 < int8.mean_error < fp8.mean_error < control.logit_spread
    assert 0 < int8.largest_error < fp8.largest_error
    assert (control.stored, int8.stored, fp8.stored) == ("float32", "int8", "float8_e4m3fn")
    assert control.bytes_per_token == 2 * 2 * 24 * 4
    assert int8.bytes_per_token == fp8.bytes_per_token == 2 * 2 * (24 + 4)
    assert int8.tokens_per_gb == 10**9 // 112
    assert len(_cells(int8)) == len(HEADERS)


def test_control_that_differs_stops_the_bench(model, monkeypatch):
    """Teeth: a pool that lost a token must not become the measure of the others."""

    def forgetful(model, prompt, answer, stored):
        calls.append(stored)
        return honest(model, prompt[len(calls) % 2 :], answer, stored)

    calls: list[torch.dtype] = []
    honest = kv_accuracy.forced_logits
    monkeypatch.setattr(kv_accuracy, "forced_logits", forgetful)
    with pytest.raises(RuntimeError, match="differs from itself"):
        measure(model, PROMPTS, 12, ["int8"])


SHARED = {
    "all": ([1, 2, 3], [1, 2, 3], 3),
    "none": ([1, 2], [2, 2], 0),
    "two": ([1, 2, 3, 4], [1, 2, 9, 4], 2),
}


@pytest.mark.parametrize(("a", "b", "count"), SHARED.values(), ids=SHARED)
def test_shared_prefix(a, b, count):
    assert shared_prefix(a, b) == count


@pytest.mark.demo_model
def test_command_line(tmp_path, capsys):
    out = ["--tokens", "3", "--kv-dtypes", "int8", "--device", "cpu", "--out", str(tmp_path)]
    assert kv_accuracy.main(out) == 0
    output = capsys.readouterr().out
    document = json.loads(output.splitlines()[-1])
    assert [row["stored"] for row in document["rows"]] == ["float32", "int8"]
    assert document["rows"][1]["bytes_per_token"] == 12240
    assert json.loads((tmp_path / "kv-accuracy-demo-bf16.json").read_text()) == document
