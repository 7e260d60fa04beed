"""Who talks: a group of ranks, each with a few collectives over flat tensors."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

# torch imports this on its own once an optimizer is made, and its default arguments then keep the
# process group they find: its threads outlive destroy_process_group and may abort the exit
# (pytorch/pytorch#190489). Imported before there is a group, they keep none.
import torch.distributed.nn
from torch.distributed.device_mesh import DeviceMesh

from gradtx.core.errors import RankLostError
from gradtx.core.phases import in_phase

_PIECE = 1 << 20  # bytes
_TAG = 0x67780000  # of pieces, so that they are not taken for what a user sends and receives
_NEVER = _TAG + 1  # of what nobody sends


class Group:
    """A group of ranks, as one of them sees it; alone, in this base class.

    Attributes:
        rank: this rank's number, from 0.
        size: how many ranks there are.
        sent: bytes this rank has put on the link so far, all copies counted.
        agreements: what all ranks have agreed on, by chain and tree; see `gradtx.exchange`.
        choices: which way each leaf went in the last step; see `gradtx.exchange.plan`.
    """

    rank: int = 0
    size: int = 1

    def __init__(self) -> None:
        self.sent = 0
        self.agreements: dict[Any, Any] = {}
        self.choices: dict[Any, Any] = {}

    @in_phase("transport")
    def all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The messages of all ranks, in rank order.

        Args:
            message: uint8 ``[n]``, the same `n` on all ranks.
        """
        self.sent += (self.size - 1) * message.numel()
        return self._all_gather(message)

    @in_phase("transport")
    def all_to_all(
        self, parts: Sequence[torch.Tensor], lengths: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """What all ranks have for this one, in rank order.

        Args:
            parts: for each rank, what it gets: uint8 ``[n]``, where `n` may differ between those
                that get it.
            lengths: for each rank, how much comes from it; by default as much as this one keeps for
                itself from all.
        """
        self.sent += sum(part.numel() for i, part in enumerate(parts) if i != self.rank)
        return self._all_to_all(parts, lengths or [parts[self.rank].numel()] * self.size)

    @in_phase("transport")
    def gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        """At rank 0, the messages of all ranks, in rank order; nothing elsewhere.

        Args:
            message: uint8 ``[n]``, the same `n` on all ranks.
        """
        self.sent += message.numel() if self.rank else 0
        return self._gather(message)

    @in_phase("transport")
    def all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, the same bits on each.

        Args:
            buffer: float ``[n]``, the same `n` and dtype on all ranks; it may be written to.
        """
        self.sent += 2 * (self.size - 1) * buffer.numel() * buffer.element_size() // self.size
        return self._all_reduce(buffer) if self.size > 1 else buffer

    @in_phase("transport")
    def broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        """Rank 0's buffer.

        Args:
            buffer: any dtype ``[n]``, the same on all ranks; it may be written to.
        """
        if self.rank == 0:
            self.sent += (self.size - 1) * buffer.numel() * buffer.element_size()
        return self._broadcast(buffer) if self.size > 1 else buffer

    def sibling(self) -> Group:
        """Another group of the same ranks, whose messages do not mix with those of this one.

        All ranks call it, in the same order.
        """
        return Group()

    def part(self, ranks: Sequence[int]) -> Group:
        """A group of some of the ranks, this one among them, in their order.

        All of these call it, in the same order as all else that makes groups.
        """
        return Group()

    def give_up(self, reason: str) -> None:
        """Says that this rank will not talk to the others again: they wait no longer.

        Args:
            reason: what whoever uses the group again is told.
        """

    @property
    def members(self) -> tuple[int, ...]:
        """What its ranks are called where all groups are told apart."""
        return (self.rank,)

    @property
    def place(self) -> str:
        """Where in a grid this group lies, in words: the same for all of its ranks."""
        return ""

    @property
    def plain(self) -> Group:
        """The group for what need not be the same on all ranks that stand for one."""
        return self

    def _all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        return [message]

    def _all_to_all(
        self, parts: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        return list(parts)

    def _gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        return [message]

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    def _broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer


class ProcessGroup(Group):
    """A `torch.distributed` process group.

    Args:
        group: the process group; None for the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # Weak, or what is known of groups would keep them alive for ever.
        self._reference = ref(group)
        self._backend = dist.get_backend(group)
        # Of a group that has a backend for each kind of device too, or was made without a name.
        self._gloo = _is_gloo(group)
        self._lost = ""

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._reference()
        if group is None:  # To torch it would be the default group, of other ranks.
            raise RuntimeError(
                f"the process group of this rank {self.rank} of {self.size} has been destroyed: "
                "make groups and chain anew after torch.distributed.destroy_process_group"
            )
        return group

    @contextmanager
    def _talking(self, to: int | None = None) -> Iterator[dist.ProcessGroup]:
        """Where other ranks have to answer; gives the process group.

        Args:
            to: the only one that has to, if there is one.

        Raises:
            RankLostError: if one does not, now or at an earlier time.
        """
        group = self._group
        if self._lost:
            raise RankLostError(self._lost)
        try:
            yield group
        except RankLostError:
            raise
        except BaseException as error:
            # Whatever it is, an interrupt too: this rank is no longer where the others are.
            self._lost = "an exchange has been broken off"
            gone = self._hang_up() or ([] if to is None else [to])
            self._lost = self._said_of(error, gone)
            if isinstance(error, RuntimeError):
                raise RankLostError(self._lost) from error
            raise

    def _said_of(self, error: BaseException, gone: Sequence[int]) -> str:
        members, limit = self.members, _timeout(self._group)
        who = " and ".join(f"rank {members[rank]}" for rank in gone) or f"a rank of {list(members)}"
        waited = "" if limit is None else f" ({limit.total_seconds():g} s)"
        why = (str(error) or type(error).__name__).split("\n")[0]
        return (
            f"no answer from {who}: dead, silent for longer than the group's time-out{waited}, or "
            f"given up. Rank {members[self.rank]} is as it was before this step, and the group "
            "cannot be used again: go on from the checkpoints of one step, in new processes, as "
            f"torchrun --max-restarts starts them. [{why}]"
        )

    def give_up(self, reason: str) -> None:
        """Closes the connections, where the backend lets it: the others wait no longer."""
        if not self._lost:
            self._lost = reason
            self._hang_up()

    def _hang_up(self) -> list[int]:
        """Closes the connections to all ranks; gives those that were closed from the other end."""
        gone: list[int] = []
        if not self._gloo:
            return gone
        for rank in range(self.size):
            if rank == self.rank:
                continue
            nothing = [torch.empty(1, dtype=torch.uint8)]
            try:
                # One that is out of time makes gloo close the connections to all.
                self._group.recv(nothing, rank, _NEVER).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if not re.search("timed out|timeout", str(error), re.IGNORECASE):
                    gone.append(rank)
        return gone

    def sibling(self) -> Group:
        """Another process group of the same ranks, backend and time-out."""
        return self._made(self.members)

    def part(self, ranks: Sequence[int]) -> Group:
        """A process group of some of the ranks, of the same backend and time-out."""
        members = self.members
        return self._made([members[rank] for rank in ranks])

    @property
    def members(self) -> tuple[int, ...]:
        """What its ranks are called in the default group."""
        return tuple(dist.get_process_group_ranks(self._group))

    def _made(self, ranks: Sequence[int]) -> ProcessGroup:
        whole = len(ranks) == dist.get_world_size()
        with self._talking() as group:
            made = dist.new_group(
                list(ranks),
                timeout=_timeout(group),
                backend=self._backend,
                use_local_synchronization=not whole,
            )
        return ProcessGroup(made)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the backend can send it; a mixed backend sends it from where it is."""
        if self._backend == "nccl":
            tensor = tensor.to(torch.device("cuda", torch.cuda.current_device()))
        elif self._backend in ("gloo", "mpi"):
            tensor = tensor.cpu()
        return tensor.contiguous()

    def _all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        own = self._here(message)
        received = [torch.empty_like(own) for _ in range(self.size)]
        if self._in_pieces(own):
            received[self.rank] = own
            self._swap([own] * self.size, received)
        else:
            with self._talking() as group:
                dist.all_gather(received, own, group=group)
        return [part.to(message.device) for part in received]

    def _in_pieces(self, message: torch.Tensor) -> bool:
        # Gloo's own gather leaves two fifths of a link of 1 Gbit/s unused, its exchange half of it.
        return self._gloo and message.is_cpu and message.numel() > _PIECE

    def _swap(self, parts: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Sends each other rank its part, and fills in what they send."""
        work = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            with self._talking(source) as group:
                for x in _pieces(received[source]):
                    there = self._global(source)
                    work.append((source, dist.irecv(x, there, group=group, tag=_TAG)))
            with self._talking(to) as group:
                for x in _pieces(parts[to]):
                    work.append((to, dist.isend(x, self._global(to), group=group, tag=_TAG)))
        for rank, each in work:
            with self._talking(rank):
                if each is not None:
                    each.wait()

    def _all_to_all(
        self, parts: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        out = [self._here(part) for part in parts]
        if self._gloo and out[0].is_cpu:
            found = [out[0].new_empty(length) for length in lengths]
            found[self.rank] = out[self.rank]
            self._swap(out, found)
            return [part.to(parts[0].device) for part in found]
        own = torch.cat(out)
        received = own.new_empty(sum(lengths))
        given = [part.numel() for part in parts]
        with self._talking() as group:
            dist.all_to_all_single(received, own, list(lengths), given, group=group)
        return list(received.to(parts[0].device).split(list(lengths)))

    def _gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        own = self._here(message)
        received = None if self.rank else [torch.empty_like(own) for _ in range(self.size)]
        with self._talking() as group:
            dist.gather(own, received, self._global(0), group=group)
        return [part.to(message.device) for part in received or []]

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        own = self._here(buffer)
        with self._talking() as group:
            dist.all_reduce(own, group=group)
        return own.to(buffer.device)

    def _broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        own = self._here(buffer)
        with self._talking() as group:
            dist.broadcast(own, self._global(0), group=group)
        return own.to(buffer.device)

    def _global(self, rank: int) -> int:
        """What a rank of this group is called in the default group."""
        return dist.get_global_rank(self._group, rank)


def _pieces(message: torch.Tensor) -> Sequence[torch.Tensor]:
    return message.split(_PIECE) if message.numel() else ()


def _is_gloo(group: Any) -> bool:
    """Whether it is gloo that a process group sends what is on a CPU with."""
    try:
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except (AttributeError, RuntimeError):
        return False


def _timeout(group: Any) -> timedelta | None:
    """How long a process group waits for a rank, as far as it tells."""
    try:
        device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        found: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found


class Hub:
    """What the threads of a `ThreadGroup` share.

    Args:
        size: how many threads.
        timeout: seconds that a thread waits for the others.
        members: what they are called in the hub that this one is a part of, if it is.
    """

    def __init__(self, size: int, timeout: float, members: Sequence[int] | None = None) -> None:
        self.size = size
        self.members = tuple(range(size) if members is None else members)
        self._timeout = timeout
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}
        self._next = [0] * size
        self._left: set[int] = set()
        self._parts: dict[Any, Hub] = {}

    def leave(self, rank: int) -> None:
        """Says that a rank has ended: whoever waits for it from now on waits no longer."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()
            parts = [(ranks, hub) for (_, ranks), hub in self._parts.items() if rank in ranks]
        for ranks, hub in parts:
            hub.leave(ranks.index(rank))

    def part(self, number: int, ranks: Sequence[int]) -> Hub:
        """A hub for some of the threads: the same one for the same number."""
        key = number, tuple(ranks)
        with self._changed:
            if key not in self._parts:
                members = [self.members[rank] for rank in ranks]
                self._parts[key] = Hub(len(members), self._timeout, members)
            return self._parts[key]

    def swap(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Hands in a tensor; gives those of all ranks, in rank order.

        Raises:
            TimeoutError: if a rank does not come within the time-out, or has ended.
            ValueError: if shapes or dtypes differ: real backends abort or give garbage there.
        """
        parts = self.trade(rank, tensor)
        if any((p.shape, p.dtype) != (tensor.shape, tensor.dtype) for p in parts):
            raise ValueError(f"ranks sent tensors of different sizes: {[p.shape for p in parts]}")
        return parts

    def trade(self, rank: int, thing: Any) -> list[Any]:
        """Hands in anything; gives what all ranks have handed in, in rank order.

        Raises:
            TimeoutError: if a rank does not come within the time-out, or has ended.
        """
        with self._changed:
            number = self._next[rank]
            self._next[rank] += 1
            here = self._rounds.setdefault(number, {})
            here[rank] = thing
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(here) == self.size or self._left - here.keys(), self._timeout
            )
            if len(here) < self.size:
                raise TimeoutError(f"rank {rank} waited for a rank that did not come")
            if all(position > number for position in self._next):
                self._rounds.pop(number, None)
        return [here[other] for other in range(self.size)]


