"""What a chain means, in plain loops over NumPy arrays: the oracle the library is compared with.

Written from the contract alone (``DESIGN.md``, sections 2 to 5) and sharing no code with
``gradtx``. It covers the chains that the order checker accepts over six stages, and does no
checking of its own::

    unscale, filter_params, topk, sign, ef, allreduce

Example:
    >>> spec = [("unscale", {}), ("topk", {"ratio": 0.5}), ("ef", {}), ("allreduce", {})]
    >>> reference = Reference(spec, {"w": ((2,), "float32")}, world_size=1)
    >>> result = reference.step([{"w": np.array([8, 2], np.float32)}], loss_scale=2.0)
    >>> result.outputs[0]["w"].tolist(), reference.residuals[0]["w"].tolist()
    ([4.0, 0.0], [0.0, 1.0])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.floating[Any]]
Leaves: TypeAlias = dict[str, Array | None]
Spec: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]
Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]

COMPRESSORS = ("topk", "sign")


class Entry(NamedTuple):
    """One value of a payload and where it belongs. A Python float holds FP32 and FP64 exactly."""

    path: str
    position: int
    value: float


class StepResult(NamedTuple):
    """What one step gives.

    Attributes:
        outputs: for each rank, path to array in FP32 (FP64 for float64 leaves), before the cast
            to the leaf's dtype; ``None`` for a leaf that no rank had. A fragment's output is its
            decoded payload.
        skipped: whether the step was bad, and so is for every rank.
    """

    outputs: list[Leaves]
    skipped: bool


class Reference:
    """Runs a chain on the gradients of all ranks at once.

    Args:
        spec: the stages in order, each ``(name, hyperparameters)``:

            - ``("unscale", {})``
            - ``("filter_params", {"keep": path -> bool})``
            - ``("topk", {"ratio": float, "scope": "leaf" | "global"})``
            - ``("sign", {})``
            - ``("ef", {})``
            - ``("allreduce", {"op": "mean" | "sum"})``

            ``scope`` is ``"leaf"`` and ``op`` is ``"mean"`` where not given. Compressors may
            carry ``"feedback"``; what counts is whether ``ef`` is in the chain.
        shapes: path to ``(shape, dtype name)``, the names being ``float16``, ``bfloat16``,
            ``float32`` and ``float64``. NumPy has no bfloat16: give such a leaf's gradients as
            float32 arrays that are rounded already (see `round_to_bfloat16`).
        world_size: number of ranks; 1 for a fragment (no ``allreduce``).

    Attributes:
        residuals: for each rank, path to what is still to be sent, in FP32 (FP64 for float64
            leaves); ``None`` for a leaf with no error feedback over it. Replaced, never written
            into, by `step`.
    """

    def __init__(self, spec: Spec, shapes: Shapes, world_size: int) -> None:
        self.spec = list(spec)
        self.shapes = dict(shapes)
        self.world_size = world_size
        names = [name for name, _ in self.spec]
        self.compressors = [stage for stage in self.spec if stage[0] in COMPRESSORS]
        self.has_feedback = "ef" in names
        self.gated = "unscale" in names or len(self.compressors) > 0
        keeps: list[Callable[[str], bool]] = [
            hyperparameters["keep"]
            for name, hyperparameters in self.spec
            if name == "filter_params"
        ]
        self.compressed: list[str] = []
        if self.compressors:
            for path in sorted(self.shapes):
                if all(keep(path) for keep in keeps):
                    self.compressed.append(path)
        self.residuals: list[Leaves] = []
        for _ in range(world_size):
            residual: Leaves = {}
            for path in self.shapes:
                has_residual = self.has_feedback and path in self.compressed
                residual[path] = self._zeros(path) if has_residual else None
            self.residuals.append(residual)

    def step(
        self, gradients: Sequence[Mapping[str, Array | None]], loss_scale: float | None = None
    ) -> StepResult:
        """Takes one step: reads every rank's gradients, moves the residuals on.

        Args:
            gradients: for each rank, path to gradient, ``None`` (or left out) where it has none.
            loss_scale: what ``unscale`` divides by.
        """
        # A bad step is made of infinities and NaNs: computing with them is the point.
        with np.errstate(all="ignore"):
            return self._step(gradients, loss_scale)

    def _step(
        self, gradients: Sequence[Mapping[str, Array | None]], loss_scale: float | None
    ) -> StepResult:
        stream: list[Leaves] = []
        for rank in range(self.world_size):
            leaves: Leaves = {}
            for path in self.shapes:
                gradient = gradients[rank].get(path)
                leaves[path] = None if gradient is None else self._widen(path, gradient)
            stream.append(leaves)

        residuals = self.residuals
        run_is_done = False
        for name, hyperparameters in self.spec:
            if name == "unscale":
                stream = [self._unscale(leaves, loss_scale) for leaves in stream]
                if not self._all_finite(stream):
                    return self._bad_step(gradients)
            elif name in COMPRESSORS and not run_is_done:
                if not self._all_finite(stream):
                    return self._bad_step(gradients)
                stream, residuals = self._compress_all_ranks(stream)
                run_is_done = True
            elif name == "allreduce":
                stream = self._allreduce(stream, hyperparameters.get("op", "mean"))

        if self.gated and not self._all_finite_after_cast(stream):
            return self._bad_step(gradients)
        self.residuals = residuals
        return StepResult(outputs=stream, skipped=False)

    def _dtype(self, path: str) -> np.dtype[np.floating[Any]]:
        """What a leaf is computed in."""
        return np.dtype(np.float64 if self.shapes[path][1] == "float64" else np.float32)

    def _zeros(self, path: str) -> Array:
        return np.zeros(self.shapes[path][0], self._dtype(path))

    def _widen(self, path: str, gradient: Array) -> Array:
        """A copy in FP32 or FP64."""
        return np.array(gradient, self._dtype(path))

    def _unscale(self, leaves: Leaves, loss_scale: float | None) -> Leaves:
        if loss_scale is None:
            raise ValueError("the chain has an unscale and loss_scale is None: give a number")
        result: Leaves = {}
        for path, leaf in leaves.items():
            if leaf is None:
                result[path] = None
            else:
                dtype = self._dtype(path)
                result[path] = np.asarray(leaf / dtype.type(loss_scale), dtype)
        return result

    def _compress_all_ranks(self, stream: list[Leaves]) -> tuple[list[Leaves], list[Leaves]]:
        """What each rank sends, decoded, and the residuals it has then if the step is good."""
        sent_by_rank: list[Leaves] = []
        residual_by_rank: list[Leaves] = []
        for rank in range(self.world_size):
            corrected: dict[str, Array] = {}
            for path in self.compressed:
                gradient, residual = stream[rank][path], self.residuals[rank][path]
                if gradient is None:
                    corrected[path] = self._zeros(path)
                elif residual is None:
                    corrected[path] = gradient
                else:
                    corrected[path] = np.asarray(gradient + residual, self._dtype(path))
            decoded = self._decode(self._compress(corrected))

            sent = dict(stream[rank])
            residuals = dict(self.residuals[rank])
            for path in self.compressed:
                # Whatever an absent leaf's zeros became, the rank contributes nothing to it.
                if stream[rank][path] is None:
                    continue
                sent[path] = decoded[path]
                if self.has_feedback:
                    residuals[path] = np.asarray(corrected[path] - decoded[path], self._dtype(path))
            sent_by_rank.append(sent)
            residual_by_rank.append(residuals)
        return sent_by_rank, residual_by_rank

    def _compress(self, leaves: dict[str, Array]) -> list[list[Entry]]:
        """Runs the compressors; values in one list are chosen among, or averaged, together."""
        groups: list[list[Entry]] = []
        for path in self.compressed:
            flat = leaves[path].reshape(-1)
            groups.append([Entry(path, i, float(flat[i])) for i in range(len(flat))])
        for name, hyperparameters in self.compressors:
            if name == "topk":
                if hyperparameters.get("scope", "leaf") == "global":
                    groups = [[entry for group in groups for entry in group]]
                groups = [topk_entries(group, hyperparameters["ratio"]) for group in groups]
            else:
                groups = [sign_entries(group) for group in groups]
        return groups

    def _decode(self, groups: list[list[Entry]]) -> dict[str, Array]:
        """Dense leaves, zero where nothing was sent; here a scale is rounded to the leaf's FP32."""
        flats: dict[str, Array] = {path: self._zeros(path).reshape(-1) for path in self.compressed}
        for group in groups:
            for entry in group:
                flats[entry.path][entry.position] = entry.value
        return {path: flat.reshape(self.shapes[path][0]) for path, flat in flats.items()}

    def _allreduce(self, stream: list[Leaves], op: str) -> list[Leaves]:
        reduced: Leaves = {}
        for path in self.shapes:
            contributions = [leaves[path] for leaves in stream]
            if all(contribution is None for contribution in contributions):
                reduced[path] = None
                continue
            dtype = self._dtype(path)
            summands = [self._zeros(path) if leaf is None else leaf for leaf in contributions]
            total = summands[0]
            for summand in summands[1:]:
                total = np.asarray(total + summand, dtype)
            if op == "mean":
                total = np.asarray(total / dtype.type(self.world_size), dtype)
            reduced[path] = total
        return [copy_leaves(reduced) for _ in range(self.world_size)]

    def _all_finite(self, stream: list[Leaves]) -> bool:
        for leaves in stream:
            for leaf in leaves.values():
                if leaf is not None and not np.isfinite(leaf).all():
                    return False
        return True

    def _all_finite_after_cast(self, stream: list[Leaves]) -> bool:
        cast: list[Leaves] = []
        for leaves in stream:
            cast_leaves: Leaves = {}
            for path, leaf in leaves.items():
                dtype_name = self.shapes[path][1]
                cast_leaves[path] = None if leaf is None else cast_to(leaf, dtype_name)
            cast.append(cast_leaves)
        return self._all_finite(cast)

    def _bad_step(self, gradients: Sequence[Mapping[str, Array | None]]) -> StepResult:
        """Zeros, and the residuals stay."""
        outputs: list[Leaves] = []
        for _ in range(self.world_size):
            leaves: Leaves = {}
            for path in self.shapes:
                is_absent = all(rank.get(path) is None for rank in gradients)
                leaves[path] = None if is_absent else self._zeros(path)
            outputs.append(leaves)
        return StepResult(outputs=outputs, skipped=True)


