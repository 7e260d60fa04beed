"""What stands in a saved state, looked at before it is used: files may hold anything."""

from __future__ import annotations

from typing import Any

import torch

_LONGEST = 1000
_PLAIN = (bool, int, float, str, type(None))


def shown(value: Any) -> str:
    """A value in words, however long or deep it is.

    Example:
        >>> shown("chain()"), shown([1, 2]), shown(2**9999)
        ("'chain()'", 'a list', 'an int')
    """
    if isinstance(value, torch.Tensor) and why_unusual(value) is None and not value.ndim:
        value = value.item()
    large = isinstance(value, int) and value.bit_length() > 256
    if isinstance(value, _PLAIN) and not large:
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def is_same(value: Any, expected: Any) -> bool:
    """Whether a number, a text or None is the one that is expected; anything else is not."""
    return type(value) is type(expected) and isinstance(value, _PLAIN) and value == expected


def why_unusual(x: torch.Tensor) -> str | None:
    """Why a tensor is none of those that a state has: dense, and all of its values in memory.

    Example:
        >>> why_unusual(torch.zeros(2).expand(3, 2))
        'has 2 values for 6 places'
    """
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(x).__name__}"
    if x.is_nested or x.is_quantized or x.layout is not torch.strided:
        return "is nested" if x.is_nested else "is quantized" if x.is_quantized else "is sparse"
    if x.is_meta:
        return "is on the meta device, which has no values"
    values = x.untyped_storage().nbytes() // x.itemsize
    return f"has {values} values for {x.numel()} places" if values < x.numel() else None


def check_tensor(name: str, value: Any) -> torch.Tensor:
    """Refuses what is no tensor, or none that a state has.

    Raises:
        ValueError: saying what `name` is.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}: expected a tensor")
    if (reason := why_unusual(value)) is not None:
        raise ValueError(f"{name} {reason}: expected a dense tensor")
    return value


def tensor_like(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, laid out as another one of that shape and dtype.

    Raises:
        ValueError: if it is none, or of another shape or dtype.
    """
    value = check_tensor(name, value)
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}: "
            f"expected {tuple(like.shape)} and {like.dtype}"
        )
    return torch.empty_like(like, requires_grad=False).copy_(value.detach())
