"""What else synchronises gradients: torch's own hooks, and what is pasted from blogs.

A peer gets gradients as `DistributedDataParallel` would hand them to it, fairly configured: in its
buckets (1 MB the first one, 25 MB the others, the last layers first), each `.grad` a view of its
bucket (``gradient_as_bucket_view=True``), so that nothing is copied in or out; and all buckets
under way at once, as they are at the end of a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from gradtx.bench.shapes import Shape
from gradtx.core.arguments import count
from gradtx.core.phases import in_phase

FIRST_BUCKET = 1 << 20  # bytes, as DDP has them
BUCKET = 25 << 20
DENSITY = 0.01  # of the naive top-k


class Method(Protocol):
    """Something that synchronises the gradients of a model.

    Attributes:
        name: as in tables.
        feedback: whether it keeps a residual as large as the gradient.
    """

    name: str
    feedback: bool

    def sync(self) -> int:
        """Makes every ``.grad`` the mean over ranks; gives the bytes that this rank sent for it."""


class Bucket:
    """Some gradients in one flat buffer, as a hook of DDP gets them.

    It answers as a `torch.distributed.GradBucket` does, which cannot be made in Python.

    Args:
        number: in the order in which buckets are sent.
        parameters: whose gradients are in it; they become views of the buffer.
        last: whether no other bucket comes after it in a step.
    """

    def __init__(self, number: int, parameters: Sequence[torch.Tensor], *, last: bool) -> None:
        self._number, self._last = number, last
        self._parameters = list(parameters)
        self._buffer = torch.zeros(sum(p.numel() for p in parameters))
        parts = self._buffer.split([p.numel() for p in parameters])
        self._gradients = [x.view(p.shape) for x, p in zip(parts, parameters, strict=True)]
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def index(self) -> int:
        """Its number."""
        return self._number

    def buffer(self) -> torch.Tensor:
        """All gradients, flat."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Each gradient: views of the buffer."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """What the gradients are of."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether no other bucket comes after it in a step."""
        return self._last

    @in_phase("apply")
    def take(self, result: torch.Tensor) -> None:
        """Writes what a hook gave into the buffer, if it is not there already."""
        if result.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(result.view_as(self._buffer))


class Gradients:
    """The gradients of a model on one rank: new ones each round, in the buckets of DDP.

    Args:
        shapes: of the parameters.
        seed: other ranks have others.

    Attributes:
        parameters: with their gradients.
        buckets: in the order in which they are sent.
        values: how many there are.
    """

    def __init__(self, shapes: Sequence[Shape], seed: int) -> None:
        self.parameters = [torch.zeros(shape) for shape in shapes]
        self.values = sum(p.numel() for p in self.parameters)
        backwards = self.parameters[::-1]
        places, _ = _compute_bucket_assignment_by_size(backwards, [FIRST_BUCKET, BUCKET])
        self.buckets = [
            Bucket(number, [backwards[i] for i in own], last=number == len(places) - 1)
            for number, own in enumerate(places)
        ]
        generator = torch.Generator().manual_seed(seed)
        self._prepared = torch.randn(self.values + _SHIFTS, generator=generator)

    def refresh(self, round_: int) -> None:
        """Writes the gradients of a round: normal numbers, each time other ones."""
        start = 7919 * round_ % _SHIFTS
        for bucket in self.buckets:
            buffer = bucket.buffer()
            buffer.copy_(self._prepared[start : start + buffer.numel()])
            start += buffer.numel()


_SHIFTS = 1 << 16


def ring_nbytes(nbytes: int, ranks: int) -> int:
    """What each rank sends in a ring all-reduce of so many bytes."""
    return 2 * (ranks - 1) * nbytes // ranks


class Hook:
    """A communication hook of DDP.

    Args:
        name: as in tables.
        gradients: in their buckets.
        hook: ``hook(state, bucket)`` gives a future.
        itemsize: bytes that it sends for each value.
    """

    feedback = False

    def __init__(
        self, name: str, gradients: Gradients, hook: Callable[..., Any], itemsize: int = 4
    ) -> None:
        self.name, self._buckets = name, gradients.buckets
        self._hook, self._itemsize = hook, itemsize

    def sync(self) -> int:
        """Sends all buckets, and waits for them."""
        futures = [self._start(bucket) for bucket in self._buckets]
        for bucket, future in zip(self._buckets, futures, strict=True):
            bucket.take(self._wait(future))
        ranks = dist.get_world_size()
        return sum(
            ring_nbytes(self._itemsize * bucket.buffer().numel(), ranks) for bucket in self._buckets
        )

    @in_phase("hook")
    def _start(self, bucket: Bucket) -> Any:
        return self._hook(dist.group.WORLD, bucket)

    @in_phase("hook")
    def _wait(self, future: Any) -> torch.Tensor:
        result: torch.Tensor = future.wait()
        return result


