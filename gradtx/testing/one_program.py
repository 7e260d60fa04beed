"""Runs of a chain on JAX arrays, all ranks in one compiled program; importing it imports jax.

The ranks are rows: `jax.vmap` over the axis that the chain exchanges over, which needs one device.
A chain is compiled once for each structure, and remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradtx.core.chain import Chain, ChainState
from gradtx.core.per_rank import without_first_axis
from gradtx.core.schedule import Schedule
from gradtx.core.tree import PyTree, flatten_with_paths, map_leaves, unflatten
from gradtx.exchange.mesh import counted
from gradtx.testing.trace import (
    Call,
    Measured,
    Step,
    Trace,
    delay_of,
    micro_steps,
    window_of,
)

_REMEMBERED = 64


def check_params(params: PyTree) -> None:
    """Refuses what JAX would narrow.

    Raises:
        ValueError: naming the path of an FP64 leaf, where JAX has no FP64.
    """
    if has_float64():
        return
    for path, leaf in zip(*flatten_with_paths(params)[:2], strict=True):
        if leaf is not None and leaf.dtype == torch.float64:
            raise ValueError(
                f"leaf {path!r} is float64, which JAX would narrow to float32: leave it out, or "
                "call jax.config.update('jax_enable_x64', True) first"
            )


def has_float64() -> bool:
    """Whether JAX keeps FP64."""
    return bool(jnp.zeros((), float).dtype == jnp.float64)


def trace(tx: Chain, params: PyTree, steps: Sequence[Step], size: int) -> list[Trace]:
    """As `gradtx.testing.trace.trace`."""
    program = Program.of(tx, size)
    on_jax = map_leaves(_to_jax, params)
    state = program.init(on_jax)
    traces = [Trace([], [own], []) for own in program.by_rank(state)]
    delay = delay_of(tx)
    for number, step in enumerate(steps):
        sent = 0
        for micro, extra in micro_steps(tx, step, number):
            arguments = _arguments(micro, size, state, on_jax, extra)
            updates, state = program.compiled(*arguments)(*arguments)[0]
            sent += program.sent(*arguments)
        ranks = zip(traces, program.by_rank(updates), program.by_rank(state), strict=True)
        for one, own, own_state in ranks:
            one.outputs.append(own)
            one.states.append(own_state)
            one.sent.append(sent)
    for _ in range(delay):
        updates, state = program.flush(state, on_jax)
        for one, own in zip(traces, program.by_rank(updates), strict=True):
            one.outputs.append(own)
    return [Trace(one.outputs[delay:], one.states, one.sent) for one in traces]


def calls(tx: Chain, params: PyTree, steps: Sequence[Step], size: int) -> list[list[Call]]:
    """As `gradtx.testing.trace.calls`: the second call is traced anew, and compiled if it differs.

    What `update` has done to the containers that it was given shows in those that it is traced on.
    """
    program = Program.of(tx, size)
    on_jax = map_leaves(_to_jax, params)
    state = program.init(on_jax)
    out: list[list[Call]] = [[] for _ in range(size)]
    for step in steps:
        arguments = _arguments(step, size, state, on_jax, {})
        first, after = program.compiled(*arguments)(*arguments)
        second, _ = program.compiled_again(*arguments)(*arguments)
        before = arguments[0], state, jax.tree.map(lambda x: jnp.stack([x] * size), on_jax)
        every = (program.by_rank(x) for x in (before, after, first, second))
        for row, given, left, one, two in zip(out, *every, strict=True):
            row.append(Call(given, left, one, one, two))
        state = first[1]
    return out


def measure(tx: Chain, params: PyTree, step: Step, size: int) -> Measured:
    """As `gradtx.testing.trace.measure`; of a window only what is before its last step is run."""
    program = Program.of(tx, size)
    on_jax = map_leaves(_to_jax, params)
    state = program.init(on_jax)
    *before, (last, extra) = micro_steps(tx, step, 0)
    for micro, weight in before:
        arguments = _arguments(micro, size, state, on_jax, weight)
        state = program.compiled(*arguments)(*arguments)[0][1]
    updates, sent = program.shapes(*_arguments(last, size, state, on_jax, extra))
    return Measured(updates, sent)


def _arguments(
    step: Step, size: int, state: Any, params: PyTree, extra: Mapping[str, float]
) -> tuple[Any, ...]:
    """Gradients, state, parameters, loss scale and weight, as a program takes them."""
    numbers = (step.loss_scale, extra.get("weight", 1.0))
    return _stacked(step, size), state, params, *map(jnp.float32, numbers)


class Program:
    """A chain on several ranks.

    Args:
        tx: the chain.
        size: how many ranks.
    """

    def __init__(self, tx: Chain, size: int) -> None:
        self.tx, self.size = tx, size
        exchange: Any = tx.exchange
        self._one_program = exchange is not None and exchange.one_program
        self._axis = {"axis_name": exchange.axis_name} if self._one_program else {}
        self._scheduled = any(
            isinstance(argument.value, Schedule)
            for stage in tx.stages
            for argument in stage.arguments
        )
        window = window_of(tx)
        self._weighs = window is not None and window.hyperparameters["mean"]
        self._branches = self._scheduled or window is not None
        self._flush = jax.jit(jax.vmap(tx.flush, in_axes=(0, None), axis_size=size, **self._axis))
        self._init = jax.jit(jax.vmap(tx.init, in_axes=None, axis_size=size, **self._axis))
        self._lowered: dict[Any, tuple[str, Callable[..., Any], int]] = {}

    @classmethod
    def of(cls, tx: Chain, size: int) -> Program:
        """The program, remembered. Equal chains may do different things: only the same one does."""
        key = (*map(id, tx.transformations), size, has_float64())
        if key not in _programs:
            if len(_programs) >= _REMEMBERED:
                del _programs[next(iter(_programs))]
            _programs[key] = cls(tx, size)
        return _programs[key]

    def init(self, params: PyTree) -> Any:
        """The states of all ranks: leaves ``[size, ...]``."""
        return self._init(params)

    def flush(self, state: Any, params: PyTree) -> Any:
        """The updates and states of all ranks."""
        return self._flush(state, params)

    def compiled(self, *arguments: Any) -> Callable[..., Any]:
        """``(gradients, state, params, loss_scale) -> ((updates, state), what was given)``."""
        _, compiled, _ = self._known(arguments)
        return compiled

    def compiled_again(self, *arguments: Any) -> Callable[..., Any]:
        """The same, if tracing it anew gives the same program; else that other one."""
        text, compiled, _ = self._known(arguments)
        again = jax.jit(self._stepped()).lower(*arguments)
        return compiled if again.as_text() == text else again.compile()

    def sent(self, *arguments: Any) -> int:
        """The bytes that a rank puts on the link in a step."""
        if self._branches:
            return self.shapes(*arguments)[1]
        return self._known(arguments)[2]

    def shapes(self, gradients: PyTree, state: Any, *rest: Any) -> tuple[PyTree, int]:
        """What the updates of one rank look like, and the bytes it puts on the link.

        Counters in the state are known here, as they are not in the compiled program, which has
        branches for all that a schedule may give.
        """
        leaves, treespec = jax.tree.flatten(state)
        known = {i: x[0] for i, x in enumerate(leaves) if x.ndim == 1 and x.dtype.kind in "iub"}
        unknown = [None if i in known else leaf for i, leaf in enumerate(leaves)]

        def stepped(gradients: PyTree, unknown: Any, *rest: Any) -> Any:
            own = [known.get(i, leaf) for i, leaf in enumerate(unknown)]
            return self._step(gradients, jax.tree.unflatten(treespec, own), *rest)[0][0]

        with counted() as link:
            mapped = self._mapped(stepped)
            updates = jax.eval_shape(mapped, gradients, unknown, *rest)
        return jax.tree.map(_to_meta, updates), link.sent

    def by_rank(self, stacked: Any) -> list[Any]:
        """What each rank holds, as torch tensors; its states as they are within a step."""
        arrays = jax.tree.map(np.asarray, stacked)
        rows = [jax.tree.map(lambda x, i=i: _to_torch(x[i]), arrays) for i in range(self.size)]
        return [self._without_first_axis(row) for row in rows]

    def _without_first_axis(self, own: Any) -> Any:
        if self._one_program and isinstance(own, ChainState):
            return ChainState(own.layout, without_first_axis(own.states, own.layout))
        if type(own) is tuple:
            return tuple(map(self._without_first_axis, own))
        return own

    def _known(self, arguments: tuple[Any, ...]) -> tuple[str, Callable[..., Any], int]:
        leaves, treespec = jax.tree.flatten(arguments)
        key = treespec, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._lowered:
            with counted() as link:
                lowered = jax.jit(self._stepped()).lower(*arguments)
            self._lowered[key] = lowered.as_text(), lowered.compile(), link.sent
        return self._lowered[key]

    def _stepped(self) -> Callable[..., Any]:
        return self._mapped(lambda *arguments: self._step(*arguments))

    def _mapped(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        mapped: Callable[..., Any] = jax.vmap(
            fn, in_axes=(0, 0, None, None, None), axis_size=self.size, **self._axis
        )
        return mapped

    def _step(
        self, gradients: PyTree, state: Any, params: PyTree, loss_scale: Any, weight: Any
    ) -> Any:
        own = getattr(state, "loss_scale", None)
        extra = {"weight": weight} if self._weighs else {}
        if own is None:
            out = self.tx.update(gradients, state, params, loss_scale=loss_scale, **extra)
        else:
            scaled = map_leaves(lambda x: (x * (own / loss_scale)).astype(x.dtype), gradients)
            out = self.tx.update(scaled, state, params, **extra)
        return out, (gradients, state, params)


_programs: dict[Any, Program] = {}


def _stacked(step: Step, size: int) -> PyTree:
    """The gradients of all ranks: leaves ``[size, ...]``, None where no rank has one."""
    paths, _, treespec = flatten_with_paths(step.gradients[0])
    ranks = [flatten_with_paths(tree)[1] for tree in step.gradients[:size]]
    rows = []
    for path, *leaves in zip(paths, *ranks, strict=True):
        lacking = sum(leaf is None for leaf in leaves)
        if lacking not in (0, size):
            raise ValueError(
                f"leaf {path!r} is None on {lacking} of {size} ranks: in one program it is there "
                "on all of them or on none"
            )
        rows.append(None if lacking else jnp.asarray(np.stack(list(map(_to_numpy, leaves)))))
    return unflatten(treespec, rows)


def _to_jax(tensor: torch.Tensor) -> Any:
    return jnp.asarray(_to_numpy(tensor))


# What NumPy itself has no dtype for crosses as whole numbers of the same size.
_BITS = {1: torch.uint8, 2: torch.int16}


def _is_foreign(dtype: str) -> bool:
    return dtype == "bfloat16" or dtype.startswith("float8")


def _to_numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if not _is_foreign(name):
        return tensor.numpy()
    return tensor.view(_BITS[tensor.itemsize]).numpy().view(jnp.dtype(name))


def _to_torch(array: Any) -> torch.Tensor:
    array, name = np.array(array, order="C"), str(array.dtype)
    if not _is_foreign(name):
        return torch.from_numpy(array)
    bits = str(_BITS[array.itemsize]).removeprefix("torch.")
    return torch.from_numpy(array.view(bits)).view(getattr(torch, name))


def _to_meta(stacked: Any) -> torch.Tensor:
    dtype = getattr(torch, str(stacked.dtype))
    return torch.empty(stacked.shape[1:], dtype=dtype, device="meta")
