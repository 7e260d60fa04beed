"""A stage: what a transformation says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

REQUIRED: Any = object()


class Kind(Enum):
    """What a stage does to the stream; the order rules go by it."""

    UNSCALE = "unscale"
    FILTER = "filter"
    COMPRESSOR = "compressor"
    FEEDBACK = "feedback"
    EXCHANGE = "exchange"
    TRANSFORM = "transform"
    ACCUMULATE = "accumulate"
    DELAY = "delay"


@dataclass(frozen=True)
class Argument:
    """One hyperparameter: its value, and the default it is not printed for.

    An argument with ``local=True`` (a process group) differs between ranks of one chain and is
    left out of the fingerprint.
    """

    name: str
    value: Any
    default: Any = REQUIRED
    local: bool = False

    def __str__(self) -> str:
        return repr(self.value) if self.default is REQUIRED else f"{self.name}={self.value!r}"

    @property
    def printed(self) -> bool:
        """Whether the value has to be written to get the same stage."""
        return self.default is REQUIRED or self.value != self.default


@dataclass(frozen=True)
class Stage:
    """The declaration of a transformation.

    Attributes:
        name: the factory's short name; ``gx.<name>(...)`` makes the stage.
        kind: what it does to the stream.
        arguments: its hyperparameters.
        linear: it commutes with scaling and with the sum over ranks.
        homogeneous: of what is not linear: it commutes with scaling by a positive number all the
            same, and hands on what is not finite.
        stateful: what it does depends on earlier steps.
        needs_reduced: it wants the gradient of all ranks, not of one.
        whole: what it does to a leaf depends on others too, so that it cannot be given some leaves
            now and others later.
        row_sparse: it treats row-sparse leaves, which are in `Progress.rows`, or has nothing to do
            with them; so has what only compresses.
        takes: the forms it accepts (``"dense"``, or the form of a payload); only dense by default.
        gives: the form that leaves a compressor.
        biased: a compressor that is wrong on average, and that error feedback can make up for.
        contraction: the error of a compressor is smaller than its input, and what the exchange
            makes of it is linear: without both, the residual may outgrow what it is the rest of.
        varies: of a compressor or an exchange: how much is sent depends on the values.
        leaves_out: of an exchange: what it leaves out of sums of compressed values is to be sent
            again by error feedback.
        feedback: false where the user wrote ``feedback=False``: goes without, on purpose.
        over: of a feedback, how many stages directly to its left it holds; None for the whole run.
        module: the prefix its name is printed with.
        identity: of a foreign transformation, the object itself; stages compare by it too.
    """

    name: str
    kind: Kind = Kind.TRANSFORM
    arguments: tuple[Argument, ...] = ()
    linear: bool = False
    homogeneous: bool = False
    stateful: bool = False
    needs_reduced: bool = False
    whole: bool = False
    row_sparse: bool = False
    takes: frozenset[str] = field(default=frozenset({"dense"}))
    gives: str = "dense"
    biased: bool = False
    contraction: bool = True
    varies: bool = False
    leaves_out: bool = False
    feedback: bool = True
    over: int | None = field(default=None, compare=False)
    module: str = "gx."
    identity: Any = None

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """All hyperparameters by name."""
        return {argument.name: argument.value for argument in self.arguments}

    @property
    def lossy(self) -> bool:
        """Whether information is lost in it."""
        return self.kind is Kind.COMPRESSOR

    def same_ranks(self, other: Stage) -> bool:
        """Of two exchanges, whether they are over the same ranks, as far as the stages tell."""
        here, there = self.hyperparameters, other.hyperparameters
        return all(here.get(name) == there.get(name) for name in ("group", "axis_name"))

    def code(self, *, local: bool = True) -> str:
        """The call that makes the stage.

        Args:
            local: whether to print what differs between ranks (a process group).
        """
        arguments = [a for a in self.arguments if a.printed and (local or not a.local)]
        return f"{self.module}{self.name}({', '.join(map(str, arguments))})"

    def __repr__(self) -> str:
        return self.code()
