"""pyproject.toml lists every folder of code: a plain install has what an editable one has."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("kernels", "model", "decoding", "scheduler", "bench")


def test_every_folder_of_code_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        str(path.parent.relative_to(ROOT)) for top in CODE for path in (ROOT / top).rglob("*.py")
    }
    names = {f"pagedraft.{folder.replace('/', '.')}": folder for folder in folders}
    names["pagedraft.tests"] = "tests"
    assert settings["package-dir"] == names
    assert sorted(settings["packages"]) == sorted(names)
