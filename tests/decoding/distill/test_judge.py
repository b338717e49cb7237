"""Figures of drafts on held-out texts: the two ends, a direct computation, and errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from pagedraft.decoding.distill import judge as judging
from pagedraft.decoding.distill.figures import Judgement, Place
from pagedraft.decoding.distill.judge import HeldOut, judge
from pagedraft.decoding.distill.report import verdict
from pagedraft.decoding.estimate_costs import Costs
from pagedraft.decoding.estimate_text import Reader, Text
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.transformer import Transformer
from pagedraft.tests.decoding.distill.judged import near_model
from pagedraft.tests.decoding.estimate_texts import PROMPT, tiny, written
from pagedraft.tests.model.drafts import save_layers
from pagedraft.tests.model.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("cpu_path")
FREE = Costs(8, (1.0,) * 9, (0.0,) * 9)
PRICED = Costs(8, (1.0, 1.1, 1.3), (0.0, 0.25, 0.4), 0.05, read_seconds=0.01)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Transformer:
    return tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Transformer:
    return tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def near(tmp_path_factory) -> Transformer:
    with use_implementation("cpu"):
        return near_model(tmp_path_factory.mktemp("near"))


@pytest.fixture(scope="module")
def held_out(target) -> list[HeldOut]:
    with use_implementation("cpu"):
        return [
            HeldOut(written(target, length, temperature=0.0), kind)
            for length, kind in ((13, "chat"), (30, "code"), (1, "text"), (25, "chat"))
        ]


@pytest.fixture
def with_costs(monkeypatch):
    def use(costs: Costs) -> list[tuple]:
        calls: list[tuple] = []
        monkeypatch.setattr(judging, "measure_costs", lambda *a, **k: calls.append(a) or costs)
        return calls

    return use


def test_a_draft_that_is_the_target_is_always_right(target, held_out, with_costs):
    """13 tokens, the first from the prompt's pass: 12 are a multiple of k + 1 for these k."""
    with_costs(FREE)
    found = judge(target, {"after": target}, held_out[:1]).drafters["after"].total
    assert found.alpha == pytest.approx(1.0, abs=1e-5)
    assert found.greedy == 1.0
    tokens = {row.k: row.tokens_per_pass for row in found.rows}
    assert {k: tokens[k] for k in (1, 2, 3, 5)} == {1: 2, 2: 3, 3: 4, 5: 6}
    assert {place.conditional for place in found.places} == {1.0}
    assert {place.cumulative for place in found.places} == {1.0}


def test_a_draft_of_random_weights_is_no_gain(target, other, held_out):
    found = judge(target, {"after": other}, held_out, repeats=3)
    assert found.drafters["after"].total.greedy < 0.2
    assert verdict(found, None, "here").startswith("no gain: at best 0.")


def direct(target: Transformer, draft: Transformer, text: Text) -> tuple[list[float], list[bool]]:
    """Alpha and agreement at each output token, from one pass of each model over the whole text."""
    with torch.inference_mode():
        logits = [Reader(m, 64).read(text.token_ids, 0) for m in (target, draft)]
    p_NV, q_NV = (one[len(text.prompt_ids) : -1].softmax(-1) for one in logits)
    alpha_N = torch.minimum(p_NV, q_NV).sum(-1)
    return alpha_N.tolist(), (p_NV.argmax(-1) == q_NV.argmax(-1)).tolist()


def accepted_by_hand(right: list[bool], k: int) -> list[tuple[int, int]]:
    """(drafts, accepted) of each pass over tokens that a draft is right about or not."""
    passes, start = [], 0
    while start < len(right):
        drafts = right[start : min(start + k, len(right) - 1)]
        accepted = next((i for i, is_right in enumerate(drafts) if not is_right), len(drafts))
        passes.append((len(drafts), accepted))
        start += accepted + 1
    return passes


def test_the_figures_are_those_of_a_direct_computation(target, near, held_out, with_costs):
    with_costs(FREE)
    found = judge(target, {"after": near}, held_out).drafters["after"].total
    texts = [one.text for one in held_out]
    pairs = [direct(target, near, text) for text in texts]
    alphas = [value for alpha, _ in pairs for value in alpha]
    rights = [value for _, right in pairs for value in right]
    assert (found.num_texts, found.num_tokens) == (4, len(rights)) == (4, 65)
    assert found.alpha == pytest.approx(sum(alphas) / len(alphas), abs=1e-5)
    assert found.greedy == pytest.approx(sum(rights) / len(rights))
    assert 0.2 < found.greedy < 0.9
    by_k = [[one for _, right in pairs for one in accepted_by_hand(right, k)] for k in range(1, 9)]
    assert [row.num_passes for row in found.rows] == [len(passes) for passes in by_k]
    places = [
        Place(
            sum(drafts > i for drafts, _ in by_k[-1]),
            sum(drafts > i and accepted >= i for drafts, accepted in by_k[-1]),
            sum(accepted > i for _, accepted in by_k[-1]),
        )
        for i in range(8)
    ]
    assert list(found.places) == places
    assert 0 < places[1].conditional < 1


