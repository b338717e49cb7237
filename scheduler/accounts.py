"""What a step that is done teaches: statistics, and the models of what steps and prompts cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pagedraft.scheduler.observer import StepRecord
from pagedraft.scheduler.rows import Step

if TYPE_CHECKING:
    from pagedraft.scheduler.engine import Engine


def account(engine: Engine, step: Step, record: StepRecord) -> None:
    """Feed the step to the engine's statistics, drafting, pace and swap, and complete its record.

    A step's seconds are all of it, host work included, from its plan on.
    """
    record.finished = time.perf_counter()
    seconds = record.finished - record.began
    num_fed = step.batch.num_tokens
    engine.speculation.record_step(
        record.scheduled, record.drafts, num_fed, record.num_kept, seconds
    )
    engine.pace.record(record.scheduled, seconds)
    if engine.prefixes.swap is not None:
        engine.prefixes.swap.policy.record_step(num_fed - step.batch.num_logits, seconds)
    used = owned = 0
    for request in engine.running:
        sequence = request.sequence
        used += sequence.num_written
        owned += len(sequence.block_ids)
    engine.stats.record(seconds, num_fed, record.num_kept, used, owned * engine.pool.block_size)
    record.num_waiting, record.num_running = len(engine.waiting), len(engine.running)
    record.num_free, record.num_evictable = engine.pool.num_free, engine.pool.num_evictable
