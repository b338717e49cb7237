"""The first phase of a distillation: the target writes texts, until its share of the time is up."""

from __future__ import annotations

import time
from typing import Any

from pagedraft.decoding.distill.taught import Taught, num_output_tokens
from pagedraft.scheduler.distill.job import Job
from pagedraft.scheduler.distill.texts import Writer

WRITE_SHARE = 0.5  # of the run's time
HELD_OUT, TEXTS = "held-out", "texts"


def write(job: Job) -> list[Taught]:
    """The texts to learn from; those that an earlier run has written are taken as they are."""
    state = job.state
    with job.clock.phase("write") as deadline:
        if state.last_shard(HELD_OUT) is None:
            _write_held_out(job)
        if state.read("written") is None:
            _write_until(job, None if job.options.texts is not None else deadline(WRITE_SHARE))
        texts = state.texts(TEXTS)
        if not texts and job.options.texts is None:
            raise ValueError("--minutes: too few for a single text; give more")
        if not texts:
            raise ValueError("--texts: the target ends at once after every prompt")
        state.write("written", {"texts": len(texts)})
    return texts


def _write_held_out(job: Job) -> None:
    writer = _writer(job, temperatures=(0.0,))
    written = writer.write(job.held_out_prompts[: job.options.sizes.held_out])
    texts = [text for _, text in sorted(written, key=lambda pair: pair[0]) if text is not None]
    if not texts:
        raise ValueError("--prompts: the target ends at once after every held-out prompt")
    job.state.add_texts(texts, HELD_OUT)


def _write_until(job: Job, end: float | None) -> None:
    """A shard after the other; the last one, at the deadline, as far as it got."""
    last, kept = job.state.last_shard(TEXTS), job.state.texts(TEXTS)
    options = job.options
    first = options.skip if last is None else last + options.sizes.shard
    num_texts, num_tokens = len(kept), num_output_tokens(kept)
    began = time.perf_counter()
    end_prompt = None if options.texts is None else options.skip + options.texts
    prompts = job.train_prompts[:end_prompt]
    if options.skip >= len(prompts):
        raise ValueError(
            f"--skip: expected fewer than the {len(prompts)} prompts there are, got {options.skip}"
        )
    writer = _writer(job)
    while first < len(prompts) and (end is None or time.perf_counter() < end):
        piece = prompts[first : first + options.sizes.shard]
        found: list[tuple[int, Taught]] = []
        for number, (index, text) in enumerate(writer.write(piece, first, end), start=1):
            if text is not None:
                found.append((index, text))
                num_tokens += text.num_output
            share = (first - options.skip + number) / (len(prompts) - options.skip)
            if end is not None:
                share = max(share, (time.perf_counter() - began) / max(end - began, 1e-9))
            job.watch.writing(num_texts + len(found), num_tokens, min(1.0, share))
        if found:
            found.sort(key=lambda pair: pair[0])
            job.state.add_texts([text for _, text in found], TEXTS, first)
        num_texts += len(found)
        first += len(piece)


def _writer(job: Job, **options: Any) -> Writer:
    sizes = job.options.sizes
    return Writer(
        job.target,
        seed=job.options.seed,
        max_prompt_tokens=job.max_prompt_tokens,
        max_tokens=job.max_tokens,
        max_rows=sizes.rows,
        with_prompts=True,
        **options,
    )
