"""Words for what went wrong in code that is not ours: drafters, logits processors, callbacks."""

from __future__ import annotations

# They end the program. Whatever else such code raises, a panic in native code among it, which is no
# Exception, is its own failure.
INTERRUPTS = (KeyboardInterrupt, SystemExit)


def describe(error: BaseException) -> str:
    """``Type: message``; the type alone where the error cannot even say what it is."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except INTERRUPTS:
        raise
    except BaseException:
        return name
