"""What the processes of `test_faults.py` do: train, until one of them is killed, or stopped."""

import copy
import hashlib
import mmap
import os
import signal
import struct
import threading
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import gradtx as gx
from gradtx import grouped
from gradtx.exchange.group import ProcessGroup

STEPS = 16
LAST = 5  # In which the victim is lost.


def two_stages():
    inner, outer = gx.node_groups(2)
    exchange = gx.allreduce(inner), gx.topk(0.1), gx.ef(), gx.allreduce(outer)
    return gx.chain(*exchange)


CHAINS = {
    "gather": lambda: gx.chain(gx.skip_bn(), gx.topk(0.1), gx.ef(), gx.allreduce()),
    "ring": lambda: gx.chain(gx.allreduce(), gx.clip_by_global_norm(1.0)),
    "sharded": lambda: gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="sharded")),
    "two shots": lambda: gx.chain(gx.cast("float16"), gx.ef(), gx.allreduce()),
    "low rank": lambda: gx.chain(gx.powersgd(1), gx.ef(), gx.allreduce()),
    "window": lambda: gx.chain(gx.accumulate(2), gx.topk(0.1), gx.ef(), gx.allreduce()),
    "two stages": two_stages,
    "masters": lambda: gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(), gx.master_weights()),
    "overlap": lambda: gx.chain(gx.skip_bn(), gx.topk(0.1), gx.ef(), gx.allreduce()),
    "delayed": lambda: gx.chain(gx.topk(0.1), gx.ef(), gx.delayed(steps=1), gx.allreduce()),
}


def ranks_of(name):
    return 4 if name == "two stages" else 3


class Marks:
    """Where a rank is, in a file that tells it when the rank has been killed.

    Attributes:
        step: the step that has begun.
        syncing: whether `sync` is under way.
        entered: how many collectives of this step have begun.
        left: how many of them have ended.
    """

    _NAMES = "step", "syncing", "entered", "left"
    _FORM = struct.Struct("<4q")

    def __init__(self, path):
        if not os.path.exists(path):
            path.write_bytes(bytes(self._FORM.size))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def all(self):
        return dict(zip(self._NAMES, self._FORM.unpack(self._map[:]), strict=True))

    def set(self, **values):
        self._map[:] = self._FORM.pack(*(self.all() | values).values())


class Fate:
    """When a rank is killed: so long after something that it does in step `LAST`.

    Args:
        marks: where it writes down what it does.
        collective: after the beginning of which collective, as a share of all that a step has; None
            for the beginning of the step.
        share: of how long that takes in other steps.
        late: by how many seconds another rank comes later to this collective.
        dies: whether this is the rank that is killed; else it is the one that comes later.
        how: by which signal.
    """

    def __init__(self, marks, collective, share, late, dies, how=signal.SIGKILL):
        self._marks, self._collective, self._share = marks, collective, share
        self._late, self._dies, self._signal, self._met = late, dies, how, False
        self._times, self._usual, self._step_began, self._seconds = [], [], 0.0, 0.0
        for name in ("_all_gather", "_all_to_all", "_gather", "_all_reduce", "_broadcast"):
            setattr(ProcessGroup, name, self._watched(getattr(ProcessGroup, name)))

    def begin(self, step):
        self._seconds = time.monotonic() - self._step_began
        self._usual, self._times = self._times or self._usual, []
        self._marks.set(step=step, syncing=1, entered=0, left=0)
        self._step_began = time.monotonic()
        # Of an exchange in the background the collective may have come in another step.
        if step == (LAST if self._collective is None else LAST + 1):
            self._doom(self._seconds)

    def _watched(self, method):
        def call(*args):
            times, began = self._times, time.monotonic()
            number = len(times)
            times.append(0.0)
            self._marks.set(entered=number + 1)
            if self._marks.all()["step"] == LAST and self._collective is not None:
                chosen = int(self._collective * max(1, len(self._usual)))
                if number == min(chosen, len(self._usual) - 1):
                    self._doom(self._usual[number] + self._late)
            out = method(*args)
            times[number] = time.monotonic() - began
            self._marks.set(left=number + 1)
            return out

        return call

    def _doom(self, seconds):
        if self._met:
            return
        self._met = True
        if not self._dies:
            time.sleep(self._late)
            return

        def kill():
            time.sleep(self._share * seconds)
            os.kill(os.getpid(), self._signal)

        threading.Thread(target=kill, daemon=True).start()


def model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(60, 60, dtype=dtype) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(60, dtype=dtype))


