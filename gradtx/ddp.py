"""`ddp_hook`: a chain at work inside `torch.nn.parallel.DistributedDataParallel`."""

# No `from __future__ import annotations`: DDP compares those of a hook, and they have to be types.

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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
from gradtx.core.phases import in_phase
from gradtx.core.stage import Kind
from gradtx.core.transformation import Context, flat
from gradtx.core.tree import parameters_of
from gradtx.ddp_model import arranged_like, check_model, check_ranks, reduced
from gradtx.engine import Direct, Outcome
from gradtx.exchange.group import find_group
from gradtx.exchange.handshake import agree
from gradtx.interop.amp import ScalerAdapter
from gradtx.pipeline import SyncReport, dense_bytes
from gradtx.resharding import rules_of
from gradtx.skips import Skips
from gradtx.transforms.master_weights import STAGE as MASTER_WEIGHTS

Tensors = dict[str, torch.Tensor]


def ddp_hook(
    tx: Any, model: DistributedDataParallel, *, scaler: Any = None, max_skips: int | None = 100
) -> "DDPHook":
    """A communication hook that runs a chain on the gradients of a model in DDP.

    Register it with the model that it was made for, with any state::

        hook = gx.ddp_hook(tx, model, scaler=scaler)
        model.register_comm_hook(None, hook)

    DDP calls it with one bucket of gradients after another. The hook waits for all of them and
    takes one step of the chain on the whole gradient, with one exchange: so nothing depends on
    which bucket a parameter is in, and a step is good or bad as a whole. The exchange comes at the
    end of the backward pass, and is not hidden behind it.

    With a scaler, gradients are divided by its scale on their way into the chain, and multiplied
    by it again on their way back: ``scaler.unscale_``, ``scaler.step`` and ``scaler.update`` are
    used as ever. After a bad step all of them are infinite on all ranks, so all scalers skip it.
    Without one they are zeros then: step only if ``hook.report.ready``.

    To accumulate, use ``model.no_sync()``. Two backward passes without it, and without
    ``zero_grad()`` between, would exchange the first gradients a second time: DDP has written their
    mean to ``.grad``, and adds the next to that. This is refused, on all ranks. With
    ``static_graph=True`` the very first backward pass cannot be one inside ``no_sync()``, for DDP
    fails there; this is refused too.

    A parameter that no rank has used is left alone by DDP, whatever a hook gives for it
    (``find_unused_parameters``, ``static_graph``): its residual stays as it is.

    Args:
        tx: the transformation. Its exchange is over the same ranks as DDP's.
        model: the model, wrapped in DDP. Its ``requires_grad`` do not change from then on.
        scaler: the `torch.amp.GradScaler` of the loop, if there is one.
        max_skips: how many bad steps in a row are borne, as for `Pipeline`.

    Returns:
        The hook.

    Raises:
        ChainOrderError: if a payload comes out at the end (GX404), or there are several ranks and
            no exchange (GX405).
        TypeError: if the model is not wrapped in DDP, the scaler no GradScaler, or the exchange one
            over a JAX mesh.
        ValueError: if the chain has `accumulate`, `delayed` or `master_weights`; if there is an
            `unscale` and no scaler, or the reverse; if DDP exchanges over other ranks, has a hook
            already, or was made with an option that a hook cannot be right with; if a lookup has a
            `max_norm`, as for `Pipeline`.
        RankMismatchError: on every rank, if ranks disagree or one of them has failed.

    Example:
        >>> import torch, torch.distributed as dist, gradtx as gx
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
        >>> hook = gx.ddp_hook(gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()), model)
        >>> model.register_comm_hook(None, hook)
        >>> model(torch.tensor([[3.0, 1.0, -4.0, 1.0]])).sum().backward()
        >>> model.module.weight.grad
        tensor([[ 3.,  0., -4.,  0.]])
        >>> hook.report
        SyncReport(ready=True, skipped=False, wire_bytes=0, dense_bytes=0)
        >>> dist.destroy_process_group()
    """
    return DDPHook(tx, model, scaler, max_skips)


