"""gated_mlp against its reference and transformers' activations."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from transformers.activations import ACT2FN

from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.gated_mlp import (
    Activation,
    gated_mlp,
    gated_mlp_cost,
    gated_mlp_cpu,
    gated_mlp_ref,
)
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import num_threads, randn


class Case(NamedTuple):
    tokens: int
    mlp: int
    dtype: torch.dtype = torch.float32
    activation: Activation = "silu"
    scale: float = 1.0


CASES = {
    "one tile": Case(2, 128),
    "tile with a tail": Case(3, 200),
    "two tiles, odd tail": Case(2, 1025),
    "one column": Case(2, 1),
    "no tokens": Case(0, 64),
    "demo model bf16": Case(3, 1536, torch.bfloat16),
    "fp16": Case(3, 256, torch.float16),
    "gelu": Case(3, 256, activation="gelu_tanh"),
    "gelu bf16": Case(3, 256, torch.bfloat16, activation="gelu_tanh"),
    "saturated gates": Case(2, 256, scale=60.0),
    "saturated gelu gates": Case(2, 256, scale=60.0, activation="gelu_tanh"),
}


def check(case: Case, device: torch.device) -> None:
    gate_up_TF2 = randn(case.tokens, 2 * case.mlp, dtype=case.dtype, device=device)
    gate_up_TF2[:, : case.mlp] *= case.scale
    assert_no_worse(
        gated_mlp(gate_up_TF2, case.activation),
        exact=gated_mlp_ref(gate_up_TF2.double(), case.activation),
        same_dtype=gated_mlp_ref(gate_up_TF2, case.activation),
    )


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gated_mlp(case, device):
    check(case, device)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cpu_path(case):
    check(case, torch.device("cpu"))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("mlp", [1536, 1001])
@pytest.mark.parametrize("tokens", [*range(1, 41), 199])
def test_cpu_rows_do_not_depend_on_their_number_or_threads(tokens, mlp, activation):
    gate_up_TF2 = randn(200, 2 * mlp)
    with num_threads(1):
        full_TF = gated_mlp_cpu(gate_up_TF2, activation)
    with num_threads(3):
        part_TF = gated_mlp_cpu(gate_up_TF2[:tokens], activation)
    assert_same_bits(part_TF, full_TF[:tokens])


@pytest.mark.parametrize(
    ("activation", "name"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")]
)
def test_reference_is_transformers(activation, name):
    gate_up_TF2 = randn(3, 96)
    gate_TF, up_TF = gate_up_TF2.chunk(2, -1)
    expected_TF = ACT2FN[name](gate_TF) * up_TF
    torch.testing.assert_close(gated_mlp_ref(gate_up_TF2, activation), expected_TF)


def test_strided_rows(device):
    gate_up_TF2 = randn(3, 96, device=device)
    wide = torch.cat([gate_up_TF2, torch.full_like(gate_up_TF2, torch.nan)], dim=1)
    assert_same_bits(gated_mlp(wide[:, :96]), gated_mlp(gate_up_TF2))


@pytest.mark.parametrize(
    ("columns", "activation", "error"),
    [(7, "silu", "even number of columns"), (8, "relu", "activation: expected one of")],
)
def test_bad_arguments(columns, activation, error):
    with pytest.raises(ValueError, match=error):
        gated_mlp(torch.ones(2, columns), activation)


def test_teeth_swapped_halves_fail():
    gate_up_TF2 = randn(3, 96, dtype=torch.bfloat16)
    swapped_TF2 = torch.cat(gate_up_TF2.chunk(2, -1)[::-1], dim=-1)
    with pytest.raises(AssertionError, match="allowed"):
        assert_no_worse(
            gated_mlp_ref(swapped_TF2),
            exact=gated_mlp_ref(gate_up_TF2.double()),
            same_dtype=gated_mlp_ref(gate_up_TF2),
        )


def test_cost():
    assert gated_mlp_cost(3, 64, 2) == (3 * 3 * 64 * 2, 6 * 3 * 64)


@pytest.mark.skipif(not INTERPRETED, reason="counts interpreted launches")
def test_one_launch_stays_inside_its_tensors_and_loads_once():
    from pagedraft.tests.sanitizer import sanitize

    gate_up_TF2 = randn(2, 2 * 1025)
    with sanitize() as launches:
        gated_mlp(gate_up_TF2)
    assert [launch.num_programs for launch in launches] == [4]
    assert launches[0].bytes_loaded(gate_up_TF2) == gate_up_TF2.numel() * 4
