"""Broken kernels are found by layer, stage and op."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedraft.decoding.diff.side import Side
from pagedraft.kernels import (
    gated_mlp,
    linear_cpu,
    linear_fused_triton,
    linear_triton,
    paged_attention,
    rms_norm,
    sample,
    write_kv,
)
from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.score_rules import ScoreRules
from pagedraft.model.transformer import Transformer
from pagedraft.tests.decoding.diffs import ALL_REFERENCES, PROMPT, diff, save_model

SHORT = {"token_ids": PROMPT[:3], "max_tokens": 1}  # an interpreted step takes a second
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernels are interpreted here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


class Layers:
    """Follows which layer a forward pass is in, so that a fault can be in one layer alone."""

    def __init__(self, monkeypatch) -> None:
        self.current = -1
        self.patch = monkeypatch
        honest = Transformer.forward

        def forward(model, batch, cache, observe):
            def follow(layer, stage, result):
                observe(layer, stage, result)
                if stage in ("input_norm", "down_norm"):
                    self.current = layer + 1

            self.current = -1
            return honest(model, batch, cache, observe=follow)

        monkeypatch.setattr(Transformer, "forward", forward)

    def break_in(self, layer: int, home: Any, name: str, fault: Callable) -> None:
        """Replace ``home.name`` in ``layer`` by ``fault(honest, *args)``."""
        original = getattr(home, name)
        is_kernel = hasattr(original, "__getitem__")

        def launched(grid, *args, **options):
            return original[grid](*args, **options)

        honest = launched if is_kernel else original

        def run(*args, **options):
            if self.current == layer:
                return fault(honest, *args, **options)
            return honest(*args, **options)

        self.patch.setattr(home, name, _Kernel(run) if is_kernel else run)


class _Kernel:
    """A kernel that is launched through ``run``."""

    def __init__(self, run: Callable) -> None:
        self.run = run

    def __getitem__(self, grid):
        return functools.partial(self.run, grid)


@pytest.fixture
def layers(monkeypatch) -> Layers:
    return Layers(monkeypatch)


def swapped_halves(honest, gate_up_TF2, *rest):
    return honest(gate_up_TF2.roll(gate_up_TF2.shape[1] // 2, 1), *rest)


def last_input_missing(honest, x_TI, *rest):
    """An off-by-one in the sum over inputs, in the output projection (128 inputs) alone."""
    return honest(x_TI.index_fill(1, torch.tensor(127), 0) if x_TI.shape[1] == 128 else x_TI, *rest)


def short_mean(honest, x_TE, weight_E, eps):
    """An off-by-one in the sum of squares."""
    return x_TE * torch.rsqrt(x_TE[:, :-1].square().mean(1, keepdim=True) + eps) * weight_E


def wrong_scale(honest, q_THD, *args, **options):
    args = [a._replace(scale=a.scale * 1.02) if isinstance(a, ScoreRules) else a for a in args]
    return honest(q_THD, *args, **options)


def shifted_queries(honest, *args, **options):
    return honest(*args, **options).roll(1, 0)


def shifted_keys(honest, qkv_TC, *args, **options):
    q_THD = honest(qkv_TC, *args, **options).clone()
    honest(qkv_TC.roll(1, 0), *args, **options)
    return q_THD


def late_nan(honest, *args, **options):
    y = honest(*args, **options)
    y[-1, 3] = math.nan
    return y


def too_large(honest, *args):
    return honest(*args) * 1.1


def one_column_less(honest, grid, gate_up, y, stride, num_columns, **options):
    return honest(grid, gate_up, y, stride, num_columns - 1, **options)


def one_square_less(honest, grid, *args, E, **options):
    return honest(grid, *args, E=E - 1, **options)


# What is broken in layer 1 -> the stage where it must be found, and the op.
CPU_FAULTS = {
    "activation": (gated_mlp, "gated_mlp_cpu", swapped_halves, "gate_up", "gated_mlp"),
    "sum over inputs": (linear_cpu, "run", last_input_missing, "o_norm", "linear"),
    "mean of squares": (rms_norm, "rms_norm_cpu", short_mean, "o_norm", "rms_norm"),
    "scores": (
        paged_attention,
        "paged_attention_cpu",
        wrong_scale,
        "attention",
        "paged_attention",
    ),
    "queries": (write_kv, "write_kv_cpu", shifted_queries, "attention", "write_kv"),
    "keys": (write_kv, "write_kv_cpu", shifted_keys, "write_kv", "write_kv"),
    "a NaN": (gated_mlp, "gated_mlp_cpu", late_nan, "gate_up", "gated_mlp"),
}
TRITON_FAULTS = {
    "activation": (gated_mlp, "_gated_mlp_kernel", one_column_less, "gate_up", "gated_mlp"),
    "sum over inputs": (linear_triton, "launch", last_input_missing, "o_norm", "linear"),
    "mean of squares": (rms_norm, "_add_rms_norm_kernel", one_square_less, "o_norm", "rms_norm"),
    "scores": (paged_attention, "launch", wrong_scale, "attention", "paged_attention"),
    "queries": (write_kv, "_launch", shifted_queries, "attention", "write_kv"),
}


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("name", CPU_FAULTS)
def test_a_broken_cpu_kernel_is_found(folder, layers, name):
    *fault, stage, op = CPU_FAULTS[name]
    layers.break_in(1, *fault)
    report = diff(folder, ALL_REFERENCES)
    error = report.first_error
    assert (error.token, error.layer, error.stage, error.ops) == (0, 1, stage, (op,))
    assert report.parts


@interpreted
@pytest.mark.parametrize("name", TRITON_FAULTS)
def test_a_broken_triton_kernel_is_found(folder, layers, name):
    *fault, stage, op = TRITON_FAULTS[name]
    layers.break_in(1, *fault)
    error = diff(folder, ALL_REFERENCES, **SHORT).first_error
    assert (error.layer, error.stage, error.ops) == (1, stage, (op,))


@interpreted
def test_a_broken_fused_launch_is_both_ops(folder, layers):
    """In bf16 the activation runs inside linear's launch: swapping either takes the fault away."""
    layers.break_in(1, linear_fused_triton, "launch_gated", too_large)
    error = diff(folder, ALL_REFERENCES, dtype="bf16", **SHORT).first_error
    assert (error.layer, error.stage, error.ops) == (1, "gate_up", ("linear", "gated_mlp"))


