"""Pytree nodes of our own: registered with optree at once, with jax when it is first met."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import optree

T = TypeVar("T")

# Of the nodes that JAX knows and optree does not; all others are registered for everyone.
NAMESPACE = "gradtx"
_classes: set[type] = set()
_nodes: list[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]] = []
_jax: list[Any] = []
# Whoever finds a class registered may use it at once.
_lock = threading.Lock()
_adopted: dict[type, Callable[[Any], tuple[list[Any], Any, tuple[Any, ...]]]] = {}
_GLOBAL: Any = getattr(optree.registry, "__GLOBAL_NAMESPACE")


class Entry(Enum):
    """Entries of a key path that say something about it."""

    OMITTED = "omitted"
    """The value in a box, such as a variable of flax's: it is called what the box is called."""


_BOX = (Entry.OMITTED,)


def register_node(
    cls: type[T], children: tuple[str, ...] = (), static: tuple[str, ...] = ()
) -> type[T]:
    """Registers a class as a pytree node, by the names of its fields.

    Args:
        cls: a class whose constructor takes `children`, then `static`, by position.
        children: fields that hold arrays or further nodes.
        static: fields that are hashable and compare by value.

    Returns:
        `cls`.
    """

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        return (
            tuple(getattr(node, name) for name in children),
            tuple(getattr(node, name) for name in static),
            children,
        )

    def unflatten(aux: tuple[Any, ...], parts: Any) -> Any:
        return cls(*parts, *aux)

    register: Any = optree.register_pytree_node
    with _lock:
        register(cls, flatten, unflatten, namespace=_GLOBAL)
        _nodes.append((cls, flatten, unflatten))
        _classes.add(cls)
        for jax in _jax:
            _register_one(jax, cls, flatten, unflatten)
    return cls


def is_registered(cls: type) -> bool:
    """Whether a class is one of the nodes registered here."""
    return cls in _classes


def is_jax_node(x: Any) -> bool:
    """Whether JAX takes an object for a node of a pytree, and not for a leaf."""
    jax = sys.modules.get("jax")
    return jax is not None and not jax.tree_util.all_leaves([x])


def adopt_type(cls: type) -> None:
    """Makes a pytree node of JAX's one of ours: a flax `FrozenDict`, an equinox module, ...

    Several threads may find the same class.
    """
    jax = sys.modules["jax"]

    def flatten(node: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
        found, treedef = jax.tree_util.tree_flatten_with_path(node, lambda part: part is not node)
        keys = [path[0] for path, _ in found]
        # Whoever unwraps the variables between two calls still has the same leaves.
        boxed = len(keys) == 1 and getattr(keys[0], "name", None) == "value"
        return [part for _, part in found], treedef, _BOX if boxed else tuple(map(_entry, keys))

    def unflatten(treedef: Any, parts: Any) -> Any:
        return jax.tree_util.tree_unflatten(treedef, parts)

    register: Any = optree.register_pytree_node
    with _lock:
        if cls not in _adopted:
            _adopted[cls] = flatten
            register(cls, flatten, unflatten, namespace=NAMESPACE)


def in_box(node: Any) -> tuple[Any, ...]:
    """The value alone, if a node is a box: it has one child, its attribute ``value``."""
    flatten = _adopted.get(type(node))
    if flatten is None:
        return ()
    parts, _, entries = flatten(node)
    return tuple(parts) if entries == _BOX else ()


def _entry(key: Any) -> Any:
    """What a key of a path of JAX's is called: of a dict, a sequence, an attribute, or whatever."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)


def register_with_jax(jax: Any) -> None:
    """Registers every node, so far and from now on, with the imported module `jax`."""
    with _lock:
        if not _jax:
            for node in _nodes:
                _register_one(jax, *node)
            _jax.append(jax)


def _register_one(jax: Any, cls: type, flatten: Any, unflatten: Any) -> None:
    jax.tree_util.register_pytree_node(cls, lambda node: flatten(node)[:2], unflatten)
