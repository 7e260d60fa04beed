"""Links of a given rate between processes of one machine: network namespaces that `tc` shapes.

Linux, root and iproute2 are needed. Each host is a network namespace with one interface, ``eth0``;
all of them hang on a bridge in a namespace of its own. A token bucket shapes both ways of each
link, so that what two hosts send at once does not share a rate.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
BURST = 16 * 1024  # bytes that pass at once: few beside a compressed message, or it were for free
LONGEST_QUEUE = "100ms"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class LinkError(OSError):
    """There is no shaped link to be had here; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """Some hosts that reach each other, and nothing else.

    Attributes:
        names: of the network namespaces, one a host.
        switch: the namespace of the bridge between them.
    """

    names: tuple[str, ...]
    switch: str

    def shape(self, rate: float, burst: int = BURST) -> None:
        """Gives each link a rate, both ways; any process may, and again at any time.

        Args:
            rate: bits per second, of Ethernet frames.
            burst: bytes that a link which has been idle passes at once.

        Raises:
            LinkError: if it cannot be done.
        """
        for number, name in enumerate(self.names):
            for namespace, interface in ((name, INTERFACE), (self.switch, _port(number))):
                where = ("-n", namespace, "qdisc", "replace", "dev", interface, "root")
                limits = ("rate", f"{rate:.0f}bit", "burst", str(burst), "latency", LONGEST_QUEUE)
                _call("tc", *where, "tbf", *limits)

    def enter(self, number: int) -> None:
        """Moves this thread, and all that it starts from now on, to a host.

        A process calls it before it opens any socket or starts any thread. It tells gloo which
        interface to use.

        Args:
            number: of the host, from 0.

        Raises:
            LinkError: if it cannot be done.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/var/run/netns", self.names[number]).open("rb") as namespace:
            if libc.setns(namespace.fileno(), _NEW_NETWORK):
                error = os.strerror(ctypes.get_errno())
                raise LinkError(f"cannot enter network namespace {self.names[number]}: {error}")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Hosts of links that are not shaped yet; they are gone when the block is left.

    Args:
        count: how many, 2 to 250.

    Raises:
        LinkError: if this is not Linux, the process not root, or a tool not there; with what the
            tool says, if it fails.
    """
    if not 2 <= count <= 250:
        raise ValueError(f"hosts({count}): expected 2 to 250")
    _check_means()
    prefix = f"gx{secrets.token_hex(4)}"
    made = Hosts(tuple(f"{prefix}-{number}" for number in range(count)), f"{prefix}-switch")
    try:
        _connect(made)
        yield made
    finally:
        for name in (*made.names, made.switch):
            with suppress(LinkError):
                _call("ip", "netns", "delete", name)


def _check_means() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise LinkError("network namespaces need root")


def _connect(made: Hosts) -> None:
    _call("ip", "netns", "add", made.switch)
    _call("ip", "-n", made.switch, "link", "add", "bridge", "type", "bridge")
    _call("ip", "-n", made.switch, "link", "set", "bridge", "up")
    for number, name in enumerate(made.names):
        port = _port(number)
        _call("ip", "netns", "add", name)
        end = ("peer", "name", port, "netns", made.switch)
        _call("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", *end)
        _call("ip", "-n", made.switch, "link", "set", port, "master", "bridge", "up")
        _call("ip", "-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _call("ip", "-n", name, "link", "set", interface, "up")


def _port(number: int) -> str:
    return f"port{number}"


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise LinkError(f"{command[0]}: {error}") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip() or f"exit status {error.returncode}"
        raise LinkError(f"{' '.join(command)}: {said}") from None
