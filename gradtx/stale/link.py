"""A worker's line to the server: a thread that gives signs of life, and carries what is asked."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Any

from gradtx.core.errors import RankMismatchError
from gradtx.stale.frames import HEAD_NBYTES, Frame, Kind, as_body
from gradtx.stale.mailbox import (
    BELL,
    JOINED,
    LONGEST_TEXT,
    POLL,
    SERVER,
    STOP,
    Clockwork,
    Mailbox,
    Silence,
    beat_interval,
    gone_key,
)
from gradtx.wire import WireFormatError

_LONGEST_REASON = 2000  # bytes


class Link:
    """What a worker asks, and what the server replies.

    Only its thread touches the store: whatever becomes of a call into it, `ask` returns in time.

    Args:
        store: of `torch.distributed`, in which the server can be found.
        timeout: seconds after which a silent server counts as dead.

    Attributes:
        number: the worker's, which no other has had.

    Raises:
        ConnectionError: if the store is not there.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        self._timeout = timeout
        self._mailbox = Mailbox(store, self._tick)
        self._clockwork = Clockwork(timeout)
        self._interval = beat_interval(timeout)
        # Not SimpleQueue: if its `get` wakes up late and finds nothing, it forgets the time-out.
        self._requests: queue.Queue[Frame] = queue.Queue()
        self._answers: queue.Queue[bytes | Exception] = queue.Queue()
        self._failure: Exception | None = None
        self._silence = Silence(timeout)
        self._beats = 0
        self._most = LONGEST_TEXT
        self._number: int | None = None
        self._sent = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="gradtx link", daemon=True)
        self._thread.start()
        self.number = int(self._answer())

    def ask(self, request: Frame, most: int = 0) -> Frame:
        """Sends a request, and waits for the reply while the server is alive.

        Args:
            request: what to ask.
            most: how many bytes the body of the reply has at most.

        Raises:
            RankMismatchError: if the server refuses it, or all are to stop.
            ConnectionError: if the server is dead.
            WireFormatError: if the reply is damaged.
        """
        self._raise_failure()
        self._most = HEAD_NBYTES + max(most, LONGEST_TEXT)
        self._requests.put(request)
        try:
            reply = Frame.decode(self._answer())
            if reply.kind is Kind.REFUSED:
                raise RankMismatchError(reply.text)
        except BaseException as error:
            # The reply to this request may still come: no other can be asked.
            self._failure = (
                error
                if isinstance(error, Exception)
                else ConnectionError(f"{type(error).__name__} while the server was asked")
            )
            raise
        return reply

    def leave(self, why: str = "") -> None:
        """Tells the server, if it can be told, that the worker goes; then ends the thread.

        Args:
            why: what has gone wrong; empty if nothing has.
        """
        self._failure = self._failure or ConnectionError("the worker is closed")
        reason = as_body(why.encode(errors="replace")[:_LONGEST_REASON])
        self._requests.put(Frame(Kind.LEAVE, body=reason))
        self._thread.join(self._timeout)

    def end(self) -> None:
        """Ends the thread, which then gives no more signs of life.

        It takes no lock: the garbage collector may call it anywhere.
        """
        self._ended = True
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout)

    def _raise_failure(self) -> None:
        if isinstance(self._failure, (RankMismatchError, WireFormatError)):
            raise type(self._failure)(str(self._failure)) from self._failure
        if self._failure is not None:
            raise ConnectionError(str(self._failure)) from self._failure

    def _answer(self) -> bytes:
        self._silence.end()
        while True:
            try:
                answer = self._answers.get(timeout=self._interval)
            except queue.Empty:
                if self._silence.is_death():
                    self._failure = ConnectionError(
                        f"no sign of life from the parameter server in {self._timeout:g} s"
                    )
                    self._raise_failure()
                continue
            if isinstance(answer, Exception):
                self._failure = answer
                self._raise_failure()
            else:
                return answer

    def _run(self) -> None:
        try:
            number = int(self._mailbox.store.add(JOINED, 1)) - 1
            self._number = number
            self._answers.put(str(number).encode())
            self._carry(number)
        except (RankMismatchError, WireFormatError) as error:
            with suppress(Exception):
                self._hand_in(Frame(Kind.LEAVE))
            self._answers.put(error)
        except Exception as error:
            self._answers.put(
                ConnectionError(f"the store of the parameter server is gone: {error}"[:500])
            )

    def _carry(self, number: int) -> None:
        """Carries requests and replies until the end, signs of life between them."""
        asked = False
        while not self._ended:
            self._tick()
            with suppress(queue.Empty):
                request = self._requests.get(timeout=POLL if asked else self._interval)
                self._hand_in(request)
                if request.kind is Kind.LEAVE:
                    return
                asked = True
            key = f"reply/{number}/{self._sent}"
            if asked and (reply := self._mailbox.take(key, self._most)) is not None:
                self._answers.put(reply)
                asked = False

    def _hand_in(self, request: Frame) -> None:
        self._sent += 1
        self._mailbox.post(f"request/{self._number}/{self._sent}", request.encode())
        self._mailbox.store.add(BELL, 1)

    def _tick(self) -> None:
        """Gives a sign of life and looks for one, if it is time."""
        if not self._clockwork.due() or self._number is None:
            return
        self._mailbox.beat(str(self._number))
        beats = self._mailbox.beats(SERVER)
        if beats != self._beats:
            self._beats = beats
            self._silence.end()
        for key in (STOP, gone_key(self._number)):
            if (why := self._mailbox.note(key)) is not None:
                raise RankMismatchError(why)
