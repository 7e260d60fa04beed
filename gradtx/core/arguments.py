"""What factories check of their arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def check_ratio(argument: str, value: Any) -> float:
    """Refuses what is no share of values.

    Args:
        argument: how it was given, such as ``"topk(ratio"``.
        value: what was given.

    Returns:
        The value as a Python float.

    Raises:
        TypeError: if it is no float.
        ValueError: if it is not over 0 and at most 1.
    """
    if isinstance(value, bool) or not isinstance(value, float):
        raise TypeError(
            f"{argument}={value!r}): expected a float over 0 and at most 1, such as 0.01"
        )
    if not (math.isfinite(value) and 0.0 < value <= 1.0):
        raise ValueError(f"{argument}={value!r}): expected a float over 0 and at most 1")
    return float(value)


def check_bool(argument: str, value: Any) -> None:
    """Refuses what is no bool.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{argument}={value!r}): expected True or False")


def check_whole(argument: str, value: Any, least: int) -> None:
    """Refuses what is no whole number, or too small.

    Raises:
        TypeError: if it is no int.
        ValueError: if it is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument}={value!r}): expected a whole number of {least} or more")
    if value < least:
        raise ValueError(f"{argument}={value!r}): expected a whole number of {least} or more")


# What is larger is infinite in FP32.
_LARGEST = float(np.finfo(np.float32).max)


def check_number(argument: str, value: Any) -> float:
    """Refuses what is no finite number.

    Returns:
        The value as a Python number.

    Raises:
        TypeError: if it is no int or float.
        ValueError: if it is not finite in FP32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument}={value!r}): expected a number")
    if not abs(value) <= _LARGEST:
        raise ValueError(f"{argument}={value!r}): expected a finite number")
    return float(value) if isinstance(value, float) else int(value)


def check_positive(argument: str, value: Any) -> float:
    """Refuses what is no finite number over 0.

    Returns:
        The value as a Python number.

    Raises:
        TypeError: if it is no int or float.
        ValueError: if it is not over 0, or not finite in FP32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument}={value!r}): expected a number over 0")
    if not 0 < value <= _LARGEST:
        raise ValueError(f"{argument}={value!r}): expected a finite number over 0")
    return check_number(argument, value)


def count(ratio: float, n: int) -> int:
    """How many of `n` values a ratio selects; at least one, but none of none."""
    return max(1, round(ratio * n)) if n else 0
