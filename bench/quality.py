"""What quantised weights cost in quality and buy in memory, on a real model and a fixed text.

    python -m pagedraft.bench quality
    python -m pagedraft.bench.quality [--model demo] [--tokens 4096] [--select int4]

The text (bench/data/README.md) is fed in windows of WINDOW tokens, each token predicted from those
before it in its window. Perplexity is the exponential of the mean negative log-likelihood; its
ratio to the unquantised model comes with a standard error, of the tokens' differences. The first
row is fed twice in different chunks and must be equal, or nothing is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from pagedraft.bench.report import header, print_header, results_folder, write_json
from pagedraft.bench.table import print_table
from pagedraft.decoding.load import read_tokenizer, resolve_device, resolve_dtype
from pagedraft.kernels.weight_quant import WeightFormat, quantize_weight
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.config import ModelConfig
from pagedraft.model.demo import resolve_model
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.model.weights import LINEAR, load_weights

TEXT = Path(__file__).parent / "data" / "public_domain.txt"
WINDOW, CHUNK, BLOCK_SIZE = 512, 256, 64
HEADERS = (
    *("weights", "head", "MB", "perplexity", "of unquantised", "+-", "target", "same best token"),
    "s",
)


@dataclass(frozen=True)
class Recipe:
    """How a row's weights are rounded: format and group of the layers, and of the head.

    target: largest ratio of perplexities that the project aims at, 0 for none.
    """

    name: str
    format: WeightFormat | None = None
    group: int | None = None
    head: WeightFormat | None = None
    target: float = 0.0


RECIPES = (
    Recipe("unquantised"),
    Recipe("int8", "int8", None, "int8", target=1.01),
    Recipe("int8, plain head", "int8"),
    Recipe("int4", "int4", None, "int8", target=1.08),
    Recipe("int4, int4 head", "int4", None, "int4"),
    Recipe("int4, groups of 64", "int4", 64, "int8"),
    Recipe("int4, groups of 128", "int4", 128, "int8"),
    Recipe("fp8", "fp8", None, "fp8"),
)


@dataclass(frozen=True)
class Quality:
    """One recipe on the text.

    ratio: of its perplexity to the unquantised model's; error: its standard error.
    same_best: share of positions whose most likely token is the unquantised model's.
    """

    name: str
    head: str
    weight_bytes: int
    perplexity: float
    ratio: float
    error: float
    same_best: float
    target: float
    seconds: float


def score(
    model: Transformer, tokens: Sequence[int], chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (negative log-likelihood, most likely token) of every predicted token."""
    losses, best = [], []
    for first in range(0, len(tokens) - 1, WINDOW):
        window = list(tokens[first : first + WINDOW + 1])
        for logits_QV, wanted in _predictions(model, window, chunk):
            losses.append(F.cross_entropy(logits_QV, wanted, reduction="none"))
            best.append(logits_QV.argmax(-1))
    return torch.cat(losses).double().cpu(), torch.cat(best).cpu()