class PowersgdHook:
    """torch's PowerSGD, with error feedback and warm start, as it comes.

    The next bucket waits for the one before: the hook makes further collectives in callbacks, on
    gloo's own threads, where those of several buckets would come in another order on each rank.

    Args:
        name: as in tables.
        gradients: in their buckets.
        rank: of the approximation.
    """

    feedback = True

    def __init__(self, name: str, gradients: Gradients, rank: int) -> None:
        self.name, self._buckets = name, gradients.buckets
        self._state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        # The dense steps before it are for DDP, which makes other buckets after the first step.
        self._state.iter = 2

    def sync(self) -> int:
        """Sends all buckets, one after the other."""
        before = self._state.total_numel_after_compression
        for bucket in self._buckets:
            bucket.take(self._run(bucket))
        values = self._state.total_numel_after_compression - before
        return ring_nbytes(4 * values, dist.get_world_size())

    @in_phase("hook")
    def _run(self, bucket: Bucket) -> torch.Tensor:
        result: torch.Tensor = powerSGD_hook.powerSGD_hook(self._state, bucket).wait()
        return result


class NaiveTopk:
    """Top-k as it is pasted: `torch.topk` for each leaf, 64-bit indices, two all-gathers.

    With error feedback, since without it nobody trains.

    Args:
        name: as in tables.
        gradients: of a model.
        density: the share of values that is sent.
    """

    feedback = True

    def __init__(self, name: str, gradients: Gradients, density: float = DENSITY) -> None:
        self.name, self._parameters, self._density = name, gradients.parameters, density
        self._residuals = [torch.zeros(p.numel()) for p in self._parameters]

    def sync(self) -> int:
        """Sends the largest values of all leaves, and adds up those of all ranks."""
        grads = [p.grad.view(-1) for p in self._parameters if p.grad is not None]
        self._feed_back(grads)
        chosen = [self._choose(residual) for residual in self._residuals]
        lengths = [indices.numel() for _, indices in chosen]
        own_values, own_indices = self._joined(chosen)
        values, indices = self._gather(own_values), self._gather(own_indices)
        self._add_up(grads, values, indices, lengths)
        others = dist.get_world_size() - 1
        return others * own_values.numel() * (own_values.itemsize + own_indices.itemsize)

    @in_phase("feedback")
    def _feed_back(self, grads: Sequence[torch.Tensor]) -> None:
        for residual, grad in zip(self._residuals, grads, strict=True):
            residual.add_(grad)

    @in_phase("select")
    def _choose(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.topk(residual.abs(), count(self._density, residual.numel())).indices
        values = residual[indices]
        residual[indices] = 0.0
        return values, indices

    @in_phase("encode")
    def _joined(self, chosen: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [torch.cat(parts) for parts in zip(*chosen, strict=True)]

    @in_phase("transport")
    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(received, own)
        return received

    @in_phase("apply")
    def _add_up(
        self,
        grads: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        indices: Sequence[torch.Tensor],
        lengths: Sequence[int],
    ) -> None:
        for grad in grads:
            grad.zero_()
        for own_values, own_indices in zip(values, indices, strict=True):
            parts = zip(grads, own_values.split(lengths), own_indices.split(lengths), strict=True)
            for grad, part, places in parts:
                grad.index_add_(0, places, part, alpha=1 / dist.get_world_size())


PEERS: dict[str, Callable[[Gradients], Method]] = {
    "allreduce": partial(Hook, "FP32 all-reduce", hook=default_hooks.allreduce_hook),
    "fp16": partial(Hook, "fp16 hook", hook=default_hooks.fp16_compress_hook, itemsize=2),
    "bf16": partial(Hook, "bf16 hook", hook=default_hooks.bf16_compress_hook, itemsize=2),
    "powersgd1": partial(PowersgdHook, "PowerSGD hook, rank 1", rank=1),
    "powersgd4": partial(PowersgdHook, "PowerSGD hook, rank 4", rank=4),
    "topk": partial(NaiveTopk, "naive top-k, 1 %"),
}
