"""`Pipeline`: a chain, its state, and the parameters whose gradients it synchronises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from gradtx.backends import is_dtensor
from gradtx.backends.torch_ops import flag
from gradtx.checkpoint import check_identity, flatten_state, identity, restore_state
from gradtx.checks import (
    check_chain,
    check_lookups,
    check_one_loss_scale,
    has_unscale,
    own_loss_scale,
    tell_why,
)
from gradtx.core.chain import Chain
from gradtx.core.combinators import BareEnclosing
from gradtx.core.phases import in_phase
from gradtx.core.stage import Kind
from gradtx.core.transformation import Context, flat
from gradtx.core.tree import (
    Layout,
    LeafSpec,
    PyTree,
    flatten,
    flatten_with_paths,
    keeps_running_statistics,
    map_leaves,
    parameters_of,
    unflatten,
    widen,
)
from gradtx.engine import Direct, Outcome, Overlapped
from gradtx.exchange.grid import agree_on_grid, joint
from gradtx.exchange.group import Group, find_group
from gradtx.fsdp import (
    AcrossShards,
    Shards,
    check_stages,
    find_shards,
    local,
    make_sharded,
    spread_like,
)
from gradtx.grouped import Grouped, Trial, partition, reason_against
from gradtx.interop.amp import ScalerAdapter
from gradtx.masters import Masters
from gradtx.resharding import rules_of
from gradtx.skips import Skips
from gradtx.transforms.accumulate import check_weight
from gradtx.transforms.master_weights import STAGE as MASTER_WEIGHTS

Tensors = dict[str, torch.Tensor]
_C_ORDER = torch.contiguous_format


@dataclass(frozen=True)
class SyncReport:
    """What one `Pipeline.sync` did.

    Attributes:
        ready: gradients are there to step with. Between the ends of the windows of `accumulate`,
            in the first steps of a `delayed` exchange, and after a bad step, they are not.
        skipped: the step was bad on some rank; no state has moved, all gradients are zero.
        wire_bytes: bytes that this rank put on the link for this result, all copies counted; the
            first has the handshake in it, ``N - 1`` times 1 KiB.
        dense_bytes: bytes that a ring all-reduce of the gradients in FP32 would have put there:
            ``2 (N - 1) / N`` times 4 bytes a value; none before the end of a window.
        seconds: with overlap, how long compressing and exchanging took in the background.
        hidden: how much of that nobody waited for, since the backward pass was still going on.

    Of a chain with an exchange inside nodes and one between them, both speak of the second.
    """

    ready: bool
    skipped: bool
    wire_bytes: int
    dense_bytes: int
    seconds: float = field(default=0.0, repr=False, compare=False)
    hidden: float = field(default=0.0, repr=False, compare=False)


def dense_bytes(group: Group, values: int) -> int:
    """What a ring all-reduce of so many values in FP32 makes a rank send."""
    return 2 * (group.size - 1) * 4 * values // group.size


class Pipeline:
    """A chain at work on the gradients of a model.

    At construction the ranks compare their chains and parameters, and parameters and buffers are
    broadcast from rank 0: replicas that start apart would stay apart.

    Args:
        tx: the transformation; an exchange must be in it if the default process group has several
            ranks.
        model: an `nn.Module`, or a pytree of tensors with ``.grad``. Of a module, the parameters
            that require a gradient now are synchronised.
        scaler: the `torch.amp.GradScaler` of the loop, if there is one. Its scale is kept from
            falling below one (or what it began with).
        max_skips: how many bad steps in a row are borne, at least 1: with one more, something is
            wrong that a smaller loss scale does not mend. None bears all.
        overlap: whether gradients go out, some leaves at a time, as soon as the backward pass has
            them, while it goes on to others. The result is the same. Each backward pass is then
            followed by one `sync`, and until then ``.grad`` is neither read nor written; where
            gradients of several are added up in it, all but the last run within `no_sync`. What has
            to be known before: the loss scale is the scaler's, and `weight` stays away. Whether it
            pays is tried in the first steps, and told by the property `overlap`; ``"always"`` does
            not try.

    Parameters may be DTensors, such as `torch.distributed.fsdp.fully_shard` makes of one dimension
    of a mesh, ``mesh["shard"]``: the exchange is then over the other one, ``mesh["replicate"]``,
    and the chain sees the shards of this rank. All ranks of all replicas take a step, or none does.

    A chain with a `delayed` exchange does its work in a thread of its own, over a process group of
    its own, while the loop goes on; gradients are taken from ``.grad``, which is None until there
    is a result.

    Raises:
        ChainOrderError: if a payload comes out at the end (GX404), or there are several ranks and
            no exchange (GX405).
        ValueError: if the model is wrapped in DDP or FSDP1; if parameters are spread over ranks of
            the exchange, or a stage of the chain cannot do with shards (named, with what to use
            instead); if there are several ranks and an `Embedding` with a `max_norm`, which each of
            them would apply to other rows; if there is a scaler and no `unscale`, or a
            `dynamic_loss_scale` as well; if there is either and the exchange is delayed: the next
            loss scale cannot wait for its verdict. With overlap, if a stage before the exchange
            looks at all leaves together, or the loss scale is known only to `sync`.
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

    def __init__(
        self,
        tx: Any,
        model: Any,
        *,
        scaler: Any = None,
        max_skips: int | None = 100,
        overlap: bool | str = False,
    ) -> None:
        self._groups: tuple[Group, ...] = (find_group(None),)
        self._between = self._group = self._groups[0]
        self._shards: Shards | None = None
        try:
            state = self._prepare(tx, model, scaler, max_skips, overlap)
        except Exception as error:
            if self._everyone.size > 1:
                tell_why(self._axes, error)
            raise
        if self._everyone.size > 1:
            agree_on_grid(self._axes, self._replicas())
            self._make_equal(self._replicated().values())
        self._masters = Masters(self._parameters if self._with_masters else {})
        # Now that all ranks come: it may make a process group.
        self._engine: Direct | Overlapped | Grouped
        self._overlap = self._reason_off(overlap)
        if self._shards is not None:
            self._engine = AcrossShards(self._run, self._between, self._tree, state, self._shards)
        elif not self._overlap:
            known, widens = self._known_scale, self._with_masters
            trial = Trial("asked for" if overlap == "always" else "")
            self._engine = Grouped(
                self._run,
                self._tree,
                self._order,
                self._info,
                state,
                known,
                trial,
                widens=widens,
            )
        else:
            engine = Overlapped if self.tx.delay else Direct
            self._engine = engine(self._run, self._between, self._tree, state)

    @property
    def _axes(self) -> tuple[Group, ...]:
        """The groups of this rank: that between nodes first, and last the ranks of its replica."""
        return self._groups if self._shards is None else (*self._groups, self._shards.group)

    @property
    def _everyone(self) -> Group:
        """All ranks: those that exchange, and those that they share a replica with."""
        return joint(self._axes)

    @property
    def overlap(self) -> str:
        """Whether gradients go out during the backward pass: ``"on"``, or ``"off"``, and why."""
        if not isinstance(self._engine, Grouped):
            return f"off: {self._overlap}"
        trial = self._engine.trial
        state = "on" if trial.on or not trial.verdict else "off"
        return f"{state}: {trial.verdict or 'being tried'}"

    def no_sync(self) -> AbstractContextManager[None]:
        """Where a backward pass is not followed by `sync`, and adds to what is in ``.grad``.

        It is only needed with overlap, and does nothing else.
        """
        return self._engine.no_sync() if isinstance(self._engine, Grouped) else nullcontext()

    def _check_overlap(self) -> None:
        reason = reason_against(self._run)
        if self.tx.exchange is not None and reason:
            raise ValueError(f"Pipeline(overlap=True): {reason}; leave overlap out")
        if has_unscale(self._run) and self._scaler is None:
            raise ValueError(
                "Pipeline(overlap=True): gradients go out before sync(loss_scale=...) says what "
                "they are multiplied by; give the GradScaler, Pipeline(tx, model, scaler=scaler)"
            )

    @property
    def _order(self) -> list[int]:
        """The positions of the parameters, as the module has registered them."""
        if self._module is None:
            return list(range(len(self._paths)))
        where = {path: i for i, path in enumerate(self._paths)}
        return [where[path] for path in self._tree]

    def _reason_off(self, overlap: bool | str) -> str:
        """Why there is no overlap; empty if there is."""
        if not overlap:
            return "not asked for"
        if self._between.size == 1:
            return "there is one rank"
        if len(partition(flatten(self._tree)[0], self._order)) == 1:
            return "there is too little to send for more than one group"
        return ""

    def _known_scale(self) -> dict[str, Any]:
        """The loss scale, as it is known before the backward pass."""
        if not has_unscale(self._run):
            return {}
        return {"loss_scale": 1.0 if self._scaler is None else self._scaler.scale}

    def _prepare(
        self, tx: Any, model: Any, scaler: Any, max_skips: int | None, overlap: bool | str
    ) -> Any:
        """All of the construction that one rank does alone, and may fail in; the first state."""
        self._module = model if isinstance(model, torch.nn.Module) else None
        if self._module is not None:
            make_sharded(self._module)
        self._tree, self._info = parameters_of(model)
        paths, leaves, _ = flatten_with_paths(self._tree)
        self._shards = find_shards(model, dict(zip(paths, leaves, strict=True)))
        self.tx = tx if isinstance(tx, Chain) else Chain(flat((tx,)))
        self._with_masters = any(
            isinstance(last, BareEnclosing) and last.stage == MASTER_WEIGHTS
            for last in self.tx.transformations[-1:]
        )
        # What a torch optimizer is to step on is no business of the chain.
        self._run = Chain(self.tx.transformations[:-1]) if self._with_masters else self.tx
        if self.tx.exchange is not None:
            if self.tx.exchange.one_program:
                raise TypeError(
                    f"{self.tx.exchange.code()} exchanges JAX arrays over a mesh; a Pipeline has "
                    "torch tensors: write allreduce()"
                )
            self._groups = self._run.groups
            self._between, self._group = self._groups[0], joint(self._groups)
        self._skips = Skips("Pipeline(max_skips", max_skips)
        if not (isinstance(overlap, bool) or overlap == "always"):
            raise ValueError(f"Pipeline(overlap={overlap!r}): expected True, False or 'always'")
        check_chain(self.tx, self._group, "a Pipeline")
        _refuse_ddp(model)
        check_lookups(model, self._group)
        self._scaler = None if scaler is None else ScalerAdapter(scaler)
        self._check_scaler()
        if self._module is not None:
            self._tree = {path: p for path, p in self._tree.items() if p.requires_grad}
        self._paths, leaves, self._treespec = flatten_with_paths(self._tree)
        named = zip(self._paths, leaves, strict=True)
        self._parameters: Tensors = {path: leaf for path, leaf in named if leaf is not None}
        _refuse_shared(self._parameters)
        if self._shards is not None:
            self._shards.check_apart(self._groups)
            check_stages(self.tx, overlap=overlap, masters=self._with_masters)
        state = self._run.init(map_leaves(local, self._tree), self._info)
        self._check_tables(state, overlap)
        self._values = sum(local(p).numel() for p in self._parameters.values())
        if overlap:
            self._check_overlap()
        return state

    def _check_tables(self, state: Any, overlap: bool | str) -> None:
        dense = {
            "the chain has master_weights()": self._with_masters,
            "overlap=True": bool(overlap),
            "the model is sharded": self._shards is not None,
        }
        given = [what for what, there in dense.items() if there]
        for i in state.layout.tables if given else ():
            raise ValueError(
                f"parameter {state.layout.leaves[i].path!r} has row-sparse gradients and "
                f"{given[0]}, for dense ones: build the layer with sparse=False"
            )

    def sync(
        self,
        *optimizers: torch.optim.Optimizer,
        loss_scale: float | None = None,
        weight: float | None = None,
    ) -> SyncReport:
        """Reads every ``.grad``, runs one update, and writes every ``.grad``.

        With a scaler it does what ``scaler.unscale_`` does for each optimizer (or leaves it, where
        you have called that yourself), and makes ``scaler.step`` and ``scaler.update`` take the
        same decision on every rank.

        Args:
            *optimizers: all that will step on the gradients; needed with a scaler.
            loss_scale: what the loss was multiplied by, for loops without a scaler.
            weight: what the micro-step weighs in the window of `accumulate`: how many tokens the
                loss is a mean over, say. One by default.

        After an error, parameters, optimizers, the state, and every ``.grad`` are as they were.
        With overlap, or a `delayed` exchange, every ``.grad`` is None; and after a delayed one that
        has failed there is no state that the parameters belong to, and none is given.

        Returns:
            What happened. Where ``ready`` is false there is nothing to step with.

        Raises:
            ValueError: if the chain has an `unscale` and there is no loss scale, or the reverse; if
                the optimizers do not own just the parameters that have a gradient.
            RankLostError: if a rank has died, or is silent for longer than the group's time-out;
                and in all later calls.
            RankMismatchError: if another rank failed, or ranks disagree.
            NeverFiniteError: after more than `max_skips` bad steps in a row, on all ranks.
        """
        self._check_group()
        try:
            self._check_frozen()
            if self._shards is not None:
                self._shards.check_gradients()
            if self._with_masters:
                self._masters.attach(optimizers)
            extra = self._loss_scale(optimizers, loss_scale)
            if weight is not None:
                if not self._windowed:
                    raise ValueError("weight is given and the chain has no accumulate()")
                extra["weight"] = check_weight(weight)
        except Exception as error:
            self._engine.fail(error)
            raise
        self._skips.look((path, local(p.grad)) for path, p in self._parameters.items())
        given = [p.grad for p in self._parameters.values()]
        try:
            outcome = self._engine.step(self._gradients(), **extra)
        except BaseException:
            if isinstance(self._engine, Direct):
                for parameter, gradient in zip(self._parameters.values(), given, strict=True):
                    parameter.grad = gradient
            raise
        return self._report(outcome, optimizers)

    def fail(self, error: Exception) -> None:
        """Tells the other ranks that this one does not come to the next `sync`, and why.

        They raise a `RankMismatchError` with its text there, and all can go on. Without it they
        wait: until this process ends, or the group's time-out. Call it where `sync` would come::

            try:
                loss = criterion(model(x), y)
                loss.backward()
            except Exception as error:
                pipe.fail(error)
                raise

        It returns once the others have come to their `sync`, or after the group's time-out.

        The ranks that a model is sharded over wait for each other in both passes, where this does
        not reach them: there call it only after the backward pass, and let the process end if it
        fails before.

        Args:
            error: what has gone wrong.
        """
        self._engine.fail(error)

    def flush(self, *optimizers: torch.optim.Optimizer) -> Iterator[SyncReport]:
        """Brings out what is held back: the window of `accumulate` so far, and delayed results.

        Call it on all ranks at the end of an epoch, before evaluating and saving, and step with
        each report that is ready::

            for report in pipe.flush(optimizer):
                if report.ready:
                    optimizer.step()
                    optimizer.zero_grad()

        The ranks may have come to it with unequal numbers of micro-steps.

        Args:
            *optimizers: as for `sync`.

        Yields:
            A report for each result; none, if there is nothing to bring out on any rank.

        Raises:
            ValueError: if optimizers are needed and not given, as for `sync`.
            RankMismatchError: if another rank failed, or ranks disagree.
        """
        if not self._windowed and not self.tx.delay:
            return
        self._check_group()
        try:
            if self._with_masters:
                self._masters.attach(optimizers)
            if self._scaler is not None and self._scaler.enabled:
                self._loss_scale(optimizers, None)
        except Exception as error:
            self._engine.fail(error)
            raise
        pending = True
        while pending:
            for parameter in (*self._parameters.values(), *self._masters.parameters.values()):
                parameter.grad = None
            outcome = self._engine.flush()
            pending = self._engine.pending
            if outcome.ready or outcome.skipped:
                yield self._report(outcome, optimizers)

    def close(self) -> None:
        """Ends the thread of a background exchange; `flush` first, or what is queued is lost."""
        self._engine.close()

    def _check_group(self) -> None:
        if self.tx.exchange is not None and self._run.groups != self._groups:
            raise RuntimeError(
                "the process group is another one than when the Pipeline was built: build it after "
                "torch.distributed.init_process_group, so that parameters start equal"
            )

    @property
    def _windowed(self) -> bool:
        return any(stage.kind is Kind.ACCUMULATE for stage in self.tx.stages)

    def _report(self, outcome: Outcome, optimizers: Sequence[torch.optim.Optimizer]) -> SyncReport:
        """Writes what a step gave, and says so."""
        written = outcome.updates is not None and self._write(flatten(outcome.updates)[0])
        decided = outcome.ready or outcome.skipped
        if self._scaler is not None and self._scaler.enabled:
            if decided:
                self._scaler.record(optimizers, skipped=outcome.skipped, left_out=outcome.left_out)
            else:
                self._scaler.go_on(optimizers)
        if decided:
            self._skips.count(outcome.skipped)
        dense = dense_bytes(self._between, self._values)
        return SyncReport(
            ready=written and outcome.ready,
            skipped=outcome.skipped,
            wire_bytes=outcome.sent,
            seconds=outcome.seconds,
            hidden=outcome.hidden,
            dense_bytes=dense if decided or not self._windowed else 0,
        )

    def parameters(self) -> list[torch.Tensor]:
        """What the optimizer is to step on.

        The model's parameters; with `master_weights` at the end of the chain, FP32 copies of those
        in 16 bits. What an optimizer that is given to `sync` makes of the copies is rounded into
        the model, after each of its steps.
        """
        return [self._masters.parameters.get(path, p) for path, p in self._parameters.items()]

    def sync_buffers(self) -> None:
        """Makes the buffers of the module the same on all ranks.

        Running means and variances are averaged; all other buffers are rank 0's. Call it before
        evaluating or saving the model.
        """
        if self._module is None or self._everyone.size == 1:
            return
        # Buffers may have changed their sizes since the first step.
        agree_on_grid(self._axes, self._replicas())
        averaged = _running_statistics(self._module)
        if averaged:
            flat_sum = self._everyone.all_reduce(
                torch.cat([buffer.reshape(-1).to(torch.float64) for buffer in averaged])
            )
            means = (flat_sum / self._everyone.size).split([b.numel() for b in averaged])
            with torch.no_grad():
                for buffer, mean in zip(averaged, means, strict=True):
                    buffer.copy_(mean.reshape(buffer.shape))
        done = {id(buffer) for buffer in averaged}
        self._make_equal(buffer for buffer in self._module.buffers() if id(buffer) not in done)

    def _make_equal(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes tensors those of rank 0, and parts of tensors those of the first replica."""
        tensors = list(tensors)
        _broadcast(self._everyone, [x for x in tensors if not is_dtensor(x)])
        _broadcast(self._group, [local(x) for x in tensors if is_dtensor(x)])

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors and numbers, the tensors keyed by parameter path.

        Returns:
            A dict that ``torch.load(weights_only=True)`` can load. Every rank has its own; for
            another number of ranks `reshard` makes others of those of all ranks.
        """
        state = self._engine.state
        return {
            **self._identity,
            "per_rank": rules_of(self._run, state),
            "state": flatten_state(state),
            **({"masters": self._masters.state_dict()} if self._with_masters else {}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the state that `state_dict` gave on the same rank.

        Args:
            state_dict: from the same chain, parameters, rank, and number of ranks and nodes.

        Raises:
            ValueError: naming what differs; the state is then as it was.
        """
        check_identity(state_dict, self._identity, "a Pipeline")
        restored = restore_state(self._engine.state, state_dict["state"])
        if self._with_masters:
            self._masters.load_state_dict(state_dict.get("masters"))
        self._engine.state = restored

    @property
    def _identity(self) -> dict[str, Any]:
        shards = None if self._shards is None else self._shards.group
        return identity(self.tx, self._group, shards)

    @property
    def state(self) -> Any:
        """The chain's state, a pytree; its buffers are used again by steps that follow.

        `state_dict` copies them.
        """
        return self._engine.state

    def _check_scaler(self) -> None:
        own = own_loss_scale(self.tx)
        scaled = self._scaler is not None and self._scaler.enabled
        if self.tx.delay and (scaled or own is not None):
            raise ValueError(
                f"{'a GradScaler is given' if scaled else f'the chain has {own}'} and results are "
                f"delayed by {self.tx.delay} steps: whether the loss scale has to fall would be "
                "known too late; write allreduce() without delayed(), or train in bfloat16, which "
                "needs no loss scale"
            )
        if scaled:
            check_one_loss_scale(self.tx, "pipe")

    def _loss_scale(self, optimizers: Any, given: float | None) -> dict[str, Any]:
        scaler = self._scaler
        if scaler is not None and scaler.enabled:
            if given is not None:
                raise ValueError("the loss scale is the scaler's: leave loss_scale out")
            scale, finite = scaler.loss_scale(
                optimizers, self._parameters | self._masters.parameters
            )
            return {"loss_scale": scale} if finite else {"loss_scale": scale, "finite": flag(False)}
        if (own := own_loss_scale(self.tx)) is not None:
            if given is not None:
                raise ValueError(
                    f"loss_scale is given and the chain has {own}: two loss scales; multiply the "
                    "loss by pipe.state.loss_scale and leave the argument out"
                )
            return {}
        if not has_unscale(self.tx):
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
        found = [self._parameters.get(path) for path in self._paths]
        grads = [None if p is None else local(p.grad) for p in found]
        if self._with_masters:
            # What is given in FP32 comes out in FP32.
            grads = [None if g is None else widen(g) for g in grads]
        if self.tx.delay or self._with_masters:
            # They are used in the background, while the next backward pass runs; or the optimizer
            # clears those of the copies only.
            for parameter in self._parameters.values():
                parameter.grad = None
        return unflatten(self._treespec, grads)

    @in_phase("apply")
    @torch.no_grad()
    def _write(self, updates: Sequence[torch.Tensor | None]) -> bool:
        for path, update in zip(self._paths, updates, strict=True):
            if update is None:
                continue
            parameter = self._masters.parameters.get(path, self._parameters[path])
            if update.is_sparse:
                parameter.grad = update.to(parameter.device, parameter.dtype)
            elif parameter.grad is None:
                parameter.grad = spread_like(update.to(parameter.dtype).clone(), parameter)
            else:
                grad = local(parameter.grad)
                if grad.data_ptr() != update.data_ptr():  # It may be there already.
                    grad.copy_(update)
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
                LeafSpec(path, tuple(t.shape), _described(t))
                for path, t in self._replicated().items()
            ),
            None,
        )
        code = self.tx.context(None).code
        if self._shards is not None and self._scaler is not None:
            # What the ranks of a replica multiply their losses by is in one gradient.
            code += f", scaled by {self._scaler.scale}"
        return Context(layout, code)


def _described(x: torch.Tensor) -> str:
    """The dtype of a tensor, and how it is spread, if it is."""
    dtype = str(x.dtype).removeprefix("torch.")
    placements: Any = getattr(x, "placements", ())
    return " ".join([dtype, *map(str, placements)]) if is_dtensor(x) else dtype


def _refuse_ddp(model: Any) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel
    if isinstance(model, torch.nn.Module) and any(isinstance(m, ddp) for m in model.modules()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which reduces the gradients itself: "
            "they would be reduced twice. Give the Pipeline a model that was never wrapped; to "
            "keep DDP, run the chain in it: model.register_comm_hook(None, gx.ddp_hook(tx, model))"
        )


def _refuse_shared(parameters: Tensors) -> None:
    first: dict[int, str] = {}
    for path, parameter in parameters.items():
        if first.setdefault(id(parameter), path) != path:
            raise ValueError(
                f"one tensor stands at {first[id(parameter)]!r} and at {path!r}: its gradient "
                "would be sent twice; leave one of them out"
            )


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
