import argparse
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from gradtx.bench import link, ranks
from gradtx.bench.ranks import Place, add_place_arguments, find_place, in_bits, rate_of, told_by
from gradtx.bench.resources import bytes_sent

LOOPBACK = Place(2, limit=120)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def means() -> None:
    try:
        with link.hosts(2) as hosts:
            hosts.shape(1e6)
    except link.LinkError as error:
        pytest.skip(str(error))


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_place_arguments(parser)
    return parser.parse_args(words)


def add_up(start: float):
    """Tells the sum over ranks, how many threads torch has, and what the interface has sent."""
    total = torch.full((250_000,), start + dist.get_rank())
    dist.all_reduce(total)
    yield float(total[0])
    with ThreadPoolExecutor(1) as pool:
        threads = pool.submit(torch.get_num_threads).result()
    yield torch.get_num_threads(), threads, os.environ["GLOO_SOCKET_IFNAME"]
    if os.environ["GLOO_SOCKET_IFNAME"] == link.INTERFACE:
        dist.barrier()
        yield bytes_sent(link.INTERFACE)


def fail(how: str):
    yield "begun"
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        raise RuntimeError("rank 1 does not like it")
    dist.barrier()


def wait_for_ever():
    yield "begun"
    time.sleep(1000)


def test_ranks_talk_over_loopback(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    first, second = told_by(LOOPBACK, add_up, 10.0)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert first == 21.0
    assert second == (1, 1, "lo0" if sys.platform == "darwin" else "lo")


@pytest.mark.usefixtures("means")
def test_ranks_are_hosts_with_counters_of_their_own():
    first, second, sent = told_by(Place(3, 1e9, limit=120), add_up, 10.0)
    assert first == 33.0
    assert second == (1, 1, "eth0")
    wanted = 2 * 2 * 1_000_000 // 3
    assert wanted < sent < 1.03 * wanted


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_rank_that_fails_is_reported(how):
    messages = told_by(LOOPBACK, fail, how)
    # The other rank, which waits for it, may be the first to be heard.
    with pytest.raises(ProcessException, match=r"exit code 3|does not like it|Connection"):
        list(messages)


def test_ranks_that_take_too_long_are_ended():
    with pytest.raises(TimeoutError, match="have not ended in 8 s"):
        list(told_by(Place(2, limit=8), wait_for_ever))


@pytest.mark.usefixtures("means")
def test_hosts_are_gone_when_the_program_is_told_to_end():
    code = """
import sys
from contextlib import contextmanager
from gradtx.bench import link
from gradtx.__main__ import main
made = link.hosts

@contextmanager
def told(count):
    with made(count) as hosts:
        print(*hosts.names, hosts.switch, flush=True)
        yield hosts

link.hosts = told
sys.exit(main(["bench", "link", "--link", "1mbit"]))
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        names = [program.stdout.readline().split() for _ in range(2)]
        assert all(Path("/var/run/netns", name).exists() for name in names[1])
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 128 + signal.SIGTERM
    finally:
        program.kill()
        program.communicate()
    assert len(names[1]) == 3
    assert not any(Path("/var/run/netns", name).exists() for name in names[0] + names[1])


class TestPlace:
    def test_shaped_where_it_can_be(self, monkeypatch):
        tried = []
        monkeypatch.setattr(ranks, "_try", tried.append)
        assert find_place(options()) == Place(2, 1e9)
        assert find_place(options("--link", "100mbit", "--ranks", "3")) == Place(3, 1e8)
        assert tried == [1e9, 1e8]
        assert find_place(options()).interface == link.INTERFACE
        assert str(find_place(options())) == "2 ranks on links of 1 Gbit/s"

    def test_loopback_else(self, monkeypatch, capsys):
        def refuse(rate):
            raise link.LinkError("network namespaces need root")

        monkeypatch.setattr(ranks, "_try", refuse)
        place = find_place(options("--limit", "5"))
        assert place == Place(2, None, limit=5)
        assert capsys.readouterr().err == (
            "No shaped link, the ranks talk over loopback: network namespaces need root\n"
        )
        assert place.interface is None
        assert str(place) == "2 ranks over loopback"
        assert find_place(options("--link", "loopback")) == Place(2)
        assert capsys.readouterr().err == ""
        with pytest.raises(link.LinkError, match="need root"):
            find_place(options("--link", "1gbit"))

    def test_launched(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("RANK", "1")
        place = find_place(options())
        assert place == Place(4, launched=True)
        assert not place.speaks
        assert place.interface is None
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        monkeypatch.setenv("RANK", "0")
        assert place.speaks
        assert place.interface == "eth7"
        with pytest.raises(ValueError, match="--link: a launcher has started the ranks"):
            find_place(options("--link", "1gbit"))
        with pytest.raises(ValueError, match="--ranks 2: a launcher has started 4 ranks"):
            find_place(options("--ranks", "2"))

    @pytest.mark.parametrize("text", ["1", "fast", "-1gbit", "0gbit", "1Gbit", "\u0661gbit"])
    def test_rates_that_are_none(self, text):
        with pytest.raises(argparse.ArgumentTypeError, match="expected loopback, or a rate such"):
            rate_of(text)

    def test_rates(self):
        assert [rate_of(x) for x in ("500kbit", "2.5gbit", "loopback")] == [5e5, 2.5e9, None]
        assert in_bits(9.08596e9) == "9.086 Gbit/s"
