"""Map a function over items, one forked process each: results survive a compiler that crashes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import TypeVar

Item = TypeVar("Item")
Out = TypeVar("Out")


def fork_map(
    function: Callable[[Item], Out], items: Sequence[Item], num_processes: int
) -> list[Out | None]:
    """Return ``function(item)`` for each item, None where its process died.

    Items and function are inherited, not pickled; results are pickled.
    """
    context = multiprocessing.get_context("fork")
    results: list[Out | None] = [None] * len(items)
    running: dict[Connection, tuple[int, multiprocessing.Process]] = {}
    pending = list(range(len(items)))[::-1]
    while pending or running:
        while pending and len(running) < num_processes:
            index = pending.pop()
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(function, items[index], writer))
            process.start()
            writer.close()
            running[reader] = (index, process)
        for reader in wait(list(running)):
            index, process = running.pop(reader)
            try:
                results[index] = reader.recv()
            except EOFError:
                results[index] = None
            reader.close()
            process.join()
    return results


def _run(function: Callable[[Item], Out], item: Item, writer: Connection) -> None:
    writer.send(function(item))
    writer.close()
