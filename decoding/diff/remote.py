"""A side that runs another git revision's kernels, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pagedraft.decoding.diff
from pagedraft.decoding.diff.side import Feed, Result, Side
from pagedraft.decoding.diff.wire import load_stages, save_stages

HERE = Path(pagedraft.decoding.diff.__file__).parent
ROOT = HERE.parents[1]


class RemoteRunner:
    """Runs the steps of ``side`` in a process on the tree of its revision; as ``Runner`` does."""

    def __init__(
        self,
        side: Side,
        tree: Path,
        folder: Path,
        max_length: int,
        temperature: float,
        seed: int,
    ) -> None:
        self.side, self.folder = side, folder
        self._num_files = 0
        names = folder / "names"
        names.mkdir()
        (names / "pagedraft").symlink_to(tree)
        (names / "pagedraft_diff").symlink_to(HERE)
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pagedraft_diff.wire"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(names)},
        )
        run = {"max_length": max_length, "temperature": temperature, "seed": seed}
        ready = self._ask({"side": {**asdict(side), "model": str(side.model)}, "run": run})
        self.formats: dict[str, str] = ready["formats"]
        self.shape: list[int] = ready["shape"]
        foreign = [file for file in ready["files"] if not Path(file).is_relative_to(tree.resolve())]
        if foreign:
            self.close()
            raise RuntimeError(f"revision {side.rev}: {foreign[0]} was loaded from outside of it")

    def step(self, feed: Feed) -> Result:
        """Run ``feed`` there and return its stages, on the CPU."""
        request = {
            "tokens": feed.tokens,
            "start": feed.start,
            "num_logits": feed.num_logits,
            "isolated": feed.isolated,
            "references": feed.references,
            "only_logits": feed.only_logits,
            "inputs": None,
            "output": self._new_file(),
        }
        if feed.inputs is not None:
            path = self._new_file()
            request["inputs"] = [save_stages(feed.inputs, path), path]
        answer = self._ask(request)
        return Result(load_stages(answer["stages"], str(request["output"])), answer["token"])

    def close(self) -> None:
        """End the process, and wait for it."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _new_file(self) -> str:
        self._num_files += 1
        return str(self.folder / f"{self._num_files}.safetensors")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # its last answer or its log says why
            print(json.dumps(request), file=process.stdin, flush=True)
        line = process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            self.close()
            raise ValueError(f"revision {self.side.rev}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"ended with status {self._process.returncode}"


@contextmanager
def checked_out(rev: str, root: Path = ROOT) -> Iterator[tuple[Path, Path]]:
    """Yield (tree, folder): the files of ``rev`` of the repository ``root``, and room beside them.

    The tree is an archive of the revision, not a worktree: git keeps no record that a killed
    process would leave behind. Raises ValueError where there is no git or no such revision.
    """
    commit = _git(root, "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}")
    if commit is None:
        raise ValueError(f"rev: no revision {rev!r} in the git repository {root}")
    folder = Path(tempfile.mkdtemp(prefix="pagedraft-diff-"))
    try:
        tree = folder / "tree"
        tree.mkdir()
        archive = folder / "tree.tar"
        if _git(root, "archive", "--format=tar", f"--output={archive}", commit) is None:
            raise ValueError(f"rev: git cannot archive revision {rev!r} of {root}")
        shutil.unpack_archive(archive, tree, filter="data")
        archive.unlink()
        yield tree, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _git(root: Path, *arguments: str) -> str | None:
    """What a git command prints, None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ValueError("rev: comparing revisions needs git, which is not installed") from None
    return done.stdout.strip() if done.returncode == 0 else None
