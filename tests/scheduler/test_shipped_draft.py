"""The draft that comes with the demo model: its worth on prompts that it never learnt from."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from pagedraft.decoding.distill.prompt_split import split
from pagedraft.decoding.distill.prompt_tokens import encode_prompts
from pagedraft.decoding.distill.prompts import demo_prompts
from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.demo import DRAFT_FOLDER
from pagedraft.model.draft_format import read_entry
from pagedraft.model.feature_head import FeatureHead
from pagedraft.scheduler.distill.options import DistillOptions
from pagedraft.scheduler.llm import LLM

pytestmark = pytest.mark.usefixtures("cpu_path")

MAX_BYTES = 16_000_000
KINDS = ("chat", "code-chat", "code")
PROMPTS_A_KIND = 2
MAX_TOKENS = 48
LEAST_TOKENS_A_PASS = 1.45  # at k = 4; the report has 1.8 for all held-out texts


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Of its report: how it was made."""
    return json.loads((DRAFT_FOLDER / "report.json").read_text(encoding="utf-8"))["facts"]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of sources that the draft's training left out, a few of each kind."""
    options = DistillOptions("demo", DRAFT_FOLDER)
    held_out = split(demo_prompts(options.seed), options.held_out, options.seed).held_out
    with use_implementation("cpu"):
        tokenizer = LLM("demo", speculate="off", kv_tokens=64).tokenizer
    found = []
    for kind in KINDS:
        some = [prompt for prompt in held_out if prompt.kind == kind][:PROMPTS_A_KIND]
        found += [list(one.token_ids) for one in encode_prompts(some, tokenizer, 128)]
    return found


def test_the_folder_is_small_and_says_how_it_was_made(facts):
    files = {str(file.relative_to(DRAFT_FOLDER)): file for file in DRAFT_FOLDER.rglob("*.*")}
    assert sum(file.stat().st_size for file in files.values()) < MAX_BYTES
    reports = {f"report.{ending}" for ending in ("json", "md", "png")}
    assert files.keys() == {
        "config.json",
        "model.safetensors",
        *reports,
        *(f"{run}-run/{name}" for run in ("first", "second") for name in reports),
    }
    command = shlex.split(facts["command"])
    assert command[:2] == ["pagedraft", "distill"]
    assert command[command.index("--kind") + 1] == read_entry(DRAFT_FOLDER).kind
    assert facts["target_sha256"] == read_entry(DRAFT_FOLDER).target_sha256
    assert sum(facts["seconds"].values()) > 0
    assert facts["held_out"]["after"]["alpha"] > facts["held_out"]["before"]["alpha"]


@pytest.mark.demo_model
def test_its_drafts_are_accepted_and_change_nothing(prompts):
    llm = LLM("demo", "demo-draft", speculate="draft", k=4, kv_tokens=512)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    passes = tokens = 0
    for prompt in prompts:
        plain, drafted = (
            llm.generate([prompt], replace(params, speculate=speculate))[0]
            for speculate in (False, True)
        )
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.drafter_errors == plain.stats.drafter_errors == []
        emissions = [count for _, count in drafted.stats.emissions[1:]]
        passes += len(emissions)
        tokens += sum(emissions)
    assert passes > 0
    assert tokens / passes >= LEAST_TOKENS_A_PASS, f"{tokens} tokens in {passes} passes"


@pytest.mark.demo_model
def test_it_stores_what_is_its_own_and_borrows_the_rest():
    llm = LLM("demo", "demo-draft", speculate="draft", k=1, kv_tokens=256)
    model = llm.engine.speculation.drafters["draft"].model
    assert isinstance(model, FeatureHead)
    assert model.embed_VE.data_ptr() == llm.target.embed_VE.data_ptr()
    assert len(model.head.ids_U) == read_entry(DRAFT_FOLDER).vocab
