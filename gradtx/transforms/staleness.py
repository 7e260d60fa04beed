"""How large a learning rate may be when gradients arrive late."""

from __future__ import annotations

import math
from typing import Any

from gradtx.core.arguments import check_positive, check_whole


def stable_learning_rate(curvature: float, *, steps: int = 0, momentum: float = 0.0) -> float:
    r"""The learning rate up to which gradient descent on late gradients converges on a quadratic.

    With the curvature :math:`\lambda`, gradients :math:`s` steps late and heavy-ball momentum
    :math:`m` (that of `torch.optim.SGD`),

    .. math:: x_{t+1} = x_t + m (x_t - x_{t-1}) - \eta \lambda x_{t-s}

    goes to zero for every :math:`\eta` over 0 and below the limit, and does not above it. Without
    momentum that is :math:`\eta \lambda < 2 \sin \frac{\pi}{2 (2 s + 1)}`: 2 for gradients in time,
    1 for gradients that are one step late. For several curvatures give the largest, that of the
    sharpest direction.

    Args:
        curvature: the second derivative, over 0.
        steps: how many steps late gradients are.
        momentum: at least 0 and less than 1.

    Returns:
        The limit.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument is out of range.

    References:
        Levin and May, A Note on Difference-Delay Equations, 1976.

    Example:
        >>> stable_learning_rate(4.0), round(stable_learning_rate(4.0, steps=1), 6)
        (0.5, 0.25)
        >>> round(stable_learning_rate(4.0, steps=1, momentum=0.9), 6)
        0.025
    """
    curvature = check_positive("stable_learning_rate(curvature", curvature)
    return _limit("stable_learning_rate", steps, momentum) / curvature


def delayed_learning_rate(lr: float, steps: int, *, momentum: float = 0.0) -> float:
    """A learning rate for late gradients, as far from the limit of stability as `lr` was in time.

    Args:
        lr: the learning rate for gradients in time, over 0.
        steps: how many steps late gradients are.
        momentum: of the optimizer, at least 0 and less than 1.

    Returns:
        `lr` times the ratio of the limits that `stable_learning_rate` gives with delay and without.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument is out of range.

    Example:
        >>> round(delayed_learning_rate(0.1, 1), 6)
        0.05
    """
    lr = check_positive("delayed_learning_rate(lr", lr)
    late = _limit("delayed_learning_rate", steps, momentum)
    return lr * (late / _limit("delayed_learning_rate", 0, momentum))


def _limit(name: str, steps: Any, momentum: Any) -> float:
    r"""The limit of :math:`\eta \lambda`.

    The characteristic roots :math:`z` have :math:`\eta \lambda = -z^{s-1} (z - 1) (z - m)`. As it
    grows from zero they leave the unit circle where the phase of that is zero, the first pair of
    them at the smallest angle; the phase grows with the angle, so that bisection finds it. None
    comes back.
    """
    check_whole(f"{name}(steps", steps, 0)
    if isinstance(momentum, bool) or not isinstance(momentum, (int, float)):
        raise TypeError(f"{name}(momentum={momentum!r}): expected a number")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"{name}(momentum={momentum!r}): expected at least 0 and less than 1")
    if momentum == 0.0:
        return 2.0 * math.sin(math.pi / (2 * (2 * steps + 1)))
    if steps == 0:
        return 2.0 * (1.0 + momentum)
    low, high = 0.0, math.pi
    while low < (middle := (low + high) / 2) < high:
        phase = (steps - 0.5) * middle + math.atan2(math.sin(middle), math.cos(middle) - momentum)
        low, high = (middle, high) if phase < math.pi / 2 else (low, middle)
    return 2.0 * math.sin(low / 2) * math.hypot(math.sin(low), math.cos(low) - momentum)
