"""The command line: answers, the demo's verdict, and one-line errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagedraft.decoding import verify
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.scheduler import demo
from pagedraft.scheduler.cli import main
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.fixture(scope="module")
def llm() -> LLM:
    with use_implementation("cpu"):
        return LLM("demo", dtype="fp32", device="cpu", kv_tokens=4096)


@pytest.mark.demo_model
def test_the_demo_says_that_outputs_are_identical(llm, capsys):
    assert demo.run_demo(llm, max_tokens=12) == 0
    output = capsys.readouterr().out
    assert "identical output: yes" in output
    assert "tokens per target pass" in output
    assert "KV waste" in output


@pytest.mark.demo_model
def test_the_demo_notices_a_difference(llm, capsys, monkeypatch):
    """Teeth: a verifier that trusts its drafts must turn the verdict and the exit status."""

    def trusting(self):
        pairs = zip(self.drafts, honest(self), strict=True)
        return [[*drafts, 5] if drafts else tokens for drafts, tokens in pairs]

    honest = verify.Verification.read
    monkeypatch.setattr(verify.Verification, "read", trusting)
    assert demo.run_demo(llm, max_tokens=12) == 1
    assert "identical output: no" in capsys.readouterr().out


OPTIONS = {
    "plain": [],
    "int8_kv": ["--kv-dtype", "int8"],
    "int8_weights": ["--weights", "int8"],
    "likeliest_token": ["--temperature", "1", "--top-k", "1", "--top-p", "0.9", "--min-p", "0.1"],
}


@pytest.mark.demo_model
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_generate_prints_the_answer(capsys, options):
    arguments = ["generate", "What is the capital of France?", "--max-tokens", "12"]
    assert main([*arguments, "--device", "cpu", "--kv-tokens", "512", *options]) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out
    assert "tok/s" in captured.err


def test_errors_are_one_line_and_status_2(tmp_path, capsys):
    missing = tmp_path / "no-such-model"
    assert main(["generate", "hi", "--model", str(missing)]) == 2
    error = capsys.readouterr().err
    assert str(missing) in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-tokens", "0"], "max_tokens: expected an integer >= 1, got 0"),
        (["--temperature", "-1"], "temperature: expected from 0 to 1000000, got -1.0"),
        (["--top-p", "0"], "top_p: expected above 0 to 1, got 0.0"),
        (["--repetition-penalty", "0"], "repetition_penalty: expected from 1e-06 to 1000000"),
        (["--weights", "int3"], "weights: expected one of"),
        (["--device", "cuda"], "there is no CUDA device"),
        (["--dtype", "int3"], "dtype: expected one of"),
        (["--kv-dtype", "int4"], "kv_dtype: expected one of"),
        (["--k", "-2"], 'k: expected "auto" or an integer >= 0, got -2'),
        ([], "has no tokenizer"),
    ],
)
def test_bad_options_are_named(tmp_path, capsys, arguments, message):
    save_tiny(tmp_path / "tiny", "llama")
    assert main(["generate", "hi", "--model", str(tmp_path / "tiny"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "pagedraft.scheduler", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "generate" in done.stdout
