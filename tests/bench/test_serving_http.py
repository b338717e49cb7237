"""The client of OpenAI-compatible servers, against one that sends what a test says."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

import pytest

from pagedraft.bench.serving_http import Address, EventLines, HttpClient, first_model, spread
from pagedraft.bench.serving_load import Job
from pagedraft.bench.serving_run import TIME_LIMIT, Answer, OpenLoop, ServingError
from pagedraft.tests.bench.fake_sse import (
    DONE,
    HEAD,
    FakeServer,
    as_json,
    chunk,
    counting,
    event,
    in_chunks,
    until_close,
)

JOB = Job(0.0, "a prompt", 3, 4, True)


def ask(script, *, time_limit: float = 5.0, body=None, job: Job = JOB) -> tuple[Answer, FakeServer]:
    """One request to a server that plays ``script``."""
    with FakeServer(lambda _: script) as server:
        client = HttpClient(Address.of(server.url), "fake", body or {}, {"X-Key": "secret"})
        run = asyncio.run(OpenLoop(client.send, time_limit).run([job]))
    return run.answers[0], server


def cut(data: bytes, size: int) -> list[bytes | float]:
    """The bytes in packets of ``size``."""
    pieces: list[bytes | float] = []
    for begin in range(0, len(data), size):
        pieces += [data[begin : begin + size], 0.0005]
    return pieces


WHOLE = [event("a"), event("é🙂"), event("c", finish_reason="length"), event(usage=3), DONE]
CRLF = [piece.replace(b"\n", b"\r\n") for piece in WHOLE]
LENGTH = len(b"".join(WHOLE))
# name: (what is sent, tokens of each chunk, how they were counted)
GOOD = {
    "chunks of HTTP": (in_chunks(*WHOLE), [1, 1, 1], "usage, a token a chunk"),
    "until the connection ends": (until_close(*WHOLE), [1, 1, 1], "usage, a token a chunk"),
    "lines with CRLF": (in_chunks(*CRLF), [1, 1, 1], "usage, a token a chunk"),
    "a length": (
        [HEAD + b"Content-Length: %d\r\n\r\n" % LENGTH, *WHOLE],
        [1, 1, 1],
        "usage, a token a chunk",
    ),
    "packets of 7 bytes": (until_close(*cut(b"".join(WHOLE), 7)), [1, 1, 1], None),
    "packets of 11 bytes in chunks of HTTP": (
        [
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
            *cut(b"".join([*map(chunk, WHOLE), chunk(b"")]), 11),
        ],
        [1, 1, 1],
        None,
    ),
    "all in one packet": ([b"".join(in_chunks(*WHOLE))], [1, 1, 1], None),
    "comments and other fields": (
        in_chunks(b": ping\n\n", b"id: 4\n", WHOLE[0], b"\n", *WHOLE[1:]),
        [1, 1, 1],
        None,
    ),
    "token ids": (
        in_chunks(
            event("ab", token_ids=[1, 2]),
            event("", token_ids=[3]),
            event("", token_ids=[], finish_reason="stop"),
            DONE,
        ),
        [2, 1],
        "token ids",
    ),
    "log-probabilities": (
        in_chunks(
            event("a", logprobs={"tokens": ["a"]}),
            event("bcd", logprobs={"tokens": ["b", "cd"]}, finish_reason="length"),
            DONE,
        ),
        [1, 2],
        "logprobs",
    ),
    "usage in every chunk": (
        in_chunks(
            event("ab", usage=2), event("cde", usage=5, finish_reason="length"), event(usage=5)
        ),
        [2, 3],
        "usage",
    ),
    "usage in the last chunk with a choice": (
        in_chunks(event("a"), event("b"), event("", usage=2, finish_reason="stop"), DONE),
        [1, 1],
        "usage, a token a chunk",
    ),
    "more tokens than chunks": (
        in_chunks(event("ab"), event("cd"), event("ef", finish_reason="stop"), event(usage=7)),
        [3, 2, 2],
        "usage, spread",
    ),
    "fewer tokens than chunks": (
        in_chunks(*[event(c) for c in "abcde"], event(usage=2), DONE),
        [1, 1],
        "usage, spread",
    ),
    "nothing said": (
        in_chunks(event("ab"), event("", finish_reason=None), event("cd"), DONE),
        [1, 1],
        "a token a chunk, assumed",
    ),
    "no [DONE]": (in_chunks(event("a", finish_reason="length")), [1], "a token a chunk, assumed"),
    "a connection that stays open": (until_close(*WHOLE, 0.5), [1, 1, 1], None),
}


@pytest.mark.parametrize("script, counts, way", GOOD.values(), ids=GOOD)
def test_good_answers(script, counts, way):
    answer, _ = ask(script)
    assert answer.failure is None
    assert [count for _, count in answer.stats.emissions] == counts
    assert answer.counted_by == (way or "usage, a token a chunk")


def test_a_stream_that_stays_open_is_not_waited_for():
    answer, _ = ask(until_close(*WHOLE, 1.0), time_limit=0.9)
    assert answer.failure is None
    assert answer.ended - answer.sent < 0.9


def test_times_are_those_of_the_chunks():
    answer, _ = ask(in_chunks(0.05, event("a"), 0.3, event("b", finish_reason="length")))
    [(first, _), (second, _)] = answer.stats.emissions
    assert answer.stats.ttft > 0.05
    assert 0.1 < second - first < 5.0


def test_several_tokens_a_chunk_share_its_gap():
    ids = [event("a", token_ids=[1]), 0.06, event("bcd", token_ids=[2, 3, 4]), DONE]
    answer, _ = ask(in_chunks(*ids))
    [gap] = [later - before for (before, _), (later, _) in pairwise(answer.stats.emissions)]
    assert answer.stats.inter_token_latencies == [gap / 3] * 3
    assert gap > 0.01
    assert answer.token_ids == [1, 2, 3, 4]


# name: (what is sent, what the failure says, chunks that came before)
BAD = {
    "busy": (as_json("503 Service Unavailable", {"error": "full"}), r'HTTP 503: \{"error"', 0),
    "not found": ([b"HTTP/1.1 404 Not Found\r\n\r\nno such path"], "HTTP 404: no such path", 0),
    "no stream": (as_json("200 OK", {"choices": []}), "content-type: expected text/event", 0),
    "no HTTP": ([b"SSH-2.0-server\r\n"], "status: expected an HTTP answer", 0),
    "dropped before the status": ([], "connection: EOFError", 0),
    "dropped in a chunk": (
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk(event("a")), b"40\r\ndata: {"],
        "connection: IncompleteReadError",
        1,
    ),
    "dropped between chunks": (
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk(event("a"))],
        "connection: EOFError",
        1,
    ),
    "dropped before the length": (
        [HEAD + b"Content-Length: 9999\r\n\r\n", event("a")],
        "connection: EOFError",
        1,
    ),
    "dropped without a length": (until_close(event("a"), event("b")), "ended before the answer", 2),
    "half an event": (until_close(event("a"), event("b")[:-9]), "ended before the answer", 1),
    "an error in the stream": (
        in_chunks(event("a"), b'data: {"error": {"message": "out of memory"}}\n\n'),
        "error in the stream: .*out of memory",
        1,
    ),
    "no JSON": (in_chunks(event("a"), b"data: {nonsense\n\n"), "event: expected a completion", 1),
    "another JSON": (in_chunks(b'data: ["a"]\n\n'), "event: expected a completion chunk", 0),
    "a bad chunk size": (
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n"],
        "ValueError: invalid literal",
        0,
    ),
}


@pytest.mark.parametrize("script, says, num_chunks", BAD.values(), ids=BAD)
def test_bad_answers_fail_alone(script, says, num_chunks):
    answer, _ = ask(script)
    assert answer.is_failed
    with pytest.raises(RuntimeError, match=says):
        raise RuntimeError(answer.failure)
    assert len(answer.stats.emissions) == num_chunks


def test_a_slow_server_is_given_up_and_its_connection_closed():
    rows = [event("a"), *[0.02, event("b")] * 100]
    answer, server = ask(in_chunks(*rows), time_limit=0.5)
    assert answer.failure == TIME_LIMIT
    assert len(answer.stats.emissions) > 1
    assert answer.ended - answer.stats.submitted < 1.5
    assert server.num_dropped == 1


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    client = HttpClient(Address.of(url), "fake")
    run = asyncio.run(OpenLoop(client.send, 5.0).run([JOB]))
    assert "ConnectionRefusedError" in run.answers[0].failure


def test_what_is_sent():
    body = {"ignore_eos": True, "temperature": 0.5, "stream_options": None}
    answer, server = ask(in_chunks(*WHOLE), body=body)
    assert server.bodies == [
        {
            "model": "fake",
            "prompt": "a prompt",
            "max_tokens": 4,
            "temperature": 0.5,
            "stream": True,
            "ignore_eos": True,
        }
    ]
    assert server.paths == ["/v1/completions"]
    assert "X-Key: secret\r\n" in server.heads[0]
    assert answer.num_prompt == 7


def test_usage_is_asked_for():
    _, server = ask(in_chunks(*WHOLE))
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


ADDRESSES = {
    "http://box:8000": Address("box", 8000, False, "/v1"),
    "http://box:8000/": Address("box", 8000, False, "/v1"),
    "https://box/v1": Address("box", 443, True, "/v1"),
    "http://box/api/v1/completions": Address("box", 80, False, "/api/v1"),
}


@pytest.mark.parametrize("url", ADDRESSES)
def test_addresses(url):
    assert Address.of(url) == ADDRESSES[url]


@pytest.mark.parametrize("url", ["box:8000", "ftp://box", "http://"])
def test_wrong_addresses(url):
    with pytest.raises(ValueError, match="url: expected http"):
        Address.of(url)


def test_the_first_model_is_taken():
    with FakeServer(counting) as server:
        assert asyncio.run(first_model(Address.of(server.url), {})) == "fake/one"
        assert server.paths == ["/v1/models"]


def test_no_list_of_models(monkeypatch):
    monkeypatch.setattr(
        "pagedraft.tests.bench.fake_sse.as_json", lambda *_: as_json("200 OK", {"models": []})
    )
    with (
        FakeServer(counting) as server,
        pytest.raises(ServingError, match="models: expected a list"),
    ):
        asyncio.run(first_model(Address.of(server.url), {}))


def test_an_event_of_several_lines():
    lines = EventLines()
    assert list(lines.feed(b"data: a\ndata: b\n")) == []
    assert list(lines.feed(b"\ndata:c\n\n\n")) == ["a\nb", "c"]


@pytest.mark.parametrize(
    "total, num_chunks, counts",
    [(7, 3, [3, 2, 2]), (3, 3, [1, 1, 1]), (2, 5, [1, 0, 1, 0, 0]), (9, 1, [9])],
)
def test_spread(total, num_chunks, counts):
    assert list(spread(total, num_chunks)) == counts
