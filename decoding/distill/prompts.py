"""The prompts that a draft is distilled on: those of the demo, a user's files, and their tokens."""

from __future__ import annotations

from pagedraft.decoding.distill.chat_prompts import chat_prompts
from pagedraft.decoding.distill.code_prompts import (
    code_chat_prompts,
    code_prompts,
    text_prompts,
)
from pagedraft.decoding.distill.prompt import Prompt, distinct, interleave
from pagedraft.decoding.distill.prompt_files import read_prompts
from pagedraft.decoding.distill.prompt_split import Split, split
from pagedraft.decoding.distill.prompt_tokens import Encoded, encode_prompts
from pagedraft.decoding.distill.stdlib_code import read_library

__all__ = [
    "MIXTURE",
    "Encoded",
    "Prompt",
    "Split",
    "demo_prompts",
    "encode_prompts",
    "read_prompts",
    "split",
]

MIXTURE = {"chat": 0.40, "code-chat": 0.35, "code": 0.20, "text": 0.05}  # of demo prompts
NUM_PROMPTS = 8000


def demo_prompts(seed: int) -> list[Prompt]:
    """The default prompts, up to NUM_PROMPTS different ones; every prefix has MIXTURE.

    Chat prompts are the project's own templates and topics; the others are made from the standard
    library of the Python that runs, so the same seed gives the same prompts with the same version
    only (``Split.facts`` names it). The list is shorter where that library has too little of a
    kind. Raises ValueError in a Python without sources.
    """
    library = read_library()
    queues = {
        "chat": chat_prompts(seed),
        "code-chat": code_chat_prompts(library.definitions, seed),
        "code": code_prompts(library.definitions, seed),
        "text": text_prompts(library.docstrings, seed),
    }
    different = {kind: distinct(prompts) for kind, prompts in queues.items()}
    return interleave(different, MIXTURE)[:NUM_PROMPTS]
