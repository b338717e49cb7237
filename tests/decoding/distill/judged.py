"""Judgements for the tests of reports: tiny models, and figures made up."""

from __future__ import annotations

from pagedraft.decoding.distill.figures import (
    DrafterFigures,
    Figures,
    Judgement,
    Measured,
    MeasuredGroup,
    MeasuredRow,
    Pay,
    Place,
)
from pagedraft.decoding.estimate_costs import Costs
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.tiny import tiny_model

COSTS = Costs(12, (0.004, 0.005, 0.006), (0.0, 0.001, 0.0021), 0.0005, 0.0001, 0.05)


def near_model(folder, share: float = 0.15) -> Transformer:
    """The tiny model with noise on its weights: right about half of the time."""
    model, noise = tiny_model("llama"), tiny_model("llama", seed=1)
    for mine, other in zip(model.parameters(), noise.parameters(), strict=True):
        mine.data.lerp_(other.data, share)
    model.save_pretrained(folder)
    return Transformer.from_folder(folder)


def figures(alpha: float | None, tokens_per_pass: float) -> Figures:
    """Of 3 texts; k=2 is dearer than it brings."""
    places = (Place(40, 40, 23), Place(36, 21, 9))
    rows = (
        Pay(1, 40, tokens_per_pass, 1.0, 1.25, 0.25, 0.0625, 0.03125),
        Pay(2, 38, tokens_per_pass + 0.1, 1.9, 1.5, 0.5, 0.0625, 0.03125),
    )
    return Figures(3, 70, alpha, None if alpha is None else 0.517, places, rows)


EMPTY = Figures(1, 0, None, None, (), ())


def judgement(tokens_per_pass: float = 2.0, kinds: tuple[str, ...] = ("chat", "code")) -> Judgement:
    """Of a draft that is expected to give tokens_per_pass / 1.59375 at k=1."""

    def drafter(alpha: float | None, tokens: float) -> DrafterFigures:
        return DrafterFigures(
            COSTS, figures(alpha, tokens), {kind: figures(alpha, tokens + 0.25) for kind in kinds}
        )

    return Judgement(
        "cpu",
        2,
        "after",
        {
            "before": drafter(0.311, 1.1),
            "after": drafter(0.642, tokens_per_pass),
            "ngram": drafter(None, 1.2),
        },
    )


def measured(
    speedup: float = 1.283, noise: float = 0.024, num_same: int = 3, k: int = 1
) -> Measured:
    """With one k; of the kind "chat" alone."""
    row = MeasuredRow(
        k, 29.87, 1.861, 0.861, speedup, (speedup - 0.011, speedup, speedup + 0.012), num_same
    )
    group = MeasuredGroup(3, 70, 23.45, noise, (row,))
    return Measured(3, 0, group, {"chat": group})
