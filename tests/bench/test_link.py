import os
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from gradtx.bench import link

MEGABIT = 1_000_000


def namespaces() -> set[str]:
    return {path.name for path in Path("/var/run/netns").iterdir()}


def unavailable() -> str:
    """Why there is no shaped link here, or nothing."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    try:
        with link.hosts(2) as hosts:
            hosts.shape(MEGABIT)
    except link.LinkError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def means() -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)


def receive(hosts: link.Hosts, out) -> None:
    """Tells when it listens, and then how long so many bytes took to come."""
    import socket

    hosts.enter(0)
    with socket.create_server(("10.77.0.1", 5000)) as server:
        server.settimeout(20)
        out.put(os.environ["GLOO_SOCKET_IFNAME"])
        connection, _ = server.accept()
        with connection:
            connection.settimeout(20)
            connection.recv(1)
            start = time.perf_counter()
            while connection.recv(1 << 16):
                pass
        out.put(time.perf_counter() - start)


def send(hosts: link.Hosts, nbytes: int) -> None:
    import socket

    hosts.enter(1)
    with socket.create_connection(("10.77.0.1", 5000), 20) as connection:
        connection.sendall(bytes(nbytes))


@pytest.mark.usefixtures("means")
def test_bytes_take_the_time_that_the_rate_gives_them() -> None:
    nbytes, rate = 500_000, 20 * MEGABIT
    context = get_context("spawn")
    with link.hosts(2) as hosts:
        hosts.shape(rate)
        out = context.Queue()
        receiver = context.Process(target=receive, args=(hosts, out), daemon=True)
        receiver.start()
        assert out.get(timeout=60) == link.INTERFACE
        sender = context.Process(target=send, args=(hosts, nbytes), daemon=True)
        sender.start()
        # What may pass at once, at both ends, is over before the clock starts.
        seconds = out.get(timeout=60)
        for process in (sender, receiver):
            process.join(20)
            assert process.exitcode == 0
    # No faster than the rate; how much slower is the machine's business.
    assert seconds >= 8 * (nbytes - 4 * link.BURST) / rate


@pytest.mark.usefixtures("means")
def test_namespaces_are_gone_whatever_happens() -> None:
    made = []

    def fail() -> None:
        with link.hosts(3) as hosts:
            made.extend([*hosts.names, hosts.switch])
            assert set(made) <= namespaces()
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail()
    assert len(made) == 4
    assert not set(made) & namespaces()


@pytest.mark.usefixtures("means")
def test_two_sets_of_hosts_are_apart() -> None:
    with link.hosts(2) as one, link.hosts(2) as other:
        assert not {*one.names, one.switch} & {*other.names, other.switch}


@pytest.mark.usefixtures("means")
def test_what_a_tool_says_is_handed_on() -> None:
    with link.hosts(2) as hosts, pytest.raises(link.LinkError, match=r"^tc -n .* tbf rate -5bit"):
        hosts.shape(-5)


def test_a_host_that_is_gone_cannot_be_entered() -> None:
    with pytest.raises(OSError, match="gx-nowhere"):
        link.Hosts(("gx-nowhere",), "gx-nowhere-switch").enter(0)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(link.LinkError, match="ip and tc not found: install iproute2"):
        link.hosts(2).__enter__()


def test_an_ordinary_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    with pytest.raises(link.LinkError, match="network namespaces need root"):
        link.hosts(2).__enter__()


@pytest.mark.parametrize("count", [1, 251])
def test_impossible_counts_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"hosts\({count}\): expected 2 to 250"):
        link.hosts(count).__enter__()


def test_a_tool_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args, **kwargs):
        raise FileNotFoundError("no such program")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(link.LinkError, match="tc: no such program"):
        link.Hosts(("a", "b"), "switch").shape(MEGABIT)
