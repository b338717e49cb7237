"""Words for what went wrong in code that is not ours: drafters, logits processors, callbacks."""

from __future__ import annotations


def describe(error: BaseException) -> str:
    """``Type: message``; the type alone where the error cannot even say what it is."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:
        return name
