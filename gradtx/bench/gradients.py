"""Gradients to measure on: the built-in ones, and those in files."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from gradtx.core.tree import PyTree, flatten_with_paths
from gradtx.untrusted import why_unusual

Gradient = dict[str, Tensor]

BUILT_IN = {"early": 5, "late": 275}
"""The built-in gradients: the step each is from, of the 285 steps of the demo (see `record`)."""

_LONGEST = 1 << 16  # bytes of the header of an array
_DEFLATED = 1032  # bytes that one may become, at most


def built_in_path(name: str) -> Path:
    """The file that holds a built-in gradient."""
    return Path(__file__).parent / "data" / f"{name}.npz"


def load(source: str) -> Gradient:
    """A gradient to measure on.

    Args:
        source: ``"early"``, ``"late"``, or a file: one tensor or several, nested in dicts and
            lists, as ``.npy``, ``.npz``, ``.pt``, ``.pth`` or ``.safetensors``. Nothing in it is
            executed.

    Returns:
        The leaves by path, on the CPU, as FP32.

    Raises:
        ValueError: if the file is of another kind or not readable, or holds anything but
            floating-point numbers that are finite as FP32, not all of them zero.
        OSError: if there is no such file.
        ImportError: if the package that reads the file is missing.

    Example:
        >>> gradient = load("late")
        >>> len(gradient), gradient["0.weight"].shape
        (13, torch.Size([16, 1, 3, 3]))
    """
    path = built_in_path(source) if source in BUILT_IN else Path(source)
    read = _READERS.get(path.suffix)
    if read is None:
        raise ValueError(
            f"{source}: expected {', '.join(BUILT_IN)}, or a file that ends in "
            f"{', '.join(_READERS)}"
        )
    return _checked(source, _read(path, read))


def _read(path: Path, read: Callable[[Path], PyTree]) -> PyTree:
    try:
        return read(path)
    except (ImportError, FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:  # Of bytes that are wrong the readers raise anything.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{path}: not read as {path.suffix}: {reason}") from error


def _read_npy(path: Path) -> PyTree:
    with path.open("rb") as file:
        _header(file)
    # Mapped, as numpy takes the memory that a file says it needs before it looks for the values.
    return torch.from_numpy(np.lib.format.open_memmap(path, mode="c"))


def _read_npz(path: Path) -> PyTree:
    # Opened here, as numpy leaves open what it cannot read.
    with path.open("rb") as file:
        _check_lengths(file)
        file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            return {name: torch.from_numpy(loaded[name]) for name in loaded.files}


def _check_lengths(whole: BinaryIO) -> None:
    """Refuses an archive of arrays that say that they are longer than they are."""
    size = whole.seek(0, io.SEEK_END)
    with zipfile.ZipFile(whole) as archive:
        for entry in archive.infolist():
            if entry.compress_size > size or entry.file_size > _DEFLATED * entry.compress_size:
                raise ValueError(f"{entry.filename} says that it has {entry.file_size} bytes")
            with archive.open(entry) as file:
                shape, dtype = _header(file)
            if math.prod(shape) * dtype.itemsize > entry.file_size:
                raise ValueError(f"{entry.filename} says that it has the shape {shape}")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the dtype of an array, whose header may say that it is of any length."""
    start = io.BytesIO(file.read(_LONGEST))
    version = np.lib.format.read_magic(start)
    headers = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
    shape, _, dtype = headers[version != (1, 0)](start)
    return shape, dtype


def _read_torch(path: Path) -> PyTree:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_safetensors(path: Path) -> PyTree:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ImportError("safetensors not found: pip install safetensors") from None
    return load_file(path)


_READERS: dict[str, Callable[[Path], PyTree]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".safetensors": _read_safetensors,
}


def _checked(source: str, tree: PyTree) -> Gradient:
    paths, leaves, _ = flatten_with_paths(tree)
    found = {
        path or "tensor": _checked_leaf(f"{source}: {path or 'the tensor'}", leaf)
        for path, leaf in zip(paths, leaves, strict=True)
        if leaf is not None
    }
    if not any(leaf.any() for leaf in found.values()):
        raise ValueError(f"{source}: holds no value other than zero: there is nothing to compare")
    return found


def _checked_leaf(where: str, leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise ValueError(f"{where} is of type {type(leaf).__name__}, expected tensors only")
    if not leaf.is_floating_point() or leaf.layout is not torch.strided:
        kind = str(leaf.dtype if leaf.layout is torch.strided else leaf.layout)
        raise ValueError(f"{where} is {kind.removeprefix('torch.')}, expected dense floats")
    if (reason := why_unusual(leaf)) is not None:
        raise ValueError(f"{where} {reason}, expected dense floats")
    wide = leaf.detach().to(torch.float32).contiguous()
    bad = wide.numel() - int(wide.isfinite().sum())
    if bad:
        raise ValueError(f"{where} holds {bad:,} of {wide.numel():,} values not finite as FP32")
    return wide
