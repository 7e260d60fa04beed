"""What has to be touched inside `torch.amp.GradScaler` so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

_SYNCED = "synced by gradtx"


class ScalerAdapter:
    """A `torch.amp.GradScaler`, as the pipeline uses it.

    The pipeline does what ``scaler.unscale_(optimizer)`` does, and leaves the scaler in the state
    that this leaves it in, but with the verdict of all ranks: then ``scaler.step(optimizer)`` and
    ``scaler.update()`` act the same everywhere.

    Args:
        scaler: the scaler.

    Raises:
        TypeError: if it is no `torch.amp.GradScaler`.
    """

    def __init__(self, scaler: Any) -> None:
        if not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler={scaler!r}: expected a torch.amp.GradScaler")
        self._scaler = scaler
        # With a smaller one, what is finite would be lost rather than what is not be found.
        self._floor = min(1.0, float(scaler.get_scale()))

    @property
    def enabled(self) -> bool:
        """Whether the scaler scales at all."""
        return bool(self._scaler.is_enabled())

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by; one if the scaler is not enabled."""
        return float(self._scaler.get_scale()) if self.enabled else 1.0

    def loss_scale(
        self, optimizers: Iterable[torch.optim.Optimizer], gradients: Mapping[str, torch.Tensor]
    ) -> tuple[float, bool]:
        """What the gradients are still multiplied by, and whether they may be finite.

        The scale is 1 if the user has called `unscale_`; what that found counts, even if the user
        has clipped it away since.

        Args:
            optimizers: those that will step on the gradients.
            gradients: the parameters that have a gradient, by path.

        Returns:
            The scale, and whether all gradients were finite as far as the scaler knows.

        Raises:
            ValueError: if no optimizer is given, or they do not own just these parameters.
            RuntimeError: if an optimizer has been synced or has stepped since the last
                ``scaler.update()``.
        """
        optimizers = list(optimizers)
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    f"sync takes optimizers one by one, sync(optimizer_a, optimizer_b): got "
                    f"{type(optimizer).__name__}"
                )
        if not optimizers:
            raise ValueError(
                "with a GradScaler, name the optimizers: pipe.sync(optimizer), "
                "before scaler.step(optimizer)"
            )
        _check_ownership(optimizers, gradients)
        stages = [self._state(optimizer)["stage"] for optimizer in optimizers]
        if OptState.STEPPED in stages:
            raise RuntimeError(
                "pipe.sync(optimizer) comes before scaler.step(optimizer); here the optimizer has "
                "stepped since the last scaler.update()"
            )
        if any(_SYNCED in self._state(optimizer) for optimizer in optimizers):
            raise RuntimeError(
                "pipe.sync() has been called on this optimizer since the last scaler.update(): the "
                "gradients are reduced already"
            )
        if OptState.UNSCALED not in stages:
            return self.scale, True
        for optimizer, stage in zip(optimizers, stages, strict=True):
            if stage is OptState.READY:
                self._scaler.unscale_(optimizer)
        found = [f for o in optimizers for f in self._state(o)["found_inf_per_device"].values()]
        return 1.0, not any(bool(flag) for flag in found)

    def record(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        skipped: bool,
        left_out: bool = False,
    ) -> None:
        """Leaves the scaler as `unscale_` does, with the verdict of all ranks.

        Args:
            optimizers: those that will step on the gradients.
            skipped: the step was bad on some rank. The scale will fall, but not below the floor.
            left_out: a bad micro-step was left out of a good step: the scale falls now.
        """
        device = self._device()
        scale: Any = self._scaler._scale
        backoff = self._scaler.get_backoff_factor()
        if left_out:
            scale.mul_(backoff).clamp_(min=self._floor)
            self._scaler._growth_tracker.zero_()  # type: ignore[union-attr]
        if skipped:
            scale.clamp_(min=self._floor / backoff)
        for optimizer in optimizers:
            state = self._state(optimizer)
            found = torch.full((), float(skipped), dtype=torch.float32, device=device)
            state["found_inf_per_device"] = {device: found}
            state["stage"] = OptState.UNSCALED
            state[_SYNCED] = True

    def go_on(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Takes back what `unscale_` has noted: before the end of a window, gradients are new."""
        for optimizer in optimizers:
            self._state(optimizer).update(stage=OptState.READY, found_inf_per_device={})

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = self._scaler._per_optimizer_states[id(optimizer)]
        return state

    def _device(self) -> torch.device:
        if self._scaler._scale is None:
            # A step on which nothing was scaled: no rank's loss reached a parameter.
            self._scaler._lazy_init_scale_growth_tracker(torch.device(self._scaler._device))
        scale: Any = self._scaler._scale
        device: torch.device = scale.device
        return device


def _check_ownership(
    optimizers: list[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]
) -> None:
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    ids, known = {id(p) for p in owned}, {id(p) for p in parameters.values()}
    orphans = [path for path, p in parameters.items() if p.grad is not None and id(p) not in ids]
    if orphans:
        raise ValueError(
            f"no optimizer given to sync owns {', '.join(map(repr, orphans[:5]))}: give all "
            "optimizers in one call, sync(optimizer_a, optimizer_b)"
        )
    foreign = [p for p in owned if p.grad is not None and id(p) not in known]
    if foreign:
        raise ValueError(
            f"an optimizer owns {len(foreign)} parameters with gradients that are not in the "
            f"pipeline (the first has shape {tuple(foreign[0].shape)}): they would be stepped on "
            "with the loss scale still in them; build the Pipeline over them too"
        )
