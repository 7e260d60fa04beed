"""The parameters that a server owns, and how it steps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradtx.core.arguments import check_bool
from gradtx.core.tree import Layout, PyTree, flatten, unflatten, widen

Optimizer = torch.optim.Optimizer
OptimizerFactory = Callable[[list[tuple[str, torch.nn.Parameter]]], Optimizer]
Values = Sequence[torch.Tensor | None]


class Master:
    """Copies of parameters in FP32 (FP64 for FP64 leaves), and the optimizer that steps them.

    Args:
        params: a tree of tensors.
        layout: of the tree.
        optimizer: makes the optimizer of the named copies.
        staleness_scaling: as for `ParameterServer`.
        delay_compensation: as for `ParameterServer`.

    Attributes:
        values: the copies, in the order of the layout.
    """

    def __init__(
        self,
        params: PyTree,
        layout: Layout,
        optimizer: OptimizerFactory,
        staleness_scaling: bool,
        delay_compensation: float,
    ) -> None:
        check_bool("ParameterServer(staleness_scaling", staleness_scaling)
        _check_compensation(delay_compensation)
        self._layout, self._given = layout, flatten(params)[0]
        self._scaling, self._compensation = staleness_scaling, delay_compensation
        self.values = [
            None if x is None else torch.nn.Parameter(widen(x.detach()).clone())
            for x in self._given
        ]
        self._optimizer = self._made_by(optimizer)

    @property
    def compensates(self) -> bool:
        """Whether `step` has to know what the worker has read."""
        return self._compensation > 0

    def tree(self) -> PyTree:
        """Copies of the values in the dtypes of the parameters given, in a tree like theirs."""
        copies = [
            None if p is None else p.detach().to(x.dtype, copy=True)
            for p, x in zip(self.values, self._given, strict=True)
        ]
        return unflatten(self._layout.treespec, copies)

    @torch.no_grad()
    def step(self, gradients: Values, read: Values, staleness: int) -> None:
        """One step of the optimizer.

        Args:
            gradients: in the order of the layout; a value whose gradient is None is left alone.
            read: where they were found, if `compensates`.
            staleness: how many steps were made since.
        """
        present = [p for p in self.values if p is not None]
        for i, parameter in enumerate(self.values):
            if parameter is not None:
                then = read[i] if self.compensates else None
                parameter.grad = self._compensated(parameter, gradients[i], then)
        scale = 1 / max(1, staleness) if self._scaling else 1.0
        before = [] if scale == 1 else [p.clone() for p in present]
        self._optimizer.step()
        # The step is scaled, not the gradient: that is the same for SGD alone, and not for Adam.
        for old, new in zip(before, present, strict=False):
            new.copy_(old + scale * (new - old))

    def _compensated(
        self, parameter: torch.Tensor, gradient: torch.Tensor | None, then: torch.Tensor | None
    ) -> torch.Tensor | None:
        if gradient is None:
            return None
        gradient = gradient.to(parameter.device)
        if then is None:
            return gradient
        moved = parameter - then.to(parameter)
        return gradient + self._compensation * gradient.square() * moved

    def _made_by(self, factory: OptimizerFactory) -> Optimizer:
        given = f"ParameterServer(optimizer={factory!r})"
        if not callable(factory):
            raise TypeError(
                f"{given}: expected a function of the parameters, such as "
                "functools.partial(torch.optim.SGD, lr=0.1)"
            )
        specs = zip(self._layout.leaves, self.values, strict=True)
        optimizer = factory([(spec.path, p) for spec, p in specs if p is not None])
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{given}: it gives a {type(optimizer).__name__}, expected a torch optimizer"
            )
        own = {id(p) for p in self.values}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"{given}: it steps on other tensors than it was given: the server has copies of "
                "the parameters"
            )
        return optimizer


def _check_compensation(value: Any) -> None:
    expected = "expected a float of 0.0 or more"
    if isinstance(value, bool) or not isinstance(value, float):
        raise TypeError(f"ParameterServer(delay_compensation={value!r}): {expected}")
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"ParameterServer(delay_compensation={value!r}): {expected}")
