"""The beginning and the end of an AsyncEngine: drained or not, left by an exception, forgotten."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.async_engine import AsyncEngine, EngineClosed
from pagedraft.tests.scheduler.async_runs import (
    Gate,
    check_all_returned,
    check_no_thread_left,
    outcome,
    raises,
    run,
    until,
)

pytestmark = pytest.mark.usefixtures("cpu_path", "no_polling")
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=180)


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("num_calls", [1, 3])
def test_shutdown_with_running_and_waiting_requests(make_worded, drain, num_calls):
    llm = make_worded(max_rows=2)

    async def main():
        engine = AsyncEngine(llm)
        await engine.start()
        streams = [await engine.submit([5], replace(LONG, max_tokens=20)) for _ in range(6)]
        await anext(streams[0])
        calls = [asyncio.create_task(engine.shutdown(drain)) for _ in range(num_calls)]
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed, match="AsyncEngine: it (is being|was) shut down"):
            await engine.submit([5])
        await asyncio.gather(*calls)
        check_no_thread_left()
        with pytest.raises(EngineClosed):
            await engine.generate([5])
        return [(await stream.completions())[0] for stream in streams]

    completions = run(main())
    reason, length = ("length", 20) if drain else ("abort", None)
    assert [c.finish_reason for c in completions] == [reason] * 6
    assert not drain or {len(c.token_ids) for c in completions} == {length}
    check_all_returned(llm)


def test_a_drain_may_become_an_abort(make_worded):
    async def main():
        async with AsyncEngine(make_worded()) as engine:
            stream = await engine.submit([5], LONG)
            await anext(stream)
            draining = asyncio.create_task(engine.shutdown())
            await asyncio.sleep(0)
            await asyncio.gather(engine.shutdown(drain=False), draining, engine.shutdown())
            return await stream.completions()

    assert run(main())[0].finish_reason == "abort"


def test_a_drain_waits_for_what_is_being_tokenised(make_worded, monkeypatch):
    llm = make_worded()
    go_on, encode = threading.Event(), llm.tokenizer.encode

    async def main():
        async with AsyncEngine(llm) as engine:
            monkeypatch.setattr(
                llm.tokenizer, "encode", lambda text: go_on.wait(20) and encode(text)
            )
            task = asyncio.create_task(engine.generate("abc", PARAMS))
            await until(lambda: engine.stats().num_waiting)
            draining = asyncio.create_task(engine.shutdown())
            await asyncio.sleep(0.01)
            go_on.set()
            await draining
            return await task

    assert run(main())[0].finish_reason == "length"


def test_a_drain_does_not_wait_for_a_client_that_has_gone(make_worded, monkeypatch):
    """One that went while its prompt was tokenised."""
    llm = make_worded()
    go_on = threading.Event()

    async def main():
        async with AsyncEngine(llm) as engine:
            monkeypatch.setattr(llm.tokenizer, "encode", lambda text: go_on.wait(20) and [5])
            task = asyncio.create_task(engine.generate("abc", PARAMS))
            await until(lambda: engine.stats().num_waiting)
            draining = asyncio.create_task(engine.shutdown())
            await asyncio.sleep(0.02)
            task.cancel()
            await draining
            go_on.set()

    run(main())


def test_a_shutdown_refuses_what_is_being_tokenised(make_worded, monkeypatch):
    llm = make_worded()
    go_on, encode = threading.Event(), llm.tokenizer.encode

    async def main():
        async with AsyncEngine(llm) as engine:
            monkeypatch.setattr(
                llm.tokenizer, "encode", lambda text: go_on.wait(20) and encode(text)
            )
            task = asyncio.create_task(engine.generate("abc", PARAMS))
            await until(lambda: engine.stats().num_waiting)
            await engine.shutdown(drain=False)
            go_on.set()
            with pytest.raises(EngineClosed):
                await task

    run(main())
    check_all_returned(llm)


def test_a_shutdown_cancels_nobody(make_worded, monkeypatch):
    """Prompts that no tokeniser thread has begun with, too."""
    llm = make_worded()
    go_on, encode = threading.Event(), llm.tokenizer.encode

    async def main():
        async with AsyncEngine(llm) as engine:
            monkeypatch.setattr(
                llm.tokenizer, "encode", lambda text: go_on.wait(20) and encode(text)
            )
            tasks = [asyncio.create_task(engine.generate("abc", PARAMS)) for _ in range(6)]
            await until(lambda: engine.stats().num_waiting == 6)
            await engine.shutdown(drain=False)
            go_on.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(answer) for answer in run(main())] == [EngineClosed] * 6
    check_all_returned(llm)


def test_a_second_engine_on_an_llm_is_refused(make_worded):
    llm = make_worded()

    async def main():
        async with AsyncEngine(llm) as engine:
            other = AsyncEngine(llm)
            with pytest.raises(RuntimeError, match="another AsyncEngine runs on it"):
                await other.start()
            await other.shutdown()
            assert (await engine.generate([5], PARAMS))[0].finish_reason == "length"
        await other.start()
        await other.shutdown()
        return llm.owner

    assert run(main()) is None


def test_a_shutdown_after_a_start_that_failed_is_a_no_op(make_worded, monkeypatch):
    llm = make_worded()

    async def main():
        engine = AsyncEngine(llm)
        monkeypatch.setattr(llm.tokenizer, "encode", raises(OSError("no tokens")))
        with pytest.raises(OSError, match="no tokens"):
            await engine.start()
        monkeypatch.undo()
        await engine.shutdown()
        async with AsyncEngine(llm) as other:
            return await other.generate([5], PARAMS)

    assert run(main())[0].finish_reason == "length"


def test_a_shutdown_waits_for_a_start(make_worded):
    async def main():
        engine = AsyncEngine(make_worded())
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        await engine.shutdown()
        assert starting.done()
        check_no_thread_left()

    run(main())


def test_a_block_that_is_left_by_an_exception_aborts(make_worded):
    streams = []

    async def serve_and_fail():
        async with AsyncEngine(make_worded()) as engine:
            streams.append(await engine.submit([5], LONG))
            await anext(streams[0])
            raise OSError("out")

    async def main():
        with pytest.raises(OSError, match="out"):
            await serve_and_fail()
        return await streams[0].completions()

    assert run(main())[0].finish_reason == "abort"


def test_a_cancelled_drain_aborts(make_worded, worded_target, monkeypatch):
    gate = Gate(monkeypatch, worded_target)
    llm = make_worded()

    async def serve(streams):
        async with AsyncEngine(llm) as engine:
            streams.append(await engine.submit([5], LONG))
            await until(gate.is_reached.is_set)

    async def main():
        streams = []
        task = asyncio.create_task(serve(streams))
        await until(gate.is_reached.is_set)
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0.02)
        gate.is_open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await streams[0].completions()

    assert run(main())[0].finish_reason == "abort"
    check_all_returned(llm)


def test_an_event_loop_that_is_closed_ends_the_thread(make_worded, monkeypatch):
    """With requests in it, and without; the LLM is free again."""
    monkeypatch.setattr("pagedraft.scheduler.engine_thread.ORPHAN_CHECK_SECONDS", 0.05)
    llm = make_worded()
    wanted = [outcome(c) for c in make_worded().generate([5], PARAMS)]

    async def leave(prompts):
        engine = AsyncEngine(llm)
        await engine.start()
        return engine, [await engine.submit(prompt, LONG) for prompt in prompts]

    for prompts in ([[5], [6]], []):
        loop = asyncio.new_event_loop()
        kept = loop.run_until_complete(leave(prompts))
        loop.close()
        kept[0]._tokenisers.shutdown()
        check_no_thread_left()
        check_all_returned(llm)
    assert [outcome(c) for c in llm.generate([5], PARAMS)] == wanted


def test_another_event_loop_is_refused(make_worded):
    engines = []

    async def other():
        for use in (engines[0].submit([5]), engines[0].generate([5]), engines[0].shutdown()):
            with pytest.raises(RuntimeError, match="expected the event loop that it was started"):
                await use
        with pytest.raises(RuntimeError, match="started before"):
            await engines[0].start()

    async def main():
        async with AsyncEngine(make_worded()) as engine:
            engines.append(engine)
            await asyncio.to_thread(asyncio.run, other())
            return await engine.generate([5], PARAMS)

    assert run(main())[0].finish_reason == "length"


def test_an_engine_that_was_not_started(make_worded):
    async def main():
        engine = AsyncEngine(make_worded())
        with pytest.raises(RuntimeError, match="expected 'async with' or start"):
            await engine.generate([5])
        assert engine.stats().num_waiting == 0
        await engine.shutdown()

    run(main())


def test_an_llm_has_one_user_at_a_time(make_worded):
    llm = make_worded()

    async def main():
        request = llm.submit([5], PARAMS)
        with pytest.raises(RuntimeError, match="llm: expected one without requests"):
            await AsyncEngine(llm).start()
        llm.engine.abort(request)
        for _ in range(2):
            async with AsyncEngine(llm) as engine:
                assert (await engine.generate([5], PARAMS))[0].finish_reason == "length"

    run(main())
