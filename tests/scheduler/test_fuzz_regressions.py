"""Cases that an engine has failed once, kept as the fuzzer printed them."""

from __future__ import annotations

import pytest
import torch

from pagedraft.tests.scheduler.fuzz_cases import Case, Row
from pagedraft.tests.scheduler.fuzz_run import run_case

REGRESSIONS = {
    "logprobs of a row whose drafts are judged are the model's own": Case(
        rows=(
            Row(
                length=1,
                options={
                    "temperature": 0.0,
                    "max_tokens": 3,
                    "logprobs": 0,
                    "accept": "rejection",
                },
            ),
        ),
    ),
    "a drafter whose q has another shape loses its drafts, the engine goes on": Case(
        rows=(
            Row(options={"temperature": 0.9, "max_tokens": 10, "accept": "rejection"}),
            Row(stem=1, options={"temperature": 0.9, "max_tokens": 10, "accept": "block"}),
        ),
        drafter="bad q",
    ),
}


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_case_that_failed_once(name: str, dtype: torch.dtype) -> None:
    run_case(REGRESSIONS[name], dtype)
