"""The server's end of all lines: who is there, and what they ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from gradtx.stale.frames import HEAD_NBYTES, Frame, Kind, as_body
from gradtx.stale.mailbox import (
    BELL,
    JOINED,
    POLL,
    SERVER,
    STOP,
    Clockwork,
    Mailbox,
    Silence,
    gone_key,
)
from gradtx.wire import WireFormatError

# Of a million leaves, as JSON: it is shorter.
_LONGEST_DESCRIPTION = 1 << 28


class Caller:
    """One of those at the other ends.

    Attributes:
        number: which one.
        pending: what it has asked last, until that is taken up.
        most: how many bytes the body of a request of it may have.
    """

    def __init__(self, number: int, timeout: float) -> None:
        self.number = number
        self.pending: Frame | None = None
        self.most = _LONGEST_DESCRIPTION
        self.requests = 0
        self.beats = 0
        self.silence = Silence(timeout)


class Switchboard:
    """Takes requests in, gives replies and signs of life out, and hangs up on the dead.

    Args:
        store: of `torch.distributed`.
        timeout: seconds without a sign of life after which a caller is dead.
        on_failure: called with a caller's number and what is wrong with it, once it is no longer
            among the `callers`.

    Attributes:
        callers: by number, all that are there.
    """

    def __init__(self, store: Any, timeout: float, on_failure: Callable[[int, str], None]) -> None:
        self.callers: dict[int, Caller] = {}
        self._timeout, self._on_failure = timeout, on_failure
        self._mailbox = Mailbox(store, self.tick)
        self._clockwork = Clockwork(timeout)
        self._bell = self._seen = 0

    def open(self) -> None:
        """Takes the store for this server.

        Raises:
            ValueError: if it has had one before: its workers would be taken for this one's.
        """
        if self._mailbox.store.add("servers", 1) > 1:
            raise ValueError(
                "this store has had a parameter server before: give each a new store, or "
                "torch.distributed.PrefixStore with a prefix of its own"
            )

    def tick(self) -> None:
        """Gives a sign of life, and looks for those of the callers, if it is time."""
        if not self._clockwork.due():
            return
        self._mailbox.beat(SERVER)
        for caller in list(self.callers.values()):
            beats = self._mailbox.beats(str(caller.number))
            if beats != caller.beats:
                caller.beats = beats
                caller.silence.end()
            elif caller.silence.is_death():
                self.fail(caller.number, f"has given no sign of life in {self._timeout:g} s")

    def collect(self) -> None:
        """Takes in what was asked since the last time."""
        bell = int(self._mailbox.store.add(BELL, 0))
        if bell == self._bell:
            return
        self._bell = bell
        joined = int(self._mailbox.store.add(JOINED, 0))
        for number in range(self._seen, joined):
            self.callers[number] = Caller(number, self._timeout)
        self._seen = joined
        for caller in list(self.callers.values()):
            try:
                # Who asks anew no longer waits for the reply to what was asked before.
                while (data := self._next(caller)) is not None:
                    caller.requests += 1
                    caller.pending = Frame.decode(data)
            except WireFormatError as error:
                self.fail(caller.number, f"has sent damaged bytes: {error}")

    def _next(self, caller: Caller) -> bytes | None:
        key = f"request/{caller.number}/{caller.requests + 1}"
        return self._mailbox.take(key, HEAD_NBYTES + caller.most)

    def reply(self, caller: Caller, frame: Frame) -> None:
        """Answers what a caller has asked last."""
        self._mailbox.post(f"reply/{caller.number}/{caller.requests}", frame.encode())

    def refuse(self, caller: Caller, why: str) -> None:
        """Answers what a caller has asked last by an error."""
        self.reply(caller, Frame(Kind.REFUSED, body=as_body(why.encode(errors="replace"))))

    def hang_up(self, number: int) -> None:
        """Forgets a caller, who has gone."""
        self.callers.pop(number, None)

    def fail(self, number: int, why: str) -> None:
        """Forgets a caller with whom something is wrong, and leaves word for it."""
        if number in self.callers:
            text = f"the parameter server no longer counts this worker in: it {why}"
            self._mailbox.store.set(gone_key(number), text.encode(errors="replace"))
            self.hang_up(number)
            self._on_failure(number, why)

    def stop_all(self, why: str, exiting: threading.Event) -> None:
        """Tells all callers to stop, and waits until they have gone, up to the time-out.

        Args:
            why: what to tell them.
            exiting: set when there is no time to wait.
        """
        if not self.callers:
            return
        self._mailbox.store.set(STOP, why.encode(errors="replace"))
        deadline = time.monotonic() + self._timeout
        while self.callers and time.monotonic() < deadline and not exiting.is_set():
            self.tick()
            self.collect()
            for caller in list(self.callers.values()):
                request, caller.pending = caller.pending, None
                if request is not None and request.kind is Kind.LEAVE:
                    self.hang_up(caller.number)
                elif request is not None:
                    self.refuse(caller, why)
            exiting.wait(POLL)
