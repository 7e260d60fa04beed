"""Pytree nodes of our own: registered with optree at once, with jax when it is first met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import optree

T = TypeVar("T")

_nodes: list[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]] = []
_jax: list[Any] = []
_GLOBAL: Any = getattr(optree.registry, "__GLOBAL_NAMESPACE")


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
    register(cls, flatten, unflatten, namespace=_GLOBAL)
    _nodes.append((cls, flatten, unflatten))
    for jax in _jax:
        _register_one(jax, cls, flatten, unflatten)
    return cls


def register_with_jax(jax: Any) -> None:
    """Registers every node, so far and from now on, with the imported module `jax`."""
    if not _jax:
        _jax.append(jax)
        for node in _nodes:
            _register_one(jax, *node)


def _register_one(jax: Any, cls: type, flatten: Any, unflatten: Any) -> None:
    jax.tree_util.register_pytree_node(cls, lambda node: flatten(node)[:2], unflatten)
