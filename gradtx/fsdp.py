"""Parameters that are spread over ranks (DTensors), as `fully_shard` leaves them, in a `Pipeline`.

A replica of the model is spread over several ranks, and FSDP reduces gradients among these: each
has the mean for its shard. Ranks with the same shard, one of each replica, exchange that as any
other leaf. What they cannot know alone is how it went for the other shards: the ranks of a replica
meet before a step and after it (`Shards`), so that all ranks take it, or none does.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gradtx.backends import is_dtensor
from gradtx.core.chain import Chain
from gradtx.core.errors import RankLostError, RankMismatchError
from gradtx.core.stage import Kind, Stage
from gradtx.core.tree import PyTree, arrays_in, map_leaves
from gradtx.engine import Direct, Outcome
from gradtx.exchange.grid import Grid
from gradtx.exchange.group import Group, find_group
from gradtx.exchange.handshake import stop
from gradtx.grouped import undone

_SAID = struct.Struct("<??dd")
_VALUES = ("loss_scale", "weight")


def _instead(device: str = "cuda") -> str:
    return (
        f"shard within replicas, and exchange between them: mesh = init_device_mesh({device!r}, "
        "(replicas, shards), mesh_dim_names=('replicate', 'shard')), then fully_shard(model, "
        "mesh=mesh['shard']) and allreduce(mesh['replicate'])"
    )


class Shards:
    """The ranks that one replica of the parameters is spread over.

    Args:
        group: these ranks.
        parameters: those that are spread, by path.
    """

    def __init__(self, group: Group, parameters: Mapping[str, Any]) -> None:
        self.group = group
        self._parameters = parameters

    def check_apart(self, groups: Sequence[Group]) -> None:
        """Refuses an exchange over ranks that parameters are spread over, or reduced between.

        Raises:
            ValueError: naming a parameter, the ranks, and what to write instead.
        """
        exchanging = {rank for group in groups for rank in group.members}
        for path, parameter in self._parameters.items():
            mesh = parameter.device_mesh
            for dim, placement in enumerate(parameter.placements):
                both = sorted(exchanging & set(find_group(mesh.get_group(dim)).members))
                if len(both) < 2:
                    continue
                if placement.is_replicate():
                    found = (
                        f"replicated on ranks {both} of a mesh, between which its gradient is "
                        "reduced already: the exchange would do so again, with nothing left to "
                        "compress"
                    )
                else:
                    found = (
                        f"spread over ranks {both}, and the exchange is over them too: the "
                        "gradient is reduced already, and each of them has that of another shard"
                    )
                instead = _instead(mesh.device_type)
                raise ValueError(f"parameter {path!r} is {found}; {instead}")

    def check_gradients(self) -> None:
        """Refuses gradients that are not laid out as their parameters are.

        Raises:
            ValueError: naming the parameter, and what to write.
        """
        for path, parameter in self._parameters.items():
            grad = parameter.grad
            if grad is None:
                continue
            placements = grad.placements if is_dtensor(grad) else "a plain tensor"
            if placements != parameter.placements:
                raise ValueError(
                    f"the gradient of {path!r} is {placements}, and the parameter "
                    f"{parameter.placements}: write p.grad = p.grad.redistribute("
                    "placements=p.placements) before sync()"
                )

    def begin(self, error: Exception | None = None, *, good: bool = True, **values: Any) -> bool:
        """Says before a step that this rank comes to it, or why it cannot.

        Args:
            error: why it cannot.
            good: whether its gradients are finite, where that has to be known before.
            values: what has to be the same on all of these ranks: `loss_scale`, `weight`.

        Returns:
            Whether those of all are.

        Raises:
            Exception: the error given.
            RankMismatchError: if another rank cannot come, or has other values.
        """
        heard = self._meet(error, not good, *(float(values.get(name, 1.0)) for name in _VALUES))
        for i, name in enumerate(_VALUES):
            found = [said[2 + i] for said in heard]
            if len({struct.pack("<d", value) for value in found}) > 1:
                raise RankMismatchError(
                    f"{name} is {found} on the ranks of one replica, whose gradients have been "
                    "averaged before it could count: it has to be the same on all of them"
                )
        return not any(bad for _, bad, *_ in heard)

    def end(self, error: Exception | None = None, *, skipped: bool = False) -> bool:
        """Says after a step how it went here.

        Args:
            error: what has gone wrong, if anything has.
            skipped: whether it was bad for this shard.

        Returns:
            Whether it was bad for some shard.

        Raises:
            Exception: the error given.
            RankMismatchError: if something has gone wrong on another rank.
        """
        return any(bad for _, bad, *_ in self._meet(error, skipped, 1.0, 1.0))

    def _meet(self, error: Exception | None, *said: Any) -> list[tuple[Any, ...]]:
        message = bytearray(_SAID.pack(error is not None, *said))
        told = self.group.all_gather(torch.frombuffer(message, dtype=torch.uint8))
        heard = [_SAID.unpack(bytes(one.cpu().numpy())) for one in told]
        if any(failed for failed, *_ in heard):
            stop(self.group, error)
        return heard


def local(x: Any) -> Any:
    """What this rank has of a tensor: of a DTensor its part, without autograd history."""
    if not is_dtensor(x):
        return x
    with torch.no_grad():
        found = x.detach().to_local()
        # What a collective is still to fill in says so.
        return found.wait() if hasattr(found, "wait") else found


def spread_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor as a DTensor, laid out as the parameter is if that is one."""
    if not is_dtensor(parameter):
        return values
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    return DTensor.from_local(
        values,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def find_shards(model: Any, parameters: Mapping[str, Any]) -> Shards | None:
    """The ranks that a model is spread over, or None if each rank has all of it.

    Args:
        model: the module, or whatever the parameters are of.
        parameters: by path.

    Raises:
        ValueError: if the model is in FSDP1; if a parameter is not sharded where FSDP has sharded
            others, or is a part of a sum, or is spread over ranks of its own.
    """
    if _has(model, "FullyShardedDataParallel"):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel, FSDP1, which lays parameters into "
            "one and reduces their gradients itself: use torch.distributed.fsdp.fully_shard; "
            f"{_instead()}"
        )
    spread = {path: p for path, p in parameters.items() if is_dtensor(p)}
    if is_sharded(model):
        for path, p in parameters.items():
            if path not in spread and p is not None and p.requires_grad:
                raise ValueError(
                    f"parameter {path!r} is not sharded, in a model that fully_shard has sharded: "
                    "its gradient is this rank's own, and the ranks of a replica would drift "
                    "apart; call fully_shard on the module that has it, without ignored_params"
                )
    if not spread:
        return None
    for path, p in spread.items():
        if any(placement.is_partial() for placement in p.placements):
            raise ValueError(
                f"parameter {path!r} has the placements {p.placements}: ranks have parts of a sum, "
                "which are no parameter; redistribute it to Shard or Replicate"
            )
    axes = {path: _axes_of(p.device_mesh) for path, p in spread.items()}
    widest = max(axes.values(), key=len)
    for path, own in axes.items():
        if [axis.members for axis in own] != [axis.members for axis in widest[: len(own)]]:
            raise ValueError(
                f"parameter {path!r} is spread over {spread[path].device_mesh} and others are over "
                "other ranks: shard all of a model over one mesh, whose first dimensions FSDP is "
                "over"
            )
    return Shards(widest[0] if len(widest) == 1 else Grid(widest), spread)


