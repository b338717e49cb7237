"""Engines whose models run from graphs: the same tokens as without, with and without drafts.

Without a GPU a capture keeps the function, and a replay runs it again on the runner's own inputs.
"""

from __future__ import annotations

from typing import Any

import pytest

from pagedraft.model.graphs import GraphRunner, Run
from pagedraft.scheduler.graph_runners import cuda_capture, graph_runners
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.warm_up import models_of, warm_up
from pagedraft.tests.scheduler.runs import mixed_params, random_prompts, run_staggered

pytestmark = pytest.mark.usefixtures("cpu_path")
OPTIONS: dict[str, Any] = {"block_size": 8, "kv_tokens": 640, "max_rows": 4, "k": 3}
# What speculates -> whether it has a draft model of its own
ENGINES = {"off": False, "ngram": False, "layers": False, "draft": True, "draft+suffix": True}


def fake_capture(device: Any) -> Any:
    def capture(run: Run) -> Run:
        run()
        return run

    return capture


def make(target, speculate: str) -> LLM:
    return LLM(target, target if ENGINES[speculate] else None, speculate=speculate, **OPTIONS)


@pytest.mark.parametrize("speculate", ENGINES)
def test_tokens_are_those_without_graphs(target, speculate):
    prompts, params = random_prompts(97, (20, 3, 41, 9, 30)), mixed_params(5, 12)
    expected = run_staggered(make(target, speculate), prompts, params)
    llm = make(target, speculate)
    engine = llm.engine
    runners = graph_runners(engine, make_capture=fake_capture)
    report = warm_up(engine, runners=runners)
    assert report.num_graphs == sum(len(runner.shapes) for runner in runners)
    engine.launcher.forward = runners[0].forward
    outcome = run_staggered(llm, prompts, params)
    assert outcome.token_ids == expected.token_ids
    assert all(runner.num_replays > 0 for runner in runners)
    engine.check_integrity()


def test_there_is_a_runner_a_model(target):
    engine = make(target, "draft+suffix").engine
    runners = graph_runners(engine, make_capture=fake_capture)
    assert [runner.cache for runner in runners] == engine.caches
    drafter: Any = engine.speculation.drafters["draft"]
    assert drafter.model is runners[1]
    assert max(shape.max_query_len for shape in runners[0].shapes) == 4
    assert max(shape.max_query_len for shape in runners[1].shapes) == 2
    assert isinstance(drafter.model, GraphRunner)
    assert [model.model for model in models_of(engine)] == [target, target]


@pytest.mark.parametrize(("k", "longest"), [(2, 3), ("auto", 9)])
def test_drafts_that_may_be_chosen_have_graphs(target, k, longest):
    engine = LLM(target, speculate="ngram", **{**OPTIONS, "k": k}).engine
    engine.speculation.controller.max_drafts = 8
    [runner] = graph_runners(engine, make_capture=fake_capture)
    assert max(shape.max_query_len for shape in runner.shapes) == longest


def test_a_processor_has_no_graphs(target):
    llm = make(target, "draft")
    assert graph_runners(llm.engine) == []
    drafter: Any = llm.engine.speculation.drafters["draft"]
    assert drafter.model is target
    assert cuda_capture(target.device) is None
