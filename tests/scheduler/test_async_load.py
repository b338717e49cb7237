"""AsyncEngine under load and without any: refusals, who holds up whom, wake-ups, statistics."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.async_engine import AsyncEngine, EngineOverloaded
from pagedraft.tests.scheduler.async_runs import Gate, check_all_returned, run, until

pytestmark = pytest.mark.usefixtures("cpu_path", "no_polling")
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=1, ignore_eos=True)


def test_one_more_than_may_wait_is_refused_at_once(make_worded, worded_target, monkeypatch):
    gate = Gate(monkeypatch, worded_target)
    llm = make_worded(max_rows=2)

    async def main():
        async with AsyncEngine(llm, max_waiting=4) as engine:
            first = await engine.submit([5], PARAMS)
            await until(gate.is_reached.is_set)
            waiting = [await engine.submit([6], replace(PARAMS, n=n)) for n in (1, 2)]
            with pytest.raises(EngineOverloaded) as caught:
                await engine.submit([7], replace(PARAMS, n=2))
            last = await engine.submit([7], PARAMS)
            with pytest.raises(EngineOverloaded):
                await anext(engine.stream([7], PARAMS))
            stats = engine.stats()
            gate.is_open.set()
            for stream in (first, *waiting, last):
                await stream.completions()
            again = await engine.generate([7], replace(PARAMS, n=4))
            return str(caught.value), stats, again

    message, stats, again = run(main())
    assert message == (
        "max_waiting: 3 of 4 requests wait to be admitted, 1 run; no room for 2 more"
    )
    assert (stats.num_waiting, stats.num_running, stats.num_refused) == (4, 1, 3)
    assert len(again) == 4
    check_all_returned(llm)


def test_tokenising_holds_up_nobody(make_worded, monkeypatch):
    """Neither steps nor the event loop: others begin and end while a long prompt is read."""
    llm = make_worded()
    go_on = threading.Event()
    encode = llm.tokenizer.encode

    def slow(text, **kwargs):
        assert text != "long" or go_on.wait(20)
        return encode(text, **kwargs)

    monkeypatch.setattr(llm.tokenizer, "encode", slow)

    async def main():
        async with AsyncEngine(llm) as engine:
            long = asyncio.create_task(engine.generate("long", PARAMS))
            await asyncio.sleep(0)
            [short] = await engine.generate("abc", PARAMS)
            assert engine.stats().num_waiting == 1
            go_on.set()
            return short, (await long)[0]

    short, long = run(main())
    assert (short.finish_reason, long.finish_reason) == ("length", "length")


def test_an_idle_engine_sleeps(make_worded):
    async def main():
        async with AsyncEngine(make_worded()) as engine:
            await engine.generate([5], PARAMS)
            began, num_steps = time.process_time(), engine.stats().engine.num_steps
            await asyncio.sleep(0.4)
            return time.process_time() - began, engine.stats().engine.num_steps - num_steps

    seconds, num_steps = run(main())
    assert num_steps == 0
    assert seconds < 0.1


def count_wake_ups(monkeypatch, loop) -> list:
    """A list that grows with each time the engine's thread wakes the loop."""
    calls, call = [], loop.call_soon_threadsafe

    def counted(callback, *args, **kwargs):
        if threading.current_thread().name == "pagedraft-engine":
            calls.append(callback)
        return call(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    return calls


def test_the_event_loop_is_woken_once_a_step(make_worded, monkeypatch):
    async def main():
        async with AsyncEngine(make_worded(speculate="off")) as engine:
            streams = [await engine.submit([i], PARAMS) for i in range(3, 43)]
            with monkeypatch.context() as patch:
                calls = count_wake_ups(patch, asyncio.get_running_loop())
                for stream in streams:
                    await stream.completions()
            return len(calls), engine.stats().engine.num_steps

    num_calls, num_steps = run(main())
    assert num_calls <= num_steps


def test_an_event_loop_that_is_held_up_is_woken_once(make_worded, monkeypatch):
    async def main():
        async with AsyncEngine(make_worded(speculate="off")) as engine:
            stream = await engine.submit([5], PARAMS)
            first = await anext(stream)  # of one step, or of more on a busy machine
            with monkeypatch.context() as patch:
                calls = count_wake_ups(patch, asyncio.get_running_loop())
                deadline = time.monotonic() + 10
                while engine.stats().num_ended != {"length": 1} and time.monotonic() < deadline:
                    time.sleep(0.001)
            parts = [part async for part in stream]
            return len(calls), [len(part.token_ids) for part in (first, *parts)]

    num_calls, lengths = run(main())
    assert num_calls <= 1
    assert sum(lengths) == 6
    assert len(lengths) <= 3


def test_stats_count_what_came_and_went(make_worded):
    async def main():
        async with AsyncEngine(make_worded()) as engine:
            before = engine.stats()
            await engine.generate([5], replace(PARAMS, n=2))
            stream = engine.stream([5], replace(PARAMS, max_tokens=30))
            await anext(stream)
            await stream.aclose()
            await until(lambda: engine.stats().num_running == 0)
            return before, engine.stats()

    before, after = run(main())
    assert (before.num_submitted, before.num_ended) == (0, {})
    assert (after.num_submitted, after.num_ended) == (3, {"length": 2, "abort": 1})
    assert after.num_free_blocks == after.num_blocks
    assert after.engine.num_steps > before.engine.num_steps
