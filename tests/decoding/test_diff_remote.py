"""Two git revisions compared: a fault is found in the one that has it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pagedraft.decoding.diff.remote import ROOT
from pagedraft.decoding.diff.run import Work, find_divergence
from pagedraft.decoding.diff.side import Side
from pagedraft.tests.decoding.diffs import CPU, PROMPT, save_model

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def commit(root: Path, message: str) -> str:
    def git(*arguments: str) -> str:
        name = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(root), *name, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", message)
    return git("rev-parse", "HEAD")


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> tuple[Path, list[str]]:
    """This package's code in three revisions: as it is, with a fault, and too old to compare."""
    root = tmp_path_factory.mktemp("repository")
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("kernels", "model", "decoding"):
        shutil.copytree(ROOT / name, root / name, ignore=skip)
    revisions = [commit(root, "as it is")]
    path = root / "kernels" / "gated_mlp.py"
    path.write_text(path.read_text().replace(".mul_(up_TF)", ".mul_(up_TF).mul_(1.01)"))
    revisions.append(commit(root, "a fault"))
    path = root / "model" / "transformer.py"
    path.write_text(path.read_text().replace("observe", "looked_at"))
    revisions.append(commit(root, "too old"))
    return root, revisions


@pytest.mark.usefixtures("cpu_path")
def test_a_fault_in_another_revision_is_found(folder, repository, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # of the processes: they run the CPU path
    root, (good, bad, _) = repository
    a, b = (Side(folder, CPU, rev=rev) for rev in (None, bad))
    error = find_divergence(a, b, Work(PROMPT, max_tokens=2), root=root).first_error
    assert (error.layer, error.stage, error.ops) == (0, "gate_up", ("gated_mlp",))
    report = find_divergence(a, replace(b, rev=good), Work(PROMPT, max_tokens=2), root=root)
    assert report.first_bit is None
    assert report.num_equal == report.num_stages > 0


def test_a_revision_that_cannot_be_compared_says_so(folder, repository):
    root, (*_, old) = repository
    with pytest.raises(ValueError, match=f"revision {old}: .*has no `observe`"):
        find_divergence(Side(folder, CPU), Side(folder, CPU, rev=old), Work(PROMPT), root=root)
    with pytest.raises(ValueError, match="no revision 'no-such' in the git repository"):
        find_divergence(Side(folder, CPU), Side(folder, rev="no-such"), Work(PROMPT), root=root)
