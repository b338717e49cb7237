"""Host time of an engine step, beside a fake model on the CPU: what the device waits for.

    python -m pagedraft.bench.overhead [--rows 64] [--contexts 128] [--k 0 4] [--profile]

The real engine schedules, lays out batches, sets up draws, verifies and commits; the model is a
script (overhead_bed.py). What a device would run is subtracted: the model, and in a column of its
own ("draw") the kernels that draw and compare. So is host work that runs while the device does, in
a column of its own too ("behind"): drafters that learn, callbacks, observers. "host" is the rest,
what the device waits for; "total" is host and behind. (On the CPU callbacks run at the end of a
step; they are counted as on a GPU.) Rows are greedy unless ``--temperature`` says otherwise.
Contexts take turns of some steps, so that they see the same machine, and caches as warm as those of
an engine that runs alone. In every other step the functions of the engine are wrapped to find the
parts (overhead_parts.py); the totals are those of the steps between. Times are CPU time of the
thread, with wall time beside.
"loop" is what a fixed loop in plain Python took beside each step: neighbours on the same cores slow
both down. "quiet" is the host time at the speed of the fastest loop of the run, an estimate; limits
are judged by what was measured.

"turnover": answers of 200 tokens, so that requests end and start; elsewhere all rows decode,
and enter new blocks as they go.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pagedraft.bench.figures import as_json
from pagedraft.bench.overhead_bed import Bed, Case, set_up_is_no_garbage
from pagedraft.bench.overhead_parts import BEHIND, OTHER_PARTS, PARTS, REST, Probes
from pagedraft.bench.overhead_profile import print_profile
from pagedraft.bench.overhead_report import SHOWN, Result, context_ratios, figures, show
from pagedraft.bench.report import header, print_header, results_folder, write_json

ROWS, CONTEXTS, DRAFTS = (1, 16, 64, 256), (128, 32_768), (0, 4)
ANSWER = 200  # tokens, where requests end
LOOP = 2000  # passes through an empty loop
NUM_STEPS = {1: 240, 16: 200, 64: 100, 256: 50}  # of a case, half of them with probes
TURN, UNMEASURED = 10, 2  # steps of a case in turn, after some that warm its memory up


def measure(cases: Sequence[Case], num_steps: int, probes: Probes) -> list[Result]:
    """Step all cases in turn, ``num_steps`` measured steps each."""
    others = Probes({name: part for name, part in PARTS.items() if part in OTHER_PARTS})
    num_turns = -(-num_steps // TURN)
    beds = [Bed(case, num_turns * (TURN + UNMEASURED)) for case in cases]
    results = [Result(case, parts={name: [] for name in SHOWN}) for case in cases]
    with set_up_is_no_garbage():
        for _ in range(num_turns):
            for bed, result in zip(beds, results, strict=True):
                for _ in range(UNMEASURED):
                    bed.prepare()
                    bed.step()
                for index in range(TURN):
                    bed.prepare()
                    if index % 2:
                        _time_parts(bed, result, probes)
                    else:
                        _time_step(bed, result, others)
    for bed, result in zip(beds, results, strict=True):
        bed.check()
        result.accepted, result.num_ended = bed.accepted, bed.num_ended
    return results


def _time_parts(bed: Bed, result: Result, probes: Probes) -> None:
    with probes.installed():
        spent = probes.measure(bed.step)
    for name in SHOWN:
        result.parts[name].append(spent[name] / 1e3)


def _time_step(bed: Bed, result: Result, others: Probes) -> None:
    began = time.thread_time_ns()
    for _ in range(LOOP):
        pass
    result.loop.append((time.thread_time_ns() - began) / 1e3)
    with others.installed():
        began = time.perf_counter_ns()
        spent = others.measure(bed.step)
        wall = time.perf_counter_ns() - began
    result.host.append(spent[REST] / 1e3)
    result.total.append((spent[REST] + spent[BEHIND]) / 1e3)
    result.wall.append((wall - sum(spent[name] for name in OTHER_PARTS)) / 1e3)


def groups(options: argparse.Namespace) -> Iterator[list[Case]]:
    """The cases that take turns: contexts of the same rows and k, and turnover at the shortest."""
    shared = {"block_size": options.block_size, "temperature": options.temperature}
    for rows in options.rows:
        for k in options.k:
            steady = [Case(rows, context, k, **shared) for context in options.contexts]
            shortest = min(options.contexts)
            yield [*steady, Case(rows, shortest, k, answer=ANSWER, **shared)]


def profiled(options: argparse.Namespace) -> list[Case]:
    """The cases of ``--profile``: 64 rows where none are named, at the shortest context."""
    rows = (64,) if options.rows is ROWS else options.rows
    shape = (min(options.contexts), options.block_size, options.temperature)
    return [
        Case(row, shape[0], k, block_size=shape[1], temperature=shape[2])
        for row in rows
        for k in options.k
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    """CPU time of the thread is all of it only if no other one helps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.overhead")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, help="tokens")
    parser.add_argument("--k", nargs="+", type=int, default=DRAFTS, help="drafts a row")
    parser.add_argument("--steps", type=int, default=None, help="of every case")
    parser.add_argument("--block-size", type=int, default=64, help="tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="only print the dearest functions: 64 rows and each k unless --rows, --k say others",
    )
    parser.add_argument("--out", default=None, help="folder for the JSON")
    options = parser.parse_args(arguments)
    with _one_thread(), torch.inference_mode():
        if options.profile:
            for case in profiled(options):
                print_profile(case, options.steps or 100)
            return 0
        facts = header(torch.device("cpu"))
        print_header(facts)
        probes, results = Probes(), []
        for group in groups(options):
            steps = options.steps or NUM_STEPS.get(group[0].rows, 100)
            results += measure(group, steps, probes)
    show(results)
    document = {"bench": "overhead", **facts, "block_size": options.block_size}
    document["fastest_loop_us"] = min(min(result.loop) for result in results)
    document["rows"] = [result.document() for result in results]
    document["context_ratios"] = context_ratios(results)
    document["figures"] = as_json(figures(results))
    folder = Path(options.out) if options.out else results_folder(torch.device("cpu"))
    write_json(folder / "overhead.json", document)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
