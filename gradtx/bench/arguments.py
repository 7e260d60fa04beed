"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import gradtx as gx
from gradtx.core.parse import parse


def chain_from(code: str) -> gx.Chain:
    """The chain that a text stands for.

    Raises:
        ValueError: if it is none, or has no exchange.

    Example:
        >>> chain_from("chain(topk(0.01), ef(), allreduce())")
        gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce())
    """
    parsed = parse(code, {name: getattr(gx, name) for name in gx.__all__})
    tx = parsed if isinstance(parsed, gx.Chain) else gx.chain(parsed)
    if tx.exchange is None:
        raise ValueError(f"{tx.code()} exchanges nothing: end it with allreduce()")
    return tx


def whole_number(least: int, most: int = 10**6) -> Callable[[str], int]:
    """An argparse type: a whole number within bounds.

    Example:
        >>> whole_number(1)("3")
        3
    """

    def convert(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{number} is not in {least}..{most}")
        return number

    convert.__name__ = "whole number"
    return convert
