"""How far a measurement has come, on standard error."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Shows steps as they are done: on a terminal by a bar of rich's, else by a line each tenth.

    Args:
        total: how many steps there will be.

    Yields:
        A function that is called with a text after each step.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _lines(total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def _lines(total: int) -> Callable[[str], None]:
    done = 0

    def show(text: str) -> None:
        nonlocal done
        before, done = 10 * done // total, done + 1
        if 10 * done // total > before:
            print(f"{100 * done // total} %: {text}", file=sys.stderr, flush=True)

    return show
