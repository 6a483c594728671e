"""Words and tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(names: Sequence[str]) -> str:
    """A list that stays readable where a residual stream has dozens of writers."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns padded to the widest cell; numbers to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        cells = (c.rjust(n) if c.isdigit() else c.ljust(n) for c, n in zip(row, widths, strict=True))
        return ("  " + "  ".join(cells)).rstrip()

    return [line(head), "  " + "  ".join("-" * n for n in widths), *map(line, rows)]
