"""The command line of the serving bench."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from pagedraft.bench.serving_bed import MAX_CONTEXT
from pagedraft.bench.serving_http import Address
from pagedraft.bench.serving_load import ARRIVALS, MIXES
from pagedraft.bench.serving_measure import Settings

FULL: dict[str, Any] = {"rates": [0.5, 1.0, 2.0, 4.0], "seconds": 60.0, "lead": 10.0}
FULL |= {"repeat": 3, "time_limit": 60.0, "search_seconds": 1200.0}
QUICK: dict[str, Any] = {"rates": [1.0, 4.0], "seconds": 5.0, "lead": 1.0}
QUICK |= {"repeat": 1, "time_limit": 10.0, "search_seconds": 15.0}
SERVER_ONLY = ("served_model", "body", "header", "label", "max_context")
ENGINE_ONLY = ("draft", "speculate", "device", "kv_tokens")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with defaults filled in; wrong ones end the program as argparse does."""
    parser = _parser()
    options = parser.parse_args(arguments)
    is_server = options.url is not None
    for name in ENGINE_ONLY if is_server else SERVER_ONLY:
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag}: is for {'the engine, not for ' if is_server else ''}--url")
    if not is_server and options.model is None:
        options.model = "demo"
    if is_server:
        try:
            Address.of(options.url)
            options.header = dict(map(_header, options.header or ()))
            options.body = _body(options.body)
        except ValueError as error:
            parser.error(str(error))
    defaults = QUICK if options.quick else FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    defaults = {**defaults, "label": "server", "max_context": MAX_CONTEXT, "device": device}
    defaults["speculate"] = "by the server" if is_server else "auto"
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """What is measured."""
    names = ("seconds", "lead", "repeat", "time_limit", "target_ms", "cv", "resolution")
    return Settings(
        arrivals=tuple(dict.fromkeys(options.arrivals)),
        mixes=tuple(dict.fromkeys(options.mix)),
        rates=tuple(sorted(set(options.rates))),
        search_seconds=options.search_seconds,
        seed=options.seed,
        **{name: getattr(options, name) for name in names},
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.serving")
    add = parser.add_argument
    positive = _number(above=0.0)
    add("--arrivals", nargs="+", default=["poisson"], choices=tuple(ARRIVALS))
    add("--cv", type=_number(0.0, 20.0), default=ARRIVALS["bursty"], help="of bursty gaps")
    add("--mix", nargs="+", default=["code"], choices=tuple(MIXES))
    add("--rates", nargs="+", type=positive, help="requests a second")
    add("--seconds", type=positive, help="of arrivals that count, a run")
    add("--lead", type=_duration, help="seconds of arrivals before them")
    add("--repeat", type=_count, help="rounds, and runs of a rate that the search tries")
    add("--time-limit", type=positive, help="seconds until a request is given up")
    add("--target-ms", type=positive, default=100.0, help="for p99 TTFT and p99 ITL")
    add("--resolution", type=_number(above=1.0), default=1.1, help="of the search, a factor")
    add("--search-seconds", type=_duration, help="most for one search; 0: none")
    add("--quick", action="store_true", help="fits 90 s on two cores with the demo model")
    add("--seed", type=int, default=0)
    add("--model", help="local folder, hub id or demo; with --url: whose tokens prompts are")
    add("--out", help="folder for JSON and charts")
    engine = parser.add_argument_group("the engine in this process").add_argument
    engine("--speculate", help="auto, drafters by name, or off: no comparison")
    engine("--draft", help="a draft model")
    engine("--device", choices=("cuda", "cpu"))
    engine("--kv-tokens", type=_count, help="of the KV pool")
    engine(
        "--pace",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="tell the engine the target (ttft_ms, itl_ms)",
    )
    server = parser.add_argument_group("a server").add_argument
    server("--url", help="of an OpenAI-compatible server, as http://127.0.0.1:8000")
    server("--served-model", help="as the server names it; the first that it lists")
    server("--body", help='JSON object of more fields, as {"ignore_eos": true}; null takes one out')
    server("--header", action="append", help="Name: value")
    server("--label", help="stands in the figures' names where 'off' and drafters do")
    server("--max-context", type=_count, help="most tokens of prompt and output")
    return parser


def _number(above: float, most: float = math.inf) -> Any:
    def number(text: str) -> float:
        value = float(text)
        if not above < value <= most or math.isinf(value):
            limit = "" if math.isinf(most) else f" and at most {most:g}"
            wanted = f"expected a number above {above:g}{limit}, got {text}"
            raise argparse.ArgumentTypeError(wanted)
        return value

    return number


def _duration(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected 0 or more seconds, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        raise ValueError(f"--header: expected 'Name: value', got {text!r}")
    return name.strip(), value.strip()


def _body(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text or "{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ValueError(f"--body: expected a JSON object, got {text!r}")
    return body
