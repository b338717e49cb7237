"""Teeth of the sanitizer: every planted fault is caught, a clean kernel is not accused."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pagedraft.kernels.dispatch import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from pagedraft.tests.sanitizer import sanitize  # noqa: E402


@triton.jit
def _copy_kernel(
    x_ptr,
    y_ptr,
    n,
    stride_load,
    stride_store,
    shift_load,
    shift_store,
    BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    offs_load = program * stride_load + lanes + shift_load
    offs_store = program * stride_store + lanes + shift_store
    mask = program * BLOCK + lanes < n
    if HAS_MASK:
        tl.store(y_ptr + offs_store, tl.load(x_ptr + offs_load, mask=mask, other=0.0), mask=mask)
    else:
        tl.store(y_ptr + offs_store, tl.load(x_ptr + offs_load))


def copy(
    x, y, n, *, stride_load=8, stride_store=8, shift_load=0, shift_store=0, has_mask=True
) -> None:
    grid = (triton.cdiv(n, 8),)
    strides = (stride_load, stride_store, shift_load, shift_store)
    _copy_kernel[grid](x, y, n, *strides, BLOCK=8, HAS_MASK=has_mask)


def test_clean_kernel_passes_and_is_counted():
    storage, y = torch.arange(64.0), torch.zeros(20)
    with sanitize() as launches:
        copy(storage[8:28], y, 20)
        copy(storage[8:28], y, 4)
    assert torch.equal(y, storage[8:28])
    assert [(launch.name, launch.num_programs) for launch in launches] == [
        ("_copy_kernel", 3),
        ("_copy_kernel", 1),
    ]


FAULTS = {
    "load past the end of a view": ({"has_mask": False}, "out of bounds load"),
    "load before the start of a view": ({"shift_load": -1}, "out of bounds load"),
    "store past the end": ({"shift_store": 1}, "out of bounds store"),
    "two programs store to one address": ({"stride_store": 4}, "race"),
}


@pytest.mark.parametrize(("arguments", "message"), FAULTS.values(), ids=FAULTS)
def test_fault_is_caught(arguments, message):
    storage, y = torch.arange(64.0), torch.zeros(20)
    with sanitize(), pytest.raises(Exception, match=message):
        copy(storage[8:28], y, 20, **arguments)


@pytest.mark.parametrize(
    ("shift_load", "message"), [(0, "stored"), (8, "loaded")], ids=["after write", "before write"]
)
def test_reading_what_another_program_writes_is_caught(shift_load, message):
    memory = torch.arange(32.0)
    with sanitize(), pytest.raises(Exception, match=f"race.*{message}"):
        copy(memory, memory, 16, shift_load=shift_load, shift_store=8 - shift_load)


def test_repeated_loads_are_counted():
    x, y = torch.arange(64.0), torch.zeros(32)
    with sanitize() as launches:
        copy(x, y, 32, stride_load=0)
    assert launches[0].bytes_loaded(x, unique=True) == 8 * 4
    assert launches[0].bytes_loaded(x) == 4 * 8 * 4
    assert launches[0].bytes_loaded(y) == 0


def test_everything_is_restored():
    with sanitize():
        pass
    copy(torch.zeros(64)[8:28], torch.zeros(64)[:20], 20, has_mask=False)
