"""AsyncEngine where the engine or one of its requests fails: nobody waits for ever."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pagedraft.decoding.detokenize import Detokenizer
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.async_engine import AsyncEngine, EngineDied
from pagedraft.tests.scheduler.async_runs import (
    check_all_returned,
    outcome,
    read,
    run,
    until,
)

pytestmark = pytest.mark.usefixtures("cpu_path", "no_polling")
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=180)


def crash_at(monkeypatch, target: Transformer, step: int, error: BaseException) -> None:
    """Let the target's forward pass number ``step`` and all later ones raise."""
    forward, calls = target.forward, []

    def crashing(*args, **kwargs):
        calls.append(1)
        if len(calls) >= step:
            raise error
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", crashing)


CRASHES = {
    "error": RuntimeError("device lost"),
    "interrupt": KeyboardInterrupt("stop"),
    "exit": SystemExit(3),
    "cancelled": asyncio.CancelledError("odd"),
}


@pytest.mark.parametrize("error", CRASHES.values(), ids=CRASHES)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_crash_fails_all_who_wait_and_all_who_come(
    make_worded, worded_target, monkeypatch, step, error
):
    crash_at(monkeypatch, worded_target, step, error)
    llm = make_worded(speculate="off", max_rows=4)

    async def main():
        async with AsyncEngine(llm) as engine:
            tasks = [read(engine, [5, 6], PARAMS), engine.generate([7], replace(PARAMS, n=4))]
            tasks += [engine.generate([8, i], PARAMS) for i in range(3, 9)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(EngineDied) as late:
                await engine.generate([5])
            await engine.shutdown()
            with pytest.raises(EngineDied):
                await anext(engine.stream([5]))
            return [*results, late.value]

    results = run(main())
    assert {type(result) for result in results} == {EngineDied}
    assert all(result.__cause__ is error for result in results)
    assert str(results[0]) == f"the engine died: {type(error).__name__}: {error}"
    assert len(set(map(id, results))) == len(results)


PHASES = {
    "plan": "pagedraft.model.block_pool.BlockPool.allocate",
    "keep": "pagedraft.scheduler.output.commit",
    "publish": "pagedraft.scheduler.prefix.Prefixes.publish",
    "draft": "pagedraft.scheduler.speculation.Speculation.propose",
    "decide": "pagedraft.scheduler.speculation.Speculation.decide",
    "statistics": "pagedraft.scheduler.metrics.EngineStats.record",
    "our own": "pagedraft.scheduler.engine_thread.EngineThread._updates",
}


@pytest.mark.parametrize("place", PHASES.values(), ids=PHASES)
def test_a_crash_in_any_phase_is_a_crash(make_worded, monkeypatch, place):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("bug")

    llm = make_worded()
    monkeypatch.setattr(place, fail)

    async def main():
        async with AsyncEngine(llm) as engine:
            tasks = [engine.generate([5, 6], PARAMS), read(engine, [7], PARAMS)]
            return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(result.__cause__) for result in run(main())] == [ZeroDivisionError] * 2


def test_what_came_before_a_crash_can_be_read(make_worded, worded_target, monkeypatch):
    crash_at(monkeypatch, worded_target, 4, RuntimeError("device lost"))

    async def main():
        async with AsyncEngine(make_worded(speculate="off")) as engine:
            stream = await engine.submit([5], PARAMS)
            with pytest.raises(EngineDied):
                await stream.completions()
            got = await anext(stream)
            with pytest.raises(EngineDied):
                await anext(stream)
        return got.token_ids

    got = run(main())
    monkeypatch.undo()
    assert got == make_worded().generate([[5]], PARAMS)[0].token_ids[:3]


def test_a_request_that_ended_before_a_crash_has_its_completion(
    make_worded, worded_target, monkeypatch
):
    async def main():
        async with AsyncEngine(make_worded(speculate="off")) as engine:
            done = await engine.submit([5], PARAMS)
            await until(lambda: engine.stats().num_ended)
            monkeypatch.setattr(engine.llm.engine, "step", None)
            with pytest.raises(EngineDied):
                await engine.generate([6], PARAMS)
            return await done.completions()

    assert run(main())[0].finish_reason == "length"


def test_an_engine_that_loses_a_request_is_dead(make_worded, monkeypatch):
    """Rather than that its client waits for ever."""
    llm = make_worded()
    monkeypatch.setattr(llm.engine, "add", lambda request: None)

    async def main():
        async with AsyncEngine(llm) as engine:
            with pytest.raises(EngineDied, match="lost requests: .'request-0'"):
                await engine.generate([5], PARAMS)

    run(main())


def test_a_request_that_somebody_else_ends_is_told(make_worded):
    """In one step with others that go on."""
    llm = make_worded(speculate="off")

    async def main():
        async with AsyncEngine(llm) as engine:
            other = await engine.submit([6], LONG)
            stream = await engine.submit([5], LONG)
            await anext(stream)
            step = llm.engine.step

            def step_and_end():
                llm.engine.abort(stream.requests[0])
                return step()

            llm.engine.step = step_and_end
            [ended] = await stream.completions()
            still_runs = not other.requests[0].finished
            other.abort()
            return ended, still_runs

    ended, still_runs = run(main())
    assert (ended.finish_reason, still_runs) == ("abort", True)


def test_a_submission_that_the_engine_refuses_fails_alone(make_worded, monkeypatch):
    """All samples of it, also those that were let in."""
    llm = make_worded()
    add = llm.engine.add

    def picky(request):
        if request.num_tokens == 3 and request.sequence.sample_index == 2:
            raise ValueError("prompt: not today")
        add(request)

    monkeypatch.setattr(llm.engine, "add", picky)

    async def main():
        async with AsyncEngine(llm) as engine:
            tasks = [engine.generate([5, 6], PARAMS)]
            tasks += [engine.generate([5, 6, 7], replace(PARAMS, n=4))]
            tasks += [read(engine, [5, 6, 7], replace(PARAMS, n=4))]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert engine.stats().num_waiting == 0
            await until(lambda: not llm.engine.has_work)
            assert engine.stats().num_ended == {"length": 1, "abort": 4}
            return results

    good, *bad = run(main())
    assert good[0].finish_reason == "length"
    assert [str(error) for error in bad] == ["prompt: not today"] * 2
    check_all_returned(llm)


@pytest.mark.parametrize("stop", [None, "zzz"], ids=["made by the reader", "made by the engine"])
def test_a_token_without_text_ends_its_sample_alone(make_worded, monkeypatch, stop):
    """The tokenizer fails on a token of one sample of three, which then runs no further."""
    params = replace(PARAMS, stop=stop, n=3, max_tokens=60)
    samples = [outcome(c) for c in make_worded().generate([[5, 6]], params)]
    others = {token for sample in samples[1:] for token in sample.token_ids}
    bad_token = next(token for token in samples[0].token_ids if token not in others)
    llm = make_worded()
    push = Detokenizer.push

    def picky(self, token_id):
        if token_id == bad_token:
            raise OverflowError("no such token")
        return push(self, token_id)

    async def main():
        async with AsyncEngine(llm) as engine:
            monkeypatch.setattr(Detokenizer, "push", picky)
            return await read(engine, [5, 6], params), engine.stats().num_ended

    (bad, *rest), num_ended = run(main())
    assert (bad.finish_reason, rest) == ("error", samples[1:])
    assert "OverflowError: no such token" in bad.error
    assert samples[0].token_ids[: len(bad.token_ids)] == bad.token_ids
    assert samples[0].text.startswith(bad.text)
    assert num_ended == {"length": 2, "error" if stop else "abort": 1}
    check_all_returned(llm)
