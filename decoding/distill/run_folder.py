"""What a run has done so far, in a folder beside its draft: settings, texts, checkpoint.

    settings.json               the options that it was begun with
    texts-000000.safetensors    taught texts, by the number of the first prompt of each shard
    held-out-000000.safetensors those that the report is made from
    written.json                there where all texts are
    plan.json                   what was decided when training began
    checkpoint.safetensors      the training
    seconds.json                what each phase has taken
    lock                        held by the process that is at work

Every file is written whole or not at all, so a run that ends anywhere goes on from here.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedraft.decoding.distill.taught import Taught, load_taught, save_taught
from pagedraft.model.config import read_json

CHECKPOINT = "checkpoint.safetensors"
OF_TRAINING = ("plan.json", CHECKPOINT)  # what other options of training make void


class RunFolder:
    """The folder of the run whose draft goes to ``out``.

    fixed: settings that its texts depend on, as JSON has them. free: those that may change; then
        training begins anew with the texts that are there.
    is_resumed: a run was there. is_changed: it had other free settings.
    Raises ValueError where a run with other fixed settings is there, or at work.
    """

    def __init__(self, out: str | Path, fixed: Mapping[str, Any], free: Mapping[str, Any]) -> None:
        out = Path(out)
        self.path = out.with_name(out.name + ".partial")
        self._settings = json.loads(json.dumps({"fixed": fixed, "free": free}))
        self.is_changed = False
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"{self.path}: another process is at work there") from None
        file = self.path / "settings.json"
        self.is_resumed = file.exists()
        try:
            if self.is_resumed:
                self._check(file)
            elif any(path.suffix != ".part" for path in self.path.iterdir() if path.name != "lock"):
                raise ValueError(f"{self.path}: expected a run's folder, it has no settings.json")
        except BaseException:
            self.close()
            raise
        if not self.is_resumed or self.is_changed:
            write_json(file, self._settings)

    def _check(self, file: Path) -> None:
        then = read_json(file)
        if not isinstance(then.get("fixed"), dict):
            raise ValueError(f"{file}: expected a run's settings, got another file")
        now = self._settings
        for name in dict.fromkeys([*now["fixed"], *then["fixed"]]):
            if then["fixed"].get(name) != now["fixed"].get(name):
                raise ValueError(
                    f"{self.path}: holds a run with {name} {then['fixed'].get(name)!r}, and this "
                    f"one has {now['fixed'].get(name)!r}; remove the folder or give another --out"
                )
        if then.get("free") != now["free"]:
            self.is_changed = True
            for name in (*OF_TRAINING, "written.json", "seconds.json"):
                (self.path / name).unlink(missing_ok=True)
            for path in self.path.glob("own-*"):
                path.unlink()

    @property
    def checkpoint(self) -> Path:
        """The file of the training."""
        return self.path / CHECKPOINT

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder, None if it is not there yet."""
        file = self.path / f"{name}.json"
        return read_json(file) if file.exists() else None

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder."""
        write_json(self.path / f"{name}.json", values)

    def add_texts(self, texts: Sequence[Taught], kind: str, first: int = 0) -> None:
        """Keep the texts of a shard, whose first prompt is number ``first``."""
        save_taught(self.path / f"{kind}-{first:06d}.safetensors", texts)

    def texts(self, kind: str) -> list[Taught]:
        """All texts that were kept, in order."""
        return [text for file in self._files(kind) for text in load_taught(file)]

    def last_shard(self, kind: str) -> int | None:
        """Number of the first prompt of the last shard; None for no shard."""
        files = self._files(kind)
        return int(files[-1].stem.rpartition("-")[2]) if files else None

    def remove(self) -> None:
        """The draft is whole, nothing of this is needed any more."""
        shutil.rmtree(self.path)
        self.close()

    def close(self) -> None:
        """Let others work here."""
        self._lock.close()

    def _files(self, kind: str) -> list[Path]:
        return sorted(self.path.glob(f"{kind}-*.safetensors"))


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    part.replace(file)
