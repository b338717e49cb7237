"""How much host memory the KV of preempted requests may take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagedraft.scheduler import memory

# option, bytes of the pools, free bytes -> bytes
BUDGETS = {
    "off": (0, 4096, 10**9, 0),
    "a number": (12345, 4096, 10**9, 12345),
    "auto, as the pools": ("auto", 4096, 10**9, 4096),
    "auto, little memory": ("auto", 4096, 4000, 1000),
}


@pytest.mark.parametrize("option, pools, free, expected", BUDGETS.values(), ids=BUDGETS)
def test_swap_bytes(option, pools: int, free: int, expected: int, monkeypatch) -> None:
    monkeypatch.setattr(memory, "_free_bytes", lambda device: free)
    caches = [SimpleNamespace(num_bytes=pools // 2)] * 2
    assert memory.resolve_swap_bytes(option, caches) == expected


@pytest.mark.parametrize("option", [-1, 1.5, True, None, "much", "1024"])
def test_bad_swap_bytes_are_named(option) -> None:
    with pytest.raises(ValueError, match='swap_bytes: expected "auto" or an integer >= 0'):
        memory.resolve_swap_bytes(option, [])