def _predictions(
    model: Transformer, window: list[int], chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits and the tokens that came, chunk by chunk; the last token is only predicted."""
    num_blocks = -(-len(window) // BLOCK_SIZE)
    blocks = list(range(1, num_blocks + 1))
    pool = KVCache(model.config, 1 + num_blocks, BLOCK_SIZE, model.activation_dtype, model.device)
    for start in range(0, len(window) - 1, chunk):
        fed = window[start : min(start + chunk, len(window) - 1)]
        batch = build_step_batch(
            [Span(fed, start, blocks, num_logits=len(fed))],
            block_size=BLOCK_SIZE,
            device=model.device,
            row_multiple=model.row_multiple,
        )
        wanted = torch.tensor(window[start + 1 : start + 1 + len(fed)], device=model.device)
        yield model.forward(batch, pool), wanted


def fits(weights: dict[str, Any], recipe: Recipe) -> bool:
    """Say whether the recipe's groups divide the inputs of every layer."""
    inputs = {weight.shape[1] for name, weight in weights.items() if _is_layer(name)}
    return recipe.group is None or all(num_in % recipe.group == 0 for num_in in inputs)


def _is_layer(name: str) -> bool:
    return name.rpartition(".")[2] in LINEAR and name != "head"


def build(config: ModelConfig, weights: dict[str, Any], recipe: Recipe) -> Transformer:
    """Return the model whose linear weights are rounded as ``recipe`` says; keeps ``weights``."""
    rounded = dict(weights)
    for name, weight in weights.items():
        if recipe.format and _is_layer(name):
            rounded[name] = quantize_weight(weight, recipe.format, recipe.group)
    if recipe.head:
        rounded["head"] = quantize_weight(weights.get("head", weights["embed"]), recipe.head)
    return Transformer(config, rounded)


def measure(
    config: ModelConfig,
    weights: dict[str, Any],
    tokens: Sequence[int],
    recipes: Sequence[Recipe] = RECIPES,
) -> list[Quality]:
    """One Quality a recipe, the first of which is the measure of the others.

    Raises RuntimeError if the first differs when it is fed in other chunks.
    """
    rows: list[Quality] = []
    for recipe in recipes:
        print(f"{recipe.name} ...", file=sys.stderr, flush=True)
        model = build(config, weights, recipe)
        began = time.perf_counter()
        losses, best = score(model, tokens)
        seconds = time.perf_counter() - began
        if not rows:
            exact_losses, exact_best = losses, best
            few = tokens[: CHUNK + 1]
            if not torch.equal(score(model, few, CHUNK // 2)[0], losses[:CHUNK]):
                raise RuntimeError("the unquantised model differs when fed in other chunks")
        change = losses - exact_losses
        ratio = math.exp(float(change.mean()))
        rows.append(
            Quality(
                name=recipe.name,
                head=recipe.head or "plain",
                weight_bytes=model.weight_bytes,
                perplexity=math.exp(float(losses.mean())),
                ratio=ratio,
                error=ratio * float(change.std()) / math.sqrt(len(change)),
                same_best=float((best == exact_best).double().mean()),
                target=recipe.target,
                seconds=seconds,
            )
        )
    return rows


def cells(row: Quality) -> list[str]:
    """Return the row of the table."""
    return [
        *(row.name, row.head, f"{row.weight_bytes / 1e6:.1f}", f"{row.perplexity:.3f}"),
        *(f"{row.ratio:.4f}", f"{row.error:.4f}"),
        f"<= {row.target:.2f}" if row.target else "-",
        f"{100 * row.same_best:.1f} %",
        f"{row.seconds:.1f}",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.quality", description=__doc__)
    parser.add_argument("--model", default="demo", help="local folder, hub id or demo")
    parser.add_argument("--dtype", default="bf16", help="of the weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text")
    parser.add_argument("--select", default="", help="rows whose name begins with this")
    parser.add_argument("--text", default=str(TEXT), help="file with another text")
    parser.add_argument("--out", default=None, help="folder for the JSON")
    options = parser.parse_args(arguments)
    device, folder = resolve_device(options.device), resolve_model(options.model)
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, dtype=resolve_dtype(options.dtype), device=device)
    tokenizer = read_tokenizer(folder)
    tokens = list(tokenizer.encode(Path(options.text).read_text()))[: options.tokens + 1]
    facts = header(device) | {"model": options.model, "dtype": options.dtype}
    print_header(facts)
    first, *others = RECIPES
    chosen = [row for row in others if row.name.startswith(options.select)]
    recipes = [first, *(row for row in chosen if fits(weights, row))]
    for row in chosen:
        if row not in recipes:
            print(f"{row.name}: left out, they do not divide the inputs of every layer")
    rows = measure(config, weights, tokens, recipes)
    print_table(f"Quantised weights on {len(tokens) - 1} tokens", HEADERS, [*map(cells, rows)])
    document = {
        **{"bench": "quality", **facts, "tokens": len(tokens) - 1, "window": WINDOW},
        "text": Path(options.text).name,
        "rows": [asdict(row) for row in rows],
    }
    path = Path(options.out) if options.out else results_folder(device)
    write_json(path / f"quality-{Path(options.model).name}-{options.dtype}.json", document)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
