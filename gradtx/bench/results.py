"""A file of finished runs, one JSON object a line, so that what is done need not be run again."""

from __future__ import annotations

import json
from pathlib import Path

from gradtx.bench.training import Record


def read(path: Path) -> list[Record]:
    """The runs in a file; none if it is not there.

    A last line that does not end was being written when something stopped the process: it is left
    out.

    Raises:
        ValueError: naming the line that holds no run.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [_record(f"{path}, line {number}", line) for number, line in enumerate(lines, 1)]


def _record(where: str, line: bytes) -> Record:
    try:
        return Record.from_json(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a run of bench convergence: {error}") from None


def mend(path: Path) -> None:
    """Takes away a last line that does not end.

    Raises:
        ValueError: if it is not the beginning of a run, and so another program's.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    unfinished, start = content[end:], b'{"task": "'
    if not unfinished.startswith(start[: len(unfinished)]):
        raise ValueError(f"{path}: ends in what is not a run of bench convergence")
    if unfinished:
        with path.open("r+b") as file:
            file.truncate(end)


def append(path: Path, record: Record) -> None:
    """Writes a run at the end of a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record.to_json(), allow_nan=False) + "\n")
