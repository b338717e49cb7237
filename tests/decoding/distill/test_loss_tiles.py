"""The distillation losses in tiles: weights, gradients in a graph, memory, products, bad inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagedraft.decoding.distill.losses import LOSSES, distill_loss
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.tests.compare import assert_no_worse
from pagedraft.tests.decoding.distill.loss_inputs import NUM_TOKENS, loss_inputs, run_loss
from pagedraft.tests.inputs import randn

pytestmark = pytest.mark.usefixtures("cpu_path")
NAN = float("nan")


def test_a_weight_of_zero_leaves_a_token_out() -> None:
    given = loss_inputs()
    weight_N = torch.ones(NUM_TOKENS)
    weight_N[2] = 0
    kept = torch.arange(NUM_TOKENS) != 2
    result, grad_NE = run_loss("jsd", given, weight_N=weight_N)
    alone = given._replace(h_NE=given.h_NE[kept], t_NE=given.t_NE[kept])
    other, other_NE = run_loss("jsd", alone)
    torch.testing.assert_close(result.loss, other.loss)
    torch.testing.assert_close(grad_NE[kept], other_NE)
    assert bool((grad_NE[2] == 0).all())
    assert result.alpha_N.shape == (NUM_TOKENS,)


def test_backward_scales_with_what_follows() -> None:
    given = loss_inputs()
    _, grad_NE = run_loss("tv", given)
    h_NE = given.h_NE.clone().requires_grad_()
    options = {"loss": "tv", "teacher_head_VE": given.teacher_head_VE}
    (-3 * distill_loss(h_NE, given.t_NE, given.head_VE, **options).loss).backward()
    torch.testing.assert_close(h_NE.grad, -3 * grad_NE)


def test_without_gradient_the_value_is_the_same() -> None:
    given = loss_inputs()
    result, _ = run_loss("acceptance", given)
    options = {"loss": "acceptance", "teacher_head_VE": given.teacher_head_VE}
    plain = distill_loss(given.h_NE, given.t_NE, given.head_VE, **options)
    with torch.no_grad():
        h_NE = given.h_NE.clone().requires_grad_()
        inside = distill_loss(h_NE, given.t_NE, given.head_VE, **options)
    assert [plain.loss.requires_grad, inside.loss.requires_grad] == [False, False]
    assert plain.loss.item() == inside.loss.item() == result.loss.item()
    assert torch.equal(plain.alpha_N, result.alpha_N)


class Products(TorchDispatchMode):
    """Records the number of elements of the largest tensor made and counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.num_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else [out]
        for tensor in found:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // 4)
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.num_flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return out


