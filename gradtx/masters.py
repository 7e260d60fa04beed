"""FP32 copies of a model's 16-bit parameters, for a torch optimizer to step on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from gradtx.transforms.master_weights import master_of
from gradtx.untrusted import shown, tensor_like


class Masters:
    """The parameters that an optimizer steps on: copies in FP32 of those in 16 bits.

    Args:
        parameters: the model's, by path.

    Attributes:
        parameters: by path, the copy, or the parameter itself if it is wider than 16 bits.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._model = dict(parameters)
        copies = {path: master_of(p.detach()) for path, p in parameters.items()}
        self._copies = {
            path: torch.nn.Parameter(copy) for path, copy in copies.items() if copy is not None
        }
        self.parameters: dict[str, torch.Tensor] = {**self._model, **self._copies}
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet()

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Makes each step of some optimizers reach the model.

        Raises:
            ValueError: if there are none, or one of them owns a parameter that has a copy.
        """
        if not optimizers:
            raise ValueError(
                "with master_weights(), name the optimizers: pipe.sync(optimizer); their steps are "
                "copied to the model"
            )
        copied = {id(self._model[path]): path for path in self._copies}
        for optimizer in optimizers:
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            wrong = [copied[id(p)] for p in owned if id(p) in copied]
            if wrong:
                raise ValueError(
                    f"the optimizer owns the 16-bit parameter {wrong[0]!r} of the model: give it "
                    "pipe.parameters()"
                )
            if optimizer not in self._known:
                optimizer.register_step_post_hook(lambda *_: self.publish())
                self._known.add(optimizer)

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the copies into the model."""
        for path, copy in self._copies.items():
            self._model[path].copy_(copy)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The copies, by path."""
        return {path: copy.detach().clone() for path, copy in self._copies.items()}

    @torch.no_grad()
    def load_state_dict(self, saved: Any) -> None:
        """Takes up what `state_dict` gave, and rounds it into the model.

        Raises:
            ValueError: naming a path that is missing or unknown, or of another shape or dtype.
        """
        if not isinstance(saved, Mapping) or saved.keys() != self._copies.keys():
            mapping = isinstance(saved, Mapping)
            found = sorted(map(str, saved)) if mapping else shown(saved)
            raise ValueError(
                f"this state_dict has master weights {found}: expected {sorted(self._copies)}"
            )
        values = {
            path: tensor_like(f"the master weight {path!r}", saved[path], copy)
            for path, copy in self._copies.items()
        }
        for path, copy in self._copies.items():
            copy.copy_(values[path])
        self.publish()
