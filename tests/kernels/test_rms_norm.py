"""rms_norm and add_rms_norm against their references and transformers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from pagedraft.kernels.dispatch import INTERPRETED, use_implementation
from pagedraft.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_ref,
    one_plus,
    rms_norm,
    rms_norm_cost,
    rms_norm_ref,
)
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import Guarded, num_threads, randn

EPS = 1e-5


class Case(NamedTuple):
    tokens: int
    embed: int
    dtype: torch.dtype = torch.float32
    scale: float = 1.0


CASES = {
    "power of two": Case(3, 64),
    "row shorter than the tile": Case(3, 72),
    "odd width": Case(2, 33),
    "one column": Case(2, 1),
    "no tokens": Case(0, 64),
    "demo model fp16": Case(5, 576, torch.float16),
    "bf16": Case(5, 576, torch.bfloat16),
    "fp16 squares overflow fp16": Case(2, 128, torch.float16, scale=1e3),
    "eps dominates": Case(2, 128, scale=1e-6),
    "widest": Case(2, 16384, torch.bfloat16),
}


def make(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, dtype = (case.tokens, case.embed), case.dtype
    x_TE = randn(*shape, dtype=dtype, device=device, scale=case.scale)
    residual_TE = randn(*shape, dtype=dtype, device=device, seed=1, scale=case.scale)
    weight_E = 1.0 + randn(case.embed, dtype=torch.float32, device=device, seed=2, scale=0.2)
    return x_TE, residual_TE, weight_E.to(dtype)


def check_rms_norm(case: Case, device: torch.device) -> None:
    x_TE, _, weight_E = make(case, device)
    assert_no_worse(
        rms_norm(x_TE, weight_E, EPS),
        exact=rms_norm_ref(x_TE.double(), weight_E.double(), EPS),
        same_dtype=rms_norm_ref(x_TE, weight_E, EPS),
    )


def check_add_rms_norm(case: Case, device: torch.device) -> None:
    x_TE, residual_TE, weight_E = make(case, device)
    y_TE, sum_TE = add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    same_TE, want_sum_TE = add_rms_norm_ref(x_TE, residual_TE, weight_E, EPS)
    assert_same_bits(sum_TE, want_sum_TE)
    exact_TE = rms_norm_ref(sum_TE.double(), weight_E.double(), EPS)
    assert_no_worse(y_TE, exact=exact_TE, same_dtype=same_TE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rms_norm(case, device):
    check_rms_norm(case, device)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_add_rms_norm(case, device):
    check_add_rms_norm(case, device)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cpu_path(case):
    check_rms_norm(case, torch.device("cpu"))
    check_add_rms_norm(case, torch.device("cpu"))


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("embed", [576, 1001])
@pytest.mark.parametrize("tokens", [*range(1, 41), 199])
def test_cpu_rows_do_not_depend_on_their_number_or_threads(tokens, embed):
    x_TE, residual_TE, weight_E = make(Case(200, embed), torch.device("cpu"))
    with num_threads(1):
        full_TE, full_sum_TE = add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    with num_threads(3):
        y_TE, sum_TE = add_rms_norm(x_TE[:tokens], residual_TE[:tokens], weight_E, EPS)
    assert_same_bits(y_TE, full_TE[:tokens])
    assert_same_bits(sum_TE, full_sum_TE[:tokens])
    last_E = rms_norm(sum_TE[-1:], weight_E, EPS)
    assert_same_bits(last_E, full_TE[tokens - 1 : tokens])


@pytest.mark.parametrize("module", [LlamaRMSNorm, Qwen3RMSNorm])
def test_reference_is_transformers(module):
    x_TE, _, weight_E = make(Case(4, 96), torch.device("cpu"))
    norm = module(96, eps=EPS)
    norm.weight.data.copy_(weight_E)
    assert_no_worse(
        rms_norm_ref(x_TE, weight_E, EPS),
        exact=rms_norm_ref(x_TE.double(), weight_E.double(), EPS),
        same_dtype=norm(x_TE).detach(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_may_be_stored_less_one(dtype, device):
    """Stored values are small: 1 + weight rounded to 16 bits would lose most of them."""
    x_TE, residual_TE, _ = make(Case(4, 96, dtype), device)
    stored_E = randn(96, dtype=dtype, device=device, seed=5, scale=2**-8)
    norm = GemmaRMSNorm(96, eps=EPS).to(device)
    norm.weight.data.copy_(stored_E)
    exact = {"exact": norm(x_TE.float()).detach(), "same_dtype": norm(x_TE).detach()}
    assert_no_worse(rms_norm(x_TE, one_plus(stored_E), EPS), **exact)
    normed_TE, sum_TE = add_rms_norm(x_TE, residual_TE, one_plus(stored_E), EPS)
    exact = {"exact": norm(sum_TE.float()).detach(), "same_dtype": norm(sum_TE).detach()}
    assert_no_worse(normed_TE, **exact)


def test_strided_rows_and_inputs_are_kept(device):
    x_TE, residual_TE, weight_E = make(Case(4, 96), device)
    buffer = Guarded(4, 96, device=device)
    buffer.tensor.copy_(x_TE)
    wide = torch.cat([buffer.tensor, torch.full_like(x_TE, torch.nan)], dim=1)
    y_TE, sum_TE = add_rms_norm(wide[:, :96], residual_TE, weight_E, EPS)
    assert_same_bits(y_TE, add_rms_norm(x_TE, residual_TE, weight_E, EPS)[0])
    assert_same_bits(sum_TE, x_TE + residual_TE)
    assert_same_bits(wide[:, :96].contiguous(), x_TE)
    buffer.assert_untouched()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((torch.ones(2, 8), torch.ones(9)), "weight_E: expected shape"),
        ((torch.ones(8), torch.ones(8)), "x_TE: expected shape"),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(ValueError, match=error):
        rms_norm(*arguments, EPS)


def test_too_wide_rows_are_refused_by_the_kernel():
    with use_implementation("triton"), pytest.raises(ValueError, match="at most 16384 columns"):
        rms_norm(torch.ones(1, 16385), torch.ones(16385), EPS)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="x_TE: expected dtype"):
        rms_norm(torch.ones(2, 8, dtype=torch.int32), torch.ones(8), EPS)


def test_teeth_a_forgotten_column_fails(device):
    x_TE, _, weight_E = make(CASES["bf16"], device)
    same_TE = rms_norm_ref(x_TE, weight_E, EPS)
    broken_TE = same_TE.clone()
    broken_TE[:, -1] = 0.0
    exact_TE = rms_norm_ref(x_TE.double(), weight_E.double(), EPS)
    with pytest.raises(AssertionError, match="allowed"):
        assert_no_worse(broken_TE, exact=exact_TE, same_dtype=same_TE)


def test_reference_can_be_swapped_in(device):
    x_TE, _, weight_E = make(CASES["power of two"], device)
    with use_implementation("ref", "rms_norm"):
        y_TE = rms_norm(x_TE, weight_E, EPS)
    assert_same_bits(y_TE, rms_norm_ref(x_TE, weight_E, EPS))


def test_cost():
    assert rms_norm_cost(3, 64, 2) == ((2 * 3 + 1) * 64 * 2, 4 * 3 * 64)
    assert rms_norm_cost(3, 64, 2, residual=True) == ((4 * 3 + 1) * 64 * 2, 5 * 3 * 64)


@pytest.mark.skipif(not INTERPRETED, reason="counts interpreted launches")
def test_one_launch_stays_inside_its_tensors_and_loads_once():
    from pagedraft.tests.sanitizer import sanitize

    x_TE, residual_TE, weight_E = make(Case(3, 72), torch.device("cpu"))
    with sanitize() as launches:
        add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    assert [(launch.name, launch.num_programs) for launch in launches] == [
        ("_add_rms_norm_kernel", 3)
    ]
    assert launches[0].bytes_loaded(x_TE) == x_TE.numel() * 4
