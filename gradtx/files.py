"""Files that the command line is asked to write."""

from __future__ import annotations

import argparse
from pathlib import Path


def file_to_write(text: str) -> Path:
    """A path, refused before any work is done if its folder is not there.

    Raises:
        argparse.ArgumentTypeError: if the file cannot be written.
    """
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: no such folder, or a folder")
    return path
