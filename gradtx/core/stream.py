"""The stream: what is known about the gradients at one point of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradtx.core.stage import Kind, Stage


@dataclass(frozen=True)
class Stream:
    """What is known about the gradients between two stages.

    Attributes:
        scaled: still multiplied by the loss scale.
        reduced: the gradient of all ranks, not of this one.
        partly: that of some ranks: one exchange is behind it, and another to come.
        form: ``"dense"``, or the form of the payload.
        fidelity: ``"exact"``, ``"lossy"`` or ``"compensated"`` (what was lost comes back later).
    """

    scaled: bool
    reduced: bool = False
    partly: bool = False
    form: str = "dense"
    fidelity: str = "exact"

    def __str__(self) -> str:
        return ", ".join(
            (
                "loss-scaled" if self.scaled else "true",
                "reduced" if self.reduced else "partly reduced" if self.partly else "local",
                self.form,
                self.fidelity,
            )
        )

    def after(self, stage: Stage, *, last: bool = True) -> Stream:
        """The stream behind a stage; of an exchange, whether it is the last one."""
        match stage.kind:
            case Kind.UNSCALE:
                return replace(self, scaled=False)
            case Kind.COMPRESSOR:
                return replace(self, form=stage.gives, fidelity="lossy")
            case Kind.FEEDBACK:
                return replace(self, fidelity="compensated")
            case Kind.EXCHANGE:
                return replace(self, reduced=last, partly=not last, form="dense")
            case _:
                return self


def streams(stages: Sequence[Stage]) -> list[Stream]:
    """The stream before each stage and behind the last: one more than there are stages.

    It starts loss-scaled if an `unscale` is among the stages, else true.
    """
    out = [Stream(scaled=any(stage.kind is Kind.UNSCALE for stage in stages))]
    kinds = [stage.kind for stage in stages]
    for i, stage in enumerate(stages):
        out.append(out[-1].after(stage, last=Kind.EXCHANGE not in kinds[i + 1 :]))
    return out