def _axes_of(mesh: Any) -> list[Group]:
    return [find_group(mesh.get_group(dim)) for dim in range(mesh.ndim)]


def _of_fsdp(name: str) -> Any:
    """A class of `torch.distributed.fsdp`; nothing, if nobody has imported that."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, ())


def _has(model: Any, name: str) -> bool:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(isinstance(module, _of_fsdp(name)) for module in modules)


def is_sharded(model: Any) -> bool:
    """Whether `fully_shard` has been called on a module, or on some part of it."""
    return _has(model, "FSDPModule")


def make_sharded(model: Any) -> None:
    """Lets FSDP put shards in the place of what a forward pass has gathered."""
    for module in model.modules():
        if isinstance(module, _of_fsdp("FSDPModule")):
            module.reshard()


def check_stages(tx: Chain, *, overlap: bool | str, masters: bool) -> None:
    """Refuses what a chain cannot do with shards.

    Args:
        tx: the chain.
        overlap: whether gradients are to go out during the backward pass.
        masters: whether it ends in a `master_weights` for a torch optimizer.

    Raises:
        ValueError: naming it, and what to write instead.
    """
    reason = next(filter(None, map(_reason_against, tx.stages)), "")
    if overlap:
        reason = (
            "overlap=True takes gradients from a background thread, and FSDP reduces them on "
            "streams of its own that only its backward pass waits for; leave overlap out"
        )
    if tx.delay:
        reason = (
            "delayed() exchanges in the background, where shards cannot agree on a step; leave it "
            "out"
        )
    if masters:
        reason = (
            "with fully_shard, parameters in FP32 are master weights: leave master_weights() out "
            "and write fully_shard(model, mp_policy=MixedPrecisionPolicy("
            "param_dtype=torch.bfloat16))"
        )
    if reason:
        raise ValueError(f"the model is sharded, and {reason}")


def _reason_against(stage: Stage) -> str:
    if not stage.whole or stage.kind in (Kind.COMPRESSOR, Kind.UNSCALE):
        return ""
    if stage.name == "clip_by_global_norm":
        norm = stage.hyperparameters["max_norm"]
        instead = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm}) after pipe.sync()"
    elif stage.name == "clip_by_local_norm":
        norm = stage.hyperparameters["max_norm"]
        instead = (
            f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm} / replicas**0.5) before "
            "pipe.sync(), after scaler.unscale_(optimizer) if there is a scaler"
        )
    elif stage.kind is Kind.FEEDBACK:
        instead = "it without clip, and clip with torch.nn.utils.clip_grad_norm_ before pipe.sync()"
    else:
        return (
            f"{stage} may look at whole leaves, of which this rank has a part: step with a torch "
            "optimizer"
        )
    return f"{stage} would take the norm of this rank's part alone: use {instead}"


class AcrossShards(Direct):
    """Runs each step of a chain on the shards of this rank, together with the other shards.

    An error of any rank reaches all: its like in other replicas through the exchange, and from
    there the ranks of each replica, where these meet. After a step that was bad for one shard the
    state is as if it had been for all.

    Args:
        tx: the chain.
        group: the ranks that exchange.
        params: the parameters, a tree of DTensors (and plain tensors).
        state: of the chain over this rank's parts, to begin with.
        shards: the ranks of this replica.
    """

    def __init__(self, tx: Chain, group: Group, params: PyTree, state: Any, shards: Shards) -> None:
        own = Chain(tx.transformations)
        # What comes of a step is known after it, and gradients stay as they were until then.
        own.overwrites = False
        super().__init__(own, group, params, state)
        self._shards = shards
        self._leaves_out = any(s.hyperparameters.get("on_bad") == "leave_out" for s in tx.stages)

    @property
    def params(self) -> PyTree:
        """This rank's parts of the parameters, where they are now: FSDP may move them."""
        return map_leaves(local, self._params)

    def step(self, gradients: PyTree, **extra: Any) -> Outcome:
        """One update of this rank's parts, which may be written over."""
        values = {name: extra[name] for name in _VALUES if name in extra}
        good = not self._leaves_out or all(bool(x.isfinite().all()) for x in arrays_in(gradients))
        with self._together():
            if not self._begun(good=good, **values):
                extra["finite"] = torch.tensor(False)
            return super().step(gradients, **extra)

    def flush(self, **extra: Any) -> Outcome:
        """One step of what is held back."""
        with self._together():
            self._begun()
            return super().flush(**extra)

    def fail(self, error: Exception) -> None:
        """Tells the other ranks that this one will not come to the next exchange, and why."""
        with suppress(Exception):
            self._shards.begin(error)
        super().fail(error)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Where a rank that is lost in one group is one for those in the others too."""
        try:
            yield
        except RankLostError as error:
            for group in (*self._tx.groups, self._shards.group):
                group.give_up(str(error))
            raise

    def _begun(self, **said: Any) -> bool:
        try:
            return self._shards.begin(**said)
        except Exception as error:
            super().fail(error)
            raise

    def _taken(self, update: Callable[[], tuple[PyTree, Any]]) -> tuple[PyTree, Any]:
        before = self.state
        try:
            updates, state = update()
        except Exception as error:
            with suppress(Exception):  # It is this one that the user is to see.
                self._shards.end(error)
            raise
        skipped = int(state.total_notfinite) > int(before.total_notfinite)
        if self._shards.end(skipped=skipped) and not skipped:
            updates = map_leaves(torch.zeros_like, updates)
            state = state._replace(states=undone(self._tx.core, before.states, state.states))
        return updates, state
