import pytest
import torch
import torch.distributed as dist

from gradtx.bench.peers import BUCKET, PEERS, Gradients, NaiveTopk, ring_nbytes
from gradtx.bench.rounds import ChainMethod
from ranks import gloo_ranks

SHAPES = [(30, 40), (40,), (7, 5, 3), ()]
# Of the normal numbers' own size: bfloat16 has 8 bits, and the sum of two is rounded once more.
ERRORS = {"allreduce": 1e-6, "fp16": 2e-3, "bf16": 2e-2}


def flat(gradients):
    return torch.cat([p.grad.reshape(-1) for p in gradients.parameters])


def mean_of(gradients):
    exact = flat(gradients)
    dist.all_reduce(exact)
    return exact / dist.get_world_size()


def errors_of_dense_peers(rank):
    gradients, found = Gradients(SHAPES, rank), {}
    for number, name in enumerate(ERRORS):
        peer = PEERS[name](gradients)
        gradients.refresh(number)
        exact = mean_of(gradients)
        sent = peer.sync()
        found[name] = float((flat(gradients) - exact).abs().max()), sent
    return found


def test_dense_peers_give_the_mean():
    first, second = gloo_ranks(2, errors_of_dense_peers)
    values = 30 * 40 + 40 + 7 * 5 * 3 + 1
    for name, bound in ERRORS.items():
        assert first[name] == second[name]
        error, sent = first[name]
        assert error < bound
        assert sent == values * (4 if name == "allreduce" else 2)


def low_rank_sums(rank):
    gradients = Gradients([(30, 40), (40,)], rank)
    peer = PEERS["powersgd4"](gradients)
    total, exact, sent = 0.0, 0.0, set()
    for number in range(40):
        gradients.refresh(number)
        exact = exact + mean_of(gradients)
        sent.add(peer.sync())
        total = total + flat(gradients)
    left_out = torch.cat([peer._state.error_dict[0]])
    dist.all_reduce(left_out)
    places = gradients.buckets[0].gradients()
    assert [tuple(x.shape) for x in places] == [(40,), (30, 40)]
    bias, matrix = (left_out / 2).split([40, 1200])
    missing = exact - total
    return (
        float((missing - torch.cat([matrix, bias])).abs().max()),
        float(missing.norm() / exact.norm()),
        sent,
    )


def test_powersgd_feeds_back_what_it_leaves_out():
    for off, missing, sent in gloo_ranks(2, low_rank_sums):
        assert off < 1e-3
        assert missing > 0.1
        assert sent == {4 * (4 * (30 + 40) + 40)}


def naive_results(rank):
    gradients = Gradients(SHAPES, rank)
    peer, whole = NaiveTopk("few", gradients, 0.1), NaiveTopk("all", gradients, 1.0)
    gradients.refresh(0)
    exact = mean_of(gradients)
    sent = whole.sync()
    off = float((flat(gradients) - exact).abs().max())
    total, wanted = 0.0, 0.0
    for number in range(5):
        gradients.refresh(number)
        wanted = wanted + mean_of(gradients)
        few = peer.sync()
        total = total + flat(gradients)
    residual = torch.cat(peer._residuals)
    dist.all_reduce(residual)
    lost = float((total + residual / 2 - wanted).abs().max())
    return off, sent, lost, few, int((flat(gradients) != 0).sum())


def test_naive_topk_loses_nothing_and_sends_twelve_bytes_a_value():
    for off, sent, lost, few, changed in gloo_ranks(2, naive_results):
        assert off < 1e-6
        assert sent == 12 * (1200 + 40 + 105 + 1)
        assert lost < 1e-5
        assert few == 12 * (120 + 4 + 10 + 1)
        assert few / 12 <= changed <= 2 * few / 12


def chain_and_peer(rank):
    """Both write into the same buckets."""
    gradients, out = Gradients(SHAPES, rank), []
    chain = ChainMethod("chain(unscale(), allreduce())", gradients.parameters)
    for method, scale in ((chain, 1024.0), (PEERS["allreduce"](gradients), 1.0)):
        gradients.refresh(3)
        for bucket in gradients.buckets:
            bucket.buffer().mul_(scale)
        method.sync()
        out.append(flat(gradients))
        assert torch.equal(gradients.buckets[0].buffer()[:1], out[-1][-1:])
    return float((out[0] - out[1]).abs().max())


def test_a_chain_works_on_the_same_gradients():
    assert max(gloo_ranks(2, chain_and_peer)) < 1e-6


def test_buckets_are_those_of_ddp():
    gradients = Gradients([(1024, 1024)] * 9 + [(3,)], 0)
    sizes = [bucket.buffer().numel() * 4 for bucket in gradients.buckets]
    # From the last parameter on; a bucket is full once it reaches its size.
    assert sizes == [4 * (3 + 2**20), 7 * 2**22, 2**22]
    assert sizes[1] >= BUCKET
    assert [bucket.is_last() for bucket in gradients.buckets] == [False, False, True]
    assert [bucket.index() for bucket in gradients.buckets] == [0, 1, 2]
    assert gradients.buckets[0].parameters()[0] is gradients.parameters[-1]


def test_rounds_and_ranks_have_other_gradients():
    gradients, others = Gradients([(100,)], 0), Gradients([(100,)], 1)
    seen = []
    for number in (0, 1, 0):
        gradients.refresh(number)
        others.refresh(number)
        seen.append(flat(gradients))
        assert not torch.equal(flat(others), seen[-1])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert float(seen[0].std()) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(("ranks", "sent"), [(2, 120), (3, 160), (4, 180)])
def test_ring(ranks, sent):
    assert ring_nbytes(120, ranks) == sent
