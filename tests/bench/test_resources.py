import gc
import sys

import pytest
import torch

from gradtx.bench.resources import PeakMemory, bytes_sent, memory_bandwidth

TABLE = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: 11 12 0 0 0 0 0 0 13 14 0 0 0 0 0 0
  eth0:3992876421 80240 0 0 0 0 0 0 4510506 51483 0 0 0 0 0 0
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "dev"
    path.write_text(TABLE)
    return str(path)


@pytest.mark.parametrize(("interface", "sent"), [("lo", 13), ("eth0", 4_510_506)])
def test_what_was_sent_is_read(table, interface, sent):
    assert bytes_sent(interface, table) == sent


def test_unknown_interfaces_are_named(table):
    with pytest.raises(OSError, match="has no interface eth"):
        bytes_sent("eth", table)


@pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux's")
def test_the_kernel_counts_what_is_sent():
    import socket

    before = bytes_sent("lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        any_socket.sendto(bytes(5000), any_socket.getsockname())
    assert bytes_sent("lo") - before >= 5000


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is Linux's")
def test_growth_is_that_since_the_beginning():
    nbytes = 64 << 20
    before = torch.ones(nbytes // 4)
    del before
    gc.collect()
    memory = PeakMemory()
    kept = torch.ones(nbytes // 4)
    assert memory.growth() == pytest.approx(nbytes, rel=0.2)
    passing = torch.ones(2 * nbytes // 4)
    del passing
    assert memory.growth() == pytest.approx(3 * nbytes, rel=0.2)
    assert memory.restart()
    assert memory.growth() == pytest.approx(nbytes, rel=0.2)
    assert kept.numel()


def test_no_growth_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr("gradtx.bench.resources._CLEAR_PEAK", "not a number")
    memory = PeakMemory()
    assert memory.growth() is None


def test_bandwidth_is_in_bytes_a_second(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr("gradtx.bench.resources.time.perf_counter", lambda: next(ticks) / 2)
    assert memory_bandwidth(1 << 22) == 2 * 2 * 4 * (1 << 22)
    assert memory_bandwidth(1) == 2 * 2 * (1 << 24)