# name: (vocab_chunk, token_chunk, wanted gradient, products of [N, E] by [E, V])
COSTS = {
    "whole": (1000, 4, True, 3),
    "whole_without_gradient": (1000, 4, False, 2),
    "chunks": (100, 8, True, 6),
    "chunks_without_gradient": (100, 8, False, 4),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", COSTS)
def test_memory_and_products(name: str, loss: str) -> None:
    vocab_chunk, token_chunk, has_grad, num_products = COSTS[name]
    num_tokens, embed_dim, vocab_size = 32, 4, 900
    h_NE, t_NE = (randn(num_tokens, embed_dim, seed=seed) for seed in (1, 2))
    head_VE = randn(vocab_size, embed_dim, seed=3)
    with Products() as seen:
        h_NE.requires_grad_(has_grad)
        result = distill_loss(
            h_NE, t_NE, head_VE, loss=loss, vocab_chunk=vocab_chunk, token_chunk=token_chunk
        )
        if has_grad:
            result.loss.backward()
    heads = head_VE.numel()  # a view of the head counts as its storage
    assert seen.largest <= max(token_chunk * min(vocab_chunk, vocab_size), heads)
    assert seen.largest < num_tokens * vocab_size / 4
    assert seen.num_flops == num_products * 2 * num_tokens * embed_dim * vocab_size


def test_chunks_do_not_change_the_result() -> None:
    given = loss_inputs()
    whole, grad_NE = run_loss("jsd", given)
    cut, cut_NE = run_loss("jsd", given, vocab_chunk=13, token_chunk=2)
    assert_no_worse(
        cut.loss.detach()[None], exact=whole.loss[None].double(), same_dtype=whole[0][None]
    )
    torch.testing.assert_close(cut_NE, grad_NE, rtol=1e-5, atol=1e-7)


H, T, W = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(6, 4)
# name: (changed arguments, error, message)
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "loss": ({"loss": "mse"}, ValueError, r"loss: expected one of \['forward_kl'.*got 'mse'"),
    "h_dtype": ({"h_NE": H.double()}, TypeError, "h_NE: expected dtype float32, got float64"),
    "head_dtype": ({"head_VE": W.half()}, TypeError, "head_VE: expected dtype float32 or bfloat16"),
    "h_axes": ({"h_NE": torch.zeros(4)}, ValueError, r"h_NE: expected shape \(\*, \*\)"),
    "no_tokens": ({"h_NE": torch.zeros(0, 4)}, ValueError, "h_NE: expected no empty axis"),
    "tokens": ({"t_NE": torch.zeros(2, 4)}, ValueError, r"t_NE: expected shape \(3, \*\)"),
    "head_width": ({"head_VE": torch.zeros(6, 5)}, ValueError, r"head_VE: expected shape \(\*, 4"),
    "teacher_rows": (
        {"teacher_head_VE": torch.zeros(5, 4)},
        ValueError,
        r"teacher_head_VE: expected shape \(6, 4\), got \(5, 4\)",
    ),
    "teacher_width": (
        {"t_NE": torch.zeros(3, 5)},
        ValueError,
        r"teacher_head_VE: expected shape \(6, 5\)",
    ),
    "trained_head": (
        {"head_VE": torch.zeros(6, 4, requires_grad=True)},
        ValueError,
        "head_VE: gets no gradient",
    ),
    "lse_rows": ({"teacher_lse_N": torch.zeros(2)}, ValueError, r"teacher_lse_N: expected shape"),
    "lse_nan": (
        {"teacher_lse_N": torch.full((3,), NAN)},
        ValueError,
        "teacher_lse_N: expected fin",
    ),
    "lse_low": (
        {"teacher_lse_N": torch.tensor([math.log(6), math.log(6), 0.0])},
        ValueError,
        "teacher_lse_N: the teacher's probabilities of row 2 add up to 6, expected at most 1",
    ),
    "weight_rows": ({"weight_N": torch.ones(4)}, ValueError, "weight_N: expected shape"),
    "weight_negative": (
        {"weight_N": torch.tensor([1.0, -1, 1])},
        ValueError,
        "weight_N: expected w",
    ),
    "weight_zero": (
        {"weight_N": torch.zeros(3)},
        ValueError,
        "weight_N: expected weights .* not all",
    ),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature: expected a positive .* 0.0"),
    "temperature_nan": ({"temperature": NAN}, ValueError, "temperature: expected a positive"),
    "vocab_chunk": ({"vocab_chunk": 0}, ValueError, "vocab_chunk: expected at least 1, got 0"),
    "token_chunk": ({"token_chunk": -1}, ValueError, "token_chunk: expected at least 1, got -1"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    changed, error, message = ERRORS[name]
    arguments: dict[str, Any] = {"h_NE": H, "t_NE": T, "head_VE": W, "loss": "tv"}
    with pytest.raises(error, match=message):
        distill_loss(**(arguments | changed))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("side", ["h_NE", "t_NE"])
@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("implementation", ["cpu", "triton", "ref"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_names_its_row(
    implementation: str, value: float, side: str, loss: str, device: torch.device
) -> None:
    given = loss_inputs(device=device)
    getattr(given, side)[5, 3] = value
    options = {"teacher_head_VE": given.teacher_head_VE, "token_chunk": 4}
    message = "expected finite logits, got some of row 5 that are not"
    with use_implementation(implementation), pytest.raises(ValueError, match=message):
        distill_loss(given.h_NE, given.t_NE, given.head_VE, loss=loss, **options)
