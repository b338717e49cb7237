"""Training a draft on taught texts: AdamW, warm-up, cosine, clipped gradients, and checkpoints.

Everything follows from the seed and the number of steps: which texts make up which batch is
computed from them, not drawn on the way. So a run that is resumed is the run that was not
interrupted, to the bit on the same machine and threads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from pagedraft.decoding.distill.batches import Batch, make_batch, plan_batches, shift
from pagedraft.decoding.distill.losses import LOSSES, LossResult, distill_loss
from pagedraft.decoding.distill.precision import DTYPES, products_in, resolve_dtype
from pagedraft.decoding.distill.student import FUSE, Student
from pagedraft.decoding.distill.taught import Taught, write_tensors

HINT = "; remove it to train anew"
CHECKPOINT_FORMAT = "pagedraft distill checkpoint 1"
DECAY = 0.8
MAX_RATE = 1e3
FINAL_RATE = 0.05  # of the learning rate, at the last step
LAST_SHARE = 0.3  # of the steps, for the last loss


@dataclass(frozen=True)
class TrainOptions:
    """loss: a name of LOSSES. batch_tokens: most tokens of a batch, prompts and padding included.

    learning_rate: at its highest, after ``warm_up`` steps; a cosine takes it to FINAL_RATE of that.
    clip: most norm of the gradient. betas, weight_decay: AdamW's.
    unroll: of a feature head: how many drafts in a row it learns to make, reading its own states
        after the first; each counts DECAY times the one before.
    state_weight: of a feature head: how much it counts how far its states are from the target's,
        which later drafts in a row read in their place: smooth L1 of both before the final norm's
        weight.
    dtype: of products, a name of DTYPES or "auto", see precision.py.
    prompts: learn at the tokens of prompts, too, where the target has read them.
    last_loss: in place of ``loss`` in the last LAST_SHARE of the steps; None: ``loss`` to the end.
    """

    loss: str = "forward_kl"
    batch_tokens: int = 256
    learning_rate: float = 2e-3
    warm_up: int = 30
    clip: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = 0
    unroll: int = 1
    state_weight: float = 0.0
    dtype: str = "fp32"
    prompts: bool = True
    last_loss: str | None = None

    def __post_init__(self) -> None:
        for name, loss in (("loss", self.loss), ("last_loss", self.last_loss or self.loss)):
            if loss not in LOSSES:
                raise ValueError(f"{name}: expected one of {list(LOSSES)}, got {loss!r}")
        if not 0 < self.learning_rate <= MAX_RATE:
            raise ValueError(
                f"learning_rate: expected above 0 and at most {MAX_RATE:g}, got "
                f"{self.learning_rate}"
            )
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype: expected one of {['auto', *DTYPES]}, got {self.dtype!r}")
        if not 0 <= self.state_weight < math.inf:
            raise ValueError(f"state_weight: expected at least 0, got {self.state_weight}")
        for name in ("batch_tokens", "warm_up", "unroll"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def resolve(self, device: torch.device) -> TrainOptions:
        """The same with a dtype of DTYPES."""
        return replace(self, dtype=resolve_dtype(self.dtype, device))

    def loss_at(self, step: int, num_steps: int) -> str:
        """The loss of step ``step``, from 0 on."""
        if self.last_loss is None or step < (1 - LAST_SHARE) * num_steps:
            return self.loss
        return self.last_loss

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of step ``step``, from 0 on."""
        done = min(1.0, step / max(1, num_steps))
        cosine = FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * cosine * min(1.0, (step + 1) / self.warm_up)


class Progress(NamedTuple):
    """What a step showed, as means over its num_tokens written tokens."""

    loss: float
    alpha: float
    agree: float
    num_tokens: int


