"""The block table that is updated in place: what each row shows after joins, growth and leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import data, integers

from pagedraft.model.row_table import RowTable

CPU = torch.device("cpu")
ROWS, BLOCKS = 5, 9


class Elsewhere(RowTable):
    """A table whose device is another memory than the host's, as a GPU's is."""

    def __init__(self) -> None:
        super().__init__(ROWS, BLOCKS, CPU)
        self._is_host = False
        self.device_RM = torch.full((ROWS, BLOCKS), -1, dtype=torch.int32)


def test_rows_grow_and_leave():
    table = RowTable(3, 4, CPU)
    first, second = table.join(), table.join()
    table.extend(first, [7])
    table.extend(second, [3, 4])
    table.extend(first, [7, 9])
    assert table.on_device(2).tolist() == [[7, 9], [3, 4]]
    table.leave(first)
    assert table.on_device(2).tolist() == [[3, 4]]


def test_on_a_cpu_the_table_is_no_copy():
    table = RowTable(2, 4, CPU)
    table.join()
    view = table.on_device(1)
    table.extend(0, [5])
    assert view.tolist() == [[5]]


def test_one_more_row_than_there_are():
    table = RowTable(1, 4, CPU)
    table.join()
    with pytest.raises(ValueError, match="rows: expected at most 1"):
        table.join()


@pytest.mark.parametrize("row", [-1, 1, 2])
def test_a_row_that_nobody_has(row):
    table = RowTable(2, 4, CPU)
    table.join()
    with pytest.raises(ValueError, match=f"row: expected 0 to 0, got {row}"):
        table.leave(row)


class TableMachine(RuleBasedStateMachine):
    """Against a plain list of rows; both kinds of device."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [RowTable(ROWS, BLOCKS, CPU), Elsewhere()]
        self.rows: list[list[int]] = []
        self.next_block = 1

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule()
    def join(self) -> None:
        assert [table.join() for table in self.tables] == [len(self.rows)] * 2
        self.rows.append([])

    @precondition(lambda self: self.rows)
    @rule(choice=data(), count=integers(0, 4))
    def grow(self, choice, count) -> None:
        index = choice.draw(integers(0, len(self.rows) - 1))
        count = min(count, BLOCKS - len(self.rows[index]))
        self.rows[index] += range(self.next_block, self.next_block + count)
        self.next_block += count
        for table in self.tables:
            table.extend(index, self.rows[index])

    @precondition(lambda self: self.rows)
    @rule(choice=data())
    def leave(self, choice) -> None:
        index = choice.draw(integers(0, len(self.rows) - 1))
        for table in self.tables:
            table.leave(index)
        last = self.rows.pop()
        if index < len(self.rows):
            self.rows[index] = last

    @invariant()
    def shows_every_row(self) -> None:
        for table in self.tables:
            shown = table.on_device(BLOCKS).tolist()
            assert [row[: len(own)] for row, own in zip(shown, self.rows, strict=True)] == self.rows


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_teeth_a_leave_that_moves_nothing_is_seen(monkeypatch):
    def leave(self, row):
        self.num_rows -= 1

    monkeypatch.setattr(RowTable, "leave", leave)
    machine = TableMachine()
    machine.join(), machine.join()
    machine.rows = [[1], [2]]
    for index, row in enumerate(machine.rows):
        for table in machine.tables:
            table.extend(index, row)
    for table in machine.tables:
        table.leave(0)
    machine.rows = [[2]]
    with pytest.raises(AssertionError):
        machine.shows_every_row()
