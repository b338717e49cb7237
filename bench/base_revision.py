"""Two sides of a comparison: this tree and a worktree of another git revision, a process each.

Ops of a side are timed by ``base_worker.py`` in a process whose ``pagedraft`` is that side's. The
other revision's own bench says what its cases are; where it is too old for that, this tree's bench
calls that revision's ops.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedraft.bench.report import ROOT

HERE = Path(__file__).resolve().parent
# What a revision's ops are made of; its bench comes from there, too, or from this tree.
PACKAGES = ("kernels", "model", "decoding", "scheduler")
Answer = dict[str, Any]


class RevisionError(ValueError):
    """What of a comparison with another revision cannot be had, and why."""


@dataclass(frozen=True)
class Base:
    """A revision as it was named, its commit, and the worktree that holds it."""

    rev: str
    commit: str
    tree: Path


@contextmanager
def worktree_of(rev: str, root: Path = ROOT) -> Iterator[Base]:
    """Check out ``rev`` of the repository ``root`` under its build/worktrees/, for this block.

    It is removed at the end, also after an error, Ctrl-C or a SIGTERM; what a killed process left
    there is removed at the start. Raises RevisionError without git, repository or revision.
    """
    commit = _commit_of(rev, root)
    folder = root / "build" / "worktrees"
    for left in folder.glob("*-*"):
        if not _is_alive(left.name.rpartition("-")[2]):
            _remove(left, root)
    tree = folder / f"{commit[:12]}-{os.getpid()}"
    with _sigterm_as_exit():
        try:
            # Hooks are somebody's reaction to their own checkouts, not to this one.
            hooks = ("-c", "core.hooksPath=/dev/null")
            _git(root, *hooks, "worktree", "add", "--detach", "--force", str(tree), commit)
            yield Base(rev, commit, tree)
        finally:
            _remove(tree, root)


def _commit_of(rev: str, root: Path) -> str:
    try:
        is_top = Path(_git(root, "rev-parse", "--show-toplevel")).resolve() == root.resolve()
    except RevisionError as error:
        if shutil.which("git") is None:
            raise
        raise RevisionError(f"--base: expected a git repository at {root}: {error}") from None
    if not is_top:
        raise RevisionError(f"--base: expected a git repository at {root}, it is inside of another")
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}")
    except RevisionError:
        raise RevisionError(f"--base: no revision {rev!r} in the repository {root}") from None


def describe_tree(root: Path, commit: str) -> str:
    """Say what this side is: its commit, what is not committed, whether its ops are the base's."""
    changed = _git(root, "status", "--porcelain", "--", *PACKAGES, "bench").splitlines()
    head = _git(root, "rev-parse", "--short", "HEAD")
    text = f"working tree, {head}" + (f" and {len(changed)} changed files" if changed else "")
    new = [line for line in changed if line.startswith("??")]
    if not new and not _git(root, "diff", "--name-only", commit, "--", *PACKAGES):
        text += "; its ops are the base's, so every difference is noise"
    return text


def _git(root: Path, *arguments: str) -> str:
    """What a git command prints; RevisionError with its complaint if it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RevisionError("--base: needs git, which is not installed") from None
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RevisionError(f"git {' '.join(arguments[:2])}: {words[-1]}")
    return done.stdout.strip()


def _remove(tree: Path, root: Path) -> None:
    with suppress(RevisionError):
        _git(root, "worktree", "remove", "--force", "--force", str(tree))
    shutil.rmtree(tree, ignore_errors=True)
    with suppress(RevisionError):
        _git(root, "worktree", "prune")


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:  # somebody else's
        pass
    return True


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let a SIGTERM run the ``finally`` blocks, as Ctrl-C does."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Side:
    """Times cases of one tree in a process of its own, which stays until ``close``.

    name: in errors. tree: where kernels, model, decoding and scheduler come from. is_own: whether
    its cases come from the tree's bench, else from this one's. cases: names, ``step/op part``.
    missing: ops that the bench cannot call there, and why.
    """

    def __init__(self, name: str, tree: Path, is_own: bool, setup: Answer) -> None:
        self.name = name
        self._folder = Path(tempfile.mkdtemp(prefix="pagedraft-base-"))
        self._log = (self._folder / "log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pagedraft_clock.base_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._folder,
            env=_environment(_names(self._folder / "names", tree, is_own)),
            start_new_session=True,  # Ctrl-C is for the parent, which ends its sides
        )
        try:
            answer = self.ask({**setup, "is_own": is_own})
            self.cases: list[str] = answer["cases"]
            self.missing: dict[str, str] = answer["missing"]
            homes = (tree.resolve(),) if is_own else (tree.resolve(), HERE)
            for file in answer["files"]:
                if not any(Path(file).is_relative_to(home) for home in homes):
                    raise RevisionError(f"{name}: {file} was loaded, from outside of {tree}")
        except BaseException:
            self.close()
            raise

    def ask(self, request: Answer) -> Answer:
        """Send one request and wait for its answer; RevisionError if there is none."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # its last answer or its log says why
            print(json.dumps(request), file=process.stdin, flush=True)
        line = process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise RevisionError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process, wait for it, and remove its folder."""
        self._process.kill()
        self._process.communicate()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"ended with status {self._process.returncode}"


def _names(folder: Path, tree: Path, is_own: bool) -> Path:
    """Make a folder in which ``pagedraft`` is the side's, for PYTHONPATH."""
    folder.mkdir()
    (folder / "pagedraft_clock").symlink_to(HERE)
    if is_own:
        (folder / "pagedraft").symlink_to(tree)
        return folder
    mixed = folder / "pagedraft"
    mixed.mkdir()
    (mixed / "bench").symlink_to(HERE)
    for package in PACKAGES:
        if (tree / package).is_dir():
            (mixed / package).symlink_to(tree / package)
    return folder


def _environment(names: Path) -> dict[str, str]:
    """This process's, with the side's modules; never the interpreter, whose times say nothing."""
    return {**os.environ, "PYTHONPATH": str(names), "TRITON_INTERPRET": "0"}


@contextmanager
def both_sides(base: Base, root: Path, setup: Answer) -> Iterator[tuple[Side, Side, str]]:
    """Yield (this, base, how the base is driven); setup: what ``base_worker`` wants to know first.

    Raises RevisionError if neither the base's bench nor this one can call the base's ops.
    """
    sides: list[Side] = []
    try:
        sides.append(Side("this", root, True, setup))
        side, how = _base_side(base, setup)
        sides.append(side)
        yield sides[0], side, how
    finally:
        for side in sides:
            side.close()


def _base_side(base: Base, setup: Answer) -> tuple[Side, str]:
    own = "it has none"
    if (base.tree / "bench" / "kernels.py").is_file():
        try:
            return Side("base", base.tree, True, setup), "its own bench's cases"
        except RevisionError as error:
            own = str(error).removeprefix("base: ")
    try:
        side = Side("base", base.tree, False, setup)
    except RevisionError as error:
        ours = str(error).removeprefix("base: ")
        raise RevisionError(
            f"--base {base.rev}: its ops can be called neither by its own bench ({own}) "
            f"nor by this one ({ours})"
        ) from None
    return side, f"this tree's cases on its ops, as its own bench is too old ({own})"
