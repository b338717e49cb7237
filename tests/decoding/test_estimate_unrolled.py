"""Agreement of a feature head by the place of a draft: against its definition and real drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedraft.decoding import estimate_text, estimate_unrolled
from pagedraft.decoding.distill import judge as judging
from pagedraft.decoding.distill.judge import HeldOut, judge
from pagedraft.decoding.drafters.table import DRAFTERS, Setup
from pagedraft.decoding.estimate import estimate
from pagedraft.decoding.estimate_costs import Costs, measure_costs
from pagedraft.decoding.estimate_forced import Agreement, compare
from pagedraft.decoding.estimate_text import Reader, Text
from pagedraft.decoding.estimate_unrolled import compare_places
from pagedraft.decoding.estimate_walk import Walk
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.transformer import Transformer
from pagedraft.tests.decoding.estimate_texts import PROMPT, RULES, tiny, written
from pagedraft.tests.model.feature_heads import Definition, head_tensors, save_head

pytestmark = pytest.mark.usefixtures("cpu_path")
NUM_PLACES = 4
STATES = 0.04  # how strongly the head reads states: with none it is the target itself


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("unrolled")


@pytest.fixture(scope="module")
def target(root) -> Transformer:
    return tiny(root / "target", num_hidden_layers=1, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def head(root, target) -> FeatureHead:
    """Right at about half of the positions."""
    return load(save_head(root / "head", root / "target", states=STATES), target)


def load(folder: Path, target: Transformer) -> FeatureHead:
    with use_implementation("cpu"):
        head = load_draft(folder, target)
    assert isinstance(head, FeatureHead)
    return head


def found(target: Transformer, head: FeatureHead, text: Text) -> Agreement:
    reader = Reader(target, 96, keeps_states=True)
    return compare_places(
        reader, Reader(head, 96, target=reader, num_places=NUM_PLACES), text, NUM_PLACES
    )


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_real_drafts_are_as_right(target, head, rules):
    """From every start the drafter's own draws, until one is wrong."""
    text = written(target, 40, **rules)
    places = found(target, head, text).by_place("equal_n")
    reader = Reader(target, 96, keeps_states=True)
    own = Reader(head, 96, target=reader)
    reader.skip(text.token_ids)
    drafter = DRAFTERS["draft"](Setup(target, reader.cache, head, own.cache))
    counts = []
    for start in range(1, 36):
        sequence = text.sequence(start)
        sequence.block_ids = reader.block_ids
        sequence.num_written = sequence.num_tokens - 1
        [proposal] = drafter.propose([sequence], [NUM_PLACES])
        pairs = zip(proposal.tokens, text.output_ids[start:], strict=False)
        right = next((i for i, (a, b) in enumerate(pairs) if a != b), NUM_PLACES)
        rows = [places[place][start + place] for place in range(NUM_PLACES)]
        assert next((i for i, is_equal in enumerate(rows) if not is_equal), NUM_PLACES) == right
        counts.append(right)
    assert {0, 1} < set(counts), "teeth: some drafts are right, some wrong"


@torch.inference_mode()
def test_places_are_the_definitions(root, target, head):
    """alpha at each place, from states that are true before the pass and guesses in it."""
    text = written(target, 12, temperature=1.0, seed=3)
    agreement = found(target, head, text)
    tensors = head_tensors(root / "target", 0, STATES, 1.0)
    definition = Definition("llama", root / "target", tensors)
    tokens, num_prompt = text.token_ids, len(PROMPT)
    true_TE = definition.states(tokens)
    p_TV = definition.target.lm_head(true_TE).softmax(-1)
    for place, alphas in enumerate(agreement.by_place("alpha_n")):
        for n in range(place, 12):
            start = num_prompt + n - place  # index of the token that the pass drafts first
            states_TE = torch.cat((torch.zeros(1, 80), true_TE[: start - 1]))
            for _ in range(place + 1):
                last_E = definition.guesses(tokens[: len(states_TE)], states_TE)[-1]
                states_TE = torch.cat((states_TE, last_E[None]))
            q_V = definition.target.lm_head(last_E).softmax(-1)
            expected = torch.minimum(p_TV[num_prompt + n - 1], q_V).sum().item()
            assert alphas[n] == pytest.approx(expected, abs=1e-4)


def test_chunks_do_not_change_what_is_compared(target, head, monkeypatch):
    text = written(target, 40, temperature=0.8, seed=1)
    whole = found(target, head, text)
    for module in (estimate_text, estimate_unrolled):
        monkeypatch.setattr(module, "LOGIT_ROWS", 5)
    assert found(target, head, text) == whole
    assert [len(row) for row in whole.by_place("equal_n")] == [40] * NUM_PLACES


def test_passes_begin_anywhere_in_a_block(target, head, monkeypatch):
    """Also where guesses run into another block than the pass begins in."""
    text = written(target, 75, temperature=0.8, seed=1)
    whole = found(target, head, text)
    for module in (estimate_text, estimate_unrolled):
        monkeypatch.setattr(module, "BLOCK_SIZE", 8)
    assert found(target, head, text) == whole


def test_models_that_read_tokens_have_no_places(target, tmp_path):
    other, text = tiny(tmp_path, seed=1), written(target, 13, temperature=0.8)
    readers = Reader(target, 64), Reader(other, 64)
    places = compare_places(*readers, text, NUM_PLACES)
    assert places == compare(*readers, text)
    assert places.by_place("equal_n") == [places.equal_n]


def test_a_head_like_the_target_is_always_right(root, target):
    same = load(save_head(root / "same", root / "target", states=0.0), target)
    estimated = estimate(
        target, [written(target, temperature=0.8)], draft=same, max_drafts=3, repeats=1
    )
    assert estimated.drafter == "draft"
    assert estimated.of_rule("match")[-1].tokens_per_pass == 4
    assert estimated.of_rule("rejection")[-1].tokens_per_pass == pytest.approx(4, abs=1e-3)


def test_a_head_is_judged(root, target, head, monkeypatch):
    """On greedy texts; the engine's own drafts at each place say the same."""
    monkeypatch.setattr(judging, "measure_costs", lambda *a, **k: Costs(8, (1.0,) * 9, (0.0,) * 9))
    text = written(target, 40, temperature=0.0)
    same = load(save_head(root / "judged", root / "target", states=0.0), target)
    held_out = [HeldOut(text, "chat")]
    drafters = judge(target, {"same": same, "after": head}, held_out, NUM_PLACES).drafters
    assert {place.conditional for place in drafters["same"].total.places} == {1.0}
    assert drafters["after"].total.alpha < 1.0
    [*_, row] = estimate(target, [text], draft=head, max_drafts=NUM_PLACES, repeats=1).rows
    assert drafters["after"].total.rows[-1].num_passes == row.num_passes


def test_accepted_drafts_cost_their_reading(target, head):
    text = written(target, temperature=0.0)
    reader = Reader(target, 64, keeps_states=True)
    own = Reader(head, 64, target=reader)
    drafter = DRAFTERS["draft"](Setup(target, reader.cache, head, own.cache))
    assert measure_costs(reader, drafter, text, 12, 3, own, repeats=3).reads_accepted
    costs = Costs(8, (1.0, 1.0), (0.0, 0.0), 0.25, reads_accepted=True)
    assert costs.walk_seconds(Walk([1.0, 1.0], 3, num_full=1, num_accepted=2)) == 2.5


def test_a_head_cannot_read_alone(head):
    with pytest.raises(ValueError, match="target: expected a reader of the states"):
        Reader(head, 64).skip([1, 2, 3])