@contextmanager
def among(rank, size, store, limit, backend="gloo"):
    """This process as a rank of a group of several."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    timeout = timedelta(seconds=limit)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
    yield
    dist.destroy_process_group()


class Loop:
    """A training loop, which knows what a step that fails has to leave as it was."""

    def __init__(self, rank, name):
        grouped._LEAST = 4_000
        self.rank, self.name = rank, name
        self.net = model(torch.bfloat16 if name == "masters" else torch.float32)
        overlap = "always" if name == "overlap" else False
        self.pipe = gx.Pipeline(CHAINS[name](), self.net, overlap=overlap)
        assert not overlap or len(self.pipe._engine._groups) > 2
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=0.05, momentum=0.9)

    def backward(self, step):
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        x = torch.randn(8, 60, generator=generator).to(next(self.net.parameters()).dtype)
        self.net(x).pow(2).mean().backward()

    def sync(self):
        if self.pipe.sync(self.optimizer).ready:
            self.optimizer.step()
        if self.name != "window" or self.pipe.state.ready:
            self.optimizer.zero_grad()

    def kept(self):
        """All that a failed step may not touch."""
        weights = {key: x.clone() for key, x in self.net.state_dict().items()}
        kept = {"net": weights, "optimizer": copy.deepcopy(self.optimizer.state_dict())}
        if self.name != "delayed":
            kept["pipe"] = self.pipe.state_dict()
        if self.name not in ("overlap", "delayed"):
            kept["grads"] = [None if p.grad is None else p.grad.clone() for p in self.all()]
        return kept

    def all(self):
        return [*self.net.parameters(), *self.pipe.parameters()]

    def weights(self):
        return digest(list(self.net.parameters()))


def digest(tree):
    """A hash over the bits of all that is in a tree of dicts and lists."""
    if isinstance(tree, dict):
        return digest([part for pair in tree.items() for part in pair])
    if isinstance(tree, (list, tuple)):
        return hashlib.sha256("".join(map(digest, tree)).encode()).hexdigest()
    if isinstance(tree, torch.Tensor):
        shown = bytes(tree.detach().reshape(-1).view(torch.uint8).numpy())
        return hashlib.sha256(f"{tree.dtype} {tuple(tree.shape)}".encode() + shown).hexdigest()
    return hashlib.sha256(repr(tree).encode()).hexdigest()


def same(one, other):
    """Whether two trees are the same, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def train(line, rank, name, store, limit, fate=None):
    """Trains, and tells of it: the weights after each step, how it has ended, what is wrong."""
    with among(rank, ranks_of(name), store, limit):
        loop = Loop(rank, name)
        fate = fate and Fate(Marks(fate[0]), *fate[1:])
        weights = [loop.weights()]
        try:
            for step in range(STEPS):
                if fate is not None and name == "overlap":
                    fate.begin(step)
                loop.backward(step)
                before = loop.kept()
                if fate is not None and name != "overlap":
                    fate.begin(step)
                began = time.monotonic()
                loop.sync()
                if fate is not None:
                    fate._marks.set(syncing=0)
                weights.append(loop.weights())
        except gx.RankLostError as error:
            late = time.monotonic() - began > limit + 5
            faults = faults_after(loop, before)
            line.tell((weights, str(error), faults + ["it has waited too long"] * late))
            return
        line.tell((weights, "", []))


def exchange_alone(line, rank, store, folder):
    """Trains as `restarted.py` does, undisturbed."""
    from restarted import train as train_on

    with among(rank, 2, store, 60.0):
        line.tell(train_on(folder)[0])


def fail_in_the_loss(line, rank, store, tells):
    """Three steps; in the second, rank 1 fails before it comes to `sync`, and may tell."""
    with among(rank, 3, store, 30.0):
        loop, heard = Loop(rank, "gather"), []
        for step in range(3):
            loop.backward(step)
            before = loop.kept()
            try:
                if (rank, step) == (1, 1):
                    error = ArithmeticError("the loss is below zero")
                    if not tells:
                        raise error
                    loop.pipe.fail(error)
                    continue
                loop.sync()
            except gx.RankMismatchError as error:
                heard.append((type(error).__name__, str(error), same(before, loop.kept())))
        line.tell((heard, loop.weights()))


def lose_the_second(line, rank, store):
    """In a group whose backend has no name rank 1 ends; the others live on until they are told."""
    with among(rank, 4, store, 30.0, backend=None):
        loop = Loop(rank, "gather")
        loop.backward(0)
        loop.sync()
        if rank == 1:
            return
        loop.backward(1)
        began, before = time.monotonic(), loop.kept()
        try:
            loop.sync()
        except gx.RankLostError as error:
            line.tell((str(error), time.monotonic() - began, same(before, loop.kept())))
        line.hear()


def faults_after(loop, before):
    """What is not as it ought to be after a step that has failed; in words."""
    kept, found = loop.kept(), []
    found += [f"{key} has changed" for key in before if not same(before[key], kept[key])]
    if loop.name in ("overlap", "delayed") and any(p.grad is not None for p in loop.all()):
        found.append("a gradient is still there")
    if loop.name == "delayed":
        try:
            loop.pipe.state_dict()
            found.append("a state that no parameters belong to can be read")
        except gx.RankLostError:
            pass
    for again in (loop.pipe.sync, loop.pipe.sync_buffers):
        if again == loop.pipe.sync:
            loop.backward(0)
            kept = loop.kept()
        elif loop.name in ("overlap", "delayed"):
            continue  # It is over another group.
        try:
            again(*[loop.optimizer] * (again == loop.pipe.sync))
            found.append("a step on a broken group was taken")
        except gx.RankLostError:
            pass
        found += [
            f"{key} has changed later" for key in kept if not same(kept[key], loop.kept()[key])
        ]
    return found


def save_for_ever(line, path):
    """Writes one checkpoint after the other, with the number of each in it."""
    first = int(time.time() * 1e6)
    for number in range(first, first + 10**6):
        gx.save_checkpoint({"number": number, "x": torch.full((100_000,), number)}, path)
        if number == first:
            line.tell("written")
