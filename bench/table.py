"""Print a table: through rich on a terminal where it is installed, else as aligned plain text."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` of text under ``headers``."""
    if sys.stdout.isatty():
        try:
            _print_rich(title, headers, rows)
            return
        except ImportError:
            pass
    print(f"\n{title}")
    print(format_table(headers, rows))


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned plain text with one line a row."""
    lines = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    texts = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:]])


def _print_rich(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*headers, title=title, title_justify="left")
    for row in rows:
        table.add_row(*[escape(cell) for cell in row])
    Console().print(table)
