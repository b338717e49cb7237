"""The self-test that finds row counts at which products give a row the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedraft.kernels import paged_attention_cpu_tiles as tiles
from pagedraft.kernels.paged_attention_cpu_tiles import RowCounts, find_row_counts, use_threads
from pagedraft.tests.inputs import num_threads

HEAD_DIMS = (8, 24, 64, 128, 256)


@pytest.fixture
def uncached():
    find_row_counts.cache_clear()
    yield
    find_row_counts.cache_clear()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_of_other_operands_agree(head_dim):
    """Rows that all differ, at every place, in batches of sizes that the self-test left out."""
    sizes = find_row_counts(head_dim, 1).sizes
    generator = torch.Generator().manual_seed(1)
    q_XPD = torch.randn(7, sizes[-1], head_dim, generator=generator)
    k_XDT = torch.randn(7, tiles.TILE, head_dim, generator=generator).transpose(1, 2)
    expected = torch.bmm(q_XPD, k_XDT)
    shifts = {size: (sizes[-1] - size) // 3 for size in sizes}
    results = {
        size: torch.bmm(q_XPD[:5, shift : shift + size].contiguous(), k_XDT[:5])
        for size, shift in shifts.items()
    }
    wrong = [
        size
        for size, shift in shifts.items()
        if not torch.equal(results[size], expected[:5, shift : shift + size])
    ]
    assert wrong == []


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_several_row_counts_agree(head_dim):
    """With one of them only attention would be exact, but slow."""
    counts = find_row_counts(head_dim, 1)
    assert len(counts.sizes) > 1
    assert counts.min_threaded == 1


def broken(fault: Callable[[torch.Tensor, int], None]) -> Callable[..., torch.Tensor]:
    """``products`` with a fault: (products [X, P, ...], number of rows) are changed in place."""
    intact = tiles.products

    def products(operands: tiles.Operands, num_rows: int, count: int) -> torch.Tensor:
        result_XPR = intact(operands, num_rows, count)
        fault(result_XPR, num_rows)
        return result_XPR

    return products


def ulp(x: torch.Tensor) -> None:
    """Move numbers to the next ones."""
    x.copy_(torch.nextafter(x, torch.full_like(x, torch.inf)))


def one_count_differs(x_XPR: torch.Tensor, num_rows: int) -> None:
    if num_rows == 12:
        ulp(x_XPR[:, :, 5])


def one_place_differs(x_XPR: torch.Tensor, num_rows: int) -> None:
    if num_rows == 12:
        ulp(x_XPR[:, 7, -1:])


def lone_matrices_differ(x_XPR: torch.Tensor, num_rows: int) -> None:
    if num_rows == 12 and x_XPR.shape[0] == 1:
        ulp(x_XPR[:, :, -1])


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("fault", [one_count_differs, one_place_differs, lone_matrices_differ])
def test_teeth(fault, monkeypatch):
    sizes = find_row_counts(64, 1).sizes
    monkeypatch.setattr(tiles, "products", broken(fault))
    find_row_counts.cache_clear()
    assert find_row_counts(64, 1).sizes == tuple(size for size in sizes if size != 12)


@pytest.mark.usefixtures("uncached")
def test_teeth_places_never_agree(monkeypatch, caplog):
    def fault(x_XPR: torch.Tensor, num_rows: int) -> None:
        if num_rows > 1:
            ulp(x_XPR[:, -1])

    monkeypatch.setattr(tiles, "products", broken(fault))
    assert find_row_counts(64, 1).sizes == (1,)
    assert "one row a product" in caplog.text


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(("most", "expected"), [(1, 2), (3, 4), (99, 6)])
def test_small_batches_run_on_one_thread_where_threads_change_bits(most, expected, monkeypatch):
    """``most``: matrices of a batch that two threads share in another way."""

    def fault(x_XPR: torch.Tensor, num_rows: int) -> None:
        if torch.get_num_threads() == 2 and x_XPR.shape[0] <= most:
            ulp(x_XPR[:, :, 3])

    monkeypatch.setattr(tiles, "ROW_COUNTS", (12, 16))
    monkeypatch.setattr(tiles, "products", broken(fault))
    with num_threads(2):
        assert find_row_counts(8, 2) == RowCounts((12, 16), expected)


def test_threads_come_back_after_an_error():
    with num_threads(2):
        with pytest.raises(TypeError), use_threads(1):
            torch.nextafter(torch.get_num_threads())
        assert torch.get_num_threads() == 2
