"""What may become of bytes on their way."""

import math
import struct

import torch
from hypothesis import strategies as st

EXTREMES = [
    *(struct.pack("<q", number) for number in (0, 1, -1, 2**15, 2**31 - 1, -(2**31), 2**62)),
    *(struct.pack("<d", number) for number in (-1.0, 1e300, math.inf, math.nan)),
    *(struct.pack("<ff", number, number) for number in (-1.0, 3e38, math.inf, math.nan)),
]


def as_tensor(data):
    return torch.tensor(list(data), dtype=torch.uint8)


def as_bytes(tensor):
    return bytes(tensor.tolist())


@st.composite
def damaged(draw, data):
    """The bytes, cut short, followed by others, with bits or numbers changed, or all others."""
    how = draw(st.sampled_from(["nothing", "cut", "extend", "flip", "number", "fill", "replace"]))
    if how == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if how == "extend":
        return data + draw(st.binary(min_size=1, max_size=20))
    if how == "flip" and data:
        flipped = bytearray(data)
        for _ in range(draw(st.integers(1, 3))):
            flipped[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(flipped)
    if how == "number" and data:
        length = draw(st.sampled_from([1, 2, 4, 8]))
        start = draw(st.integers(0, (len(data) - 1) // length)) * length
        number = draw(st.sampled_from(EXTREMES))[:length]
        return data[:start] + number[: len(data) - start] + data[start + length :]
    if how == "fill":
        return bytes([draw(st.sampled_from([0, 255]))]) * len(data)
    if how == "replace":
        return draw(st.binary(min_size=len(data), max_size=len(data)))
    return data
