"""What is predicted for many ranks is what few ranks send."""

import functools

import pytest
import torch

import gradtx as gx
from gradtx.__main__ import main
from gradtx.exchange.group import find_group
from gradtx.plan.simulate import ALGORITHMS, SUPPORTS, Gradient, simulate
from gradtx.testing import run_ranks

N, RATIO, SIZES = 100_000, 0.02, [2, 4, 8]
TOPK = (gx.topk(RATIO), gx.ef())
CHAINS = {
    "gather": gx.chain(*TOPK, gx.allreduce(algorithm="gather")),
    "sharded": gx.chain(*TOPK, gx.allreduce(algorithm="sharded")),
    "sharded, density": gx.chain(*TOPK, gx.allreduce(algorithm="sharded", density=RATIO)),
    "root": gx.chain(*TOPK, gx.allreduce(algorithm="root")),
    "dense FP32": gx.chain(gx.allreduce()),
    "dense 16 bits": gx.chain(gx.cast("bfloat16"), gx.ef(), gx.allreduce(algorithm="two_shot")),
}


def gradients(rank, size, support):
    """Those that `topk` takes are at these places."""
    generator = torch.Generator().manual_seed(rank)
    k = round(RATIO * N)
    place = {
        "equal": torch.arange(0, N, N // k),
        "random": torch.randperm(N, generator=generator)[:k],
        "disjoint": torch.arange(rank, N, size)[:k],
    }[support]
    flat = torch.zeros(N)
    flat[place] = 1.0 + torch.rand(k, generator=generator)
    return [flat]


@functools.cache
def most_sent(name, support, size):
    tx = CHAINS[name]

    def rank(i):
        grads = gradients(i, size, support)
        state = tx.init(grads)
        tx.update(grads, state)
        before = find_group().sent
        # With no residual, which may make a rank choose what it owns.
        tx.update(grads, state)
        return find_group().sent - before

    return max(run_ranks(size, rank))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_bytes_are_those_that_ranks_send(name, support, size):
    predicted = simulate(Gradient(N, RATIO, support), [size])[name][0].sent
    assert most_sent(name, support, size) == pytest.approx(predicted, rel=0.05)


def test_a_gather_grows_with_the_ranks_and_owners_with_a_density_do_not():
    found = simulate(Gradient(25_000_000, 0.01), [2, 4, 8, 64, 1024])
    sent = {name: [x.sent for x in row] for name, row in found.items()}
    assert sent["gather"][-1] > 1000 * sent["gather"][0]
    assert sent["sharded, density"][-1] < 1.3 * sent["sharded, density"][2]
    assert sent["sharded"][-1] < 1.03 * sent["dense FP32"][-1] / 2


def test_equal_supports_cost_owners_little_and_random_ones_no_more_than_half_a_ring():
    equal, most = (
        [x.sent for x in simulate(Gradient(10**6, 0.01, how), [16, 256])["sharded"]]
        for how in ("equal", "disjoint")
    )
    assert equal[1] < 1.4 * equal[0]
    assert most[1] < 0.55 * 2 * 4 * 10**6


def test_the_command_prints_bytes_and_times(capsys):
    arguments = ["--values", "1000000", "--ranks", "2", "1024", "--gbits", "1", "100"]
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    head, sent, slow, fast = text.split("\n\n")
    assert head == "1,000,000 values, of which each rank chooses 10,000: random"
    assert sent.splitlines()[0].split() == ["MB", "sent", "by", "a", "rank", "2", "1,024"]
    assert [line.split("  ")[0] for line in sent.splitlines()[1:]] == list(ALGORITHMS)
    assert sent.splitlines()[1].split() == ["gather", "0.05", "51.91"]
    assert slow.startswith("time at 50 us and 1 Gbit/s")
    assert slow.splitlines()[1].split() == ["gather", "456", "us", "466", "ms"]
    assert fast.startswith("time at 50 us and 100 Gbit/s")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--values", "0"], "Gradient(values=0): expected a whole number of 1 or more"),
        (["--ratio", "2"], "Gradient(ratio"),
        (["--ranks", "0"], "simulate(sizes=0): expected a whole number of 1 or more"),
        (["--gbits", "-1"], "Link(bandwidth=-125000000.0): expected a finite number over 0"),
        (["--latency", "nan"], "Link(latency=nan): expected a finite number of at least 0"),
    ],
)
def test_arguments_that_are_of_no_use_are_refused(capsys, arguments, text):
    assert main(["plan", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_support_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"support='half'\): expected one of 'equal', 'random', "):
        Gradient(10, 0.5, "half")
