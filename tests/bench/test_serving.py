"""The serving bench as a whole: on a tiny model in this process, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from pagedraft.bench import serving, serving_bed
from pagedraft.bench.figures import read_figures
from pagedraft.bench.serving_bed import InProcess, check_nothing_left, check_outputs
from pagedraft.bench.serving_load import MIXES, Job, Load, make_jobs
from pagedraft.bench.serving_options import parse, settings_of
from pagedraft.bench.serving_run import STOPPED, TIME_LIMIT, Answer, OpenLoop
from pagedraft.scheduler.async_engine import AsyncEngine
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.request import RequestStats
from pagedraft.tests.bench.fake_sse import FakeServer, as_json, counting
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serving") / "model"
    save_tiny(path, "llama")
    return path


@pytest.fixture
def llm(folder):
    return LLM(folder, kv_tokens=512, block_size=8, speculate="ngram", k=2)


LOAD = Load(MIXES["code"], rate=30.0, cv=1.0, seconds=0.3, lead=0.1, seed="a")
SMALL = ("--rates", "20", "--seconds", "0.4", "--lead", "0.1", "--search-seconds", "2")


def test_dry_run(folder, tmp_path, capsys):
    """Everything, with and without speculation, in two rounds."""
    more = ["--arrivals", "bursty", "--repeat", "2", "--speculate", "ngram"]
    arguments = ["--model", str(folder), *SMALL, *more, "--device", "cpu", "--out", str(tmp_path)]
    assert serving.main(arguments) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert json.loads((tmp_path / "serving-model.json").read_text()) == document
    assert document["outputs_compared"] == 8
    assert document["settings"]["seed"] == 0
    assert len(document["rows"]) == 2
    assert {row["speculation"] for row in document["rows"]} == {"off", "ngram"}
    [first, second] = document["rows"][0]["rounds"]
    assert first["requests"] == second["requests"] == 8
    assert (first["mean_prompt"], first["mean_new"]) == (64.0, 16.0)  # half of 128 positions
    assert first["failed"] == 0
    goodput = document["goodput"]
    assert [(one["arrivals"], one["speculation"]) for one in goodput] == [
        ("bursty", "off"),
        ("bursty", "ngram"),
    ]
    figures = {figure.name: figure for figure in read_figures(document)}
    assert figures["serving/bursty/code/ngram/goodput at 100 ms"].value == (goodput[1]["kept"] or 0)
    p99 = figures["serving/bursty/code/off/TTFT p99 at 20 per s"]
    assert (p99.unit, p99.better, p99.how) == ("ms", "lower", "measured")
    assert p99.low <= p99.value <= p99.high
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(
        f"serving-model-bursty-code-{chart}.png" for chart in ("curve", "ttft", "itl")
    )
    assert printed.count("no load can do better") == 2
    assert printed.count("goodput at 100 ms, ") == 2


def test_pairs_get_the_same_requests(llm):
    """With and without speculation: same prompts, same times, same answers; nothing is left."""

    async def measured():
        async with AsyncEngine(llm) as engine:
            bed = InProcess(engine, ("off", "ngram"), None)
            jobs = make_jobs(LOAD, bed.source("code"), 128)
            lines = [bed.line(speculation, speculation) for speculation in bed.speculations]
            return [await OpenLoop(line.send, 20.0).run(jobs) for line in lines]

    plain, drafted = asyncio.run(measured())
    outputs = [[a.token_ids for a in run.counted] for run in (plain, drafted)]
    assert outputs[0] == outputs[1]
    assert {len(output) for output in outputs[0]} == {16}
    assert not any(a.failure for a in (*plain.counted, *drafted.counted))
    chunks = [sum(len(a.stats.emissions) for a in run.counted) for run in (plain, drafted)]
    assert chunks[0] >= chunks[1]
    check_nothing_left(llm)


def test_requests_that_are_given_up_are_aborted(llm):
    """By their time limit, and by the end of the run: blocks and requests are gone."""
    jobs = [
        Job(0.0, [3] * 8, 8, 4, True),
        Job(0.0, [4] * 8, 8, 110, True),
        Job(0.001, [5] * 8, 8, 110, False),
    ]

    async def measured():
        async with AsyncEngine(llm) as engine:
            send = InProcess(engine, ("off",), 100.0).line("off", "a").send
            step = llm.engine.step

            def slow_step():
                time.sleep(0.02)
                return step()

            llm.engine.step = slow_step
            return await OpenLoop(send, 0.6).run(jobs)

    run = asyncio.run(measured())
    assert [answer.failure for answer in run.answers][:2] == [None, TIME_LIMIT]
    assert run.answers[2].failure in (TIME_LIMIT, STOPPED)
    assert 0 < len(run.answers[1].token_ids) < 110
    check_nothing_left(llm)


def test_what_is_left_is_seen(llm):
    llm.submit([3, 4], serving_bed.greedy(4, speculate=False))
    with pytest.raises(RuntimeError, match="the load left 0 running and 1 waiting"):
        check_nothing_left(llm)


JOB = Job(0.0, [3, 4], 2, 4, True)


def completed(llm: LLM, prompt: list[int], num_new: int) -> Answer:
    [completion] = llm.generate([prompt], serving_bed.greedy(num_new, speculate=False))
    answer = Answer(Job(0.0, prompt, len(prompt), num_new, True), RequestStats())
    answer.token_ids = completion.token_ids
    return answer


def test_the_gate_sees_another_token(llm):
    answers = [completed(llm, [3, 4, 5], 6), completed(llm, [8, 9], 5)]
    assert check_outputs(llm, answers, 0) == 2
    answers[1].token_ids[-1] += 1
    with pytest.raises(RuntimeError, match="the load changed the output"):
        check_outputs(llm, answers, 0)


def test_the_gate_sees_a_token_too_few(llm):
    answer = completed(llm, [3, 4, 5], 6)
    answer.token_ids.pop()
    with pytest.raises(RuntimeError, match="5 of 6 tokens"):
        check_outputs(llm, [answer], 0)


def test_the_gate_needs_an_answer(llm):
    with pytest.raises(RuntimeError, match="nothing to compare"):
        check_outputs(llm, [Answer(JOB, RequestStats(), failure=TIME_LIMIT)], 0)


ARGUMENTS = ("--rates", "20", "--seconds", "0.6", "--lead", "0.1", "--repeat", "1")


def test_a_server_is_measured(tmp_path, capsys):
    with FakeServer(counting) as server:
        more = ["--search-seconds", "0.5", "--label", "drafts", "--body", '{"ignore_eos": true}']
        arguments = ["--url", server.url, *ARGUMENTS, *more, "--out", str(tmp_path)]
        assert serving.main(arguments) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert document == json.loads((tmp_path / "serving-fake-one.json").read_text())
    assert document["where"] == "http"
    assert document["device"].startswith(server.url)
    assert document["outputs_compared"] == 0
    [row] = document["rows"]
    [only] = row["rounds"]
    assert only["requests"] == 12
    assert only["tokens_counted_by"] == {"token ids": 12}
    assert only["tokens a chunk"] == 2.0
    assert only["mean_prompt"] == 7.0  # as the server says
    names = {figure["name"] for figure in document["figures"]}
    assert "serving/poisson/code/drafts/TTFT p99 at 20 per s" in names
    assert "serving/poisson/code/drafts/goodput at 100 ms" in names
    prompts = {body["prompt"] for body in server.bodies}
    assert {len(prompt) for prompt in prompts} == {512}
    assert all(body["ignore_eos"] for body in server.bodies)


def test_a_server_that_only_fails_is_no_measurement(tmp_path, capsys):
    with FakeServer(lambda _: as_json("500 Oops", {"error": "broken"})) as server:
        arguments = ["--url", server.url, *ARGUMENTS, "--out", str(tmp_path)]
        assert serving.main(arguments) == 1
    assert "every request failed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


WRONG = {
    "a rate of 0": (["--rates", "0"], "--rates: expected a number above 0, got 0"),
    "no number": (["--rates", "fast"], "--rates: invalid number value"),
    "no time": (["--seconds", "0"], "--seconds: expected a number above 0"),
    "no rounds": (["--repeat", "0"], "--repeat: expected 1 or more"),
    "a resolution of 1": (["--resolution", "1"], "--resolution: expected a number above 1"),
    "time that runs back": (["--lead", "-1"], "--lead: expected 0 or more seconds"),
    "cv": (["--cv", "21"], "--cv: expected a number above 0 and at most 20"),
    "other arrivals": (["--arrivals", "uniform"], "invalid choice: 'uniform'"),
    "another mix": (["--mix", "books"], "invalid choice: 'books'"),
    "body without a server": (["--body", "{}"], "--body: is for --url"),
    "a label without a server": (["--label", "x"], "--label: is for --url"),
    "drafts of a server": (["--url", "http://x", "--draft", "d"], "--draft: is for the engine"),
    "another url": (["--url", "x:80"], "url: expected http://host:port"),
    "a body that is no object": (["--url", "http://x", "--body", "[1]"], "expected a JSON object"),
    "a body that is no JSON": (["--url", "http://x", "--body", "{"], "expected a JSON object"),
    "half a header": (["--url", "http://x", "--header", "a"], "expected 'Name: value'"),
}


@pytest.mark.parametrize("arguments, says", WRONG.values(), ids=WRONG)
def test_wrong_options(arguments, says, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_quick_is_a_default_that_options_change():
    quick = settings_of(parse(["--quick", "--rates", "3", "2", "3"]))
    assert quick.rates == (2.0, 3.0)
    assert quick.repeat == 1
    assert quick.search_seconds < settings_of(parse([])).search_seconds
    assert parse(["--url", "http://x", "--header", "A: b:c"]).header == {"A": "b:c"}
