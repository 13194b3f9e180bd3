"""Tables as text: what commands and reports print."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Lines with the cells of `rows` (all of one length, at least one row) below each other, two spaces between columns.

    numbers: all columns but the first stand at their right end."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if numbers else cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return lines
