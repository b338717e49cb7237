"""Rejection and block rule from end to end: drafts of another model, verified, committed, rolled
back, must emit the target's exact distribution.

The vocabulary is so small that every continuation of three tokens can be enumerated: the target's
logits after every prefix, through the plain reference of the rules, give its probability. 200,000
continuations a case are counted against that.

A case fails by chance once in 1e6 choices of the seeds: the chi-square test is at that level.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from pagedraft.decoding.drafters.base import Drafter, Proposal
from pagedraft.decoding.drafters.draft_model import DraftModelDrafter
from pagedraft.decoding.drafters.feature_head import FeatureHeadDrafter
from pagedraft.decoding.params import (
    MODEL_DEFAULTS,
    LogitsProcessor,
    SamplingParams,
    derive_seed,
    logit_rules,
)
from pagedraft.decoding.sequence import Sequence
from pagedraft.decoding.verify import verify_rows
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.kernels.sample_inputs import Row, plain_probabilities
from pagedraft.tests.model.drafts import save_layers
from pagedraft.tests.model.feature_heads import save_head
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")

VOCAB_SIZE, LENGTH, NUM_DRAFTS = 6, 3, 2
PROMPT = [3, 4]
BLOCK_SIZE, NUM_ROWS = 8, 2000
FALSE_ALARM = 1e-6
TINY: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "hidden_size": 32},
    **{"intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1},
    **{"head_dim": 32, "bos_token_id": 0, "eos_token_id": 1},
}
# name: (parameters, the same in words of the plain reference)
RULES = {
    "plain": (SamplingParams(temperature=1.0), Row()),
    "rules": (
        SamplingParams(
            **{
                "temperature": 0.9,
                "top_k": 5,
                "top_p": 0.95,
                "min_p": 0.02,
                "logit_bias": {2: 0.5},
            },
            **{"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": -0.2},
        ),
        Row(
            **{"temperature": 0.9, "top_k": 5, "top_p": 0.95, "min_p": 0.02, "bias": {2: 0.5}},
            **{"repetition": 1.3, "presence": 0.3, "frequency": -0.2},
        ),
    ),
}


# The engine drafts after a request's first token, and no more than it can keep.
ENOUGH: dict[str, Any] = {"max_tokens": 2 + LENGTH, "ignore_eos": True}


class Models(NamedTuple):
    target: Transformer
    draft: Transformer


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Keep what is imported out of the garbage collector, which would walk it over and over."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    root = tmp_path_factory.mktemp("distribution")
    save_tiny(root / "target", "llama", seed=0, **TINY)
    save_tiny(root / "draft", "llama", seed=1, **TINY)
    with use_implementation("cpu"):
        return Models(*(Transformer.from_folder(root / name) for name in Models._fields))


def _cache(model: Transformer, *, keeps_states: bool = False) -> KVCache:
    dtype = model.activation_dtype
    options = {"features_dtype": dtype if keeps_states else None}
    return KVCache(model.config, NUM_ROWS + 1, BLOCK_SIZE, dtype, model.device, **options)


def _forward(model: Transformer, cache: KVCache, spans: list[Span]) -> torch.Tensor:
    batch = build_step_batch(
        spans, block_size=BLOCK_SIZE, device=model.device, row_multiple=model.row_multiple
    )
    return model.forward(batch, cache)


def exact_probabilities(
    target: Transformer, row: Row, processor: LogitsProcessor = lambda ids, logits_V: logits_V
) -> torch.Tensor:
    """Probability of every continuation of the prompt, fp64 [VOCAB_SIZE ** LENGTH]."""
    probs_n = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        outputs = [*product(range(VOCAB_SIZE), repeat=length)]
        spans = [Span([*PROMPT, *out], 0, [1 + i], 1) for i, out in enumerate(outputs)]
        logits_QV = _forward(target, _cache(target), spans)
        next_nV = torch.stack(
            [
                plain_probabilities(
                    processor(out, logits_V.clone()),
                    replace(row, prompt=tuple(PROMPT), output=out),
                )
                for out, logits_V in zip(outputs, logits_QV, strict=True)
            ]
        )
        probs_n = (probs_n[:, None] * next_nV).flatten()
    return probs_n


Verify = Callable[[torch.Tensor, list[Sequence], list[Proposal]], list[list[int]]]


def counted(
    models: Models,
    params: SamplingParams,
    num_continuations: int,
    *,
    make_drafter: Callable[..., Drafter] = DraftModelDrafter,
    verify: Verify = verify_rows,
) -> torch.Tensor:
    """Counts of the continuations, [VOCAB_SIZE ** LENGTH]: the engine's parts, in large batches."""
    is_head = isinstance(models.draft, FeatureHead)
    caches = [_cache(models.target, keeps_states=is_head), _cache(models.draft)]
    if is_head:
        make_drafter = partial(FeatureHeadDrafter, target_cache=caches[0])
    drafter = make_drafter(
        models.draft, caches[1], target_vocab_size=VOCAB_SIZE, catch_up_tokens=10**9
    )
    counts_n = torch.zeros(VOCAB_SIZE**LENGTH, dtype=torch.int64)
    for first in range(0, num_continuations, NUM_ROWS):
        sequences = [_sequence(params, first + row, row) for row in range(NUM_ROWS)]
        active = sequences
        while active:
            proposals = drafter.propose(active, [NUM_DRAFTS] * len(active))
            spans = [_span(*pair) for pair in zip(active, proposals, strict=True)]
            logits_QV = _forward(models.target, caches[0], spans)
            for sequence, tokens in zip(
                active, verify(logits_QV, active, list(proposals)), strict=True
            ):
                sequence.append(tokens)
            active = [s for s in active if s.num_tokens < len(PROMPT) + LENGTH]
        counts_n += _histogram([sequence.output_ids for sequence in sequences])
    return counts_n


