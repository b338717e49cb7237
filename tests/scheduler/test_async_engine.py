"""AsyncEngine: what coroutines get is what ``LLM.generate`` gives, however many there are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import accumulate

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.async_engine import AsyncEngine
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.scheduler.async_runs import (
    check_all_returned,
    joined,
    outcome,
    read,
    run,
    until,
)
from pagedraft.tests.scheduler.contract_examples import (
    ENDS,
    TOKENIZER,
    Oracle,
    examples,
)
from pagedraft.tests.scheduler.runs import random_prompts

pytestmark = pytest.mark.usefixtures("cpu_path", "no_polling")
VOCAB = len(TOKENIZER)
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=1, ignore_eos=True)
MIXED = [
    PARAMS,
    replace(PARAMS, temperature=0.0, logprobs=2),
    replace(PARAMS, stop=["a", "e", "!"], max_tokens=12),
    replace(PARAMS, stop=["ab"], logprobs=0, include_stop_str_in_output=True),
    replace(PARAMS, n=3, max_tokens=4),
    SamplingParams(max_tokens=5, temperature=1.5),
]


def expected(llm: LLM, prompts, params) -> list[list]:
    """Outcomes of ``generate``, a list of samples for each prompt."""
    rows = iter(map(outcome, llm.generate(prompts, params)))
    return [[next(rows) for _ in range(row.n)] for row in params]


LOADS = {
    "200 at once": (200, {}),
    "without drafts": (60, {"speculate": "off"}),
    "a small pool": (60, {"kv_tokens": 64, "max_rows": 5}),
}


@pytest.mark.parametrize("count, options", LOADS.values(), ids=LOADS)
def test_many_streams_are_what_generate_gives(make_worded, count, options):
    """With seeds of their own and without, with stop strings, several samples."""
    prompts = random_prompts(VOCAB, [1 + i % 9 for i in range(count)])
    params = [replace(MIXED[i % 6], seed=None if i % 6 == 5 else i) for i in range(len(prompts))]
    llm = make_worded(**options)

    async def main():
        async with AsyncEngine(llm, max_waiting=400) as engine:
            tasks = [read(engine, p, row) for p, row in zip(prompts, params, strict=True)]
            return await asyncio.gather(*tasks)

    assert run(main(), 60) == expected(make_worded(), prompts, params)
    check_all_returned(llm)


def test_generate_is_what_generate_gives(make_worded):
    prompts = ["abc", "", "é漢🙂", [5], [7, 8, 9]]
    prompts[1] = "a b" * 3
    llm = make_worded()

    async def main():
        async with AsyncEngine(llm) as engine:
            tasks = [engine.generate(prompt, MIXED[4]) for prompt in prompts]
            return [[outcome(c) for c in row] for row in await asyncio.gather(*tasks)]

    assert run(main()) == expected(make_worded(), prompts, [MIXED[4]] * 5)
    check_all_returned(llm)


@pytest.mark.parametrize("name", [name for name, end in ENDS.items() if not end.fills_context])
def test_parts_joined_are_the_text_wherever_it_ends(make_worded, name):
    """At each place in a span of accepted drafts, with halves of characters before it."""
    rows = examples(name)
    llm = make_worded(drafter=Oracle(), k=4)

    async def main():
        async with AsyncEngine(llm) as engine:
            return await asyncio.gather(*(read(engine, r.prompt, r.params) for r in rows))

    assert [(got.token_ids, got.text, got.finish_reason) for [got] in run(main())] == [
        (row.token_ids, row.text, row.end.finish_reason) for row in rows
    ]


def test_text_is_shown_as_soon_as_it_is_final(make_worded):
    """No part takes anything back, and a stop string is not shown in advance."""
    [row] = [row for row in examples("over three tokens") if len(row.token_ids) == 10]

    async def main():
        async with AsyncEngine(make_worded(speculate="off")) as engine:
            return [part async for part in engine.stream(row.prompt, row.params)]

    parts = run(main())
    shown_at = list(accumulate(["a", " b", "", "é", "c", "ab", " ", "", "", ""]))
    num_tokens = list(accumulate(len(part.token_ids) for part in parts))  # a late reader gets more
    assert num_tokens[-1] == len(shown_at)
    shown = list(accumulate(part.text for part in parts))
    assert shown == [shown_at[count - 1] for count in num_tokens]


def test_chat_is_what_chat_gives(make_worded):
    llms = [make_worded(), make_worded()]
    for llm in llms:
        llm.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]

    async def main():
        async with AsyncEngine(llms[0]) as engine:
            streamed = await read(engine, messages, PARAMS)
            return streamed, [outcome(c) for c in await engine.chat(messages, PARAMS)]

    wanted = [outcome(c) for c in llms[1].chat(messages, PARAMS)]
    assert run(main()) == (wanted, wanted)


def test_a_model_without_tokenizer_streams_ids(make_worded, worded_target, monkeypatch):
    monkeypatch.setattr(worded_target, "folder", None)

    async def main():
        async with AsyncEngine(make_worded()) as engine:
            with pytest.raises(ValueError, match="prompt: text needs a tokenizer"):
                await engine.generate("abc")
            return await read(engine, [5, 6], PARAMS)

    [got] = run(main())
    assert (len(got.token_ids), got.text) == (6, "")


def test_a_reader_that_sleeps_finds_its_parts_merged(make_worded):
    async def main():
        async with AsyncEngine(make_worded(speculate="off")) as engine:
            stream = await engine.submit([5, 6], replace(PARAMS, n=3, logprobs=0))
            await until(lambda: engine.stats().num_ended == {"length": 3})
            return [part async for part in stream]

    parts = run(main())
    assert [(part.index, len(part.token_ids), len(part.logprobs)) for part in parts] == [
        (index, 6, 6) for index in range(3)
    ]
    assert all(joined([part]) for part in parts)


def test_samples_take_turns_with_a_slow_reader(make_worded):
    """The first sample does not hold up the others' parts."""
    params = replace(PARAMS, n=3, max_tokens=30)

    async def main():
        indices = []
        async with AsyncEngine(make_worded(speculate="off")) as engine:
            async for part in engine.stream([5], params):
                indices.append(part.index)
                num_steps = engine.stats().engine.num_steps
                await until(
                    lambda n=num_steps: (
                        engine.stats().engine.num_steps >= n + 2 or not engine.stats().num_running
                    )
                )
        return indices

    assert {1, 2} <= set(run(main())[:6])


