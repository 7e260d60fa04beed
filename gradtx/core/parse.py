"""A chain given as text, such as ``"chain(unscale(), topk(0.01), ef())"``; nothing is evaluated."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

# What `parse` raises, and the factories that it calls.
FAILURES = (ValueError, TypeError, NotImplementedError, MemoryError, RecursionError)


def parse(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression of calls, names, literals and the operators & | ~.

    Args:
        text: the expression; names may be prefixed by ``gx.``.
        names: what a name stands for.

    Returns:
        The value.

    Raises:
        ValueError: if the text is anything else, or has an unknown name.

    Example:
        >>> import gradtx as gx
        >>> parse("gx.chain(topk(0.01), ef())", vars(gx))
        gx.chain(gx.topk(0.01), gx.ef())
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"not a chain: {text!r} ({error.msg})") from None
    return _value(tree.body, names)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Call(func=func, args=args, keywords=keywords):
            if any(keyword.arg is None for keyword in keywords):
                raise ValueError(f"not part of a chain: {ast.unparse(node)!r}")
            named = {str(keyword.arg): _value(keyword.value, names) for keyword in keywords}
            return _value(func, names)(*(_value(arg, names) for arg in args), **named)
        case ast.Attribute(value=ast.Name(id="gx" | "gradtx"), attr=name) | ast.Name(id=name):
            if name.startswith("_") or name not in names:
                raise ValueError(f"unknown name {name!r}")
            return names[name]
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _value(left, names) & _value(right, names)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _value(left, names) | _value(right, names)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_value(operand, names)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"not part of a chain: {ast.unparse(node)!r}") from None
