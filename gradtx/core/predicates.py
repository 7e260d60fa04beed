"""Which leaves to compress: predicates for `filter_params` and `masked`, combined by & | ~."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable

from gradtx.backends.registry import is_jax_node
from gradtx.core.tree import Array, LeafInfo

Test = Callable[[str, Array, "LeafInfo | None"], bool]


class Predicate:
    """A named test on a leaf: ``predicate(path, leaf, info) -> bool``.

    Args:
        test: the function.
        code: the expression that makes it, for printing.
        functions: those of the user in it; predicates compare by them and by the code.

    Example:
        >>> import gradtx as gx
        >>> gx.is_matrix & ~gx.path_glob("head.*")
        gx.is_matrix & ~gx.path_glob('head.*')
    """

    def __init__(self, test: Test, code: str, functions: tuple[Test, ...] = ()) -> None:
        self._test = test
        self._code = code
        self._functions = functions

    def __call__(self, path: str, leaf: Array, info: LeafInfo | None = None) -> bool:
        """Asks the test about one leaf."""
        return bool(self._test(path, leaf, info))

    def __and__(self, other: Test) -> Predicate:
        right = predicate(other)
        return self._joined(right, "&", lambda *a: self(*a) and right(*a))

    def __or__(self, other: Test) -> Predicate:
        right = predicate(other)
        return self._joined(right, "|", lambda *a: self(*a) or right(*a))

    def __invert__(self) -> Predicate:
        return Predicate(lambda *a: not self(*a), f"~{self._inner()}", self._functions)

    def _joined(self, other: Predicate, sign: str, test: Test) -> Predicate:
        code = f"{self._inner()} {sign} {other._inner()}"
        return Predicate(test, code, self._functions + other._functions)

    def _inner(self) -> str:
        return f"({self._code})" if " " in self._code else self._code

    def __repr__(self) -> str:
        return self._code

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Predicate):
            return NotImplemented
        return (self._code, self._functions) == (other._code, other._functions)

    def __hash__(self) -> int:
        return hash(self._code)


def predicate(test: Test) -> Predicate:
    """A function ``(path, leaf, info) -> bool`` as a `Predicate`; a predicate as it is.

    Raises:
        TypeError: if `test` is not callable, or a module of JAX's that happens to be.
    """
    if isinstance(test, Predicate):
        return test
    if not callable(test):
        raise TypeError(f"a predicate is a function (path, leaf, info) -> bool, got {test!r}")
    if is_jax_node(test):
        raise TypeError(
            f"a predicate is a function (path, leaf, info) -> bool, got a {type(test).__name__}, "
            "which can be called but is a pytree"
        )
    # No address in it: ranks and runs compare the code.
    named = getattr(test, "func", test)  # of a functools.partial
    named = named if hasattr(named, "__qualname__") else type(named)
    return Predicate(test, f"{named.__module__}.{named.__qualname__}", (test,))


def all_of(*tests: Test) -> Predicate:
    """True where all tests are."""
    first, *rest = (predicate(test) for test in tests)
    for other in rest:
        first = first & other
    return first


_NORM_NAME = re.compile(r"(^|_)(sync_?)?(bn|batch_?norm)(\d+d)?(_?\d+)?$", re.IGNORECASE)


def _batch_norm(path: str, leaf: Array, info: LeafInfo | None) -> bool:
    if info is not None:
        return info.running_statistics
    return any(_NORM_NAME.search(key) for key in re.split("[./]", path))


def path_glob(*patterns: str) -> Predicate:
    """Leaves whose key path matches a shell pattern, such as ``"encoder.*.weight"``.

    Args:
        *patterns: as `fnmatch.fnmatchcase` takes them; one match is enough.

    Returns:
        The predicate.

    Raises:
        TypeError: if a pattern is no string, or there is none.
    """
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"path_glob takes one or more strings, got {patterns!r}")
    return Predicate(
        lambda path, leaf, info: any(fnmatch.fnmatchcase(path, p) for p in patterns),
        f"gx.path_glob({', '.join(map(repr, patterns))})",
    )


def min_size(n: int) -> Predicate:
    """Leaves with at least `n` values.

    Args:
        n: a positive whole number.

    Returns:
        The predicate.

    Raises:
        ValueError: if `n` is no positive int.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"min_size(n) takes a whole number of 1 or more, got {n!r}")

    def test(path: str, leaf: Array, info: LeafInfo | None) -> bool:
        size: int = math.prod(leaf.shape)
        return size >= n

    return Predicate(test, f"gx.min_size({n})")


is_matrix = Predicate(lambda path, leaf, info: len(leaf.shape) >= 2, "gx.is_matrix")
"""Matrices and convolution kernels: leaves of two or more dimensions."""

is_bias = Predicate(lambda path, leaf, info: path.split(".")[-1] == "bias", "gx.is_bias")
"""Leaves named ``bias``."""

is_batch_norm = Predicate(_batch_norm, "gx.is_batch_norm")
"""Leaves of normalisation layers with running statistics.

Where `init` was given a module, the layer decides: every subclass of torch's batch normalisation
(SyncBatchNorm too) and instance normalisation with ``track_running_stats``, and any module with
buffers ``running_mean`` and ``running_var``. Without a module the path decides: a key such as
``bn1``, ``downsample_bn`` or ``BatchNorm_0``. A layer that only has a number for a name
(``layers.1.weight`` in an `nn.Sequential`) cannot be told by path: give `init` the module.
"""