BAD = {
    "no tokens": ({"prompt": []}, ValueError, "prompt: expected at least one token"),
    "unknown token": ({"prompt": [VOCAB]}, ValueError, r"prompt\[0\]: expected a token id"),
    "negative token": ({"prompt": [-1]}, ValueError, r"prompt\[0\]: expected a token id"),
    "no prompt": ({"prompt": None}, TypeError, "prompt: expected text or a list"),
    "half a character": ({"prompt": "\ud83d"}, ValueError, "prompt: expected Unicode text"),
    "too long": ({"prompt": [5] * 200}, ValueError, "prompt: 200 tokens leave no room"),
    "params": ({"params": {"n": 2}}, TypeError, "params: expected SamplingParams"),
    "bias": ({"params": SamplingParams(logit_bias={VOCAB: 1})}, ValueError, "logit_bias: expected"),
    "priority": ({"priority": "high"}, TypeError, "priority: expected an integer"),
    "tenant": ({"tenant": []}, TypeError, "tenant: expected"),
    "salt": ({"cache_salt": {}}, TypeError, "cache_salt: expected"),
    "first-token target": ({"ttft_ms": -3}, ValueError, "ttft_ms: expected a number > 0, got -3"),
    "target of another type": ({"itl_ms": "5"}, TypeError, "itl_ms: expected a number > 0"),
    "unknown option": ({"user": "me"}, TypeError, "user"),
    "too many samples": ({"params": replace(PARAMS, n=9)}, ValueError, "n: expected at most"),
    "no template": ({"prompt": [{"role": "user", "content": "a"}]}, ValueError, "chat template"),
}


@pytest.mark.parametrize("arguments, kind, message", BAD.values(), ids=BAD)
def test_a_bad_submission_is_refused_alone(make_worded, arguments, kind, message):
    llm = make_worded()
    llm.tokenizer.chat_template = None

    async def main():
        async with AsyncEngine(llm, max_waiting=8) as engine:
            good = await engine.submit([5, 6], PARAMS)
            with pytest.raises(kind, match=message):
                await engine.submit(**{"prompt": [5], "params": PARAMS} | arguments)
            assert [c.finish_reason for c in await good.completions()] == ["length"]
            assert engine.stats().num_waiting == 0
            assert engine.stats().num_submitted == 1

    run(main())
    check_all_returned(llm)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, None])
def test_max_waiting_is_checked(make_worded, value):
    with pytest.raises((TypeError, ValueError), match="max_waiting: expected an integer >= 1"):
        AsyncEngine(make_worded(), max_waiting=value)
