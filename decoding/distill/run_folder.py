"""What a run has done so far, in a folder beside its draft: settings, texts, checkpoint.

    settings.json             the options that must not change on the way
    texts-0000.safetensors    taught texts, in the order in which they were written
    held-out.safetensors      those that the report is made from
    plan.json                 what was decided when training began
    checkpoint.safetensors    the training
    seconds.json              what each phase has taken

Every file is written whole or not at all, so a run that ends anywhere goes on from here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedraft.decoding.distill.taught import Taught, load_taught, save_taught
from pagedraft.model.config import read_json


class RunFolder:
    """The folder of the run whose draft goes to ``out``.

    Raises ValueError where one of another run is there; ``settings`` as JSON has them.
    """

    def __init__(self, out: str | Path, settings: Mapping[str, Any]) -> None:
        out = Path(out)
        self.path = out.with_name(out.name + ".partial")
        self._settings = json.loads(json.dumps(settings))
        file = self.path / "settings.json"
        self.is_resumed = file.exists()
        if self.is_resumed:
            self._check(file)
        elif self.path.exists() and any(self.path.iterdir()):
            raise ValueError(f"{self.path}: expected a run's folder, it has no settings.json")
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(file, self._settings)

    def _check(self, file: Path) -> None:
        then = read_json(file)
        for name in dict.fromkeys([*self._settings, *then]):
            if then.get(name) != self._settings.get(name):
                raise ValueError(
                    f"{self.path}: holds a run with {name} {then.get(name)!r}, and this one has "
                    f"{self._settings.get(name)!r}; remove the folder or give another --out"
                )

    @property
    def checkpoint(self) -> Path:
        """The file of the training."""
        return self.path / "checkpoint.safetensors"

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder, None if it is not there yet."""
        file = self.path / f"{name}.json"
        return read_json(file) if file.exists() else None

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder."""
        write_json(self.path / f"{name}.json", values)

    def add_texts(self, texts: Sequence[Taught], kind: str = "texts") -> None:
        """Keep some more texts."""
        save_taught(self.path / f"{kind}-{len(self._files(kind)):04d}.safetensors", texts)

    def texts(self, kind: str = "texts") -> list[Taught]:
        """All texts that were kept, in order."""
        return [text for file in self._files(kind) for text in load_taught(file)]

    def remove(self) -> None:
        """The draft is whole, nothing of this is needed any more."""
        shutil.rmtree(self.path)

    def _files(self, kind: str) -> list[Path]:
        return sorted(self.path.glob(f"{kind}-*.safetensors"))


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    part.replace(file)
