"""Tokens a pass with drafts that are right as often as they are told to be, on a tiny random model.

A draft's fate is drawn beforehand for each place of each output (synthetic.py), whatever the tokens
are. So these counts hold on every machine, though its sums may round otherwise: they change only
where the engine drafts, verifies, commits or rolls back otherwise. Half of the requests are greedy.
"""

from __future__ import annotations

import torch

from pagedraft.bench.figures import Figure
from pagedraft.bench.random_model import random_model
from pagedraft.bench.shapes import TINY
from pagedraft.bench.synthetic import SyntheticDrafter
from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.config import ModelConfig
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM, Completion
from pagedraft.scheduler.metrics import summarise

CONFIG = ModelConfig(
    family="llama",
    num_layers=TINY.num_layers,
    embed_dim=TINY.embed_dim,
    num_heads=TINY.num_heads,
    num_kv_heads=TINY.num_kv_heads,
    head_dim=TINY.head_dim,
    mlp_dim=TINY.mlp_dim,
    vocab_size=TINY.vocab_size,
    max_positions=128,
    rms_eps=1e-5,
    tied_head=True,
)
NUM_ROWS, NUM_NEW, BLOCK_SIZE = 8, 49, 16
ALPHAS, DRAFTS = (1.0, 0.7), (1, 4, 8)
PROMPTS = [
    [(11 * row + 5 * place) % CONFIG.vocab_size for place in range(6 + row)]
    for row in range(NUM_ROWS)
]
PARAMS = [
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8 * (row % 2), seed=row, ignore_eos=True)
    for row in range(NUM_ROWS)
]


def _run(model: Transformer, drafter: SyntheticDrafter | None, k: int) -> list[Completion]:
    options = {"speculate": "off"} if drafter is None else {"drafter": drafter, "k": k}
    tokens = NUM_ROWS * CONFIG.max_positions
    llm = LLM(model, block_size=BLOCK_SIZE, kv_tokens=tokens, **options)
    return llm.generate(PROMPTS, PARAMS)


def _figure(name: str, completions: list[Completion]) -> Figure:
    summary = summarise([completion.stats for completion in completions], 0.0, 0.0)
    value = summary.tokens_per_pass
    return Figure(f"tokens/{name}/tokens a pass", value, "tokens", "higher", "counted")


def token_figures() -> list[Figure]:
    """Tokens a pass, plain and for each acceptance and draft length.

    Names say "synthetic": no drafter earned them. RuntimeError where drafts change an output.
    """
    with use_implementation("cpu"):
        model = random_model(CONFIG, dtype=torch.float32, device="cpu")
        plain = _run(model, None, 0)
        outputs = [completion.token_ids for completion in plain]
        figures = [_figure(f"plain, {NUM_ROWS} rows", plain)]
        for alpha in ALPHAS:
            for k in DRAFTS:
                drafter = SyntheticDrafter(zip(PROMPTS, outputs, strict=True), alpha)
                found = _run(model, drafter, k)
                name = f"synthetic acceptance {alpha:g}, k={k}, {NUM_ROWS} rows"
                if [completion.token_ids for completion in found] != outputs:
                    raise RuntimeError(f"{name}: expected the plain output, got another one")
                figures.append(_figure(name, found))
    return figures
