"""Worktrees of other revisions do not stay behind; a side's process runs that side's ops."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedraft.bench import kernels
from pagedraft.bench.base_revision import (
    Base,
    RevisionError,
    Side,
    _base_side,
    both_sides,
    describe_tree,
    worktree_of,
)
from pagedraft.tests.bench.toy_revisions import copy_of_package, git, small_repository, trees

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
SETUP = {
    **{"device": "cpu", "model": "tiny", "dtype": "fp32"},
    **{"ops": ["rms_norm", "gated_mlp"], "steps": ["decode1"]},
}


@pytest.fixture
def small(tmp_path) -> Path:
    return small_repository(tmp_path / "small")


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> tuple[Path, str, str]:
    """A copy of this package, a revision whose bench is too old, one with slow ops."""
    root = tmp_path_factory.mktemp("repository")
    return root, *copy_of_package(root)


def test_base_with_an_old_bench_is_driven_by_this_one(copied):
    root, old, _ = copied
    with worktree_of(old, root) as base, both_sides(base, root, SETUP) as (this, side, how):
        answers = [s.ask({"case": "decode1/rms_norm norm", "budget": 0.01}) for s in (this, side)]
    assert how.startswith("this tree's cases")
    assert "no table here" in how
    assert answers[1]["seconds"] < 0.002 < answers[0]["seconds"]  # the slow op came later
    assert {answer["implementation"] for answer in answers} == {"cpu"}
    assert [s._process.poll() for s in (this, side)] == [-signal.SIGKILL] * 2


def test_base_that_no_bench_can_drive_is_an_error(small):
    base = Base("HEAD", "0" * 40, small)
    with pytest.raises(RevisionError, match="neither by its own bench .* nor by this one"):
        _base_side(base, SETUP)


class TestWorktree:
    """Checked out for a block, whatever ends the block."""

    def test_has_the_revision_not_the_edits(self, small):
        (small / "kernels" / "op.py").write_text("two = 2\n")
        with worktree_of("HEAD", small) as base:
            assert (base.tree / "kernels" / "op.py").read_text() == "one = 1\n"
            assert base.tree.is_relative_to(small / "build" / "worktrees")
        assert (small / "kernels" / "op.py").read_text() == "two = 2\n"
        assert trees(small) == []

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_is_removed_after(self, small, error):
        def fail(message: str) -> None:
            raise error(message)

        with pytest.raises(error, match="2 traces"), worktree_of("HEAD", small):
            fail(f"{len(trees(small))} traces")  # git's record and the folder
        assert trees(small) == []

    def test_is_removed_after_sigterm(self, small):
        def wait_for_it() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as caught, worktree_of("HEAD", small):
            wait_for_it()
        assert caught.value.code == 128 + signal.SIGTERM
        assert trees(small) == []
        assert signal.getsignal(signal.SIGTERM) == before

    def test_of_a_killed_process_is_removed_by_the_next(self, small):
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        left = small / "build" / "worktrees" / f"0123456789ab-{gone.pid}"
        git(small, "worktree", "add", "--detach", str(left), "HEAD")
        with worktree_of("HEAD", small) as base:
            assert not left.exists()
            assert base.tree.exists()
        assert trees(small) == []

    def test_of_a_living_process_is_left_alone(self, small):
        other = small / "build" / "worktrees" / f"0123456789ab-{os.getppid()}"
        git(small, "worktree", "add", "--detach", str(other), "HEAD")
        with worktree_of("HEAD", small):
            pass
        assert other.exists()

    def test_unknown_revision_is_named(self, small):
        with (
            pytest.raises(RevisionError, match="no revision 'nowhere'"),
            worktree_of("nowhere", small),
        ):
            pass

    def test_folder_without_repository_is_named(self, tmp_path):
        with (
            pytest.raises(RevisionError, match=f"expected a git repository at {tmp_path}"),
            worktree_of("HEAD", tmp_path),
        ):
            pass

    def test_repository_around_the_package_is_not_taken(self, small):
        with (
            pytest.raises(RevisionError, match="inside of another"),
            worktree_of("HEAD", small / "kernels"),
        ):
            pass

    def test_without_git(self, small, monkeypatch):
        monkeypatch.setenv("PATH", "")
        with (
            pytest.raises(RevisionError, match="git, which is not installed"),
            worktree_of("HEAD", small),
        ):
            pass


class TestDescription:
    """What this side is called."""

    def test_clean_tree_of_the_base_is_all_noise(self, small):
        assert "every difference is noise" in describe_tree(small, git(small, "rev-parse", "HEAD"))

    def test_edit_is_counted(self, small):
        (small / "kernels" / "op.py").write_text("two = 2\n")
        text = describe_tree(small, "HEAD")
        assert "and 1 changed file" in text
        assert "noise" not in text

    def test_new_file_is_an_edit(self, small):
        (small / "kernels" / "new.py").write_text("two = 2\n")
        assert "noise" not in describe_tree(small, "HEAD")


def test_side_whose_process_fails_says_its_last_words(small):
    (small / "bench").mkdir()
    (small / "bench" / "kernels.py").write_text("raise SystemExit('no bench today')\n")
    with pytest.raises(RevisionError, match="this: no bench today"):
        Side("this", small, True, SETUP)


def test_code_of_another_tree_is_not_taken_for_this_one(small):
    with pytest.raises(RevisionError, match="was loaded, from outside of"):
        Side("this", small, True, SETUP)


def test_command_names_an_unknown_revision(capsys):
    with pytest.raises(SystemExit) as caught:
        kernels.main(["--device", "cpu", "--base", "nowhere", "--op", "rms_norm"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "--base: no revision 'nowhere'" in error or "expected a git repository" in error
