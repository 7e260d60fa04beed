"""Ranks that are real processes, talking over gloo on the loopback interface.

Starting a process costs seconds, since it imports torch. So the processes are kept: each call of
`gloo_ranks` makes a process group of its own among as many of them as it asks for, and takes it
down again. When one dies or does not answer in time, all are ended, by their handles, and the next
call starts new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradtx.exchange.group import Group, default_group, find_group


class RanksFailed(AssertionError):
    """One or more ranks raised; the message has their tracebacks."""


def gloo_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Calls ``fn(rank, *args)`` in processes that are the ranks of one gloo process group.

    Args:
        size: how many ranks.
        fn: a function at the top level of a file; warnings are errors in it.
        args: picklable; tensors are.
        timeout: seconds for all of it; the process group gives up a little earlier.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        RanksFailed: if a rank raised or ended.
        TimeoutError: if a rank did not answer in time.
    """
    while len(_workers) < size:
        _workers.append(_Worker())
    workers = _workers[:size]
    with tempfile.TemporaryDirectory() as folder:
        for rank, worker in enumerate(workers):
            where = fn.__code__.co_filename, fn.__qualname__
            worker.give((where, args, rank, size, f"{folder}/store", timeout))
        return _collect(workers, time.monotonic() + timeout)


def outcome(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call raises, as type and text; or "fine"."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "fine"


def in_network_namespace(fn: Callable[[], Any], timeout: float = 120.0) -> Any:
    """Calls a function in a process whose loopback interface carries only what it sends.

    Args:
        fn: a function at the top level of a file; it may call `gloo_ranks`.
        timeout: seconds.

    Raises:
        PermissionError: if there is no ``unshare`` or this process may not use it.
        RanksFailed: if the function raised.
    """
    unshare = ["unshare", "-rn"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, timeout=timeout)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PermissionError(f"no network namespace: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        command = [sys.executable, __file__, "call", fn.__code__.co_filename, fn.__qualname__]
        done = subprocess.run(
            [*unshare, *command, str(answer)], env=_environment(), capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        if done.returncode or not answer.exists():
            raise RanksFailed(done.stdout + done.stderr)
        return pickle.loads(answer.read_bytes())


class Spy(Group):
    """A group that notes every call and hands it on.

    Attributes:
        calls: name of the collective, dtype and number of values.
    """

    def __init__(self, inner: Group) -> None:
        super().__init__()
        self.rank, self.size, self._inner = inner.rank, inner.size, inner
        self.calls: list[tuple[str, str, int]] = []

    def _note(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append((name, str(tensor.dtype).removeprefix("torch."), tensor.numel()))
        return tensor

    def all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        return super().all_gather(self._note("all_gather", message))

    def all_to_all(
        self, parts: list[torch.Tensor], lengths: list[int] | None = None
    ) -> list[torch.Tensor]:
        self._note("all_to_all", torch.cat(parts))
        return super().all_to_all(parts, lengths)

    def gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        return super().gather(self._note("gather", message))

    def all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(self._note("all_reduce", buffer))

    def broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        return super().broadcast(self._note("broadcast", buffer))

    def _all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        return self._inner._all_gather(message)

    def _all_to_all(self, parts: list[torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
        return self._inner._all_to_all(parts, lengths)

    def _gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        return self._inner._gather(message)

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._inner._all_reduce(buffer)

    def _broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._inner._broadcast(buffer)


def spied(fn: Callable[[Spy], Any]) -> Any:
    """Calls ``fn(spy)`` with a spy in the place of this rank's default group."""
    spy = Spy(find_group())
    with default_group(spy):
        return fn(spy)


class _Worker:
    """A process that runs what it is given, until its pipe closes."""

    def __init__(self) -> None:
        child_reads, writes = os.pipe()
        reads, child_writes = os.pipe()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(child_reads), str(child_writes)],
            pass_fds=(child_reads, child_writes),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env=_environment(),
        )
        os.close(child_reads)
        os.close(child_writes)
        self.tasks = Connection(writes, readable=False)
        self.results = Connection(reads, writable=False)

    def give(self, task: Any) -> None:
        # If it has ended, its results say so.
        with contextlib.suppress(BrokenPipeError):
            self.tasks.send_bytes(pickle.dumps(task))

    def last_words(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-4000:]

    def end(self) -> None:
        self.tasks.close()
        self.results.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


_workers: list[_Worker] = []


@atexit.register
def _end_all() -> None:
    while _workers:
        _workers.pop().end()


def _collect(workers: list[_Worker], deadline: float) -> list[Any]:
    answers: dict[int, tuple[bool, Any]] = {}
    waiting = {worker.results: rank for rank, worker in enumerate(workers)}
    dead = []
    while waiting and not dead:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            words = [f"rank {r}:\n{workers[r].last_words()}" for r in waiting.values()]
            words += [f"rank {r} raised:\n{a[1]}" for r, a in sorted(answers.items()) if not a[0]]
            _end_all()
            raise TimeoutError("no answer in time from " + "\n".join(words))
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                answers[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                code = workers[rank].process.wait()
                dead.append(f"rank {rank} ended ({code}):\n{workers[rank].last_words()}")
    failed = dead + [f"rank {r}:\n{a[1]}" for r, a in sorted(answers.items()) if not a[0]]
    if dead:
        _end_all()
    if failed:
        raise RanksFailed("\n".join(failed))
    return [answers[rank][1] for rank in range(len(workers))]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**os.environ, **settings}


def _load(where: tuple[str, str]) -> Callable[..., Any]:
    """A function by file and name: test files cannot be imported by name."""
    file, name = where
    if file not in sys.modules:
        spec = importlib.util.spec_from_file_location(file, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file])
    return getattr(sys.modules[file], name)


def _serve(tasks: Connection, results: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    gc.freeze()  # A collection is then quick.
    while True:
        try:
            where, args, rank, size, store, timeout = pickle.loads(tasks.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, _in_group(_load(where), args, rank, size, store, timeout)
        except BaseException:
            answer = False, traceback.format_exc()
        results.send_bytes(pickle.dumps(answer))


def _in_group(fn: Any, args: Any, rank: int, size: int, store: str, timeout: float) -> Any:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=0.7 * timeout),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return fn(rank, *args)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        # A model in DDP that goes after its group can wait for ever (pytorch/pytorch#56297).
        gc.collect()
        dist.destroy_process_group()


def _bring_loopback_up() -> None:
    import fcntl
    import socket
    import struct

    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


def _main(command: str, *arguments: str) -> None:
    if command == "serve":
        reads, writes = map(int, arguments)
        _serve(Connection(reads, writable=False), Connection(writes, readable=False))
    else:
        # What this process runs imports this file by its own name; there is one set of workers.
        sys.modules["ranks"] = sys.modules["__main__"]
        file, name, answer = arguments
        _bring_loopback_up()
        Path(answer).write_bytes(pickle.dumps(_load((file, name))()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