def topk_entries(entries: list[Entry], ratio: float) -> list[Entry]:
    """The ``max(1, round(ratio * n))`` largest magnitudes, ties by place; none of none."""
    if not entries:
        return []
    k = max(1, round(ratio * len(entries)))
    places = sorted(range(len(entries)), key=lambda i: (-abs(entries[i].value), i))[:k]
    return [entries[i] for i in sorted(places)]


def sign_entries(entries: list[Entry]) -> list[Entry]:
    """Plus or minus the mean magnitude (zero counts as positive), the mean taken in FP64."""
    if not entries:
        return []
    total = 0.0
    for entry in entries:
        total += abs(entry.value)
    scale = total / len(entries)
    return [entry._replace(value=scale if entry.value >= 0 else -scale) for entry in entries]


def round_to_bfloat16(array: Array) -> Array:
    """The nearest bfloat16 (ties to even) of each float32, as float32; infinite past its range."""
    source = np.asarray(array, np.float32)
    result = np.empty(source.size, np.float32)
    for i, value in enumerate(source.reshape(-1)):
        if not np.isfinite(value):
            result[i] = value
            continue
        bits = int(value.view(np.uint32))
        upper, lower = bits >> 16, bits & 0xFFFF
        if lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1):
            upper += 1
        result[i] = np.uint32(upper << 16).view(np.float32)
    return result.reshape(source.shape)


def cast_to(array: Array, dtype_name: str) -> Array:
    """A copy rounded to the named dtype; bfloat16 is held in float32. Overflow gives infinity."""
    if dtype_name == "bfloat16":
        return round_to_bfloat16(array)
    with np.errstate(over="ignore"):
        return np.array(array, np.dtype(dtype_name))


def copy_leaves(leaves: Leaves) -> Leaves:
    return {path: None if leaf is None else leaf.copy() for path, leaf in leaves.items()}
