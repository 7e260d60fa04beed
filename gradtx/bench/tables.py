"""Tables of text, for a terminal or a file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence


def print_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints rows: by rich, if it is there and has a terminal, or plainly.

    Args:
        headings: one for each column; the first column is flush left, all others flush right.
        lines: the cells of each row.
    """
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(headings[0])
        for heading in headings[1:]:
            table.add_column(heading, justify="right", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        Console(highlight=False).print(table)
        return
    print("\n".join(plain([headings, *lines])))


def plain(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of text, the first one flush left.

    Example:
        >>> print(*plain([["name", "n"], ["x", "10"]]), sep=chr(10))
        name   n
        x     10
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *others = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        yield "  ".join([line[0].ljust(len(first)), *others])
