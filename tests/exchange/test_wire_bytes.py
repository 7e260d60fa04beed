"""What a rank says it sends, against the loopback interface's own counters.

The ranks run in a network namespace of their own, so that nothing else is counted, and the counters
are that namespace's. They are read from ``/proc/self/net/dev``; ``/sys/class/net/lo/statistics``
shows the same number, but of the namespace that the sysfs was mounted in. They count whole frames:
one holds up to 65,536 bytes, of which 66 are Ethernet, IP and TCP headers (with the time stamps
option), and each acknowledgement is as much again. That is 0.2 % where the frames are full.
"""

import functools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradtx as gx
from gradtx.exchange.group import find_group
from gradtx.testing import run_ranks
from ranks import gloo_ranks, in_network_namespace

VALUES, STEPS, SIZES = 1_000_000, 6, [2, 3]
CHAINS = {
    "dense": gx.chain(gx.allreduce()),
    "topk": gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce()),
    "sign": gx.chain(gx.sign(), gx.ef(), gx.allreduce()),
    "mixed": gx.chain(
        gx.filter_params(gx.is_matrix), gx.topk(0.05), gx.sign(), gx.ef(), gx.allreduce()
    ),
    "cast": gx.chain(gx.cast("float8_e4m3fn"), gx.ef(), gx.allreduce()),
    "gather": gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(algorithm="gather")),
    "sharded": gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce(algorithm="sharded")),
    "root": gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce(algorithm="root")),
}


def on_loopback():
    """Bytes that the loopback interface has transmitted."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise LookupError("no loopback interface")


def counted(fn):
    """What a call gives, and the bytes on the interface between two barriers around it.

    The least of some calls: a busy machine reads in small pieces and acknowledges each of them.
    """
    seen = []
    for _ in range(4):
        dist.barrier()
        before = on_loopback()
        dist.barrier()
        value = fn()
        dist.barrier()
        seen.append(on_loopback() - before)
    return value, min(seen)


def a_model(rank):
    generator = torch.Generator().manual_seed(rank)
    model = torch.nn.ParameterDict(
        {"w": torch.zeros(1000, VALUES // 1000), "b": torch.zeros(50_000)}
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def _sync(rank, name):
    """Bytes reported for some steps, by this rank; and those counted, of all ranks."""
    pipe = gx.Pipeline(CHAINS[name], a_model(rank))
    pipe.sync()
    steps = {"topk": 2, "sign": STEPS, "mixed": STEPS}.get(name, 1)
    return counted(lambda: sum(pipe.sync().wire_bytes for _ in range(steps)))


def _broadcast(rank):
    """The same for the broadcast of two megabytes."""
    group = find_group()
    group.broadcast(torch.zeros(8))

    def send():
        before = group.sent
        group.broadcast(torch.ones(500_000))
        return group.sent - before

    return counted(send)


def measure():
    """Reported by all ranks and counted, for each chain and number of ranks."""
    out = {}
    for size in SIZES:
        for name in CHAINS:
            ranks = gloo_ranks(size, _sync, name)
            out[name, size] = [value for value, _ in ranks], ranks[0][1]
        ranks = gloo_ranks(size, _broadcast)
        out["broadcast", size] = [value for value, _ in ranks], ranks[0][1]
    return out


@functools.cache
def measured():
    try:
        return in_network_namespace(measure)
    except PermissionError as error:
        return str(error)


@pytest.fixture
def traffic():
    if isinstance(measured(), str):
        pytest.skip(f"{measured()}: on the host's loopback other traffic would be counted too")
    return measured()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHAINS)
def test_what_a_sync_reports_is_what_the_interface_counts(traffic, name, size):
    reported, seen = traffic[name, size]
    assert seen > 1_000_000
    assert seen == pytest.approx(sum(reported), rel=0.03)


@pytest.mark.parametrize("size", SIZES)
def test_what_a_broadcast_counts_is_what_the_interface_counts(traffic, size):
    reported, seen = traffic["broadcast", size]
    assert seen > 1_000_000
    assert seen == pytest.approx(sum(reported), rel=0.03)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHAINS)
def test_the_interface_counts_no_less_than_is_reported(traffic, name, size):
    reported, seen = traffic[name, size]
    assert seen >= sum(reported)


@pytest.mark.parametrize("name", [name for name in CHAINS if name != "root"])
def test_all_ranks_report_alike(traffic, name):
    """But for two blocks of values: of what goes to owners not all own as much.

    Owners of positions may have 1 % more of them than others.
    """
    reported, _ = traffic[name, 3]
    spread = {"cast": 2 * 258, "sharded": 0.01 * max(reported)}
    assert max(reported) - min(reported) <= spread.get(name, 0)


def test_the_root_reports_a_copy_of_the_sums_for_each_other_rank(traffic):
    """There are more of them than of the values that one rank has chosen."""
    (root, *others), _ = traffic["root", 3]
    assert max(others) == min(others) > 800_000
    assert root % 2 == 0
    assert root / 2 > max(others)


@functools.cache
def message_bytes(chain, n=VALUES):
    """The size of one message for one leaf of `n` normal values."""

    def rank(i):
        grads = {"w": torch.randn(n, generator=torch.Generator().manual_seed(i))}
        state = chain.init(grads)
        _, state = chain.update(grads, state)
        before = find_group().sent
        chain.update(grads, state)
        return find_group().sent - before

    return run_ranks(2, rank)[0]


HEADER = 48


@pytest.mark.parametrize("ratio", [0.001, 0.003, 0.01, 0.03, 0.05])
def test_an_index_takes_at_most_ten_percent_over_the_entropy_bound(ratio):
    chain = gx.chain(gx.topk(ratio), gx.ef(), gx.allreduce())
    k = round(ratio * VALUES)
    bits_an_index = 8 * (message_bytes(chain) - HEADER) / k - 32
    bound = math.log2(1 / ratio) + (1 / ratio - 1) * -math.log2(1 - ratio)
    assert bound <= bits_an_index + 0.01
    assert bits_an_index <= 1.1 * bound


def test_an_index_at_one_percent_takes_at_most_8_6_bits():
    chain = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce())
    assert 8 * (message_bytes(chain) - HEADER) / (VALUES // 100) - 32 <= 8.6


def test_a_value_that_top_k_chose_takes_32_bits():
    chain = gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce(algorithm="gather"))
    assert 0 <= message_bytes(chain) - 4 * VALUES <= HEADER


def test_a_sign_takes_one_bit():
    chain = gx.chain(gx.sign(), gx.ef(), gx.allreduce())
    assert 1.0 <= 8 * message_bytes(chain) / VALUES <= 1.02


@pytest.mark.parametrize("n", [1000, 1001, 1007])
def test_the_signs_of_a_small_leaf_take_a_bit_each_beside_scale_and_header(n):
    chain = gx.chain(gx.sign(), gx.ef(), gx.allreduce())
    assert message_bytes(chain, n) <= 1.02 * n / 8 + 4 + HEADER


def test_the_signs_of_what_top_k_chose_take_one_bit_beside_the_index():
    sparse = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce())
    signs = gx.chain(gx.topk(0.01), gx.sign(), gx.ef(), gx.allreduce())
    k = VALUES // 100
    saved = message_bytes(sparse) - message_bytes(signs)
    assert saved == pytest.approx(4 * k - k / 8 - 4, abs=8)