@interpreted
def test_triton_kernels_agree_with_the_references(folder):
    report = diff(folder, ALL_REFERENCES, **SHORT)
    assert report.first_bit is not None
    assert not report.parts


@interpreted
def test_triton_and_cpu_path_pack_their_own_weights(folder):
    report = diff(folder, Side(swaps={"linear": "cpu"}), **SHORT)
    assert report.first_bit.ops == ("linear",)
    assert not report.parts


@pytest.mark.usefixtures("cpu_path")
def test_a_nan_is_named_with_its_side(folder, layers):
    layers.break_in(1, gated_mlp, "gated_mlp_cpu", late_nan)
    error = diff(folder, Side(swaps={"gated_mlp": "ref"})).first_error
    assert (error.nan, error.layer, error.stage) == ("A", 1, "gate_up")
    assert error.position == len(PROMPT) - 1


@pytest.mark.usefixtures("cpu_path")
def test_an_error_of_the_third_token_alone(folder, layers):
    """The position is that of the context where the fault begins, not of the step's start."""

    def late(honest, gate_up_TF2, *rest):
        is_late = gate_up_TF2.shape[0] < len(PROMPT) and next(steps) >= 1
        return honest(gate_up_TF2 * (1.5 if is_late else 1.0), *rest)

    steps = iter(range(100))
    layers.break_in(1, gated_mlp, "gated_mlp_cpu", late)
    error = diff(folder, Side(swaps={"gated_mlp": "ref"})).first_error
    assert (error.token, error.position, error.layer) == (2, len(PROMPT) + 1, 1)


@pytest.mark.usefixtures("cpu_path")
def test_a_broken_draw_is_found(folder, monkeypatch):
    honest = sample.sample_cpu
    monkeypatch.setattr(sample, "sample_cpu", lambda *args: (honest(*args) + 1) % 97)
    report = diff(folder, Side(swaps={"sample": "ref"}))
    assert (report.first_error.stage, report.first_error.ops) == ("draw", ("sample",))
    assert report.first_token.margin > 0
    assert report.first_token.logit_error == 0.0
