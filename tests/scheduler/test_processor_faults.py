"""Logits processors and parameters of any kind: at worst they end their own request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.tests.scheduler.async_runs import (
    Panic,
    check_all_returned,
    raises,
    run_beside_another,
)
from pagedraft.tests.scheduler.contract_examples import TOKENIZER

pytestmark = pytest.mark.usefixtures("cpu_path")
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=4, ignore_eos=True)
VOCAB = len(TOKENIZER)


class Angry(torch.Tensor):
    """A tensor that answers no question about its values."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.amax, torch.Tensor.detach, torch.Tensor.copy_):
            raise RuntimeError("angry")
        return super().__torch_function__(func, types, args, kwargs or {})


class Nameless:
    """A callable that has not even a name."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __call__(self, output_ids: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
        return logits_V


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyError("x")


def resized(output_ids, logits_V):
    return logits_V.resize_(3)


def recursive(output_ids, logits_V):
    return recursive(output_ids, logits_V)


def nan_at_5(output_ids, logits_V):
    logits_V[5] = torch.nan
    return logits_V


NONSENSE = {
    "nothing": lambda ids, logits_V: None,
    "a list": lambda ids, logits_V: logits_V.tolist(),
    "an array": lambda ids, logits_V: logits_V.numpy(),
    "a number": lambda ids, logits_V: logits_V.sum(),
    "a row of one": lambda ids, logits_V: logits_V[None],
    "too few": lambda ids, logits_V: logits_V[1:],
    "no values": lambda ids, logits_V: logits_V[:0],
    "resized": resized,
    "another dtype": lambda ids, logits_V: logits_V.half(),
    "complex": lambda ids, logits_V: logits_V.to(torch.complex64),
    "sparse": lambda ids, logits_V: logits_V.to_sparse(),
    "nowhere": lambda ids, logits_V: logits_V.to("meta"),
    "NaN": nan_at_5,
    "NaN alone": lambda ids, logits_V: logits_V * torch.nan,
    "nothing left": lambda ids, logits_V: torch.full_like(logits_V, -torch.inf),
    "a tensor that raises": lambda ids, logits_V: logits_V.as_subclass(Angry),
    "no name": Nameless(),
    "an error without words": raises(Unspeakable()),
    "a panic": raises(Panic("index")),
    "a generator's end": raises(GeneratorExit()),
    "an iterator's end": raises(StopIteration()),
    "recursion": recursive,
}


@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("name", NONSENSE)
def test_a_processor_of_nonsense_ends_its_request_alone(make_worded, name, speculate):
    llm = make_worded(speculate=speculate)
    params = replace(PARAMS, logits_processors=(NONSENSE[name],), logprobs=2)
    got = run_beside_another(llm, [5, 6, 5, 6], params)
    assert (got.finish_reason, got.token_ids, got.logprobs) == ("error", [], [])
    assert got.error.startswith("logits_processors: ")
    assert got.error.endswith("at position 4")


def with_gradient(output_ids, logits_V):
    return logits_V.requires_grad_()


def in_inference_mode(output_ids, logits_V):
    with torch.inference_mode():
        return logits_V * 1.0


def infinite(output_ids, logits_V):
    return torch.full_like(logits_V, torch.inf)


def meddling(output_ids, logits_V):
    output_ids.clear()
    return logits_V.zero_()


ODD_BUT_FINE = {
    "a gradient": {"logits_processors": (with_gradient,)},
    "inference mode": {"logits_processors": (in_inference_mode,)},
    "one value for all": {"logits_processors": (lambda i, x: torch.zeros(1).expand(x.shape),)},
    "a parameter": {"logits_processors": (lambda i, x: torch.nn.Parameter(x),)},
    "infinite": {"logits_processors": (infinite,)},
    "meddling": {"logits_processors": (meddling,)},
    "stop ids beyond the vocabulary": {"stop_token_ids": (10**6, 2**40), "min_tokens": 3},
    "the largest seed": {"seed": 2**64 - 1},
    "a huge k": {"k": 10**30},
    "a huge top_k": {"top_k": 10**30},
    "the hottest": {"temperature": 1e6},
    "nearly greedy": {"temperature": 1e-300},
    "the tightest top_p": {"top_p": 1e-300},
    "min_p 1": {"min_p": 1.0},
    "the largest penalties": {"repetition_penalty": 1e6, "frequency_penalty": 2.0},
    "the smallest penalties": {"repetition_penalty": 1e-6, "presence_penalty": -2.0},
    "every bias": {"logit_bias": dict.fromkeys(range(VOCAB), -100)},
    "an empty bias": {"logit_bias": {}},
    "all logprobs": {"logprobs": 20},
    "half a character": {"stop": "\ud800"},
    "a long stop string": {"stop": "x" * 100_000},
    "many stop strings": {"stop": tuple(chr(0x4E00 + i) for i in range(2000))},
}


@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("fields", ODD_BUT_FINE.values(), ids=ODD_BUT_FINE)
def test_odd_parameters_run(make_worded, fields, speculate):
    got = run_beside_another(
        make_worded(speculate=speculate), [5, 6, 5, 6], replace(PARAMS, **fields)
    )
    assert (got.finish_reason, got.error, len(got.token_ids)) == ("length", None, 6)


def test_logprobs_of_a_row_that_only_a_processor_saved(make_worded, worded_target, monkeypatch):
    """The model says NaN, a processor says what to draw: log-probabilities are NaN."""
    forward = worded_target.forward

    def poisoned(batch, *args, **kwargs):
        logits_QV = forward(batch, *args, **kwargs).clone()
        logits_QV[batch.tokens_T[batch.logit_rows_Q[: batch.num_logits]] == 77] = torch.nan
        return logits_QV

    monkeypatch.setattr(worded_target, "forward", poisoned)
    params = replace(PARAMS, logits_processors=(lambda i, x: torch.zeros_like(x),), logprobs=1)
    got = run_beside_another(make_worded(speculate="off"), [5, 77], params)
    assert (got.finish_reason, got.error, len(got.logprobs)) == ("length", None, 6)
    assert all(value != value for value in got.logprobs[0].values())


@pytest.mark.parametrize("victim", ["itself", "the other"])
@pytest.mark.parametrize("k", [0, 3])
def test_a_processor_that_aborts_requests(make_worded, victim, k):
    """In the middle of a step, at each of some places."""
    llm = make_worded(speculate="ngram", k=k)
    requests: dict[str, Any] = {}
    rng = random.Random(k)

    def deed(output_ids, logits_V):
        if len(output_ids) == 2:
            llm.engine.abort(requests[victim])
        return logits_V

    for _ in range(3):
        prompt = [rng.choice([5, 6]) for _ in range(8)]
        params = replace(PARAMS, logits_processors=(deed,))
        requests["itself"] = llm.submit(prompt, params)
        requests["the other"] = llm.submit(prompt, PARAMS)
        while llm.engine.has_work:
            llm.engine.step()
            llm.engine.check_integrity()
        assert requests[victim].finish_reason == "abort"
        check_all_returned(llm)
