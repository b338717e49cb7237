"""What a draft begins with: layers of its target, and the tokens that it may propose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pagedraft.decoding.distill.fit import (
    RMS_TEXTS,
    SILENT,
    fit_fusion,
    fit_out,
    state_rms,
)
from pagedraft.decoding.distill.student import FUSE, OUT, Student, first_tensors
from pagedraft.decoding.distill.taught import Taught
from pagedraft.model.config import ModelConfig
from pagedraft.model.draft_folder import read_own
from pagedraft.model.draft_format import VOCAB_IDS, own_parts, read_entry
from pagedraft.model.draft_save import save_draft
from pagedraft.model.fingerprint import fingerprint
from pagedraft.model.weights import load_weights

STARTS = ("first", "even", "last")


def pick_layers(count: int, num_target_layers: int, start: str) -> list[int]:
    """Which layers of a target a draft begins with: STARTS. "even" has the first and the last.

    The first ones read tokens as the embedding gives them, as a draft's must: two of the demo
    model's agreed with it at 31 % of tokens after 2.5 minutes on a core, first and last at 26 %.
    """
    if not 1 <= count <= num_target_layers:
        raise ValueError(
            f"--layers: expected 1 to {num_target_layers}, as many as the target has, got {count}"
        )
    last = num_target_layers - 1
    if start == "first":
        return list(range(count))
    if start == "last":
        return list(range(num_target_layers - count, num_target_layers))
    return [round(i * last / max(1, count - 1)) for i in range(count)]


def choose_vocabulary(texts: Iterable[Taught], size: int, vocab_size: int) -> torch.Tensor | None:
    """The ``size`` tokens that occur most in the texts, ascending [U]; None for all there are.

    What the target wrote counts, then prompts, then low ids: merges of a BPE vocabulary are in the
    order in which they were found to be frequent.
    """
    if size < 1:
        raise ValueError(f"vocab: expected at least 1, got {size}")
    if size >= vocab_size:
        return None
    written_V, read_V = torch.zeros(2, vocab_size, dtype=torch.int64)
    for text in texts:
        ids = text.token_ids.long()
        read_V += torch.bincount(ids[: text.num_prompt], minlength=vocab_size)
        written_V += torch.bincount(ids[text.num_prompt :], minlength=vocab_size)
    order = torch.arange(vocab_size)
    for count_V in (read_V, written_V):  # the last key counts most
        order = order[count_V[order].argsort(stable=True, descending=True)]
    return order[:size].sort().values


def coverage(texts: Iterable[Taught], ids_U: torch.Tensor | None) -> float:
    """The share of written tokens that are among ``ids_U``."""
    if ids_U is None:
        return 1.0
    inside = total = 0
    for text in texts:
        total += text.num_output
        inside += int(torch.isin(text.output_ids.long(), ids_U).sum())
    return inside / total if total else 0.0


def start_student(
    folder: Path,
    layers: Sequence[int],
    device: torch.device,
    *,
    kind: str = "layers",
    texts: Sequence[Taught] = (),
    begin: Path | None = None,
) -> tuple[Student, torch.Tensor]:
    """A student made of the target's ``layers``, and the fp32 rows of the target's head [V, E].

    kind: "layers" or "head". texts: that the start is fitted to, see fit.py; without any a head
        reads the sum of state and token, and layers are as in the target. begin: a draft of that
        kind and target to take the weights of.
    """
    config = ModelConfig.from_folder(folder)
    if config.quantization is not None:
        raise ValueError(f"{folder}: expected plain weights to start from, got quantised ones")
    if layers[-1] >= config.num_layers:
        raise ValueError(
            f"layers: expected at most {config.num_layers}, as many as the target has, got "
            f"layer {layers[-1]}"
        )
    weights = load_weights(folder, config, dtype=torch.float32, device=device)
    embed_VE = weights["embed"]
    tensors = first_tensors(weights, layers)
    size = state_rms(texts) if texts else 1.0
    if begin is not None:
        tensors = _tensors_of(begin, folder, kind, len(layers), device)
    elif kind == "head" and texts:
        tensors[FUSE] = fit_fusion(texts, embed_VE, tensors["final_norm"]).to(device)
        for name in tensors:
            if name.rpartition(".")[2] in SILENT:
                tensors[name] = torch.zeros_like(tensors[name])
    elif kind == "head":
        tensors[FUSE] = torch.eye(config.embed_dim, device=device).repeat(1, 2)
    config = replace(config, num_layers=len(layers))
    left_size = 1.0
    if kind == "layers" and texts:
        some = texts if begin is None else texts[:RMS_TEXTS]  # for the size alone
        fitted, left_size = fit_out(Student(config, tensors, embed_VE).to(device), some)
        if begin is None:
            tensors[OUT] = fitted.to(device)
    elif kind == "layers" and begin is None:
        tensors[OUT] = torch.eye(config.embed_dim, device=device)
    student = Student(config, tensors, embed_VE, size, left_size).to(device)
    return student, weights.get("head", embed_VE)


def _tensors_of(
    draft: Path, target_folder: Path, kind: str, num_layers: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """The weights of a draft in fp32; ValueError if it is of another kind, size or target."""
    entry = read_entry(draft)
    if entry is None:
        raise ValueError(f"{draft}: expected a draft to begin with, got a model of its own")
    config = ModelConfig.from_folder(draft)
    for name, found, expected in (
        ("kind", entry.kind, kind),
        ("layers", config.num_layers, num_layers),
        ("target", entry.target_sha256[:12], fingerprint(target_folder)[:12]),
    ):
        if found != expected:
            raise ValueError(
                f"{draft}: expected a draft to begin with of {name} {expected}, got {found}"
            )
    own = read_own(draft, entry, config, dtype=torch.float32, device=device)
    own.pop(VOCAB_IDS, None)
    return own


def save_student(
    student: Student, out: Path, target_folder: Path, target: str, ids_U: torch.Tensor | None
) -> None:
    """Write the draft's folder; layers whose parts the family keeps apart are taken apart again."""
    tensors = student.tensors()
    kind = "head" if FUSE in tensors else "layers"
    save_draft(
        out,
        target_folder,
        _apart(student.config, tensors, kind, OUT in tensors),
        num_layers=student.config.num_layers,
        kind=kind,
        target=target,
        vocab_ids=ids_U,
    )


def _apart(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], kind: str, has_out: bool
) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for name, parts in own_parts(config, kind, has_out).items():
        rows = tensors[name].split([part.shape[0] for part in parts])
        result |= {part.source: piece for part, piece in zip(parts, rows, strict=True)}
    return result
