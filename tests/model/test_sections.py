"""Sections: what is written into one array is found there alone, wherever the memory is moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedraft.model.sections import ALIGN, Sections, step_sections

CPU = torch.device("cpu")
SIZES = {
    "whole multiples of the alignment": [(torch.int64, 4), (torch.int32, 8)],
    "odd sizes": [(torch.int64, 3), (torch.int32, 5), (torch.int64, 1), (torch.int32, 1)],
    "empty ones": [(torch.int32, 0), (torch.int64, 3), (torch.int64, 0)],
}


@pytest.mark.parametrize("name", SIZES)
def test_arrays_are_aligned_and_apart(name):
    sections = Sections(SIZES[name])
    memory_x = np.zeros(sections.num_bytes, np.uint8)
    arrays = sections.arrays(memory_x)
    for number, array in enumerate(arrays):
        array[:] = number + 1
    starts = [array.ctypes.data - memory_x.ctypes.data for array in arrays if array.size]
    assert [start % ALIGN for start in starts] == [0] * len(starts)
    copied = sections.tensors(torch.from_numpy(memory_x.copy()))
    for tensors in (sections.moved(memory_x, arrays, CPU), copied):
        assert [(t.dtype, t.shape[0]) for t in tensors] == SIZES[name]
        assert [t.tolist() for t in tensors] == [
            [number + 1] * size for number, (_, size) in enumerate(SIZES[name])
        ]


def test_on_the_cpu_nothing_is_copied():
    sections = Sections(SIZES["odd sizes"])
    memory_x = np.zeros(sections.num_bytes, np.uint8)
    tensor = sections.moved(memory_x, sections.arrays(memory_x), CPU)[1]
    sections.arrays(memory_x)[1][:] = 7
    assert tensor.tolist() == [7] * 5


def test_a_step_without_a_table_is_the_beginning_of_one_with():
    without, with_table = step_sections(5, 3, 2), step_sections(5, 3, 2, num_columns=4)
    memory_x = np.zeros(with_table.num_bytes, np.uint8)
    memory_x[: without.num_bytes] = 1
    *inputs, table = with_table.arrays(memory_x)
    assert all((array == array[0]).all() and array[0] != 0 for array in inputs)
    assert table.tolist() == [0] * 12
