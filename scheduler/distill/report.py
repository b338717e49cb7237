"""The last phase of a distillation: what the draft is worth, on prompts of other sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagedraft.decoding.distill.judge import HeldOut, judge
from pagedraft.decoding.distill.report import document, render
from pagedraft.decoding.distill.taught import Taught
from pagedraft.decoding.estimate_text import Text
from pagedraft.decoding.load import default_sampling
from pagedraft.decoding.params import SamplingParams, logit_rules
from pagedraft.model.draft_folder import load_draft
from pagedraft.scheduler.distill.check import measure
from pagedraft.scheduler.distill.job import Job
from pagedraft.scheduler.distill.train import Outcome


def report(job: Job, outcome: Outcome, command: str) -> str:
    """Judge the draft, write the report beside it, and return the verdict in a line."""
    sizes = job.options.sizes
    with job.clock.phase("report"):
        texts = [held_out_text(job, text) for text in outcome.held_out]
        drafts = {
            name: load_draft(folder, job.target)
            for name, folder in (("before", outcome.start), ("after", outcome.out))
        }
        job.watch.say("judging the draft on held-out texts")
        judgement = judge(job.target, drafts, texts)
        job.watch.say("measuring it in the engine")
        some = [
            replace(one, text=_shortened(one.text, sizes.measured_tokens))
            for one in spread(texts, sizes.measured)
        ]
        measured = measure(job.target, drafts["after"], some, rounds=1)
    seconds = {name: round(value, 1) for name, value in job.clock.seconds.items()}
    facts = {"command": command, **outcome.facts, "seconds": seconds}
    found = document(facts, judgement, measured)
    render(outcome.out, found)
    return str(found["verdict"])


def held_out_text(job: Job, text: Taught) -> HeldOut:
    """A greedy text as the estimate takes it."""
    params = SamplingParams(max_tokens=job.max_tokens, temperature=0.0)
    stop_ids = frozenset(job.target.config.eos_token_ids)
    ids = text.token_ids.tolist()
    return HeldOut(
        Text(
            tuple(ids[: text.num_prompt]),
            tuple(ids[text.num_prompt :]),
            max_tokens=job.max_tokens,
            rules=logit_rules(params, default_sampling(job.folder), stop_ids),
        ),
        text.kind,
    )


def spread(texts: Sequence[HeldOut], count: int) -> list[HeldOut]:
    """``count`` of the texts, of all kinds in turn."""
    by_kind: dict[str, list[HeldOut]] = {}
    for text in texts:
        by_kind.setdefault(text.kind, []).append(text)
    found: list[HeldOut] = []
    while len(found) < min(count, len(texts)):
        for queue in by_kind.values():
            if queue and len(found) < count:
                found.append(queue.pop(0))
    return found


def _shortened(text: Text, max_tokens: int) -> Text:
    return replace(text, output_ids=text.output_ids[:max_tokens], max_tokens=max_tokens)
