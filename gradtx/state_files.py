"""``python -m gradtx reshard``: the per-rank files of a dead job, for another number of ranks."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gradtx.checkpoint_files import flush, load_checkpoint
from gradtx.core.arguments import check_whole
from gradtx.resharding import Resharded


def reshard_files(paths: Sequence[str | Path], new_size: int, folder: str | Path) -> list[Path]:
    """As `reshard`, from files to files, with one leaf in memory at a time.

    Files are mapped, not read; sums are made leaf by leaf, in FP64, and kept on disk until all is
    written. New files are written aside, into a folder that is renamed in the end: either all are
    there or none. Nothing is overwritten.

    Args:
        paths: of all ranks, in any order: each what ``save_checkpoint(pipe.state_dict(), path)``
            or `torch.save` wrote.
        new_size: the number of ranks to come, at least 1.
        folder: where to write ``state_0.pt``, ``state_1.pt``, ...; it is not there yet, or empty.
            It takes as much room again while it is written.

    Returns:
        The paths of the new files, in the order of ranks.

    Raises:
        FileExistsError: if there is something in the folder.
        OSError: if a file cannot be read or written.
        TypeError: if `new_size` is no int.
        ValueError: if a file was written by neither, or is cut off; and as for `reshard`, with the
            names of files.
    """
    check_whole("reshard_files(new_size", new_size, 1)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already, and not empty: nothing is overwritten")
    old = [load_checkpoint(path, mapped=True) for path in paths]
    names = [str(path) for path in paths]
    target = folder.resolve()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as aside:
        spool, made = Path(aside, "spool"), Path(aside, "made")
        spool.mkdir()
        made.mkdir()
        states = Resharded(old, new_size, names=names, room=_Spool(spool)).all()
        for rank, state in enumerate(states):
            torch.save(state, made / f"state_{rank}.pt")
            flush(made / f"state_{rank}.pt")
        flush(made)
        made.replace(target)
    flush(target.parent)
    return [folder / f"state_{rank}.pt" for rank in range(new_size)]


class _Spool:
    """Makes tensors that are files, mapped.

    Args:
        folder: where to put them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """One like `x`, to be filled."""
        if not x.numel():
            return torch.empty_like(x)
        self._count += 1
        path = self._folder / str(self._count)
        if hasattr(os, "posix_fallocate"):
            # A mapped file that the disk has no room for ends the process when it is written to.
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, x.numel() * x.itemsize)
        mapped = torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype)
        return mapped.reshape(x.shape)


def added(paths: Sequence[str | Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """What is kept for each rank and adds to the results, by key: in FP64, one after the other."""
    states = [load_checkpoint(path, mapped=True) for path in paths]
    for key, rule in states[0]["per_rank"].items():
        if rule in ("mean", "node mean", "sum"):
            total = states[0]["state"][key].to(torch.float64, copy=True)
            for state in states[1:]:
                total += state["state"][key]
            yield key, total if rule == "sum" else total.div_(len(states))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``python -m gradtx reshard``."""
    parser.add_argument(
        "files", nargs="+", type=Path, help="of all ranks: torch.save(pipe.state_dict(), file)"
    )
    parser.add_argument("--ranks", type=int, required=True, help="how many there are to be")
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder to write state_0.pt, ... to; a new one"
    )


def main(options: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit status: 0; 2 if the files cannot be resharded.
    """
    try:
        written = reshard_files(options.files, options.ranks, options.out)
    except (OSError, TypeError, ValueError) as error:
        print(f"gradtx reshard: {error}", file=sys.stderr)
        return 2
    print(f"{len(options.files)} ranks to {len(written)}: {written[0]} to {written[-1].name}")
    for line in _compared(options.files, written):
        print(line)
    return 0


# Of a key, what leads to a field of a state.
_PARTS = ("states", "inner_states", "inner_state")


def _compared(old: Sequence[Path], new: Sequence[Path]) -> Iterator[str]:
    """What residuals, velocities and windows add up to, before and after, in words."""
    sums: dict[str, list[float]] = {}
    for (key, before), (_, after) in zip(added(old), added(new), strict=True):
        parts = (x for x in key.split(".") if not x.isdecimal() and x not in _PARTS)
        field = next(parts, key)
        found = sums.get(field, [0.0, 0.0, 0.0])
        values = before, after, after - before
        sums[field] = [x + float(y.square().sum()) for x, y in zip(found, values, strict=True)]
    for field, squares in sums.items():
        norms = [square**0.5 for square in squares]
        yield (
            f"{field}: norm {norms[0]:.9g} before, {norms[1]:.9g} after, "
            f"{norms[2]:.2g} of the difference"
        )
