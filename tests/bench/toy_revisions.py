"""Small git repositories for comparing revisions; one is a copy of this package with slow ops.

The slow ops sleep: a sleep takes as long on a busy machine as on an idle one.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from pagedraft.bench.report import ROOT

SLEEP = """

import time as _time

_awake = {op}


def {op}(*args, **kwargs):
    _time.sleep({seconds})
    return _awake(*args, **kwargs)
"""


def git(root: Path, *arguments: str) -> str:
    name = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(root), *name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "a revision")
    return git(root, "rev-parse", "HEAD")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def trees(root: Path) -> list[str]:
    """Worktrees that git or the folder still knows, beside the repository itself."""
    known = [line for line in git(root, "worktree", "list").splitlines()[1:] if line]
    folder = root / "build" / "worktrees"
    return known + [path.name for path in folder.glob("*")]


def small_repository(root: Path) -> Path:
    """Make a repository of one file."""
    (root / "kernels").mkdir(parents=True)
    (root / "kernels" / "op.py").write_text("one = 1\n")
    git(root, "init", "-q")
    commit(root)
    return root


def copy_of_package(root: Path) -> tuple[str, str]:
    """Make a copy of this package; return a revision with an old bench, and one with two slow ops.

    The working tree has one of the two slower, the other as it was, and another case.
    """
    skip = shutil.ignore_patterns("__pycache__", "drafts", "results", "baseline", "data")
    for name in ("kernels", "model", "bench"):
        shutil.copytree(ROOT / name, root / name, ignore=skip)
    git(root, "init", "-q")
    (root / ".gitignore").write_text("__pycache__/\nbuild/\n")
    bench, cases = root / "bench" / "kernels.py", root / "bench" / "layer_cases.py"
    text = bench.read_text()
    bench.write_text("raise ImportError('no table here')\n")
    old = commit(root)
    bench.write_text(text)
    for op in ("gated_mlp", "rms_norm"):
        path = root / "kernels" / f"{op}.py"
        path.write_text(path.read_text() + SLEEP.format(op=op, seconds=0.002))
    edit(cases, '"add_norm",', '"old_norm",')
    slow = commit(root)
    edit(root / "kernels" / "gated_mlp.py", "sleep(0.002)", "sleep(0.006)")
    edit(cases, '"old_norm",', '"add_norm",')
    return old, slow
