"""What arrives at a server, and when: seeded arrivals, Poisson or in bursts, of a mix of lengths.

The gaps between arrivals are gamma distributed. Their coefficient of variation (standard deviation
over mean) says how bursty they are: 1 is a Poisson process. A run has exactly ``rate * seconds``
requests that count: the gaps are scaled to fill the time. For Poisson arrivals that is the process
given its count; gaps of bursts vary a little less than stated, the less the fewer there are.

Lengths in tokens. "chat": log-normal prompts and answers with the means of ShareGPT as measured by
Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(SOSP 2023, Fig. 11); the paper gives the means alone, sigma 1 is ours. "code": 128 and 16 always,
as of a completion in an editor. Prompts are pieces of a story and of Python's own library, cut at
random, so that hardly any two begin alike.
"""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pagedraft.bench.kv_waste import MEAN_ANSWER, MEAN_PROMPT

PROSE = Path(__file__).parent / "data" / "public_domain.txt"
ARRIVALS = {"poisson": 1.0, "bursty": 3.0}  # coefficient of variation of the gaps
MODULES = ("argparse", "ast", "calendar", "configparser", "csv", "dataclasses", "difflib", "pdb")
CHARS_A_TOKEN = 4  # of a prompt that is sent as text: how long it really is only the server knows

Prompt = list[int] | str
PromptSource = Callable[[random.Random, int], Prompt]  # (numbers, tokens) to a prompt as long


@dataclass(frozen=True)
class Lengths:
    """Log-normal numbers of tokens: their mean before they are cut, and sigma of the logarithm."""

    mean: float
    sigma: float

    def draw(self, numbers: random.Random, most: int) -> int:
        """One length, from 1 to ``most``."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(round(numbers.lognormvariate(mu, self.sigma)), most))


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts and of what is generated, and which text prompts are cut from."""

    name: str
    prompt: Lengths
    new: Lengths
    text: str


MIXES = {
    mix.name: mix
    for mix in (
        Mix("chat", Lengths(MEAN_PROMPT, 1.0), Lengths(MEAN_ANSWER, 1.0), "prose"),
        Mix("code", Lengths(128, 0.0), Lengths(16, 0.0), "code"),
    )
}


@dataclass(frozen=True)
class Load:
    """One run's arrivals.

    rate: requests a second. cv: of the gaps. seconds: of the arrivals that count; lead: of those
    before them, which find the server busy as it will be. As many again as ``seconds`` come after
    them, at most: they stop when all that count have ended.
    seed: of everything that is drawn.
    """

    mix: Mix
    rate: float
    cv: float
    seconds: float
    lead: float
    seed: str

    @property
    def num_counted(self) -> int:
        """Requests that count."""
        return max(1, round(self.rate * self.seconds))


@dataclass(frozen=True)
class Job:
    """One request to come.

    when: seconds from the begin of the run. num_prompt: tokens, asked for; num_new: tokens.
    """

    when: float
    prompt: Prompt
    num_prompt: int
    num_new: int
    is_counted: bool


def arrival_times(numbers: random.Random, count: int, seconds: float, cv: float) -> list[float]:
    """``count`` times within ``seconds``; the gaps' coefficient of variation is ``cv``."""
    shape = cv**-2
    gaps = [numbers.gammavariate(shape, 1.0 / shape) for _ in range(count + 1)]
    scale = seconds / sum(gaps)
    return [scale * time for time in accumulate(gaps[:-1])]


def make_jobs(load: Load, source: PromptSource, max_context: int) -> list[Job]:
    """The requests of a run in their order.

    max_context: most tokens of prompt and output; a prompt takes half of it at most.
    """
    numbers = random.Random(load.seed)
    end = load.lead + load.seconds
    phases = (
        (0.0, load.lead, round(load.rate * load.lead), False),
        (load.lead, load.seconds, load.num_counted, True),
        (end, load.seconds, round(load.rate * load.seconds), False),
    )
    return [
        _job(load.mix, numbers, source, max_context, begin + time, is_counted)
        for begin, seconds, count, is_counted in phases
        for time in arrival_times(numbers, count, seconds, load.cv)
    ]


def _job(
    mix: Mix,
    numbers: random.Random,
    source: PromptSource,
    max_context: int,
    when: float,
    is_counted: bool,
) -> Job:
    num_prompt = mix.prompt.draw(numbers, max_context // 2)
    num_new = mix.new.draw(numbers, max_context - num_prompt)
    return Job(when, source(numbers, num_prompt), num_prompt, num_new, is_counted)


def read_text(name: str) -> str:
    """The text of a mix: "prose" or "code", some files of Python's library.

    Raises ValueError where this Python comes without them.
    """
    if name == "prose":
        return PROSE.read_text(encoding="utf-8")
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{module}.py" for module in MODULES]
    found = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    if not found:
        raise ValueError(f"{folder}: expected files of Python's library, got none")
    return "\n".join(found)


def pieces_of_ids(token_ids: list[int]) -> PromptSource:
    """Prompts cut out of a text's tokens."""

    def piece(numbers: random.Random, num_tokens: int) -> list[int]:
        start = numbers.randrange(_room(len(token_ids), num_tokens, "tokens"))
        return token_ids[start : start + num_tokens]

    return piece


def pieces_of_text(text: str) -> PromptSource:
    """Prompts of CHARS_A_TOKEN characters a token, for a server whose tokens are not known."""

    def piece(numbers: random.Random, num_tokens: int) -> str:
        num_chars = CHARS_A_TOKEN * num_tokens
        start = numbers.randrange(_room(len(text), num_chars, "characters"))
        return text[start : start + num_chars]

    return piece


def random_ids(vocab_size: int) -> PromptSource:
    """Prompts of random tokens, for a model without a tokenizer."""
    return lambda numbers, num_tokens: [numbers.randrange(vocab_size) for _ in range(num_tokens)]


def _room(length: int, wanted: int, unit: str) -> int:
    if wanted > length:
        raise ValueError(f"prompt: expected at most the text's {length} {unit}, got {wanted}")
    return length - wanted + 1
