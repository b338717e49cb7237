"""Shared set-up: Triton's interpreter unless the caller says otherwise, no network, fixtures.

The environment is set before anything imports Triton, because it fixes its mode at import. On a GPU
machine call with ``TRITON_INTERPRET=0``: then kernels are compiled and CUDA tests run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "TRITON_CACHE_DIR" not in os.environ:
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="pagedraft-triton-")
    atexit.register(shutil.rmtree, os.environ["TRITON_CACHE_DIR"], ignore_errors=True)

import pytest  # noqa: E402
import torch  # noqa: E402

from pagedraft.kernels.dispatch import INTERPRETED, use_implementation  # noqa: E402

if INTERPRETED:
    from pagedraft.tests import interpreter

    interpreter.install()

with contextlib.suppress(ImportError):  # a GPU machine may lack it; only pure-Python tests use it
    from hypothesis import settings

    settings.register_profile("ci", deadline=None, derandomize=True, database=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

HAS_CUDA = torch.cuda.is_available() and not INTERPRETED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a CUDA device where none can be used."""
    if HAS_CUDA:
        return
    reason = "interpreted run (TRITON_INTERPRET=1)" if INTERPRETED else "no CUDA device"
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that kernel tests run on: CUDA when kernels are compiled, else the CPU."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture
def cpu_path() -> Iterator[None]:
    """Run the test on the CPU implementations instead of interpreted kernels."""
    with use_implementation("cpu"):
        yield
