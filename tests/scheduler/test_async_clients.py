"""Clients of an AsyncEngine that go, at any time: within a step nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import replace

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.async_engine import AsyncEngine
from pagedraft.tests.scheduler.async_runs import (
    Gate,
    check_all_returned,
    outcome,
    read,
    run,
    until,
)
from pagedraft.tests.scheduler.contract_examples import TOKENIZER
from pagedraft.tests.scheduler.runs import random_prompts

pytestmark = pytest.mark.usefixtures("cpu_path", "no_polling")
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=180)


@pytest.mark.parametrize("options", [{}, {"kv_tokens": 240, "max_rows": 6}], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(2))
def test_random_cancels_disturb_nobody(make_worded, seed, options):
    """30 % of 100 clients go, at any time; the others get what they would have got alone."""
    choose = random.Random(seed)
    prompts = random_prompts(len(TOKENIZER), [1 + i % 9 for i in range(100)], seed)
    params = [replace(PARAMS, seed=i, stop=["a"] if i % 3 else None) for i in range(100)]
    goes = [choose.random() < 0.3 for _ in prompts]
    delays = [choose.random() * 0.3 for _ in prompts]
    llm = make_worded(**options)

    async def client(engine, index):
        await asyncio.sleep(choose.random() * 0.05)
        async with asyncio.timeout(delays[index] if goes[index] else None):
            return await read(engine, prompts[index], params[index])

    async def main():
        async with AsyncEngine(llm) as engine:
            tasks = [client(engine, index) for index in range(100)]
            return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(main())
    kept = [i for i in range(100) if not isinstance(results[i], BaseException)]
    assert {type(results[i]) for i in range(100)} <= {list, TimeoutError}
    assert len(kept) >= 100 - sum(goes)
    wanted = make_worded().generate([prompts[i] for i in kept], [params[i] for i in kept])
    assert [results[i] for i in kept] == [[outcome(c)] for c in wanted]
    check_all_returned(llm)


async def leave_loop(engine: AsyncEngine) -> None:
    async for _ in engine.stream([5], LONG):
        break


async def close_iterator(engine: AsyncEngine) -> None:
    parts = engine.stream([5], LONG)
    await anext(parts)
    await parts.aclose()


async def cancel_task(engine: AsyncEngine) -> None:
    task = asyncio.create_task(engine.generate([5], replace(LONG, n=3)))
    await until(lambda: engine.stats().num_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def time_out(engine: AsyncEngine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await engine.generate([5], LONG)


async def fail_in_loop(engine: AsyncEngine) -> None:
    async def read_and_fail() -> None:
        async for _ in engine.stream([5], LONG):
            raise OSError("client gone")

    with pytest.raises(OSError, match="client gone"):
        await read_and_fail()


async def drop_stream(engine: AsyncEngine) -> None:
    stream = await engine.submit([5], LONG)
    await anext(stream)
    del stream
    gc.collect()


async def abort_stream(engine: AsyncEngine) -> None:
    stream = await engine.submit([5], replace(LONG, n=2))
    await anext(stream)
    stream.abort()
    stream.abort()
    parts = [part async for part in stream]
    assert [p.finish_reason for p in parts if p.finish_reason] == ["abort"] * 2
    assert [c.finish_reason for c in await stream.completions()] == ["abort"] * 2


async def abort_before_the_first_step(engine: AsyncEngine) -> None:
    stream = await engine.submit([5], LONG)
    await stream.aclose()
    assert [part.finish_reason async for part in stream][-1] == "abort"


WAYS_TO_GO = [
    leave_loop,
    close_iterator,
    cancel_task,
    time_out,
    fail_in_loop,
    drop_stream,
    abort_stream,
    abort_before_the_first_step,
]


@pytest.mark.parametrize("go", WAYS_TO_GO)
def test_a_client_that_goes_leaves_nothing_behind(make_worded, go):
    llm = make_worded()

    async def main():
        async with AsyncEngine(llm) as engine:
            await go(engine)
            await until(lambda: not llm.engine.has_work)
            assert engine.stats().num_ended.keys() == {"abort"}
            assert engine.stats().engine.num_committed < 100
            check_all_returned(llm)
            return [outcome(c) for c in await engine.generate([5], PARAMS)]

    assert run(main()) == [outcome(c) for c in make_worded().generate([5], PARAMS)]


def test_an_abort_takes_effect_before_the_next_step(make_worded, worded_target, monkeypatch):
    gate = Gate(monkeypatch, worded_target)
    llm = make_worded(speculate="off")

    async def main():
        async with AsyncEngine(llm) as engine:
            stream = await engine.submit([5], LONG)
            await until(gate.is_reached.is_set)
            stream.abort()
            gate.is_open.set()
            return await stream.completions(), engine.stats().engine.num_steps

    [completion], num_steps = run(main())
    assert (completion.finish_reason, len(completion.token_ids), num_steps) == ("abort", 1, 1)


@pytest.mark.parametrize("where", ["queue", "tokeniser"])
def test_a_client_that_goes_while_it_waits_gives_its_place_back(
    make_worded, worded_target, monkeypatch, where
):
    gate = Gate(monkeypatch, worded_target)
    llm = make_worded(max_rows=1)

    async def main():
        async with AsyncEngine(llm, max_waiting=2) as engine:
            monkeypatch.setattr(llm.tokenizer, "encode", lambda text: gate.is_open.wait(20) and [5])
            running = await engine.submit([5], PARAMS)
            await until(gate.is_reached.is_set)
            prompt = "a" if where == "tokeniser" else [6]
            task = asyncio.create_task(engine.generate(prompt, PARAMS))
            await until(lambda: engine.stats().num_waiting == 1)
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.is_open.set()
            await until(lambda: engine.stats().num_waiting == 0)
            return await running.completions(), engine.stats().num_ended

    [completion], num_ended = run(main())
    assert completion.finish_reason == "length"
    assert num_ended == ({"length": 1, "abort": 1} if where == "queue" else {"length": 1})
    check_all_returned(llm)
