"""What can be read off a transformation that is not ours: its name, and what it was made with.

What is read are the variables that its functions close over and the attributes of its objects, as
far as they are numbers, strings, sequences of those, small arrays, or functions in turn. Constants
in the code of a function, its defaults, and what it finds in its module are not seen:
``lambda step: 1e-3`` and ``lambda step: 1e-2`` look the same, and ranks do not notice if they have
one each.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

from gradtx.core.stage import Argument

_DEEPEST = 8
# Arrays of more values are data rather than settings.
_SMALL = 16


class Code(str):
    """Text that prints as it is: part of the code of a stage."""

    def __repr__(self) -> str:
        return str(self)


def name_of(function: Any) -> str:
    """The name of the factory that made a function, or of the function's class."""
    function = _unwrapped(function)
    qualname = getattr(function, "__qualname__", type(function).__name__)
    first: str = qualname.split(".")[0]
    return first


def settings_of(function: Any) -> tuple[Argument, ...]:
    """The numbers and strings that a function closes over, or its object holds, by name.

    So are sequences of those and arrays of at most 16 values. What it is made of is described as
    well: the transformations of an `optax.chain`, a schedule.
    """
    return tuple(_settings(_held(_unwrapped(function)), _DEEPEST))


def describe(function: Any) -> Code:
    """The name and the settings of a function, as one call.

    Example:
        >>> import optax
        >>> describe(optax.sgd(0.1).update)
        chain(identity(), scale(step_size=-0.1))
    """
    return _described(function, _DEEPEST)


def _described(function: Any, depth: int) -> Code:
    arguments = _settings(_held(_unwrapped(function)), depth)
    return Code(f"{name_of(function)}({', '.join(map(str, arguments))})")


def _settings(held: dict[str, Any], depth: int) -> Iterator[Argument]:
    for key, value in sorted(held.items()):
        if key.startswith("_") or not depth:
            continue
        plain = _plain(value, depth)
        if plain is not None:
            yield Argument(key, plain, None)
        elif isinstance(value, dict):
            yield from _settings({str(name): part for name, part in value.items()}, depth - 1)
        elif _is_sequence(value):
            for part in _updates_in(value):
                yield Argument(key, _described(part, depth - 1))
        elif (part := _update_of(value)) is not None:
            described = _described(part, depth - 1)
            if not described.endswith("()"):
                yield Argument(key, described, None)


def _held(function: Any) -> dict[str, Any]:
    owner = getattr(function, "__self__", None)
    found = {} if owner is None else dict(getattr(owner, "__dict__", {}))
    if inspect.isfunction(function):
        found |= _closed_over(function)
    if isinstance(function, functools.partial):
        found |= {"func": function.func, "args": function.args, **function.keywords}
    return found


def _closed_over(function: Any) -> dict[str, Any]:
    """The variables that a function closes over, but for those that were never set."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # The cell is empty.
            found[name] = cell.cell_contents
    return found


def _plain(value: Any, depth: int) -> Any:
    """A number or a string, a list or tuple of them, a small array as such; None for others."""
    if isinstance(value, (bool, int, float, complex, str)) and not hasattr(value, "tolist"):
        return value
    if isinstance(value, (list, tuple)) and value and depth:
        parts = [_plain(part, depth - 1) for part in value]
        kind = list if isinstance(value, list) else tuple
        return None if any(part is None for part in parts) else kind(parts)
    if hasattr(value, "tolist") and math.prod(getattr(value, "shape", (_SMALL + 1,))) <= _SMALL:
        try:
            return value.tolist()
        except Exception:  # It is traced, or on other hosts: its values are not known here.
            return None
    return None


def _update_of(value: Any) -> Any:
    """The update of a transformation, or a function; None for anything else."""
    update = getattr(value, "update", None)
    if callable(update) and hasattr(value, "init"):
        return update
    return value if inspect.isroutine(value) or isinstance(value, functools.partial) else None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and not hasattr(value, "update")


def _updates_in(values: Any) -> Iterator[Any]:
    for value in values:
        if _is_sequence(value):
            yield from _updates_in(value)
        elif (update := _update_of(value)) is not None:
            yield update


def _unwrapped(function: Any) -> Any:
    """The update that `optax.with_extra_args_support` has wrapped."""
    qualname = getattr(function, "__qualname__", "")
    if qualname.startswith("with_extra_args_support.") and inspect.isfunction(function):
        inner = _closed_over(function).get("tx")
        return function if inner is None else _unwrapped(inner.update)
    return function
