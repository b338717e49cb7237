"""llama.cpp: its server on a GGUF file that its own converter made of the same weights.

A server has a fixed number of slots and one way of drafting, so there is one for each mode and
number of prompts; it is started before the clock is, and kept. The server batches requests as they
come, so mode "plain" is continuous batching here.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedraft.bench.peers.base import (
    PeerFailed,
    PeerRequest,
    PeerRun,
    PeerUnavailable,
    check_run,
    check_tokens,
)
from pagedraft.bench.peers.environment import find_converter, find_llama_server, openmp_settings
from pagedraft.bench.peers.gguf_file import OUT_TYPES, gguf_file
from pagedraft.bench.peers.llama_server import (
    ANSWER_LIMIT,
    START_LIMIT,
    Answer,
    LlamaServer,
    server_command,
)

SLOT_STEP = 256  # tokens; a slot's size is rounded up to it, so that servers are used again
# The last 3 tokens looked up, 8 drafted, as the other engines here. Its own sizes, 12 and 48,
# drafted nothing for 24 tokens of code of which these gave 19, of 31 drafted (b10434, demo model).
LOOKUP = (
    *("--spec-type", "ngram-simple"),
    *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
)
ASSISTED = ("--spec-type", "draft-simple")
VERBOSE = ("--log-verbosity", "4")
CHECK_LIMIT = 30.0  # seconds that --help and --version may take


class LlamaCppPeer:
    """See Peer. ``model`` and ``draft`` are GGUF files; ``weights`` is the model's type.

    start_limit, answer_limit: seconds for a server to come up, and for all answers of a run.
    """

    name = "llama.cpp"

    def __init__(
        self,
        program: Path,
        model: Path,
        threads: int,
        weights: str,
        draft: Path | None = None,
        *,
        start_limit: float = START_LIMIT,
        answer_limit: float = ANSWER_LIMIT,
    ) -> None:
        self.program, self.model, self.threads = program, model, threads
        self.start_limit, self.answer_limit = start_limit, answer_limit
        options = _output(program, "--help")
        self.extra: dict[str, tuple[str, ...]] = {"plain": ()}
        if all(word in options for word in LOOKUP if not word.isdigit()):
            self.extra["lookup"] = LOOKUP
        if draft is not None and ASSISTED[1] in options:
            self.extra["assisted"] = ("--model-draft", str(draft), *ASSISTED)
        self.modes = tuple(self.extra)
        self.servers: dict[tuple[str, int], tuple[int, LlamaServer]] = {}
        command = server_command(program, model, threads, 1, SLOT_STEP)
        self.facts: dict[str, Any] = {
            "version": _version(program),
            "system": _system_info([*command, *VERBOSE], start_limit),
            "weights": weights,
            "threads": threads,
            "openmp": openmp_settings(),
            "server": _shown(command),
            "modes": {mode: _shown(extra) for mode, extra in self.extra.items() if extra},
            "slots": "one a prompt; no prompt cache",
            "eos": "never picked",
        }

    def run(self, prompts: Sequence[list[int]], num_tokens: int, mode: str = "plain") -> PeerRun:
        """See Peer.run. Prompts go over HTTP, each in its own request, tokens come as a stream."""
        check_run(self, prompts, num_tokens, mode)
        server = self._server(mode, len(prompts), max(map(len, prompts)) + num_tokens)
        try:
            began = time.perf_counter()
            answers = server.complete(prompts, num_tokens, limit=self.answer_limit)
            seconds = time.perf_counter() - began
            token_ids = [answer.token_ids for answer in answers]
            if any(len(answer.token_ids) < answer.num_told for answer in answers):
                token_ids = _told_whole(server, prompts, num_tokens, answers)
            check_tokens(self.name, token_ids, len(prompts), num_tokens)
        except PeerFailed:
            self.close()  # it may hang or still work on what was asked: the next run gets new ones
            raise
        return PeerRun(token_ids, seconds, [answer.first_at - began for answer in answers])

    def close(self) -> None:
        """See Peer.close."""
        for _, server in self.servers.values():
            server.close()
        self.servers.clear()

    def _server(self, mode: str, num_slots: int, slot_tokens: int) -> LlamaServer:
        """The running server for so many requests of such a length."""
        slot_tokens = -(-slot_tokens // SLOT_STEP) * SLOT_STEP
        key = (mode, num_slots)
        if key in self.servers:
            size, server = self.servers[key]
            if size >= slot_tokens and server.is_alive:
                return server
            self.servers.pop(key)
            server.close()
        command = server_command(self.program, self.model, self.threads, num_slots, slot_tokens)
        server = LlamaServer([*command, *self.extra[mode]], self.start_limit)
        self.servers[key] = (slot_tokens, server)
        return server


def open_peer(request: PeerRequest) -> LlamaCppPeer:
    """Find the server, make the GGUF file and start it on the CPU."""
    if request.device.type != "cpu":
        raise PeerUnavailable("is compared on the CPU only")
    program = find_llama_server(request)
    converter = find_converter(request, program)
    model = gguf_file(request.folder, request.dtype, converter)
    draft = gguf_file(request.assistant, request.dtype, converter) if request.assistant else None
    return LlamaCppPeer(program, model, request.threads, OUT_TYPES[request.dtype], draft)


def _told_whole(
    server: LlamaServer, prompts: Sequence[list[int]], num_tokens: int, streamed: Sequence[Answer]
) -> list[list[int]]:
    """Ask again, untimed and not as a stream: that leaves out tokens that end inside a character.

    Raises PeerFailed unless the streamed tokens are those of the whole answers, less some.
    """
    whole = server.complete(prompts, num_tokens, stream=False)
    for index, (told, part) in enumerate(zip(whole, streamed, strict=True)):
        rest = iter(told.token_ids)
        if not all(token_id in rest for token_id in part.token_ids):
            raise PeerFailed(
                f"llama.cpp: prompt {index}: asked again, it answered other tokens: expected "
                f"{part.token_ids} with some between, got {told.token_ids}"
            )
    return [answer.token_ids for answer in whole]


def _shown(command: Sequence[str]) -> str:
    """A command without the folders of this machine."""
    return " ".join(Path(word).name for word in command)


def _version(program: Path) -> str:
    found = re.search(r"^version: *(.+)$", _output(program, "--version"), re.MULTILINE)
    return found.group(1).strip() if found else "unknown"


def _system_info(command: Sequence[str], start_limit: float) -> str:
    """What the processor has and the program was built for, by its own log, of a server that is
    started for this alone. Raises PeerFailed where it does not come up."""
    server = LlamaServer(command, start_limit)
    found = re.search(r"system_info: *(.+)$", server.child.text(), re.MULTILINE)
    server.close()
    return found.group(1).strip() if found else "unknown"


def _output(program: Path, option: str) -> str:
    """What the program prints, on either stream, for an option that ends it."""
    try:
        done = subprocess.run(
            [str(program), option], capture_output=True, text=True, timeout=CHECK_LIMIT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"{program} {option}: {error}") from error
    if done.returncode != 0:
        raise PeerUnavailable(
            f"{program} {option}: status {done.returncode}: {done.stderr.strip()[-200:]}"
        )
    return done.stdout + done.stderr
