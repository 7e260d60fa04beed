"""Checkpoints as files: written aside and renamed, read without running what is in them."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any, TypeAlias

import torch

from gradtx.interop.optional import require

_PLAIN = (str, int, float, bool, type(None))
_MAPPINGS = (dict, OrderedDict, Counter)  # that torch.load(weights_only=True) makes
_SAFETENSORS = ".safetensors"
_ENTRY = "gradtx"  # of the metadata of a safetensors file

Write: TypeAlias = Callable[[Path], None]


def save_checkpoint(checkpoint: Any, path: str | Path) -> None:
    """Writes tensors and numbers to a file, so that there is a whole one at any time.

    The new file is written aside, flushed to the disk, and renamed: whenever the process or the
    machine dies, what is at `path` is the old checkpoint or the new one. Each rank has a file of
    its own, for what a `Pipeline` keeps differs between ranks::

        gx.save_checkpoint(
            {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
             "pipe": pipe.state_dict()},
            f"{folder}/rank_{rank}.pt",
        )

    Args:
        checkpoint: dicts, lists and tuples of tensors, strings, numbers, bools and None, such as
            state dicts are.
        path: of the file, in a folder that is there. With a name that ends in ``.safetensors`` it
            is of that format, its tensors named by their keys, with ``/`` between; else it is what
            `torch.save` writes, and ``torch.load(weights_only=True)`` reads.

    Raises:
        ImportError: for a safetensors file, if that package is not installed.
        OSError: if the file cannot be written.
        TypeError: if something else is in the checkpoint, naming its key; nothing is written then.

    Example:
        >>> import os, tempfile, torch, gradtx as gx
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "rank_0.safetensors")
        ...     gx.save_checkpoint({"step": 3, "model": {"w": torch.ones(2)}}, path)
        ...     gx.load_checkpoint(path)
        {'step': 3, 'model': {'w': tensor([1., 1.])}}
    """
    path = Path(path)
    tensors: dict[str, torch.Tensor] = {}
    tree = _described(checkpoint, "", tensors)
    if path.suffix == _SAFETENSORS:
        write_aside(path, lambda aside: _write_safetensors(aside, tree, tensors))
    else:
        write_aside(path, lambda aside: torch.save(_readable(checkpoint), aside))


def load_checkpoint(path: str | Path, *, mapped: bool = False) -> Any:
    """Reads what `save_checkpoint` has written. Nothing that is in the file is run.

    Args:
        path: of the file.
        mapped: whether tensors are mapped into memory, to be read when they are used: then the file
            is not to be written over.

    Returns:
        The checkpoint, its tensors on the CPU. What was a mapping of another kind is a dict, what
        was a parameter a plain tensor.

    Raises:
        ImportError: for a safetensors file, if that package is not installed.
        OSError: if there is no such file, or it cannot be read.
        ValueError: if it is no checkpoint, or one that is cut off.
    """
    path = Path(path)
    with open(path, "rb"):  # What is raised of one that is cut off may be an OSError too.
        pass
    try:
        if path.suffix == _SAFETENSORS:
            return _read_safetensors(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except ImportError:
        raise
    except Exception as error:
        why = str(error).split("\n")[0]
        raise ValueError(
            f"{path} is no checkpoint, or is cut off: {why or type(error).__name__}; expected what "
            "gx.save_checkpoint or torch.save has written"
        ) from error


def write_aside(path: Path, write: Write) -> None:
    """Writes a file under another name, and renames it once the disk has all of it.

    Args:
        path: what it is called in the end.
        write: writes to the path that it is given.
    """
    aside = path.with_name(f".{path.name}.new")
    try:
        write(aside)
        flush(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until the disk has a file, or, where that can be asked for, the names in a folder."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Of a file system over a network, which has no such thing for folders.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def _described(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON, with names in the place of tensors, which it adds to `tensors`.

    Raises:
        TypeError: naming the key of something that is neither.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if key in tensors:
            raise TypeError(f"checkpoint: two tensors have the key {key!r}")
        tensors[key] = value.detach()
        return {"tensor": key}
    if isinstance(value, Mapping):
        for name in value:
            if type(name) not in _PLAIN:
                raise TypeError(f"checkpoint[{key!r}] has a key {name!r}: expected a str or number")
        pairs = [[k, _described(x, _within(key, k), tensors)] for k, x in value.items()]
        return {"dict": pairs}
    if type(value) in (list, tuple):
        parts = [_described(x, _within(key, i), tensors) for i, x in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    raise TypeError(
        f"checkpoint[{key!r}] is a {type(value).__module__}.{type(value).__qualname__}: expected "
        "tensors, strings, numbers, bools, None, or dicts, lists and tuples of them"
    )


def _readable(value: Any) -> Any:
    """The same in types that are read without running anything, and with nothing tied to them."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        found: Any = copy(value) if type(value) in _MAPPINGS else {}  # A module's has `_metadata`.
        for key, x in value.items():
            found[key] = _readable(x)
        return found
    return type(value)(map(_readable, value)) if isinstance(value, (list, tuple)) else value


def _within(key: str, name: Any) -> str:
    """As in a JSON pointer (RFC 6901), so that no two are the same."""
    own = str(name).replace("~", "~0").replace("/", "~1")
    return f"{key}/{own}" if key else own


def _restored(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `_described`."""
    if isinstance(tree, list):
        return [_restored(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, value)] = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "tuple":
        return tuple(_restored(part, tensors) for part in value)
    if kind == "dict":
        return {key: _restored(part, tensors) for key, part in value}
    raise ValueError(f"it speaks of a {kind!r}")


def _write_safetensors(path: Path, tree: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file = require("safetensors.torch", "a checkpoint in that format").save_file
    known: set[int] = set()
    apart: dict[str, torch.Tensor] = {}
    for key, x in tensors.items():
        if x.layout is not torch.strided:
            raise TypeError(f"checkpoint[{key!r}] is sparse, which safetensors files cannot hold")
        # The format has no strides, and no two names for one memory.
        shared = x.untyped_storage().data_ptr() in known
        known.add(x.untyped_storage().data_ptr())
        apart[key] = x.clone(memory_format=torch.contiguous_format) if shared else x.contiguous()
    save_file(apart, path, {_ENTRY: json.dumps(tree)})


def _read_safetensors(path: Path) -> Any:
    safe_open = require("safetensors", "a checkpoint in that format").safe_open
    with safe_open(path, framework="pt", device="cpu") as file:
        entry = (file.metadata() or {}).get(_ENTRY)
        if entry is None:
            raise ValueError(f"its metadata has no {_ENTRY!r}")
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return _restored(json.loads(entry), tensors)
