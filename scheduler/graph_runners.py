"""Graphs of an engine's models: a runner in place of each forward pass, largest steps and all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pagedraft.model.feature_graphs import FeatureHeadRunner
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.graph_shapes import GraphLimits
from pagedraft.model.graphs import Capture, CudaCapture, GraphRunner
from pagedraft.scheduler.warm_up import models_of

if TYPE_CHECKING:
    from pagedraft.scheduler.engine import Engine

# A drafting model feeds one token a row, two after all drafts of a row were accepted. A feature
# head reads all that were.
CATCH_UP = 1


def cuda_capture(device: torch.device) -> Capture | None:
    """CUDA graphs where there is CUDA."""
    return CudaCapture(device) if device.type == "cuda" else None


def graph_runners(
    engine: Engine,
    table_RM: torch.Tensor | None = None,
    make_capture: Callable[[torch.device], Capture | None] = cuda_capture,
) -> list[GraphRunner]:
    """Return a runner for the target, then one for each model that drafts, which runs it at once.

    Nothing is captured yet: ``warm_up(engine, runners=...)`` does that. Who runs the target's is
    the engine's matter. table_RM: the engine's block table on the device.
    Without graphs on the engine's device there are no runners.
    """
    runners: list[GraphRunner] = []
    for run_model in models_of(engine):
        capture = make_capture(run_model.model.device)
        if capture is None:
            return []
        is_target, is_head = run_model.drafter is None, isinstance(run_model.model, FeatureHead)
        limits = GraphLimits(
            engine.max_rows,
            max_drafts=_most_drafts(engine) if is_target or is_head else CATCH_UP,
            max_kv_len=run_model.limits.max_context,
        )
        own: dict[str, Any] = {"table_RM": table_RM if is_target else None, "capture": capture}
        make: Callable[..., GraphRunner] = FeatureHeadRunner if is_head else GraphRunner
        runner = make(run_model.model, run_model.cache, limits, **own)
        if run_model.drafter is not None:
            run_model.drafter.model = runner  # type: ignore[attr-defined]
        runners.append(runner)
    return runners


def _most_drafts(engine: Engine) -> int:
    """Drafts a row that the controller may choose; requests that ask for more run without."""
    if not engine.speculation.drafters:
        return 0
    controller = engine.speculation.controller
    return controller.k if isinstance(controller.k, int) else controller.max_drafts