class DDPHook:
    """A chain, its state, and the parameters whose gradients DDP hands over. Made by `ddp_hook`.

    An error of the hook is raised by ``backward()``, once DDP has ended the pass; all gradients are
    NaN then, and the state is that of the last step. DDP can go on with the next pass.

    Attributes:
        tx: the chain.
        report: what the last exchange did; None before the first.
    """

    def __init__(self, tx: Any, model: Any, scaler: Any, max_skips: Any) -> None:
        # DDP asks for these, which functions have.
        self.__name__ = self.__qualname__ = "ddp_hook"
        self.report: SyncReport | None = None
        self._group = find_group(None)
        try:
            self._skips = Skips("ddp_hook(max_skips", max_skips)
            state = self._prepare(tx, model, scaler)
            ranks = dist.get_process_group_ranks(model.process_group)
            code = f"{self.tx.shared_code} in DDP over ranks {ranks}"
            context = Context(state.layout, code)
        except Exception as error:
            if self._group.size > 1:
                tell_why([self._group], error)
            raise
        if self._group.size > 1:
            agree(self._group, context, 0)
        self._engine = Direct(self.tx, self._group, self._parameters, state)
        # Of the backward passes since the last exchange.
        self._used: set[str] = set()
        self._on_top: Tensors = {}
        # Of the backward pass that is under way.
        self._waiting: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._gradients: Tensors = {}
        self._error: Exception | None = None
        # Whose .grad has in it what an exchange gave, unless it was cleared.
        self._given: set[str] = set()
        self._begun = False
        self._watch(model)

    def _prepare(self, tx: Any, model: Any, scaler: Any) -> Any:
        """All of the construction that one rank does alone, and may fail in; the first state."""
        self.tx = tx if isinstance(tx, Chain) else Chain(flat((tx,)))
        if self.tx.exchange is not None:
            if self.tx.exchange.one_program:
                raise TypeError(
                    f"{self.tx.exchange.code()} exchanges JAX arrays over a mesh; DDP has torch "
                    "tensors: write allreduce()"
                )
            self._group = self.tx.exchange.group
        check_chain(self.tx, self._group, "a DDP hook")
        _check_stages(self.tx)
        check_model(model)
        check_lookups(model.module, self._group)
        check_ranks(model, self._group)
        self._scaler = None if scaler is None else ScalerAdapter(scaler)
        self._check_scaler()
        self._model = weakref.ref(model)  # DDP holds the hook, where the collector does not look.
        tree, info = parameters_of(model.module)
        self._parameters: Tensors = reduced(model, tree)
        self._paths = {id(p): path for path, p in self._parameters.items()}
        self._strides = {path: p.stride() for path, p in self._parameters.items()}
        self._values = sum(p.numel() for p in self._parameters.values())
        return self.tx.init(self._parameters, info)

    def _check_scaler(self) -> None:
        if self._scaler is not None and self._scaler.enabled:
            check_one_loss_scale(self.tx, "hook")
        elif self._scaler is None and has_unscale(self.tx) and own_loss_scale(self.tx) is None:
            raise ValueError(
                "the chain has unscale() and there is no loss scale: write ddp_hook(tx, model, "
                "scaler=scaler), or dynamic_loss_scale() in its place, or leave it out"
            )

    def _watch(self, model: DistributedDataParallel) -> None:
        """Lets parameters tell of their gradients, before these are added to ``.grad``."""
        this = weakref.ref(self)
        handles = [
            p.register_hook(partial(_tell, this, path)) for path, p in self._parameters.items()
        ]
        handles.append(model.register_forward_pre_hook(partial(_tell_forward, this)))
        weakref.finalize(self, _remove, handles).atexit = False

    def _note(self, path: str) -> None:
        """A gradient is about to be added to the ``.grad`` of a parameter."""
        self._used.add(path)
        if path in self._given:
            self._given.discard(path)
            grad = self._parameters[path].grad
            if grad is not None:
                self._on_top[path] = _values(grad).any()  # Read once it is known for all of them.

    def _note_forward(self, model: DistributedDataParallel) -> None:
        """A forward pass begins.

        Raises:
            Exception: what a backward pass could not raise, since it came to no end.
            RuntimeError: in the first pass of a static graph, inside ``no_sync()``.
        """
        self._raise()
        synced = model.require_backward_grad_sync or not torch.is_grad_enabled()
        if model.static_graph and not self._begun and not synced:
            # pytorch/pytorch#143580
            raise RuntimeError(
                "the first step of DDP(static_graph=True) is inside no_sync(): there DDP exchanges "
                "all the same, and then fails; run it outside, or leave static_graph out"
            )

    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls with each bucket.

        Args:
            state: what was registered with the hook; not used.
            bucket: some gradients.

        Returns:
            What will be the bucket's buffer with the results in it.
        """
        buffer = bucket.buffer()
        devices = [] if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._waiting.append((future, buffer))
        failed_before = self._error is not None
        if not failed_before:
            try:
                with torch.no_grad():
                    self._take(bucket)
            except Exception as error:
                self._error = error
        if self._error is not None:
            self._spoil()
        if self._error is not None or len(self._gradients) == len(self._parameters):
            self._hand_back()
        if self._error is not None and not failed_before:
            self._raise_after_backward()
        return future

    def _take(self, bucket: Any) -> None:
        """Takes a bucket; with the last one, the step."""
        try:
            self._collect(bucket)
            if len(self._gradients) < len(self._parameters):
                return
            self._begun = True
            extra = self._extra()
            self._check_accumulated()
        except Exception as error:
            self._engine.fail(error)
            raise
        gradients = {path: self._gradient(path) for path in self._parameters}
        self._skips.look(gradients.items())
        self._used.clear()
        outcome = self._engine.step(gradients, **extra)
        written = self._write(outcome)
        self.report = SyncReport(
            ready=written and outcome.ready,
            skipped=outcome.skipped,
            wire_bytes=outcome.sent,
            dense_bytes=dense_bytes(self._group, self._values),
        )
        self._skips.count(outcome.skipped)

    @property
    def _ddp(self) -> Any:
        return self._model()

    def _collect(self, bucket: Any) -> None:
        """Finds the gradients of a bucket by path."""
        in_rows = bucket.buffer().is_sparse  # Then it is the gradient of one parameter.
        gradients = [bucket.buffer()] if in_rows else bucket.gradients()
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            path = self._paths.get(id(parameter))
            if path is None:
                raise RuntimeError(
                    f"DDP reduces a parameter of shape {list(parameter.shape)} that the hook does "
                    "not know: register a hook with the model that it was made for, and change "
                    "requires_grad before that"
                )
            if path in self._gradients:
                raise RuntimeError(
                    f"the gradient of {path!r} came twice: the backward pass before this one did "
                    "not come to its end"
                )
            if parameter.stride() != self._strides[path]:
                raise RuntimeError(
                    f"parameter {path!r} has strides {parameter.stride()} and had "
                    f"{self._strides[path]} when the hook was made: change the memory format "
                    "before the model is wrapped in DDP"
                )
            self._gradients[path] = gradient if in_rows else arranged_like(gradient, parameter)

    def _gradient(self, path: str) -> torch.Tensor | None:
        """The gradient of a parameter; None if there is none and DDP may discard the result."""
        discards = self._ddp.find_unused_parameters or self._ddp.static_graph
        return None if discards and path not in self._used else self._gradients[path]

    def _extra(self) -> dict[str, Any]:
        model = self._ddp
        # Joined ranks bring zeros, and a mean is over all ranks.
        if model._join_config.enable and not model._divide_by_initial_world_size:
            raise ValueError(
                "join(divide_by_initial_world_size=False) does not reach a hook, which takes the "
                "mean over all ranks: write join()"
            )
        if self._scaler is None or not has_unscale(self.tx):
            return {}
        return {"loss_scale": self._scaler.scale}

    def _check_accumulated(self) -> None:
        again = sorted(path for path, anything in self._on_top.items() if bool(anything))
        self._on_top.clear()
        if again:
            shown = ", ".join(map(repr, again[:5])) + (" and others" if len(again) > 5 else "")
            raise RuntimeError(
                f"the gradients of {shown} were added to what the last exchange had left in .grad, "
                "which would be exchanged again: run all backward passes of a step but the last "
                "inside model.no_sync(), and call zero_grad() after the step"
            )

    @in_phase("apply")
    def _write(self, outcome: Outcome) -> bool:
        """Writes the results into the buckets, as the loop expects them; whether there are any."""
        scaled = self._scaler is not None and self._scaler.enabled
        scale = self._scaler.scale if self._scaler is not None and scaled else 1.0
        self._given |= self._gradients.keys()
        if outcome.skipped and scaled:
            for _, buffer in self._waiting:
                _fill(buffer, torch.inf)
            return False
        for path, gradient in self._gradients.items():
            update = outcome.updates[path]
            if update is None:
                gradient.zero_()
                continue
            _check_update(path, update, gradient)
            # A dense one may be there already.
            if gradient.is_sparse or update.data_ptr() != gradient.data_ptr():
                gradient.copy_(update)
        if scale != 1.0:
            for _, buffer in self._waiting:
                _values(buffer).mul_(scale)
        return any(update is not None for update in outcome.updates.values())

    def _hand_back(self) -> None:
        """Tells DDP that the buckets that have come hold their results."""
        for future, buffer in self._waiting:
            future.set_result(buffer)
        self._waiting, self._gradients = [], {}

    @torch.no_grad()
    def _spoil(self) -> None:
        """Writes what nobody takes for gradients."""
        for _, buffer in self._waiting:
            _fill(buffer, torch.nan)

    def _raise_after_backward(self) -> None:
        """Raises the error once DDP has ended the pass: within it, DDP could not go on."""
        engine: Any = torch.autograd.Variable._execution_engine
        try:
            # DDP ends the pass in a callback, which comes between these two.
            engine.queue_callback(lambda: engine.queue_callback(self._raise))
            return
        except RuntimeError:  # There is no pass: join() calls in the place of one.
            pass
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            self._used.clear()
            self._on_top.clear()
            raise error

    @property
    def state(self) -> Any:
        """The chain's state, a pytree; its buffers are used again by steps that follow.

        `state_dict` copies them.
        """
        return self._engine.state

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain tensors and numbers, the tensors keyed by parameter path.

        It is that of a `Pipeline` with the same chain and parameters.

        Returns:
            A dict that ``torch.load(weights_only=True)`` can load. Every rank has its own.
        """
        state = self._engine.state
        return {
            **identity(self.tx, self._group),
            "per_rank": rules_of(self.tx, state),
            "state": flatten_state(state),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the state that `state_dict` gave on the same rank.

        Args:
            state_dict: from the same chain, parameters, rank and number of ranks.

        Raises:
            ValueError: naming what differs; the state is then as it was.
        """
        check_identity(state_dict, identity(self.tx, self._group), "a DDP hook")
        self._engine.state = restore_state(self._engine.state, state_dict["state"])


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _fill(buffer: torch.Tensor, value: float) -> None:
    """Fills a buffer with a value; one that is row-sparse becomes one row of it."""
    if not buffer.is_sparse:
        buffer.fill_(value)
        return
    row = buffer._values().new_full((1, *buffer.shape[1:]), value)
    where = buffer._indices().new_zeros((1, 1))
    buffer.copy_(torch.sparse_coo_tensor(where, row, buffer.shape, check_invariants=False))


def _tell(this: "weakref.ref[DDPHook]", path: str, gradient: torch.Tensor | None) -> None:
    hook = this()
    if hook is not None and gradient is not None:
        hook._note(path)


def _tell_forward(
    this: "weakref.ref[DDPHook]", model: DistributedDataParallel, inputs: object
) -> None:
    hook = this()
    if hook is not None:
        hook._note_forward(model)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _check_stages(tx: Chain) -> None:
    for stage in tx.stages:
        if stage.kind is Kind.ACCUMULATE:
            raise ValueError(
                f"a DDP hook refuses {stage}: DDP discards what a hook gives for parameters that "
                "the last micro-step has not used; leave it out, and run all micro-steps but the "
                "last inside model.no_sync()"
            )
        if stage.kind is Kind.DELAY and tx.delay:
            raise ValueError(
                f"a DDP hook refuses {stage}: DDP waits for results before backward() returns; "
                "leave it out, or give a Pipeline the model that is not wrapped"
            )
        if stage == MASTER_WEIGHTS:
            raise ValueError(
                f"a DDP hook refuses {stage}: it has no part in the optimizer's step; leave it "
                "out, or give a Pipeline the model that is not wrapped"
            )


def _check_update(path: str, update: Any, gradient: torch.Tensor) -> None:
    shape = tuple(getattr(update, "shape", ()))
    if not isinstance(update, torch.Tensor) or shape != tuple(gradient.shape):
        raise ValueError(
            f"the chain gives {path!r} a {type(update).__name__} of shape {shape}: expected "
            f"{tuple(gradient.shape)}, that of its gradient"
        )
