"""Replays of a feature head's passes, and of a target's that keeps states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedraft.model.batch import Span
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.feature_graphs import FeatureHeadRunner
from pagedraft.model.graph_shapes import GraphLimits
from pagedraft.model.graphs import GraphRunner, Run
from pagedraft.model.transformer import Transformer
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.model.feature_heads import BLOCK_SIZE, pool, save_head
from pagedraft.tests.model.steps import random_spans, step
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")
LIMITS = GraphLimits(max_rows=4, max_drafts=3, max_kv_len=64)
TOKENS, BLOCKS = [5, 9, 33, 7, 60, 61, 5, 9], [4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A target "llama" and its "llama-head"."""
    root = tmp_path_factory.mktemp("heads")
    save_tiny(root / "llama", "llama", dtype=torch.bfloat16)
    save_head(root / "llama-head", root / "llama")
    return root


def capture(run: Run) -> Run:
    """Keeps the function."""
    run()
    return run


@pytest.mark.parametrize("seed", range(4))
def test_replays_have_the_bits_of_the_pass(folders, seed):
    head = load_draft(folders / "llama-head", Transformer.from_folder(folders / "llama"))
    caches = [pool(head, keeps_states=False, num_blocks=32) for _ in range(2)]
    for cache in caches:
        for tensor in cache.tensors:
            tensor.fill_(0.5)

    runner = FeatureHeadRunner(head, caches[1], LIMITS, capture=capture)
    runner.capture_all()
    for index in range(2):  # what the first leaves must not matter
        spans = random_spans(seed + 9 * index, 1 + seed, 4, block_size=BLOCK_SIZE, context=30)
        batch = step(head, spans, BLOCK_SIZE)
        features_TE = torch.randn(batch.num_tokens, 80)
        expected = head.forward(batch, caches[0], features_TE)
        for one, other in zip(runner.forward(batch, caches[1], features_TE), expected, strict=True):
            assert_same_bits(one, other)
    assert runner.num_replays == 2


def test_targets_keep_states_from_graphs(folders):
    model = Transformer.from_folder(folders / "llama")
    caches = [pool(model, keeps_states=True, num_blocks=32) for _ in range(2)]

    runner = GraphRunner(model, caches[1], LIMITS, capture=capture)
    runner.capture_all()
    start = 0
    for length in (4, 1, 3):
        span = Span(TOKENS[start : start + length], start, BLOCKS, length)
        batch = step(model, [span], BLOCK_SIZE)
        expected = model.forward(batch, caches[0])
        assert_same_bits(runner.forward(batch, caches[1]), expected)
        start += length
    assert runner.num_replays == 3
    kept = [cache.features_NBE[BLOCKS[0]] for cache in caches]
    assert_same_bits(*kept)
