"""What a trace holds for a replay: arguments of events, written and read in one place.

Events of category ``replay`` carry all of it; every other event is for the eye. Requests go by
their ``arrival``: it is unique, and the replaying engine counts the same way.

``settings`` comes first. What was done to the engine is a ``submit``, ``abort``, ``preempt``,
``clear`` or ``raise`` (a callback's failure), what became of it a ``step`` or a ``fail`` (of one
that committed nothing). ``before_step`` is the number of steps that were complete, ``caller`` the
request whose callback did it, on the tokens of the last of those; the ``step`` itself may come
later in the file (observer.py), but before the second next. ``swaps`` are the decisions about
swapping since the event before (swap_policy.py).
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pagedraft.decoding.detokenize import OutputText
from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.logit_rules import LogitRules
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence
from pagedraft.scheduler.observer import StepRecord
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.trace_file import CATEGORY, read_lines

FORMAT = 1
CALLBACK_ERROR = "on_tokens: "
UNRECORDED = ("logits_processors", "temperature", "seed")  # callables, and what is resolved
REQUEST_FIELDS = ("priority", "tenant", "cache_salt", "ttft_ms", "itl_ms")


class Event(NamedTuple):
    """One event of a replay."""

    kind: str
    args: dict[str, Any]


def submission_args(request: Request) -> dict[str, Any]:
    """All that a request was submitted with.

    Seeds are text: they have up to 64 bits, and most readers of JSON keep 53.
    """
    sequence, params = request.sequence, request.params
    return {
        "request": request.arrival,
        "id": request.request_id,
        "prompt": list(sequence.token_ids),
        "num_prompt": sequence.num_prompt,
        "temperature": sequence.temperature,
        "seed": str(sequence.seed),
        "sample_index": sequence.sample_index,
        "accept": sequence.accept,
        "rules": _fields(sequence.rules),
        "params": {k: v for k, v in _fields(params).items() if k not in UNRECORDED},
        "stop_ids": sorted(request.stop_ids),
        "has_stop_text": request.output_text is not None,
        "max_context": request.max_context,
        "parent": number(request.parent),
        "num_processors": len(sequence.processors),
        **{name: getattr(request, name) for name in REQUEST_FIELDS},
    }


def build_request(
    args: Mapping[str, Any],
    parent: Request | None,
    tokenizer: Any,
    on_tokens: Callable[[list[int]], None],
) -> Request:
    """The request that ``submission_args`` described; raises ValueError where it cannot be made."""
    if args["num_processors"]:
        raise ValueError(
            f"request {args['id']!r}: it has logits processors, which are functions and not in the "
            "trace, so it cannot be replayed"
        )
    params = dict(args["params"])
    params["logit_bias"] = _int_keys(params.get("logit_bias"))
    resolved = SamplingParams(**params, temperature=args["temperature"], seed=int(args["seed"]))
    if args["has_stop_text"] and tokenizer is None:
        raise ValueError(
            f"request {args['id']!r}: its stop strings need a tokenizer, and the model has none"
        )
    rules = {k: _tuples(v) for k, v in args["rules"].items()}
    return Request(
        request_id=args["id"],
        sequence=Sequence(
            token_ids=list(args["prompt"]),
            num_prompt=args["num_prompt"],
            temperature=args["temperature"],
            seed=int(args["seed"]),
            rules=LogitRules(**rules),
            sample_index=args["sample_index"],
            accept=args["accept"],
        ),
        params=resolved,
        stop_ids=frozenset(args["stop_ids"]),
        max_context=args["max_context"],
        on_tokens=on_tokens,
        output_text=_output_text(resolved, tokenizer) if args["has_stop_text"] else None,
        parent=parent,
        **{name: args[name] for name in REQUEST_FIELDS},
    )


def step_args(record: StepRecord) -> dict[str, Any]:
    """What a step was given, chose and brought."""
    rows = [_row(request, span, record) for request, span in record.scheduled.items()]
    return {
        "step": record.index,
        "rows": rows,
        "admitted": [request.arrival for request in record.admitted],
        "preempted": [request.arrival for request in record.preempted],
        "prompt_budget": record.prompt_budget,
        "urgent": [request.arrival for request in record.urgent],
        "waiting": record.num_waiting,
        "running": record.num_running,
        "free": record.num_free,
        "evictable": record.num_evictable,
    }


def recorded_proposal(row: Mapping[str, Any], most: int) -> Proposal:
    """The drafts of a row, at most ``most`` of them."""
    tokens = list(row.get("drafts", ()))[:most]
    q = row.get("q")
    return Proposal(tokens, None if q is None else _unpack(q)[: len(tokens)])


def number(request: Request | None) -> int | None:
    """What a trace calls a request."""
    return None if request is None else request.arrival


def read_events(path: str | Path) -> Iterator[tuple[int, Event]]:
    """What a replay needs of a trace, with its line, in order; raises as ``read_lines`` does.

    Behind the last event of a trace that has no end comes one of kind ``cut``.
    """
    for line, event in read_lines(path):
        if event is None:
            yield line, Event("cut", {})
        elif event.get("cat") == CATEGORY:
            yield line, Event(str(event.get("name")), event.get("args", {}))


def _row(request: Request, span: int, record: StepRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"request": request.arrival, "span": span}
    wanted = record.wanted.get(request)
    if wanted:
        row["wanted"] = wanted
    proposal = record.drafts.get(request)
    if proposal is not None and proposal.tokens:
        row["drafts"] = proposal.tokens
        if proposal.q_KV is not None and request.sequence.accept != "match":
            row["q"] = _pack(proposal.q_KV)
    tokens = record.emitted.get(request)
    if tokens:
        row["tokens"] = tokens
    if request.finish_reason is not None:
        row["end"] = request.finish_reason
        if request.error is not None:
            row["error"] = request.error
    return row


def _pack(q_KV: torch.Tensor) -> dict[str, Any]:
    """A matrix of fp32 as text; q of a truncated distribution is mostly zeros and packs well."""
    array = np.ascontiguousarray(q_KV.detach().cpu().numpy(), dtype="<f4")
    packed = zlib.compress(array.tobytes(), 1)
    return {"shape": list(array.shape), "zlib": base64.b64encode(packed).decode()}


def _unpack(packed: Mapping[str, Any]) -> torch.Tensor:
    data = zlib.decompress(base64.b64decode(packed["zlib"]))
    return torch.from_numpy(np.frombuffer(data, "<f4").reshape(packed["shape"]).copy())


def _output_text(params: SamplingParams, tokenizer: Any) -> OutputText:
    return OutputText(
        tokenizer,
        stop=params.stop or (),
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )


def _fields(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def _int_keys(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    return None if bias is None else {int(token): value for token, value in bias.items()}


def _tuples(value: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
