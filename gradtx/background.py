"""Jobs that run one after the other in a thread of their own."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

# How long the exit of the interpreter waits for a job that is under way, in seconds.
_PATIENCE = 10.0


class Job:
    """A call that is made in the background, or has been made.

    Args:
        fn: what is called.
        after: the job before it: if that has failed, the call is not made, and this one fails too.
    """

    def __init__(self, fn: Callable[[], Any], after: Job | None = None) -> None:
        self._fn: Callable[[], Any] | None = fn
        self._after = after
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    @classmethod
    def done(cls, value: Any) -> Job:
        """A job that has given a value."""
        job = cls(lambda: value)
        job.run()
        return job

    def run(self) -> None:
        """Makes the call, unless the job before it has failed."""
        fn, self._fn = self._fn, None
        after, self._after = self._after, None
        try:
            if after is not None and after._error is not None:
                raise after._error
            self._value = fn() if fn is not None else None
        except BaseException as error:
            self._error = error
        self._ended.set()

    def result(self) -> Any:
        """What the call gave, once it has ended; raises what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Background:
    """A thread that runs jobs in the order in which they were submitted.

    After one that has failed none is run: all later ones fail with its error. The thread is a
    daemon, and the exit of the interpreter waits some seconds for it.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._jobs,), name="gradtx exchange", daemon=True
        )
        self._last: Job | None = None
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread)
        _running.add(self)

    def submit(self, fn: Callable[[], Any]) -> Job:
        """Begins a job.

        Raises:
            RuntimeError: if the thread has been closed.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the Pipeline has been closed")
        job = self._last = Job(fn, self._last)
        self._jobs.put(job)
        return job

    def wait(self) -> None:
        """Waits until all jobs have ended; raises what one of them raised."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Waits for the job that is under way, some seconds at most, and ends the thread."""
        self._finalizer()


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    # It keeps no job and no error, whose traceback would keep all that the job had in its hands.
    while (job := jobs.get()) is not None:
        job.run()
        del job


def _stop(jobs: queue.SimpleQueue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # The collector may run in any.
        thread.join(_PATIENCE)


_running: weakref.WeakSet[Background] = weakref.WeakSet()


# Registered after the imports above, and so called before what they have registered: what a job
# needs is still there.
@atexit.register
def _close_all() -> None:
    for background in list(_running):
        background.close()