def _sequence(params: SamplingParams, index: int, row: int) -> Sequence:
    assert params.temperature is not None
    return Sequence(
        list(PROMPT),
        len(PROMPT),
        params.temperature,
        derive_seed(0, index),
        rules=logit_rules(params, MODEL_DEFAULTS, ()),
        accept=params.accept,
        block_ids=[1 + row],
    )


def _span(sequence: Sequence, proposal: Proposal) -> Span:
    tokens = sequence.token_ids[sequence.num_written :] + proposal.tokens
    return Span(tokens, sequence.num_written, sequence.block_ids, len(proposal.tokens) + 1)


def _histogram(outputs: Seq[list[int]]) -> torch.Tensor:
    weights = torch.tensor([VOCAB_SIZE**i for i in reversed(range(LENGTH))])
    codes = torch.tensor([output[:LENGTH] for output in outputs]) @ weights
    return torch.bincount(codes, minlength=VOCAB_SIZE**LENGTH)


def p_value(counts_n: torch.Tensor, probs_n: torch.Tensor) -> float:
    """How likely counts this far from the expected ones are; cells that expect < 5 are one.

    0 where something was emitted that has no probability.
    """
    if counts_n[probs_n == 0].any():
        return 0.0
    expected_n = probs_n * counts_n.sum()
    is_rare_n = expected_n < 5
    cells = [
        torch.cat([values_n[~is_rare_n].double(), values_n[is_rare_n].double().sum()[None]])
        for values_n in (counts_n, expected_n)
    ]
    observed, expected = (cell[cells[1] > 0] for cell in cells)
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2)
    )


@pytest.fixture
def reference_draws(cpu_path) -> Iterator[None]:
    """Draw through the reference, which is several times as fast on rows this short."""
    with use_implementation("ref", "sample"):
        yield


@pytest.mark.usefixtures("reference_draws")
@pytest.mark.parametrize("accept", ["rejection", "block"])
@pytest.mark.parametrize("name", RULES)
def test_continuations_have_the_targets_distribution(models, name, accept):
    params, row = RULES[name]
    counts_n = counted(models, replace(params, accept=accept), 200_000)
    assert p_value(counts_n, exact_probabilities(models.target, row)) > FALSE_ALARM


@pytest.mark.usefixtures("reference_draws")
@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_a_draft_that_proposes_few_tokens(models, tmp_path, accept):
    """Most of what the target may draw has no chance with the draft."""
    folder = save_layers(tmp_path / "draft", models.target.folder, 1, ids=[0, 2, 5])
    few = models._replace(draft=load_draft(folder, models.target))
    params, row = RULES["rules"]
    counts_n = counted(few, replace(params, accept=accept), 10_000)
    assert p_value(counts_n, exact_probabilities(models.target, row)) > FALSE_ALARM