def test_speedups_follow_from_counts_and_costs(target, held_out, with_costs):
    with_costs(PRICED)
    found = judge(target, {"after": target}, held_out[:1], max_drafts=2).drafters["after"]
    [one, two] = found.total.rows
    assert one.speedup == pytest.approx(12 / (6 * 1.35 + 5 * 0.05 + 6 * 0.01))
    assert two.speedup == pytest.approx(12 / (4 * 1.7 + 3 * 0.05 + 6 * 0.01))
    parts = (two.verify, two.drafting, two.catch_up, two.reading)
    assert parts == pytest.approx((1.3, 0.4, 3 * 0.05 / 4, 6 * 0.01 / 4))
    assert (found.draft_share, found.verify_ratios) == (0.25, (1.0, 1.1, 1.3))


def test_kinds_are_parts_of_the_whole(target, near, held_out, with_costs):
    with_costs(FREE)
    found = judge(target, {"after": near}, held_out).drafters["after"]
    assert list(found.kinds) == ["chat", "code", "text"]
    sizes = [(part.num_texts, part.num_tokens) for part in found.kinds.values()]
    assert sizes == [(2, 36), (1, 29), (1, 0)]
    parts = [part for part in found.kinds.values() if part.rows]
    passes = [sum(part.rows[i].num_passes for part in parts) for i in range(8)]
    assert passes == [row.num_passes for row in found.total.rows]
    alpha = sum(part.alpha * part.num_tokens for part in parts) / 65
    assert alpha == pytest.approx(found.total.alpha)
    alone = judge(target, {"after": near}, held_out[1:2]).drafters["after"].total
    assert found.kinds["code"] == alone


def test_a_kind_without_a_token_has_no_figures(target, near, held_out, with_costs):
    with_costs(FREE)
    found = judge(target, {"after": near}, held_out).drafters
    empty = [found[name].kinds["text"] for name in ("after", "ngram")]
    assert {(one.num_tokens, one.alpha, one.places, one.rows) for one in empty} == {
        (0, None, (), ())
    }


def test_k_is_cut_to_the_longest_output(target, near, with_costs):
    with_costs(FREE)
    short = [HeldOut(written(target, length, temperature=0.0), "chat") for length in (2, 4)]
    found = judge(target, {"after": near}, short)
    assert found.max_drafts == 3
    assert [row.k for row in found.drafters["after"].total.rows] == [1, 2, 3]
    assert [row.k for row in found.drafters["ngram"].total.rows] == [1, 2, 3]


def test_costs_are_measured_once_for_drafts_of_one_shape(target, near, other, with_costs, tmp_path):
    calls = with_costs(FREE)
    text = HeldOut(written(target, temperature=0.0), "chat")
    found = judge(target, {"before": other, "after": near}, [text])
    assert (len(calls), list(found.drafters)) == (2, ["before", "after", "ngram"])
    assert found.subject == "after"
    judge(target, {"before": tiny(tmp_path, num_hidden_layers=1), "after": near}, [text])
    assert len(calls) == 2 + 3


def test_a_draft_of_few_tokens_is_judged(target, held_out, with_costs, tmp_path):
    """Logits of tokens that it cannot propose are -inf, which are numbers."""
    with_costs(FREE)
    written_ids = sorted(set(held_out[1].text.output_ids))[::2]
    draft = load_draft(save_layers(tmp_path, target.folder, ids=written_ids), target)
    found = judge(target, {"after": draft}, held_out[1:2]).drafters["after"].total
    known = [token in written_ids for token in held_out[1].text.output_ids[1:]]
    assert 0 < found.greedy <= sum(known) / len(known) < 1
    assert 0 < found.alpha < 1


def test_all_figures_are_json(target, near, held_out, with_costs):
    with_costs(FREE)
    found: Judgement = judge(target, {"after": near}, held_out)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    after = document["drafters"]["after"]
    assert after["total"]["rows"][2]["speedup"] == found.drafters["after"].total.rows[2].speedup
    assert after["kinds"]["text"]["alpha"] is None
    assert document["drafters"]["ngram"]["costs"]["v"] == [1.0] * 9


def test_nan_is_refused(target, held_out, tmp_path):
    model = tiny_model("llama")
    model.lm_head.weight.data[5] = float("nan")
    model.save_pretrained(tmp_path)
    broken = Transformer.from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"drafts\['after'\]: expected logits that are numbers"):
        judge(target, {"before": target, "after": broken}, held_out, repeats=1)


WARM = Text(PROMPT, (3, 4), 2, temperature=0.7)
GREEDY = Text(PROMPT, (3, 4), 2)
BAD = {
    "no texts": ([], {}, "texts: expected an output of at least 2 tokens"),
    "nothing to draft": ([HeldOut(replace(GREEDY, output_ids=(3,)), "chat")], {}, "at least 2"),
    "sampled": ([HeldOut(GREEDY, "a"), HeldOut(WARM, "a")], {}, r"held_out\[1\]: expected a text"),
    "no kind": ([HeldOut(GREEDY, "")], {}, r"held_out\[0\]: expected a kind"),
    "no drafts a pass": ([HeldOut(GREEDY, "chat")], {"max_drafts": 0}, "max_drafts: expected an"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_texts_are_named(target, name):
    held_out, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        judge(target, {"after": target}, held_out, **options)


def test_bad_drafts_are_named(target, tmp_path):
    texts = [HeldOut(GREEDY, "chat")]
    with pytest.raises(ValueError, match="drafts: expected at least one, got none"):
        judge(target, {}, texts)
    with pytest.raises(ValueError, match="'ngram' is the lookup's name"):
        judge(target, {"ngram": target}, texts)
    with pytest.raises(ValueError, match="vocabulary of 2000 tokens does not agree"):
        judge(target, {"after": tiny(tmp_path, vocab_size=2000)}, texts)
