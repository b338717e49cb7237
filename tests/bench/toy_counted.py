"""Hold the launches of a forward pass in which one op runs twice, for test_counted.py.

Runs in a process of its own, with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import sys
from typing import Any

from pagedraft.bench import counted
from pagedraft.model import transformer

GATED_LINEAR = transformer.gated_linear


def twice(*args: Any, **kwargs: Any) -> Any:
    """``gated_linear``, whose first result is thrown away."""
    GATED_LINEAR(*args, **kwargs)
    return GATED_LINEAR(*args, **kwargs)


if __name__ == "__main__":
    transformer.gated_linear = twice
    sys.exit(counted.main(["--check", "--parts", "launches"]))
