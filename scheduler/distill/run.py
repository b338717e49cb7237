"""One distillation from prompts to a draft's folder, in phases that can be interrupted.

write      the target continues prompts until a share of the time is spent
train      the student learns them, for as many steps as the rest of the time allows; between
           parts of it the draft may write texts of its own, which the target judges ("on-policy")
report     acceptance and speed, before and after, on prompts of other sources
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagedraft.scheduler.distill.job import Watch, prepare
from pagedraft.scheduler.distill.options import DistillOptions
from pagedraft.scheduler.distill.report import report
from pagedraft.scheduler.distill.train import Outcome, train
from pagedraft.scheduler.distill.write import write


class DistillRun:
    """Runs ``options``; every phase picks up where an earlier run was interrupted.

    job: what the phases share.
    """

    def __init__(self, options: DistillOptions, watch: Watch | None = None) -> None:
        self.job = prepare(options, watch or Watch())

    def run(self) -> Outcome:
        """Write and train; another run may go on from wherever this is interrupted."""
        with self._closing():
            return train(self.job, write(self.job))

    def report(self, outcome: Outcome, command: str) -> str:
        """Judge the draft and write the report; return the verdict in a line."""
        with self._closing():
            return report(self.job, outcome, command)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.job.state.close()
            raise
