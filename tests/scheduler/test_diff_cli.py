"""``pagedraft diff``: what its arguments mean, what it prints, and its exit status."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pagedraft.decoding.diff.report import USED_OPS
from pagedraft.decoding.diff.side import Side
from pagedraft.kernels import gated_mlp
from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.scheduler.cli import main
from pagedraft.scheduler.diff import add_diff_command, sides
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")
PROMPT = "5,9,33,7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "llama")
    return path


def run(folder: Path, *arguments: str, prompt: str = PROMPT) -> int:
    base = ["diff", prompt, "--ids", "--model", str(folder), "--device", "cpu"]
    return main([*base, "--max-tokens", "2", *arguments])


def parsed(*arguments: str) -> tuple[Side, Side]:
    parser = argparse.ArgumentParser()
    add_diff_command(parser.add_subparsers())
    return sides(parser.parse_args(["diff", "hi", "--model", "m", *arguments]))


def side(options: dict | None = None, **fields) -> Side:
    return Side("m", {"device": "auto", **(options or {})}, **fields)


# arguments -> A, B.
SIDES = {
    "nothing": ([], side(), side()),
    "a swap": (["--swap", "linear"], side(), side(swaps={"linear": "ref"})),
    "swaps": (
        ["--swap", "linear=cpu,sample", "--swap", "rms_norm=triton"],
        side(),
        side(swaps={"linear": "cpu", "sample": "ref", "rms_norm": "triton"}),
    ),
    "all": (["--swap", "all"], side(), side(swaps=dict.fromkeys(USED_OPS, "ref"))),
    "fast": (["--fast"], side(), side(exact=False)),
    "dtypes": (["--dtype", "bf16,fp32"], side({"dtype": "bf16"}), side({"dtype": "fp32"})),
    "one dtype": (["--dtype", "fp32"], side({"dtype": "fp32"}), side({"dtype": "fp32"})),
    "weights": (["--weights", "auto,int8"], side({"weights": "auto"}), side({"weights": "int8"})),
    "pools": (["--kv-dtype", "auto,int8"], side(), side(kv_dtype="int8")),
    "a revision": (["--rev-b", "HEAD"], side(), side(rev="HEAD")),
    "revisions": (["--rev", "v1", "v2"], side(rev="v1"), side(rev="v2")),
    "pairs": (
        ["--a", "dtype=fp16", "--a", "swap=sample", "--b", "exact=false", "--b", "device=cpu"],
        side({"dtype": "fp16"}, swaps={"sample": "ref"}),
        side({"device": "cpu"}, exact=False),
    ),
}


@pytest.mark.parametrize("name", SIDES)
def test_arguments_name_two_sides(name):
    arguments, a, b = SIDES[name]
    assert parsed(*arguments) == (a, b)


def test_right_sides_end_with_status_0(folder, capsys, tmp_path):
    path = tmp_path / "report.json"
    assert run(folder, "--swap", "paged_attention", "--json", str(path)) == 0
    output = capsys.readouterr().out
    assert "first different bit: token 0 (position" in output
    assert "attention (paged_attention), " in output
    assert "first error beyond tolerance: none" in output
    assert "first different token: none" in output
    document = json.loads(path.read_text())
    assert document["b"] == {
        "model": str(folder),
        "device": "cpu",
        "swap paged_attention": "ref",
    }
    assert document["parts"] is False
    assert document["first_error"] is None
    assert document["first_bit"]["ops"] == ["paged_attention"]
    assert len(document["a_ids"]) == 2


def test_a_fault_ends_with_status_1(folder, capsys, monkeypatch, tmp_path):
    honest = gated_mlp.gated_mlp_cpu
    monkeypatch.setattr(gated_mlp, "gated_mlp_cpu", lambda *args: -honest(*args))
    path = tmp_path / "report.json"
    assert run(folder, "--swap", "gated_mlp", "--json", str(path)) == 1
    output = capsys.readouterr().out
    fault = "first error beyond tolerance: token 0 (position 0), layer 0, gate_up (gated_mlp), "
    assert fault in output
    assert "first different token: token 0 (position 4): A (id " in output
    assert "margin of A's best two logits " in output
    assert json.loads(path.read_text())["first_token"]["token"] == 0


def test_a_nan_is_valid_json(folder, capsys, monkeypatch, tmp_path):
    honest = gated_mlp.gated_mlp_cpu
    monkeypatch.setattr(gated_mlp, "gated_mlp_cpu", lambda *args: honest(*args) * float("nan"))
    path = tmp_path / "report.json"
    assert run(folder, "--swap", "gated_mlp", "--json", str(path)) == 1
    output = capsys.readouterr().out
    assert "layer 0, gate_up (gated_mlp): NaN or infinity in A only" in output
    assert "A none (no finite logit)" in output
    error = json.loads(path.read_text(), parse_constant=pytest.fail)["first_error"]
    assert (error["error"], error["nan"]) == (None, "A")


def test_what_changes_nothing_is_said(folder, capsys):
    assert run(folder, "--fast") == 0
    assert "exact=False changes nothing on a CPU" in capsys.readouterr().out
    assert run(folder) == 0
    assert "the sides are alike" in capsys.readouterr().out


def test_a_run_without_triton_kernels_is_said(folder, capsys, monkeypatch):
    monkeypatch.setattr("pagedraft.scheduler.diff.INTERPRETED", False)
    run(folder)
    assert "no Triton kernel" in capsys.readouterr().out


BAD = {
    "an op": (["--swap", "lineer"], "B: swap 'lineer': expected one of ['rms_norm', "),
    "an op of other runs": (["--swap", "verify"], "B: swap 'verify': expected one of"),
    "an implementation": (["--swap", "linear=fast"], "swap linear=fast: expected one of"),
    "three dtypes": (["--dtype", "bf16,fp16,fp32"], "--dtype: expected one value or A,B"),
    "a dtype": (["--dtype", "bf16,int3"], "dtype: expected one of"),
    "a key": (["--b", "wieghts=int8"], "--b: expected key=value, key one of ["),
    "a value": (["--b", "exact=maybe"], "exact: expected true or false, got 'maybe'"),
    "a revision": (["--rev-b", "no-such-revision"], "no revision 'no-such-revision'"),
    "tokens": (["--max-tokens", "0"], "max_tokens: expected an integer >= 1, got 0"),
    "a tolerance": (["--tolerance", "-1"], "tolerance: expected a number > 0, got -1.0"),
    "a model": (["--model", "/no/such"], "/no/such"),
    "a device": (["--device", "cuda"], "there is no CUDA device"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(folder, capsys, name):
    arguments, message = BAD[name]
    assert run(folder, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.skipif(not INTERPRETED, reason="an interpreter's limit")
def test_bf16_is_refused_under_the_interpreter(folder, capsys):
    assert run(folder, "--swap", "gated_mlp=triton") == 2
    assert "B: dtype: expected fp16 or fp32 under Triton's interpreter" in capsys.readouterr().err
    assert run(folder, "--swap", "gated_mlp=triton", "--dtype", "fp32") == 0


BAD_PROMPTS = {
    "empty": ("", "prompt: expected text, got none"),
    "no integers": ("five", "--ids: expected integers and commas, got 'five'"),
    "unknown ids": ("97", "token ids from 0 to 96, got 97"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_named(folder, capsys, name):
    prompt, message = BAD_PROMPTS[name]
    assert run(folder, prompt=prompt) == 2
    assert message in capsys.readouterr().err


def test_text_needs_a_tokenizer(folder, capsys):
    assert main(["diff", "hi", "--model", str(folder), "--device", "cpu"]) == 2
    assert "has no tokenizer; give token ids with --ids" in capsys.readouterr().err


@pytest.mark.demo_model
def test_the_demo_model(capsys):
    arguments = ["What is the capital of France?", "--swap", "paged_attention=ref"]
    assert main(["diff", *arguments, "--device", "cpu", "--max-tokens", "3"]) == 0
    output = capsys.readouterr().out
    assert "attention (paged_attention), " in output
    assert "first error beyond tolerance: none" in output
