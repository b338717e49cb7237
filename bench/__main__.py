"""``python -m pagedraft.bench [PART ...]``: what this machine can do.

Kernels first (each gated by a comparison with its reference), then a short sweep of attention
(modelled only, without a CUDA device), then the engine against transformers on the demo model,
its host time and the KV slots it wastes beside a fake model, a short run of latency targets, draft
lengths against plain decoding, and what quantised weights cost in quality. ``python -m
pagedraft.bench.kernels --help`` has the options of one part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from pagedraft.bench import engine, kernels, kv_waste, latency, overhead, quality, speculation

PARTS: dict[str, Callable[[list[str]], int]] = {
    "kernels": kernels.main,
    "attention": lambda _: kernels.main(["--sweep", "attention", "--select", "short"]),
    "engine": engine.main,
    "overhead": overhead.main,
    "kv_waste": kv_waste.main,
    "latency": lambda _: latency.main(["--rounds", "1", "--requests", "8"]),
    "speculation": speculation.main,
    "quality": quality.main,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named parts, all of them by default; return 1 if any failed its gate."""
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {list(PARTS)}; all by default")
    names = parser.parse_args(arguments).parts or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {unknown}, expected some of {list(PARTS)}")
    return max(PARTS[name]([]) for name in names)


if __name__ == "__main__":
    sys.exit(main())
