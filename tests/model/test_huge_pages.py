"""Huge pages: asked for where there is something large, values untouched, refusals harmless."""

from __future__ import annotations

import sys

import pytest
import torch

from pagedraft.model import huge_pages

linux = pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")


@linux
def test_values_stay_and_large_mappings_are_found():
    values = torch.arange(8 * 2**20, dtype=torch.float32)  # 32 MB
    expected = values.clone()
    assert huge_pages.use_huge_pages() >= values.numel() * 4 - 2 * huge_pages.HUGE
    assert torch.equal(values, expected)


@linux
def test_code_files_and_stacks_are_left_alone():
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    named = {
        int(line.split("-")[0], 16)
        for line in lines
        if len(line.split()) > 5 and line.split()[5] != "[heap]"
    }
    assert named
    assert not named & {start for start, _ in huge_pages._anonymous_mappings()}


def test_no_proc_and_other_systems(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no /proc here")

    monkeypatch.setattr("builtins.open", refuse)
    assert huge_pages._anonymous_mappings() == []
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert huge_pages.use_huge_pages() == 0
