"""Models as the shapes of their parameters: what a gradient is made of, without any weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

Shape = tuple[int, ...]


def resnet50() -> Iterator[Shape]:
    """ResNet-50 on ImageNet, as torchvision has it: 25,557,032 values in 161 leaves.

    References:
        He et al., Deep Residual Learning for Image Recognition, 2016.

    Example:
        >>> sum(map(math.prod, resnet50()))
        25557032
    """
    yield from _convolution(3, 64, 7)
    width = 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from _convolution(width, inner, 1)
            yield from _convolution(inner, inner, 3)
            yield from _convolution(inner, 4 * inner, 1)
            if block == 0:
                yield from _convolution(width, 4 * inner, 1)
            width = 4 * inner
    yield from ((1000, width), (1000,))


def _convolution(channels: int, out: int, size: int) -> Iterator[Shape]:
    """A convolution without bias, and the BatchNorm behind it."""
    yield from ((out, channels, size, size), (out,), (out,))


def gpt2() -> Iterator[Shape]:
    """The smallest GPT-2: 124,439,808 values in 148 leaves; the output layer is the embedding.

    References:
        Radford et al., Language Models are Unsupervised Multitask Learners, 2019.

    Example:
        >>> sum(map(math.prod, gpt2()))
        124439808
    """
    vocabulary, context, width, layers = 50_257, 1024, 768, 12
    norm = ((width,), (width,))
    yield from ((vocabulary, width), (context, width))
    for _ in range(layers):
        yield from norm
        yield from ((width, 3 * width), (3 * width,), (width, width), (width,))
        yield from norm
        yield from ((width, 4 * width), (4 * width,), (4 * width, width), (width,))
    yield from norm


def leaves() -> Iterator[Shape]:
    """A thousand leaves of 64 values, which cost time and no bytes."""
    yield from [(64,)] * 1000


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": resnet50,
    "gpt2": gpt2,
    "leaves": leaves,
}
FEWEST, MOST = 1, 2**31


def shapes_of(model: str) -> list[Shape]:
    """The shapes of a model's parameters, in the order of the model.

    Args:
        model: one of `MODELS`, or how many leaves of which shape, such as ``"24x1024x1024"``.

    Raises:
        ValueError: for anything else, or if there are more than 2^31 values, or none.

    Example:
        >>> shapes_of("2x3x4")
        [(3, 4), (3, 4)]
    """
    if model in MODELS:
        return list(MODELS[model]())
    if not re.fullmatch(r"\d+(x\d+)+", model, re.ASCII):
        raise ValueError(
            f"{model}: expected {', '.join(MODELS)}, or so many leaves of one shape, such as "
            "24x1024x1024"
        )
    count, *shape = map(int, model.split("x"))
    values = count * math.prod(shape)
    if not FEWEST <= values <= MOST:
        raise ValueError(f"{model}: expected {FEWEST} to {MOST:,} values, got {values:,}")
    return [tuple(shape)] * count


def described(model: str) -> str:
    """A model in a few words.

    Example:
        >>> described("leaves")
        'leaves: 64,000 values in 1,000 leaves'
    """
    shapes = shapes_of(model)
    return f"{model}: {sum(map(math.prod, shapes)):,} values in {len(shapes):,} leaves"
