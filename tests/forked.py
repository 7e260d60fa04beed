"""Processes that start fast, since they are forked off one that has imported gradtx already."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from pathlib import Path

import torch

_context = multiprocessing.get_context("forkserver")
# Making an optimizer imports the latter, which takes longer than anything that they do.
_context.set_forkserver_preload(["gradtx", "torch._dynamo"])


class Forked:
    """A process that calls a function of a file on the path, with a line to it as first argument.

    Attributes:
        process: the process, which can be killed.
    """

    def __init__(self, target, *args):
        self._line, theirs = _context.Pipe()
        self.process = _context.Process(target=_call, args=(theirs, target, *args), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, word):
        self._line.send(word)

    def suspend(self, timeout=30.0):
        """Stops the process as SIGSTOP does, and waits until it has: the signal takes a while.

        Raises:
            TimeoutError: as `await_stop`.
        """
        os.kill(self.process.pid, signal.SIGSTOP)
        self.await_stop(timeout)

    def await_stop(self, timeout=30.0):
        """Waits until the process has stopped, with all its threads.

        Raises:
            TimeoutError: if some thread of it still runs after so many seconds.
        """
        threads = Path(f"/proc/{self.process.pid}/task")
        deadline = time.monotonic() + timeout
        # A name may hold blanks and brackets; the state comes after it.
        while any(
            stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in threads.glob("*/stat")
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.process} does not stop")
            time.sleep(0.001)

    def hear(self, timeout=30.0):
        """What the process says next.

        Raises:
            TimeoutError: if it says nothing in time.
            AssertionError: if it has raised or ended; with its traceback.
        """
        if not self._line.poll(timeout):
            raise TimeoutError(f"{self.process} says nothing")
        try:
            failed, word = self._line.recv()
        except EOFError:
            raise AssertionError(f"{self.process} has ended") from None
        assert not failed, word
        return word


@contextlib.contextmanager
def forked(target, *args):
    """A process that is there for a ``with`` block, and killed at its end if it has not ended."""
    child = Forked(target, *args)
    try:
        yield child
    finally:
        child.process.kill()
        child.process.join()


class Line:
    """How a process talks with the one that has started it."""

    def __init__(self, connection):
        self._connection = connection

    def tell(self, word):
        self._connection.send((False, word))

    def hear(self):
        return self._connection.recv()


def _call(connection, target, *args):
    torch.set_num_threads(1)
    try:
        target(Line(connection), *args)
    except BaseException:
        connection.send((True, traceback.format_exc()))