@pytest.mark.usefixtures("reference_draws")
@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_a_feature_head(models, tmp_path, accept):
    """Each draft's q is that of the states it was drawn after: the target's, then guesses."""
    folder = save_head(tmp_path / "draft", models.target.folder, states=0.2)
    head = models._replace(draft=load_draft(folder, models.target))
    params, row = RULES["rules"]
    counts_n = counted(head, replace(params, accept=accept), 10_000)
    assert p_value(counts_n, exact_probabilities(models.target, row)) > FALSE_ALARM


class FlattenedQ(DraftModelDrafter):
    """Says that its drafts were drawn from something flatter than they were."""

    def propose(self, sequences, num_drafts):
        return [
            Proposal(p.tokens, p.q_KV.sqrt() / p.q_KV.sqrt().sum(-1, keepdim=True))
            for p in super().propose(sequences, num_drafts)
        ]


class NextQ(DraftModelDrafter):
    """Says of each draft what the one after it was drawn from."""

    def propose(self, sequences, num_drafts):
        return [
            Proposal(p.tokens, p.q_KV.roll(-1, 0)) for p in super().propose(sequences, num_drafts)
        ]


def _no_residual(
    logits_QV: torch.Tensor, sequences: list[Sequence], proposals: list[Proposal]
) -> list[list[int]]:
    """Draws the token after a rejected draft from p."""
    verified = verify_rows(logits_QV, sequences, proposals)
    processed_RV = logits_QV.view(len(proposals), NUM_DRAFTS + 1, VOCAB_SIZE)
    noise_RV = torch.rand(len(proposals), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    places = torch.tensor([len(tokens) - 1 for tokens in verified])
    scores_RV = processed_RV[torch.arange(len(places)), places] - (-noise_RV.log()).log()
    return [
        [*tokens[:-1], int(token)]
        for tokens, token in zip(verified, scores_RV.argmax(-1), strict=True)
    ]


BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "a drafter that lies about q": ("rejection", {"make_drafter": FlattenedQ}),
    "q of another position": ("block", {"make_drafter": NextQ}),
    "no residual": ("rejection", {"verify": _no_residual}),
}


@pytest.mark.usefixtures("reference_draws")
@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_noticed(models, name):
    """Teeth: at a twentieth of the continuations."""
    accept, fault = BROKEN[name]
    params, row = RULES["plain"]
    counts_n = counted(models, replace(params, accept=accept), 10_000, **fault)
    assert p_value(counts_n, exact_probabilities(models.target, row)) < FALSE_ALARM


def _repeats(output_ids: Seq[int], logits_V: torch.Tensor) -> torch.Tensor:
    """A logits processor that likes the token two before."""
    if len(output_ids) > 1:
        logits_V[output_ids[-2]] += 1.0
    return logits_V


class Constant:
    """Drafts the same tokens always, so there is no q."""

    name = "constant"

    def propose(self, sequences, num_drafts):
        return [[2, 5, 2][:k] for k in num_drafts]

    def on_free(self, sequence):
        pass


@pytest.mark.parametrize("drafter", [None, Constant()], ids=["draft model", "constant"])
def test_samples_of_an_engine_have_the_targets_distribution(models, drafter):
    """The front end, with all rules and a processor; rows of both rules in every step."""
    params, row = RULES["rules"]
    llm = LLM(
        models.target,
        models.draft if drafter is None else None,
        **{"speculate": "draft", "drafter": drafter, "k": NUM_DRAFTS, "block_size": BLOCK_SIZE},
        **{"max_rows": 512, "token_budget": 4096, "kv_tokens": 1100 * BLOCK_SIZE},
    )
    asked = [
        replace(params, accept=accept, n=500, logits_processors=(_repeats,), **ENOUGH)
        for accept in ("rejection", "block")
    ]
    completions = [c for _ in range(10) for c in llm.generate([PROMPT] * 2, asked)]
    probs_n = exact_probabilities(models.target, row, _repeats)
    counts_n = _histogram([completion.token_ids for completion in completions])
    assert p_value(counts_n, probs_n) > FALSE_ALARM
    assert sum(sum(c.stats.accepted) for c in completions) > len(completions) // 3
    assert p_value(counts_n, exact_probabilities(models.target, row)) < FALSE_ALARM  # teeth
    llm.engine.check_integrity()
