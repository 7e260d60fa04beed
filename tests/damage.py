"""What may become of bytes on their way."""

import torch
from hypothesis import strategies as st


def as_tensor(data):
    return torch.tensor(list(data), dtype=torch.uint8)


def as_bytes(tensor):
    return bytes(tensor.tolist())


@st.composite
def damaged(draw, data):
    """The bytes, cut short, followed by others, with bits flipped, or others altogether."""
    how = draw(st.sampled_from(["nothing", "cut", "extend", "flip", "fill", "replace"]))
    if how == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if how == "extend":
        return data + draw(st.binary(min_size=1, max_size=20))
    if how == "flip" and data:
        flipped = bytearray(data)
        for _ in range(draw(st.integers(1, 3))):
            flipped[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(flipped)
    if how == "fill":
        return bytes([draw(st.sampled_from([0, 255]))]) * len(data)
    if how == "replace":
        return draw(st.binary(min_size=len(data), max_size=len(data)))
    return data