class ThreadGroup(Group):
    """Threads of one process: for tests and simulation.

    Args:
        hub: what the threads share.
        rank: this thread's number.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__()
        self.rank, self.size = rank, hub.size
        self._hub, self._parts = hub, 0

    def sibling(self) -> Group:
        """Another group of the same threads."""
        return self.part(range(self.size))

    def part(self, ranks: Sequence[int]) -> Group:
        """A group of some of the threads."""
        self._parts += 1
        return ThreadGroup(self._hub.part(self._parts, ranks), list(ranks).index(self.rank))

    @property
    def members(self) -> tuple[int, ...]:
        """What its threads are called in the first group of all."""
        return self._hub.members

    def _all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        return [part.clone() for part in self._hub.swap(self.rank, message.clone())]

    def _all_to_all(
        self, parts: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        swapped = self._hub.trade(self.rank, [part.clone() for part in parts])
        received = [sent[self.rank].clone() for sent in swapped]
        found = [part.numel() for part in received]
        if found != list(lengths):
            raise ValueError(f"ranks sent {found} bytes to rank {self.rank}, expected {lengths}")
        return received

    def _gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        parts = self._hub.swap(self.rank, message.clone())
        return [] if self.rank else [part.clone() for part in parts]

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        first, *rest = self._hub.swap(self.rank, buffer.clone())
        total = first.clone()
        for part in rest:
            total += part
        return total

    def _broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._hub.swap(self.rank, buffer.clone())[0].clone()


_current: ContextVar[Group | None] = ContextVar("gradtx_group", default=None)
_known: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()
_alone = Group()


@contextmanager
def default_group(group: Group) -> Iterator[None]:
    """Makes a group the default in this thread, for the time of a ``with`` block."""
    token = _current.set(group)
    try:
        yield
    finally:
        _current.reset(token)


def find_group(group: Any = None) -> Group:
    """The `Group` for what a user gives.

    Args:
        group: a `Group`, a `torch.distributed` process group, a `DeviceMesh` of one dimension, or
            None: then the thread's own in `run_ranks`, the default process group if one is
            initialised, else this rank alone.

    Raises:
        TypeError: if it is none of these.
        ValueError: if this rank is not a member of the process group, or the mesh has several
            dimensions.
        RuntimeError: if a launcher has started several processes and none is initialised.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        current = _current.get()
        if current is not None:
            return current
        if not (dist.is_available() and dist.is_initialized()):
            _check_alone()
            return _alone
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the process group given to allreduce")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{group} has {group.ndim} dimensions: say over which to exchange, such as "
                f"mesh[{(group.mesh_dim_names or ('node',))[0]!r}]"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "expected a torch.distributed process group, a DeviceMesh of one dimension or None, "
            f"got {group!r}"
        )
    if group not in _known:
        _known[group] = ProcessGroup(group)
    return _known[group]


def _check_alone() -> None:
    """Refuses to train alone what a launcher has started several times."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > 1:
        raise RuntimeError(
            f"{started} processes were started (WORLD_SIZE) and there is no process group: each "
            "would train a model of its own; call torch.distributed.init_process_group() first"
        )
