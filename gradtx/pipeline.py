"""`Pipeline`: a chain, its state, and the parameters whose gradients it synchronises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from gradtx.backends.torch_ops import flag
from gradtx.checkpoint import flatten_state, restore_state
from gradtx.core.chain import Chain, telling_others
from gradtx.core.errors import ChainOrderError, RankMismatchError
from gradtx.core.rules import NO_EXCHANGE, PAYLOAD_AT_END, check
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import Context, flat
from gradtx.core.tree import (
    Layout,
    LeafSpec,
    PyTree,
    flatten,
    flatten_with_paths,
    keeps_running_statistics,
    parameters_of,
    unflatten,
)
from gradtx.exchange.group import Group, find_group
from gradtx.exchange.handshake import agree
from gradtx.interop.amp import ScalerAdapter
from gradtx.transforms.unscale import unscale

Tensors = dict[str, torch.Tensor]
_C_ORDER = torch.contiguous_format


@dataclass(frozen=True)
class SyncReport:
    """What one `Pipeline.sync` did.

    Attributes:
        ready: gradients are there to step with.
        skipped: the step was bad on some rank; no state has moved, all gradients are zero.
        wire_bytes: bytes that this rank put on the link in this step, all copies counted; the first
            step has the handshake in it, ``N - 1`` times 1 KiB.
        dense_bytes: bytes that a ring all-reduce of the gradients in FP32 would have put there:
            ``2 (N - 1) / N`` times 4 bytes a value.
    """

    ready: bool
    skipped: bool
    wire_bytes: int
    dense_bytes: int


class Pipeline:
    """A chain at work on the gradients of a model.

    At construction the ranks compare their chains and parameters, and parameters and buffers are
    broadcast from rank 0: replicas that start apart would stay apart.

    Args:
        tx: the transformation; an exchange must be in it if the default process group has several
            ranks.
        model: an `nn.Module`, or a pytree of tensors with ``.grad``. Of a module, the parameters
            that require a gradient now are synchronised.
        scaler: the `torch.amp.GradScaler` of the loop, if there is one.

    Raises:
        ChainOrderError: if a payload comes out at the end (GX404), or there are several ranks and
            no exchange (GX405).
        ValueError: if the model is wrapped in DDP; if there is a scaler and no `unscale`, or a
            `dynamic_loss_scale` as well.
        TypeError: if a parameter is no floating-point tensor, the scaler no GradScaler, or the
            exchange one over a JAX mesh.
        RankMismatchError: on every rank, if ranks disagree or one of them has failed.

    Example:
        >>> import torch, gradtx as gx
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pipe = gx.Pipeline(gx.chain(gx.topk(0.25), gx.ef(), gx.allreduce()), model)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> pipe.sync(optimizer)
        SyncReport(ready=True, skipped=False, wire_bytes=0, dense_bytes=0)
    """

    def __init__(self, tx: Any, model: Any, *, scaler: Any = None) -> None:
        self._group = find_group(None)
        try:
            self._prepare(tx, model, scaler)
        except Exception as error:
            if self._group.size > 1:
                _tell(self._group, error)
            raise
        if self._group.size > 1:
            agree(self._group, self._replicas(), 0)
            _broadcast(self._group, list(self._replicated().values()))

    def _prepare(self, tx: Any, model: Any, scaler: Any) -> None:
        """All of the construction that one rank does alone, and may fail in."""
        self.tx = tx if isinstance(tx, Chain) else Chain(flat((tx,)))
        if self.tx.exchange is not None:
            if self.tx.exchange.one_program:
                raise TypeError(
                    f"{self.tx.exchange.code()} exchanges JAX arrays over a mesh; a Pipeline has "
                    "torch tensors: write allreduce()"
                )
            self._group = self.tx.exchange.group
        _check_chain(self.tx, self._group)
        _refuse_ddp(model)
        self._scaler = None if scaler is None else ScalerAdapter(scaler)
        self._check_scaler()
        self._module = model if isinstance(model, torch.nn.Module) else None
        self._tree, info = parameters_of(model)
        if self._module is not None:
            self._tree = {path: p for path, p in self._tree.items() if p.requires_grad}
        self._paths, leaves, self._treespec = flatten_with_paths(self._tree)
        named = zip(self._paths, leaves, strict=True)
        self._parameters: Tensors = {path: leaf for path, leaf in named if leaf is not None}
        _refuse_shared(self._parameters)
        self._state = self.tx.init(self._tree, info)
        self._values = sum(p.numel() for p in self._parameters.values())

    def sync(
        self, *optimizers: torch.optim.Optimizer, loss_scale: float | None = None
    ) -> SyncReport:
        """Reads every ``.grad``, runs one update, and writes every ``.grad``.

        With a scaler it does what ``scaler.unscale_`` does for each optimizer (or leaves it, where
        you have called that yourself), and makes ``scaler.step`` and ``scaler.update`` take the
        same decision on every rank.

        Args:
            *optimizers: all that will step on the gradients; needed with a scaler.
            loss_scale: what the loss was multiplied by, for loops without a scaler.

        Returns:
            What happened. Where ``ready`` is false there is nothing to step with.

        Raises:
            ValueError: if the chain has an `unscale` and there is no loss scale, or the reverse; if
                the optimizers do not own just the parameters that have a gradient.
            RankMismatchError: if another rank failed, or ranks disagree.
        """
        if self.tx.exchange is not None and self.tx.exchange.group is not self._group:
            raise RuntimeError(
                "the process group is another one than when the Pipeline was built: build it after "
                "torch.distributed.init_process_group, so that parameters start equal"
            )
        sent = self._group.sent
        context = self.tx.context(self._state)
        with telling_others(self.tx, self._state, context):
            self._check_frozen()
            extra = self._loss_scale(optimizers, loss_scale)
        with torch.no_grad():
            gradients = self._gradients()
            updates, self._state = self.tx.update(gradients, self._state, self._tree, **extra)
        written = self._write(flatten(updates)[0])
        skipped = not bool(self._state.last_finite)
        if self._scaler is not None and self._scaler.enabled:
            self._scaler.record(optimizers, skipped=skipped)
        return SyncReport(
            ready=written and not skipped,
            skipped=skipped,
            wire_bytes=self._group.sent - sent,
            dense_bytes=2 * (self._group.size - 1) * 4 * self._values // self._group.size,
        )

    def sync_buffers(self) -> None:
        """Makes the buffers of the module the same on all ranks.

        Running means and variances are averaged; all other buffers are rank 0's. Call it before
        evaluating or saving the model.
        """
        if self._module is None or self._group.size == 1:
            return
        # Buffers may have changed their sizes since the first step.
        agree(self._group, self._replicas(), 0)
        averaged = _running_statistics(self._module)
        if averaged:
            flat_sum = self._group.all_reduce(
                torch.cat([buffer.reshape(-1).to(torch.float64) for buffer in averaged])
            )
            means = (flat_sum / self._group.size).split([b.numel() for b in averaged])
            with torch.no_grad():
                for buffer, mean in zip(averaged, means, strict=True):
                    buffer.copy_(mean.reshape(buffer.shape))
        done = {id(buffer) for buffer in averaged}
        rest = [buffer for buffer in self._module.buffers() if id(buffer) not in done]
        _broadcast(self._group, rest)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors and numbers, the tensors keyed by parameter path.

        Returns:
            A dict that ``torch.load(weights_only=True)`` can load. Every rank has its own.
        """
        return {
            **self._identity(),
            "state": flatten_state(self._state),
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "format": 1,
            "chain": self.tx.shared_code,
            "rank": self._group.rank,
            "world_size": self._group.size,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the state that `state_dict` gave on the same rank.

        Args:
            state_dict: from the same chain, parameters, rank and number of ranks.

        Raises:
            ValueError: naming what differs; the state is then as it was.
        """
        here = self._identity()
        missing = sorted({*here, "state"} - state_dict.keys())
        if missing:
            raise ValueError(f"this is no state_dict of a Pipeline: it lacks {missing}")
        for name in here:
            if state_dict.get(name) != here[name]:
                raise ValueError(
                    f"this state_dict has {name} {state_dict.get(name)!r}: expected {here[name]!r}"
                )
        self._state = restore_state(self._state, state_dict["state"])

    @property
    def state(self) -> Any:
        """The chain's state, a pytree."""
        return self._state

    def _check_scaler(self) -> None:
        if self._scaler is None or not self._scaler.enabled:
            return
        if (own := _dynamic(self.tx)) is not None:
            raise ValueError(
                f"a GradScaler is given and the chain has {own}: two loss scales; leave the scaler "
                "out and multiply the loss by pipe.state.loss_scale, or write unscale()"
            )
        if not _has_unscale(self.tx):
            raise ValueError(
                "a GradScaler is given and the chain has no unscale(): the loss scale would stay "
                f"in the gradients; write {Chain((unscale(), *self.tx.transformations)).code()}"
            )

    def _loss_scale(self, optimizers: Any, given: float | None) -> dict[str, Any]:
        scaler = self._scaler
        if scaler is not None and scaler.enabled:
            if given is not None:
                raise ValueError("the loss scale is the scaler's: leave loss_scale out")
            scale, finite = scaler.loss_scale(optimizers, self._parameters)
            return {"loss_scale": scale} if finite else {"loss_scale": scale, "finite": flag(False)}
        if (own := _dynamic(self.tx)) is not None:
            if given is not None:
                raise ValueError(
                    f"loss_scale is given and the chain has {own}: two loss scales; multiply the "
                    "loss by pipe.state.loss_scale and leave the argument out"
                )
            return {}
        if not _has_unscale(self.tx):
            if given is not None:
                raise ValueError("loss_scale is given and the chain has no unscale(): put it first")
            return {}
        if given is None and scaler is None:
            raise ValueError(
                "the chain has unscale() and there is no loss scale: write "
                "Pipeline(tx, model, scaler=scaler), or sync(loss_scale=...), or leave unscale() "
                "out"
            )
        return {"loss_scale": 1.0 if given is None else given}

    def _check_frozen(self) -> None:
        if self._module is None:
            return
        for path, parameter in self._module.named_parameters():
            if parameter.grad is None or parameter is self._parameters.get(path):
                continue
            if path in self._parameters:
                raise ValueError(
                    f"parameter {path!r} has been replaced since the Pipeline was built: build a "
                    "new Pipeline, after load_state_dict(assign=True) too"
                )
            raise ValueError(
                f"parameter {path!r} has a gradient and did not require one when the Pipeline "
                "was built: build a new Pipeline after changing requires_grad"
            )

    def _gradients(self) -> PyTree:
        grads = [p if p is None else p.grad for p in map(self._parameters.get, self._paths)]
        return unflatten(self._treespec, grads)

    @torch.no_grad()
    def _write(self, updates: Sequence[torch.Tensor | None]) -> bool:
        for path, update in zip(self._paths, updates, strict=True):
            if update is None:
                continue
            parameter = self._parameters[path]
            if parameter.grad is None:
                parameter.grad = update.to(parameter.dtype).clone()
            else:
                parameter.grad.copy_(update)
        return any(update is not None for update in updates)

    def _replicated(self) -> Tensors:
        """All that has to start equal: every parameter, frozen ones too, and every buffer."""
        if self._module is None:
            return dict(self._parameters)
        parameters = dict(self._module.named_parameters())
        return parameters | {f"buffer {k}": b for k, b in self._module.named_buffers()}

    def _replicas(self) -> Context:
        """What ranks compare before they take rank 0's values: the chain, and all tensors."""
        layout = Layout(
            tuple(
                LeafSpec(path, tuple(t.shape), str(t.dtype).removeprefix("torch."))
                for path, t in self._replicated().items()
            ),
            None,
        )
        return Context(layout, self.tx.shared_code)


def _check_chain(tx: Chain, group: Group) -> None:
    rules = [PAYLOAD_AT_END] + [NO_EXCHANGE] * (group.size > 1)
    violations = check(tx.stages, rules)
    if violations:
        lines = [f"{v.code}: {v.reason}\n    fix: {v.fix}" for v in violations]
        raise ChainOrderError("\n".join([f"a Pipeline refuses {tx.code()}", *lines]), violations)


def _refuse_ddp(model: Any) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel
    if isinstance(model, torch.nn.Module) and any(isinstance(m, ddp) for m in model.modules()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which reduces the gradients itself: "
            "they would be reduced twice. Give the Pipeline a model that was never wrapped; to "
            "keep DDP, change what it sends by a hook: ddp_model.register_comm_hook(state, hook)"
        )


def _refuse_shared(parameters: Tensors) -> None:
    first: dict[int, str] = {}
    for path, parameter in parameters.items():
        if first.setdefault(id(parameter), path) != path:
            raise ValueError(
                f"one tensor stands at {first[id(parameter)]!r} and at {path!r}: its gradient "
                "would be sent twice; leave one of them out"
            )


def _has_unscale(tx: Chain) -> bool:
    return any(stage.kind is Kind.UNSCALE for stage in tx.stages)


def _dynamic(tx: Chain) -> Stage | None:
    """The stage that keeps a loss scale of its own, if there is one."""
    unscales = (stage for stage in tx.stages if stage.kind is Kind.UNSCALE)
    return next((stage for stage in unscales if stage.stateful), None)


def _tell(group: Group, error: Exception) -> None:
    """Tells the other ranks, which wait in the handshake, why this one does not come."""
    with suppress(RankMismatchError):
        agree(group, Context(Layout((), None), ""), 0, f"{type(error).__name__}: {error}")


def _running_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    return [
        buffer
        for module in model.modules()
        if keeps_running_statistics(module)
        for name, buffer in module.named_buffers(recurse=False)
        if name in ("running_mean", "running_var")
    ]


@torch.no_grad()
def _broadcast(group: Group, tensors: list[torch.Tensor]) -> None:
    """Makes tensors those of rank 0, in one message of bytes."""
    if not tensors:
        return
    # One value may be contiguous with any stride, and then `view` refuses it: hence copies.
    flat_copies = [t.detach().reshape(-1).clone(memory_format=_C_ORDER) for t in tensors]
    parts = [t.view(torch.uint8).cpu() for t in flat_copies]
    received = group.broadcast(torch.cat(parts))
    for tensor, part in zip(tensors, received.split([p.numel() for p in parts]), strict=True):
        values = part.clone().view(tensor.dtype)
        tensor.copy_(values.reshape(tensor.shape).to(tensor.device))
