"""Implementations that are right, however they differ, are not blamed; bad sides are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedraft.decoding.diff.run import Work, check_side, find_divergence
from pagedraft.decoding.diff.side import Side
from pagedraft.tests.decoding.diffs import (
    ALL_REFERENCES,
    CPU,
    NUM_LAYERS,
    PROMPT,
    diff,
    save_model,
)
from pagedraft.tests.model.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize(
    "b", [Side(), Side(exact=False), Side(swaps={"linear": "cpu"})], ids=["same", "fast", "cpu"]
)
def test_equal_sides_have_nothing_to_report(folder, b):
    report = diff(folder, b, temperature=0.8, seed=3)
    assert (report.first_bit, report.first_error, report.first_token) == (None, None, None)
    assert report.num_equal == report.num_stages == 3 * (NUM_LAYERS * 6 + 3)
    assert report.worst == {}
    assert report.a_ids == report.b_ids


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize(
    "op, stages",
    [("paged_attention", {"attention"}), ("rms_norm", {"input_norm", "o_norm", "down_norm"})],
)
def test_errors_are_not_carried_along(folder, op, stages):
    """What starts from equal inputs and runs the same op has equal bits, wherever it is."""
    report = diff(folder, Side(swaps={op: "ref"}))
    assert set(report.worst) == stages
    assert report.logit_error > 0
    assert not report.parts


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize(
    "b",
    [
        ALL_REFERENCES,
        Side(options={"dtype": "bf16"}),
        Side(options={"dtype": "fp16"}),
        Side(options={"weights": "int8"}),
        Side(kv_dtype="int8"),
    ],
    ids=["references", "bf16", "fp16", "int8 weights", "int8 pool"],
)
def test_right_sides_part_within_tolerance(folder, b):
    report = diff(folder, b)
    assert report.first_bit is not None
    assert report.first_error is None


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_products_with_quantised_weights_part_within_tolerance(folder, weights):
    options = {**CPU, "weights": weights}
    sides = Side(folder, options), Side(folder, options, {"linear": "ref"})
    report = find_divergence(*sides, Work(PROMPT, max_tokens=2))
    assert report.first_error is None
    assert set(report.worst) <= {"qkv", "o_norm", "gate_up", "down_norm", "head"}


@pytest.mark.usefixtures("cpu_path")
def test_other_weights_part_at_once(folder):
    bit = diff(folder, Side(options={"dtype": "bf16"})).first_bit
    assert (bit.token, bit.position, bit.layer, bit.stage) == (0, 0, -1, "embed")
    assert bit.error < bit.tolerance


@pytest.mark.usefixtures("cpu_path")
def test_a_tolerance_of_ones_own(folder):
    report = diff(folder, ALL_REFERENCES, tolerance=1e-12)
    assert report.first_error.tolerance == 1e-12
    assert report.first_error.stage == report.first_bit.stage


@pytest.mark.usefixtures("cpu_path")
def test_chunks_change_no_position(folder):
    b = Side(options={"dtype": "bf16"})
    whole, chunked = (diff(folder, b, tolerance=1e-3, chunk_tokens=size) for size in (512, 3))
    assert chunked.a_ids == whole.a_ids
    places = [(e.position, e.layer, e.stage) for e in (chunked.first_error, whole.first_error)]
    assert places[0] == places[1]
    assert chunked.first_bit.position == whole.first_bit.position == 0


@pytest.mark.usefixtures("cpu_path")
def test_the_run_ends_at_a_stop_token(folder):
    first = diff(folder).a_ids[0]
    assert diff(folder, stop_ids=frozenset({first})).a_ids == [first]


def test_bad_sides_are_named(monkeypatch):
    with pytest.raises(ValueError, match="B: swap 'lineer': expected one of"):
        check_side("B", Side(swaps={"lineer": "ref"}))
    with pytest.raises(ValueError, match="swap linear=cuda: expected one of"):
        check_side("B", Side(swaps={"linear": "cuda"}))
    monkeypatch.setattr("pagedraft.decoding.diff.run.INTERPRETED", False)
    with pytest.raises(ValueError, match="Triton needs a CUDA device"):
        check_side("A", Side(options={"device": "cpu"}, swaps={"linear": "triton"}))


BAD_WORK = {
    "no prompt": ({"token_ids": []}, "prompt: expected at least one token"),
    "an unknown id": ({"token_ids": [97]}, "token ids from 0 to 96, got 97"),
    "too long": ({"max_tokens": 121}, "8 tokens and 121 more do not fit"),
    "no chunk": ({"chunk_tokens": 0}, "chunk_tokens: expected an integer >= 1"),
    "no tolerance": ({"tolerance": 0.0}, "tolerance: expected a number > 0"),
}


@pytest.mark.parametrize("name", BAD_WORK)
def test_bad_work_is_named(folder, name):
    work, message = BAD_WORK[name]
    with pytest.raises(ValueError, match=message):
        diff(folder, **work)


def test_an_unknown_option_is_named(folder):
    with pytest.raises(ValueError, match="no option 'weigths'"):
        diff(folder, Side(options={"weigths": "int8"}))


@pytest.mark.usefixtures("cpu_path")
def test_models_of_other_sizes_are_refused(folder, tmp_path):
    save_tiny(tmp_path, "qwen3")
    sides = Side(folder, CPU), Side(tmp_path, CPU)
    with pytest.raises(ValueError, match="models: A has the sizes"):
        find_divergence(*sides, Work(PROMPT))