def read_first(file: str | Path) -> int:
    """The first step of the texts that a checkpoint's training was at, see ``Trainer.use``."""
    try:
        with safe_open(str(file), "pt") as opened:
            return int(json.loads((opened.metadata() or {})["facts"])["first"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}{HINT}") from None


class Diverged(ValueError):
    """Training has come to numbers that are none."""


class Trainer:
    """Trains ``student`` in place.

    head_UE: fp32, rows of the target's head for the tokens that the draft may propose.
    num_steps: of the whole run, which the learning rate follows. step: how many are done.
    first: the step at which the texts that it learns now came in, see ``use``.
    is_whole: False inside a step's update, and for good where that was interrupted.
    """

    def __init__(
        self,
        student: Student,
        head_UE: torch.Tensor,
        texts: Sequence[Taught],
        options: TrainOptions,
        num_steps: int,
    ) -> None:
        if not texts:
            raise ValueError("texts: expected at least one to train on, got none")
        if num_steps < 1:
            raise ValueError(f"num_steps: expected at least 1, got {num_steps}")
        self.student = student
        self.options = options = options.resolve(head_UE.device)
        self.num_steps = num_steps
        self.step = 0
        self.is_whole = True
        self._head_UE = head_UE.to(DTYPES[options.dtype])
        self._optimizer = torch.optim.AdamW(
            student.parameters(),
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
        )
        self.use(texts, 0)

    def use(self, texts: Sequence[Taught], first: int) -> None:
        """Learn from these texts, whose first step is ``first``; at most ``step``."""
        self._texts, self.first = list(texts), first
        self._epoch = -1
        self._batches: list[list[int]] = []
        self._num_before = first  # steps before this epoch

    def advance(self) -> Progress:
        """Run one step."""
        texts = [self._texts[i] for i in self._next()]
        batch = self._batch(texts, with_prompts=self.options.prompts)
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.rate(self.step, self.num_steps)
        result = self._loss(batch, self.options.loss_at(self.step, self.num_steps))
        self._optimizer.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.options.clip)
        self.is_whole = False
        self._optimizer.step()
        self.step += 1
        self.is_whole = True
        return Progress(
            result.loss.item(),
            result.alpha_N.mean().item(),
            result.agree_N.float().mean().item(),
            len(result.alpha_N),
        )

    @torch.no_grad()
    def examine(self, texts: Sequence[Taught]) -> Progress:
        """The means over other texts, without learning from them."""
        total, sums = 0, [0.0, 0.0, 0.0]
        for indices in plan_batches(texts, self.options.batch_tokens, self.options.seed, 0):
            result = self._loss(self._batch([texts[i] for i in indices]), self.options.loss)
            count = len(result.alpha_N)
            total += count
            means = (result.loss, result.alpha_N.mean(), result.agree_N.float().mean())
            sums = [old + count * mean.item() for old, mean in zip(sums, means, strict=True)]
        loss, alpha, agree = (value / total for value in sums)
        return Progress(loss, alpha, agree, total)

    def save(self, file: str | Path) -> None:
        """Write a checkpoint, whole or not at all."""
        tensors = {}
        for name, weight in self.student.weights.items():
            tensors[f"weight.{name}"] = weight.detach()
            for key, value in self._optimizer.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value.reshape(-1) if value.ndim == 0 else value
        metadata = {
            "format": CHECKPOINT_FORMAT,
            "step": str(self.step),
            "facts": json.dumps(self._facts()),
        }
        write_tensors(file, {name: t.contiguous() for name, t in tensors.items()}, metadata)

    def load(self, file: str | Path) -> None:
        """Go on where a checkpoint was written; ValueError if it is of another run.

        ``use`` must have been called with the texts of its part of the run.
        """
        try:
            with safe_open(str(file), "pt") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") != CHECKPOINT_FORMAT:
                    raise ValueError(f"{file}: expected a checkpoint, got another file")
                then, now = (
                    json.loads(metadata["facts"]),
                    json.loads(json.dumps(self._facts())),
                )
                for name in sorted({*then, *now}):
                    if then.get(name) != now.get(name):
                        raise ValueError(
                            f"{file}: is of a run with {name} {then.get(name)!r}, and this one "
                            f"has {now.get(name)!r}{HINT}"
                        )
                self._restore({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
            self.step = int(metadata["step"])
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{file}: cannot be read: {error}{HINT}") from None
        self.use(self._texts, self.first)

    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        device = self._head_UE.device
        for name, weight in self.student.weights.items():
            with torch.no_grad():
                weight.copy_(tensors[f"weight.{name}"])
            if f"step.{name}" in tensors:
                self._optimizer.state[weight] = {
                    "step": tensors[f"step.{name}"].reshape(()),
                    "exp_avg": tensors[f"exp_avg.{name}"].to(device),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(device),
                }

    def _facts(self) -> dict[str, object]:
        """What a resumed run must agree with."""
        texts = hashlib.sha256()
        for text in self._texts:
            texts.update(text.token_ids.numpy().tobytes())
            texts.update(text.num_prompt.to_bytes(8, "little"))
        facts = {"num_steps": self.num_steps, "texts": texts.hexdigest(), "first": self.first}
        return facts | asdict(self.options)

    def _next(self) -> list[int]:
        """Indices of the texts of the step that comes."""
        while self.step >= self._num_before + len(self._batches):
            self._num_before += len(self._batches)
            self._epoch += 1
            seed = self.options.seed + self.first
            self._batches = plan_batches(self._texts, self.options.batch_tokens, seed, self._epoch)
        return self._batches[self.step - self._num_before]

    def _batch(self, texts: Sequence[Taught], *, with_prompts: bool = False) -> Batch:
        has_states = FUSE in self.student.weights
        device = self._head_UE.device
        return make_batch(texts, device, with_states=has_states, with_prompts=with_prompts)

    def _loss(self, batch: Batch, loss: str) -> LossResult:
        """Of the first draft, with ``unroll`` of later ones, too; all but the loss is its own."""
        first, before_BLE, share = None, batch.before_BLE, 1.0
        total = torch.zeros((), device=self._head_UE.device)
        for _ in range(self.options.unroll):
            with products_in(self.options.dtype, self._head_UE.device):
                hidden_BLE = self.student(batch.tokens_BL, before_BLE).float()
            if not bool(hidden_BLE.isfinite().all()):
                raise Diverged(
                    f"step {self.step}: the draft's states are no numbers any more; the learning "
                    f"rate of {self.options.learning_rate:g} is too high"
                )
            written_NE = hidden_BLE.flatten(0, 1)[batch.places_N]
            result = distill_loss(
                written_NE,
                batch.states_NE,
                self._head_UE,
                loss=loss,
                teacher_lse_N=batch.lse_N,
            )
            total = total + share * (result.loss + self._apart(written_NE, batch))
            share *= DECAY
            first = first or result
            if before_BLE is None:
                break
            before_BLE = shift(hidden_BLE)
        assert first is not None
        return first._replace(loss=total)

    def _apart(self, written_NE: torch.Tensor, batch: Batch) -> torch.Tensor | float:
        """How far a feature head's states are from the target's, weighted."""
        if batch.before_BLE is None or not self.options.state_weight:
            return 0.0
        weight_E = self.student.weights["final_norm"].detach()
        scale_E = torch.where(weight_E != 0, 1 / weight_E, 0.0)
        apart = F.smooth_l1_loss(written_NE * scale_E, batch.states_NE * scale_E)
        return self.options.state_weight * apart
