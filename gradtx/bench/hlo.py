"""What a program compiled by XLA sends: read from its text."""

from __future__ import annotations

import math
import re

_BITS = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64"), 64),
}
_COLLECTIVE = re.compile(
    r"= (?P<types>.+?) (?P<name>all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_NO_TYPE = re.compile(r"\{[^}]*\}|/\*.*?\*/")  # layouts, and comments between the parts of a tuple


def collective_bytes(text: str, devices: int) -> dict[str, int]:
    """By collective, the bytes that one device puts into it.

    What these put on a link depends on the algorithm: a gather on `N` devices sends ``N - 1``
    copies of them, a ring all-reduce ``2 (N - 1) / N`` times as much.

    Args:
        text: of the program: ``jax.jit(f).lower(*arguments).compile().as_text()``.
        devices: how many take part in a gather or a scatter.

    Raises:
        KeyError: for a dtype that is not known.

    Example:
        >>> line = "%g = u8[2,100]{1,0} all-gather(u8[1,100]{1,0} %x), dimensions={0}"
        >>> collective_bytes(line, 2)
        {'all-gather': 100}
    """
    total: dict[str, int] = {}
    for found in _COLLECTIVE.finditer(text):
        name, types = found["name"], _NO_TYPE.sub("", found["types"])
        # All but an all-reduce start with a tuple of what goes in, what comes out, and more.
        operands = bool(found["start"]) and name != "all-reduce"
        size = _nbytes(_first(types) if operands else types)
        if name == "all-gather" and not operands:
            size //= devices
        elif name == "reduce-scatter" and not operands:
            size *= devices
        total[name] = total.get(name, 0) + size
    return total


def _nbytes(types: str) -> int:
    bits = sum(
        _BITS[dtype] * math.prod(int(length) for length in shape.split(",") if length)
        for dtype, shape in _ARRAY.findall(types)
    )
    return bits // 8


def _first(types: str) -> str:
    """The first part of a tuple: an array, or a tuple in turn."""
    depth = 0
    for i, letter in enumerate(types):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 1:
            return types[1:i]
    return types
