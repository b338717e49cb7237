"""Drafters that run a model: acceptance where theory gives it, passes, positions, vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as memoize

import pytest
import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.drafters.draft_model import DraftModelDrafter
from pagedraft.decoding.drafters.layers import LayersDrafter
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.tests.decoding.rounds import make_cache, run_rounds, start, verify_round
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")

PROMPT = [5, 9, 33, 7, 60, 61, 5, 9, 33, 8, 20, 90, 14]
KS = [3, 1, 4, 2, 5]
# name: (seed, changes of the tiny model's config)
MODELS = {
    "target": (0, {}),
    "other": (1, {}),
    "short": (0, {"max_position_embeddings": 16}),
    "wide": (1, {"vocab_size": 128}),
    "narrow": (1, {"vocab_size": 64}),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Callable[[str], Transformer]:
    root = tmp_path_factory.mktemp("drafters")

    @memoize
    def load(name: str) -> Transformer:
        seed, changes = MODELS[name]
        save_tiny(root / name, "llama", seed=seed, **changes)
        with use_implementation("cpu"):
            return Transformer.from_folder(root / name)

    return load


@pytest.fixture
def target(load) -> Transformer:
    return load("target")


@pytest.fixture
def cache(target) -> KVCache:
    return make_cache(target)


def make_drafter(model: Transformer, **options: int) -> DraftModelDrafter:
    return DraftModelDrafter(
        model, make_cache(model), **{"target_vocab_size": 97, "catch_up_tokens": 64} | options
    )


def make_self_drafter(name: str, target: Transformer, cache: KVCache):
    """A drafter that is the target itself."""
    if name == "draft":
        return make_drafter(target)
    return LayersDrafter(target, cache, num_layers=len(target.layers))


def count_passes(model: Transformer, monkeypatch) -> list[int]:
    """Gets one entry a pass from now on: the tokens it feeds."""
    passes: list[int] = []
    forward = model.forward

    def counted(batch, cache):
        passes.append(batch.num_tokens)
        return forward(batch, cache)

    monkeypatch.setattr(model, "forward", counted)
    return passes


class TestTheTargetItself:
    @pytest.mark.parametrize("name", ["draft", "layers"])
    @pytest.mark.parametrize("accept", ["match", "rejection", "block"])
    @pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
    def test_every_draft_is_accepted(self, target, cache, name, accept, temperature):
        drafter = make_self_drafter(name, target, cache)
        sequence = start(target, cache, PROMPT, temperature=temperature, accept=accept)
        assert run_rounds(target, cache, drafter, sequence, KS) == [(k, k) for k in KS]

    @pytest.mark.parametrize("name", ["draft", "layers"])
    def test_the_context_gets_another_end(self, target, cache, name):
        """After a rejection the drafter goes on from what was emitted, not from what it drafted."""
        drafter = make_self_drafter(name, target, cache)
        sequence = start(target, cache, PROMPT)
        [proposal] = drafter.propose([sequence], [4])
        proposal.tokens[1] = proposal.tokens[1] ^ 1
        assert len(verify_round(target, cache, sequence, proposal)) == 2
        assert run_rounds(target, cache, drafter, sequence, KS) == [(k, k) for k in KS]


class TestDraftModel:
    def test_passes(self, target, cache, monkeypatch):
        """The first feeds what is missing: a prompt, or two tokens after full acceptance."""
        drafter = make_drafter(target)
        passes = count_passes(drafter.model, monkeypatch)
        sequence = start(target, cache, PROMPT)
        passes.clear()
        drafts = []
        drafts += drafter.propose([sequence], [3])
        assert (passes, drafter.last_num_rounds) == ([13, 1, 1], 3)
        verify_round(target, cache, sequence, drafts.pop())
        passes.clear()
        drafter.propose([sequence], [2])
        assert (passes, drafter.last_num_rounds) == ([2, 1], 2)

    def test_missing_context_is_fed_within_the_budget(self, target, cache, monkeypatch):
        drafter = make_drafter(target, catch_up_tokens=5)
        sequence = start(target, cache, PROMPT)
        passes = count_passes(drafter.model, monkeypatch)
        proposals = [drafter.propose([sequence], [2])[0].tokens for _ in range(3)]
        assert passes == [5, 5, 3, 1]
        assert proposals[:2] == [[], []]
        again = start(target, cache, PROMPT)
        assert proposals[2] == make_drafter(target).propose([again], [2])[0].tokens

    def test_the_budget_is_that_of_all_rows(self, load, target, cache):
        sequences = [start(target, cache, PROMPT, first) for first in (1, 9, 17)]
        drafter = make_drafter(load("other"), catch_up_tokens=17)
        proposals = drafter.propose(sequences, [2, 2, 2])
        assert [len(p.tokens) for p in proposals] == [2, 0, 0]
        assert [s.num_draft_written for s in sequences] == [14, 5, 0]

    def test_a_batch_drafts_what_its_rows_draft_alone(self, load, target, cache):
        prompts = [PROMPT, PROMPT[:1], PROMPT[3:9], PROMPT[:5]]
        ks, firsts = [5, 2, 0, 3], [1, 9, 17, 24]
        fields = [{"temperature": 0.9, "seed": seed} for seed in range(4)]
        rows = list(zip(prompts, firsts, fields, strict=True))

        def sequences():
            return [start(target, cache, p, first, **more) for p, first, more in rows]

        together = make_drafter(load("other")).propose(sequences(), ks)
        alone = [
            make_drafter(load("other")).propose([sequence], [k])[0]
            for sequence, k in zip(sequences(), ks, strict=True)
        ]
        assert [p.tokens for p in together] == [p.tokens for p in alone]
        assert [len(p.tokens) for p in together] == ks

    @pytest.mark.parametrize("length, expected", [(12, 5), (13, 4), (16, 1), (17, 0), (30, 0)])
    def test_positions_end(self, load, target, cache, length, expected):
        """16 positions: the pass that draws draft i has read the context and i - 1 drafts."""
        drafter = make_drafter(load("short"))
        sequence = start(target, cache, (PROMPT * 3)[:length])
        [proposal] = drafter.propose([sequence], [5])
        assert len(proposal.tokens) == expected
        assert drafter.last_num_rounds == expected

    def test_a_failed_pass_leaves_no_trace(self, load, target, cache, monkeypatch):
        sequence = start(target, cache, PROMPT)
        drafter = make_drafter(load("other"))
        expected = make_drafter(load("other")).propose([sequence], [3])[0].tokens
        sequence.num_draft_written = 0
        forward = drafter.model.forward

        def fail_at_the_second(batch, cache):
            if batch.num_tokens == 1:
                raise RuntimeError("out of memory")
            return forward(batch, cache)

        with monkeypatch.context() as patch:
            patch.setattr(drafter.model, "forward", fail_at_the_second)
            with pytest.raises(RuntimeError, match="out of memory"):
                drafter.propose([sequence], [3])
        assert sequence.num_draft_written == 0
        assert drafter.propose([sequence], [3])[0].tokens == expected

    def test_nan_ends_a_row(self, load, target, cache, monkeypatch):
        drafter = make_drafter(load("other"))
        forward = drafter.model.forward

        def nan_at_the_second(batch, cache):
            logits_QV = forward(batch, cache)
            return logits_QV * torch.nan if batch.num_tokens == 1 else logits_QV

        monkeypatch.setattr(drafter.model, "forward", nan_at_the_second)
        [proposal] = drafter.propose([start(target, cache, PROMPT)], [3])
        assert len(proposal.tokens) == 1
        assert drafter.last_num_rounds == 2


class TestVocabularies:
    @pytest.mark.parametrize("name, known", [("other", 97), ("wide", 97), ("narrow", 64)])
    def test_q_is_over_the_targets(self, load, target, cache, name, known):
        drafter = make_drafter(load(name))
        prompt = [token % 64 for token in PROMPT]
        sequence = start(target, cache, prompt, temperature=1.3, accept="rejection")
        [proposal] = drafter.propose([sequence], [4])
        assert proposal.q_KV.shape == (4, 97)
        torch.testing.assert_close(proposal.q_KV.sum(1), torch.ones(4))
        assert (proposal.q_KV[:, :known] > 0).all()
        assert not proposal.q_KV[:, known:].any()
        assert max(proposal.tokens) < known

    def test_q_is_what_was_drawn_from(self, load, target, cache):
        drafter = make_drafter(load("wide"))
        sequence = start(target, cache, PROMPT, temperature=1.3, accept="block")
        [proposal] = drafter.propose([sequence], [2])
        plain = start(target, cache, PROMPT + proposal.tokens[:1], first_block=9)
        logits_V = _last_logits(drafter.model, plain.token_ids)
        expected_V = (logits_V[:97] / 1.3).softmax(-1)
        torch.testing.assert_close(proposal.q_KV[1], expected_V, rtol=1e-4, atol=1e-7)

    def test_q_only_for_rows_that_are_judged_by_it(self, load, target, cache):
        sequences = [
            start(target, cache, PROMPT, first, temperature=1.0, accept=accept)
            for first, accept in ((1, "match"), (9, "rejection"))
        ]
        match, rejection = make_drafter(load("other")).propose(sequences, [2, 2])
        assert match.q_KV is None
        assert rejection.q_KV.shape == (2, 97)

    def test_a_token_that_the_draft_cannot_read(self, load, target, cache):
        drafter = make_drafter(load("narrow"))
        sequence = start(target, cache, PROMPT)  # 90 is none of its 64
        assert drafter.propose([sequence], [3])[0].tokens == []
        assert drafter.last_num_rounds == 0


def _last_logits(model: Transformer, token_ids: list[int]) -> torch.Tensor:
    span = Span(token_ids, 0, [1, 2, 3], 1)
    batch = build_step_batch(
        [span], block_size=8, device=model.device, row_multiple=model.row_multiple
    )
    return model.forward(batch, make_cache(model))[0]


class TestLayers:
    def test_counts_stay(self, target, cache):
        sequence = start(target, cache, PROMPT)
        LayersDrafter(target, cache, num_layers=1).propose([sequence], [4])
        assert (sequence.num_written, sequence.num_draft_written) == (12, 0)

    def test_passes(self, target, cache, monkeypatch):
        drafter = LayersDrafter(target, cache, num_layers=1)
        passes = count_passes(drafter.model, monkeypatch)
        sequences = [start(target, cache, PROMPT, first) for first in (1, 9)]
        proposals = drafter.propose(sequences, [3, 1])
        assert [len(p.tokens) for p in proposals] == [3, 1]
        assert (passes, drafter.last_num_rounds) == ([2, 1, 1], 3)

    def test_wrong_drafts_leave_no_trace(self, target, cache):
        """Verification writes again what one layer wrote: the output is the plain one."""
        plain = start(target, cache, PROMPT, first_block=9, temperature=0.9)
        expected = [verify_round(target, cache, plain, Proposal([])) for _ in range(9)]
        sequence = start(target, cache, PROMPT, temperature=0.9)
        counts = run_rounds(
            target, cache, LayersDrafter(target, cache, num_layers=1), sequence, [3] * 9
        )
        assert sequence.output_ids[:9] == sum(expected, [])
        assert sum(accepted for _, accepted in counts) < 27

    def test_none_inside_a_prompt(self, target, cache):
        sequence = start(target, cache, PROMPT)
        sequence.num_written -= 1
        drafter = LayersDrafter(target, cache)
        assert drafter.propose([sequence], [3])[0].tokens == []
        assert drafter.last_num_rounds == 0

    def test_a_third_by_default(self, target, cache):
        assert len(LayersDrafter(target, cache).model.layers) == 1

    @pytest.mark.parametrize("num_layers", [0, 3])
    def test_refused(self, target, cache, num_layers):
        with pytest.raises(ValueError, match="num_layers: expected an integer from 1 to 2"):
            LayersDrafter(target, cache, num_layers=num_layers)
