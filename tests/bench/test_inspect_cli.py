"""The inspector's command line: bad arguments, and what it compares with."""

from __future__ import annotations

import pytest

from pagedraft.bench import inspect_cli
from pagedraft.bench.inspect_cli import DEFAULT_STEPS, find_base, main
from pagedraft.bench.shapes import parse_step

# Bad arguments -> what is said of them.
BAD = {
    "step": (["--steps", "decode1"], "expected decode8@1024"),
    "rows": (["--steps", "decode0@1024"], "expected at least a row"),
    "span": (["--steps", "prefill512@256"], "such a context"),
    "context": (["--steps", "decode1@999999"], "at most 131072 tokens"),
    "target": (["--targets", "sm_70"], "unknown ['sm_70']"),
    "layers": (["--layers", "1"], "expected 2 or more, got 1"),
    "model": (["--model", "nowhere"], "or a folder, got nowhere"),
    "fp8": (["--weights", "fp8", "--targets", "sm_80"], "int8 for all"),
    "base": (["--base", "nowhere.json"], "nowhere.json"),
    "check": (["--check"], "a baseline is about compiled kernels"),
    "baseline": (["--save-baseline"], "a baseline is about compiled kernels"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_is_an_error(name, capsys):
    arguments, expected = BAD[name]
    with pytest.raises(SystemExit, match="2"):
        main(["--no-compile", *arguments])
    assert expected in capsys.readouterr().err


def test_default_steps_are_one_of_each_kind():
    steps = [parse_step(name) for name in DEFAULT_STEPS]
    assert [(s.num_rows, s.span, s.num_logits) for s in steps] == [
        (1, 1, 1),
        (8, 1, 8),
        (8, 5, 40),
        (1, 512, 1),
    ]


def test_unknown_triton_has_no_baseline(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(inspect_cli, "baseline_path", lambda: tmp_path / "forward-0.0.0.json")
    assert find_base(None, is_check=True) is None
    assert "no baseline for triton" in capsys.readouterr().out


def test_nothing_to_compare_with_unless_asked():
    assert find_base(None, is_check=False) is None
