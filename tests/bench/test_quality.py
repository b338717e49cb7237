"""The quality table: teacher-forced perplexity is right, the control is equal, faults are seen."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

from pagedraft.bench import quality
from pagedraft.bench.quality import HEADERS, RECIPES, TEXT, WINDOW, Recipe, cells, measure, score
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.config import ModelConfig
from pagedraft.model.transformer import Transformer
from pagedraft.model.weights import load_weights
from pagedraft.tests.model.packers import SIZES
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, 97, (70,), generator=GENERATOR).tolist()
FEW = (Recipe("unquantised"), Recipe("int8", "int8", None, "int8", 1.01), Recipe("int4", "int4"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(config, weights, transformers' model)."""
    folder = tmp_path_factory.mktemp("quality") / "model"
    reference = save_tiny(folder, "llama-tied", **SIZES)
    config = ModelConfig.from_folder(folder)
    with use_implementation("cpu"):
        return config, load_weights(folder, config), reference


def test_losses_are_those_of_transformers(saved, monkeypatch):
    """Two windows: the second one's tokens see nothing of the first."""
    config, weights, reference = saved
    monkeypatch.setattr(quality, "WINDOW", 40)
    losses, best = score(Transformer(config, dict(weights)), TOKENS, chunk=16)
    windows = [TOKENS[:41], TOKENS[40:]]
    with torch.inference_mode():
        logits = [reference(torch.tensor([window])).logits[0, :-1] for window in windows]
    wanted = torch.tensor(TOKENS[1:])
    expected = F.cross_entropy(torch.cat(logits), wanted, reduction="none")
    torch.testing.assert_close(losses.float(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(best, torch.cat(logits).argmax(-1))


def test_rows(saved):
    config, weights, _ = saved
    before = {name: weight.clone() for name, weight in weights.items()}
    plain, int8, int4 = measure(config, weights, TOKENS, FEW)
    assert (plain.ratio, plain.error, plain.same_best) == (1, 0, 1)
    assert plain.weight_bytes > int8.weight_bytes > int4.weight_bytes
    assert abs(int8.ratio - 1) < abs(int4.ratio - 1) < 0.5
    assert 0 < int8.error < int4.error
    assert int8.perplexity == pytest.approx(plain.perplexity * int8.ratio)
    assert (int8.head, int4.head) == ("int8", "plain")
    assert len(cells(int8)) == len(HEADERS)
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_control_that_differs_stops_the_bench(saved, monkeypatch):
    """Teeth: a model whose numbers depend on the chunks must not become the measure."""
    config, weights, _ = saved

    def chunky(model, tokens, chunk=quality.CHUNK):
        losses, best = honest(model, tokens, chunk)
        return losses + chunk * 1e-6, best

    honest = quality.score
    monkeypatch.setattr(quality, "score", chunky)
    with pytest.raises(RuntimeError, match="differs when fed in other chunks"):
        measure(config, weights, TOKENS, FEW)


@pytest.mark.parametrize(
    ("group", "is_fitting"), [(None, True), (32, True), (128, True), (96, False)]
)
def test_groups_that_do_not_divide_are_left_out(saved, group, is_fitting):
    assert quality.fits(saved[1], Recipe("int4", "int4", group)) == is_fitting


def test_recipes_and_text():
    assert RECIPES[0] == Recipe("unquantised")
    assert {row.name: row.target for row in RECIPES if row.target} == {"int8": 1.01, "int4": 1.08}
    assert len(TEXT.read_text()) > 15_000
    assert math.log2(WINDOW).is_integer()


@pytest.mark.demo_model
def test_command_line(tmp_path, capsys):
    options = ["--tokens", "32", "--select", "int8, plain", "--device", "cpu"]
    assert quality.main([*options, "--out", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in document["rows"]] == ["unquantised", "int8, plain head"]
    assert document["tokens"] == 32
    assert json.loads((tmp_path / "quality-demo-bf16.json").read_text()) == document
