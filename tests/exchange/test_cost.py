"""What exchanges cost: predicted bytes are those sent, and `auto` takes the least time."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core.transformation import Context
from gradtx.core.tree import flatten, layout_of
from gradtx.exchange import cost
from gradtx.exchange.group import find_group
from gradtx.exchange.outgoing import Outgoing
from gradtx.testing import check_laws, run_ranks

LINKS = {
    "no latency": gx.Link(0.0, 1e8),
    "all latency": gx.Link(1.0, 1e12),
    "default": gx.Link(),
    "fast": gx.Link(5e-6, 1.25e10),
}
COMPRESSORS = {
    "topk": gx.topk(0.02, feedback=False),
    "fp16": gx.topk(0.02, values="float16", feedback=False),
    "signs": gx.sign(feedback=False),
    "cast": gx.cast("float16", feedback=False),
    "8 bits": gx.quantize(8),
    "random": gx.random_k(0.1, unbiased=True),
}
SHAPES = [(100, 60), (501,), (), (2000,)]


def plan_of(compressors, shapes, size, algorithm="auto", link=None, density=None):
    grads = [torch.zeros(shape) for shape in shapes]
    tx = gx.chain(*compressors)
    leaves = flatten(tx.update(grads, tx.init(grads))[0])[0]
    context = Context(layout_of(grads), "")
    return Outgoing(leaves, context, size, algorithm, None, density, link)


def most_sent(compressors, size, algorithm, density=None):
    """Bytes sent by the rank that sends most; ranks choose other positions, if there is room."""
    exchange = gx.allreduce(algorithm=algorithm, density=density)
    tx = gx.chain(*compressors, exchange, check=False)

    def rank(i):
        grads, generator = [], torch.Generator().manual_seed(i)
        for shape in SHAPES:
            flat = torch.full((math.prod(shape),), 1e-6)
            flat[i::size] = 1.0 + torch.rand(len(flat[i::size]), generator=generator)
            grads.append(flat.reshape(shape))
        state = tx.init(grads)
        tx.update(grads, state)
        before = find_group().sent
        tx.update(grads, state)
        return find_group().sent - before

    return max(run_ranks(size, rank))


class TestTraffic:
    @pytest.mark.parametrize("size", [2, 3, 4, 8])
    @pytest.mark.parametrize("algorithm", ["gather", "two_shot", "root", "auto"])
    @pytest.mark.parametrize("name", COMPRESSORS)
    def test_predicted_bytes_are_those_sent(self, name, algorithm, size):
        compressors = (COMPRESSORS[name],)
        plan = plan_of(compressors, SHAPES, size, algorithm)
        name = {"auto": "by leaf"}.get(algorithm, algorithm)
        found = next(x for x in plan.compared()[0] if x.name == name)
        assert found.choice == plan.choice
        sent = most_sent(compressors, size, algorithm)
        # A share may be up to a grain more, and have a scale more.
        share = 2 * (size - 1) * 270 if plan.shared else 0
        assert sent <= found.traffic.sent + share / 10
        assert sent >= 0.97 * found.traffic.sent - share

    @pytest.mark.parametrize("size", [2, 3, 4, 8])
    @pytest.mark.parametrize("density", [None, 0.01, 0.1])
    @pytest.mark.parametrize("name", ["topk", "fp16"])
    def test_so_they_are_where_positions_have_owners(self, name, density, size):
        """Disjoint positions, which is the most; owners have nearly as many each."""
        compressors = (COMPRESSORS[name],)
        plan = plan_of(compressors, SHAPES, size, "sharded", density=density)
        found = next(x for x in plan.compared()[0] if x.name == "sharded")
        sent = most_sent(compressors, size, "sharded", density)
        # Of 170 values an owner may get some more than an eighth.
        assert sent == pytest.approx(found.traffic.sent, rel=0.2)

    def test_a_dense_ring_is_the_limit(self):
        plan = plan_of((COMPRESSORS["topk"],), SHAPES, 4)
        dense, limit = plan.compared()[0][0], plan.compared()[1]
        assert (dense.name, dense.traffic.sent) == ("dense", limit)
        assert limit == most_sent((), 4, "auto")

    def test_seconds_are_latencies_and_bytes(self):
        traffic = cost.all_gather(1000, 5) + cost.all_reduce(500, 5)
        assert (traffic.sent, traffic.steps) == (4000 + 800, 4 + 8)
        assert traffic.seconds(gx.Link(1e-3, 1e6)) == pytest.approx(12e-3 + 4.8e-3)

    def test_at_the_root_what_comes_in_takes_time_too(self):
        traffic = cost.gather(1000, 5) + cost.broadcast(10, 5)
        assert (traffic.sent, traffic.busiest, traffic.steps) == (40, 4040, 2)

    def test_a_rank_alone_sends_nothing(self):
        plan = plan_of((COMPRESSORS["topk"],), SHAPES, 1)
        assert {x.traffic.sent for x in plan.compared()[0]} == {0}
        assert {x.traffic.steps for x in plan.compared()[0]} == {0}

    @given(st.integers(1, 10_000), st.integers(0, 10_000), st.integers(1, 1024))
    def test_a_union_is_between_that_of_equal_and_of_disjoint_supports(self, n, k, size):
        lane = cost.Sparse(n, min(n, k))
        equal, random, most = (lane.union(size, how) for how in ("equal", "random", "disjoint"))
        assert equal <= random <= most + 1
        assert most <= n

    def test_a_random_union_is_what_random_supports_have(self):
        generator = torch.Generator().manual_seed(0)
        chosen = torch.zeros(10_000, dtype=torch.bool)
        for _ in range(20):
            chosen[torch.randperm(10_000, generator=generator)[:500]] = True
        assert cost.Sparse(10_000, 500).union(20, "random") == pytest.approx(
            int(chosen.sum()), rel=0.02
        )


class TestFastest:
    @pytest.mark.parametrize("size", [2, 8, 64, 256, 1024])
    @pytest.mark.parametrize("link", LINKS)
    @pytest.mark.parametrize("name", COMPRESSORS)
    def test_nothing_that_may_be_sent_is_faster(self, name, link, size):
        plan = plan_of((COMPRESSORS[name],), [(100, 600), (500,)], size, link=LINKS[link])
        rows, limit = plan.compared()
        taken = [x for x in rows if x.choice == plan.choice]
        assert taken
        assert all(x.traffic.sent <= limit for x in taken)
        able = [x.traffic.seconds(LINKS[link]) for x in rows if x.traffic.sent <= limit]
        assert taken[0].traffic.seconds(LINKS[link]) == min(able)

    def names(self, compressor, size, link):
        plan = plan_of((compressor,), [(1000, 1000)], size, link=link)
        return [x.name for x in plan.compared()[0] if x.choice == plan.choice]

    def test_few_ranks_gather_and_many_have_owners(self):
        topk, link = COMPRESSORS["topk"], gx.Link(1e-6, 1e8)
        assert self.names(topk, 2, link) == ["gather", "two_shot", "by leaf"]
        assert self.names(topk, 64, link) == ["sharded"]

    def test_the_more_a_message_waits_the_fewer_there_are(self):
        assert "gather" in self.names(COMPRESSORS["topk"], 4, gx.Link(1e-4, 1e8))
        assert self.names(COMPRESSORS["topk"], 64, gx.Link(0.0, 1e8)) == ["sharded"]
        assert "gather" in self.names(COMPRESSORS["topk"], 48, gx.Link(1.0, 1e8))

    def test_from_64_ranks_on_signs_are_dense_whatever_the_link(self):
        for link in LINKS.values():
            assert "dense" in self.names(COMPRESSORS["signs"], 64, link)

    def test_without_a_link_it_is_the_fewest_bytes(self):
        assert "by leaf" in self.names(COMPRESSORS["topk"], 64, None)

    @pytest.mark.parametrize("link", LINKS)
    @pytest.mark.parametrize(
        "parts",
        [
            (gx.topk(0.02), gx.ef()),
            (gx.topk(0.5, values="bfloat16"), gx.ef()),
            (gx.sign(), gx.ef()),
            (gx.filter_params(gx.is_matrix), gx.cast("float8_e4m3fn"), gx.ef()),
            (),
        ],
        ids=repr,
    )
    def test_auto_keeps_the_laws(self, parts, link):
        params = {"big": torch.zeros(50, 20), "half": torch.zeros(90, dtype=torch.float16)}
        tx = gx.chain(gx.unscale(), *parts, gx.allreduce(link=LINKS[link]))
        check_laws(tx, ranks=(2, 4), params=params)

    @pytest.mark.parametrize("n", [100, 1654, 100_000])
    def test_narrow_leaves_that_take_more_than_in_full_width_are_dense(self, n):
        leaves = [torch.zeros(n, dtype=torch.bfloat16)]
        plan = Outgoing(leaves, Context(layout_of(leaves), ""), 64, "auto", link=gx.Link())
        rows, limit = plan.compared()
        assert next(x.traffic.sent for x in rows if x.choice == plan.choice) <= limit
        assert bool(plan.shared) == (n == 100_000)

    def test_ways_that_are_no_ones_are_not_chosen(self):
        """Through a root only if that is the fastest, and not more bytes: with two ranks, never."""
        link = gx.Link(1.0, 1e12)
        for size in (2, 3, 8):
            plan = plan_of((COMPRESSORS["topk"],), [(1000, 1000)], size, link=link)
            assert plan.through_root == (size > 3)

    def test_through_a_root_that_auto_has_chosen_it_gives_what_a_gather_gives(self):
        def results(exchange):
            tx = gx.chain(gx.topk(0.002), gx.ef(), exchange)

            def rank(i):
                grads = {"w": torch.randn(5000, generator=torch.Generator().manual_seed(i))}
                out, _ = tx.update(grads, tx.init(grads))
                return out["w"].tolist()

            return run_ranks(8, rank)

        link = gx.Link(1.0, 1e12)
        assert plan_of((gx.topk(0.002, feedback=False),), [(5000,)], 8, link=link).through_root
        assert results(gx.allreduce(link=link)) == results(gx.allreduce(algorithm="gather"))


class TestLink:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            (
                {"latency": -1.0},
                ValueError,
                r"Link\(latency=-1.0\): expected a finite number of at",
            ),
            ({"bandwidth": 0}, ValueError, r"Link\(bandwidth=0\): expected a finite number over 0"),
            ({"bandwidth": math.inf}, ValueError, "expected a finite number over 0"),
            ({"latency": math.nan}, ValueError, "expected a finite number of at least 0"),
            ({"latency": "1"}, TypeError, r"Link\(latency='1'\): expected a number"),
            ({"latency": True}, TypeError, r"Link\(latency=True\): expected a number"),
        ],
    )
    def test_what_it_cannot_be_is_refused(self, arguments, error, text):
        with pytest.raises(error, match=text):
            gx.Link(**arguments)

    def test_it_is_loaded_from_what_has_been_measured(self, tmp_path):
        path = tmp_path / "link.json"
        path.write_text(json.dumps({"latency": 1e-4, "bandwidth": 5, "ranks": 4}))
        assert gx.Link.load(path) == gx.Link(1e-4, 5.0)

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"latency": 1}', '{"latency": -1, "bandwidth": 1}']
    )
    def test_another_file_is_refused(self, tmp_path, text):
        path = tmp_path / "link.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"link\.json is no measured link"):
            gx.Link.load(path)

    def test_the_code_of_a_chain_makes_it_again(self):
        tx = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(link=gx.Link(1e-5, 1e9)))
        assert eval(tx.code(), {"gx": gx}) == tx

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"link": 1e9}, TypeError, r"allreduce\(link=1000000000.0\): expected a Link"),
            ({"link": gx.Link(), "algorithm": "gather"}, ValueError, "a link is for algorithm="),
            ({"link": gx.Link(), "axis_name": "data"}, ValueError, "a link is for torch tensors"),
        ],
    )
    def test_an_exchange_refuses_what_is_no_link_or_not_for_it(self, arguments, error, text):
        with pytest.raises(error, match=text):
            gx.allreduce(**arguments)

    def test_ranks_with_other_links_all_raise(self):
        def rank(i):
            tx = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(link=gx.Link(1e-5 * (1 + i))))
            grads = [torch.ones(100)]
            with pytest.raises(gx.RankMismatchError, match=r"rank 1 runs .*latency=2e-05"):
                tx.update(grads, tx.init(grads))

        run_ranks(2, rank)


class TestExplain:
    def rows(self, tx, ranks, params=None):
        text = gx.explain(tx, params or {"w": torch.zeros(300, 400)}, ranks=ranks)
        table, _, tail = text.partition("for each of them, at most\n")[2].partition(
            "  predicted for"
        )
        head, *lines = table.splitlines()
        return head, {line.split()[0]: line for line in lines}, f"  predicted for{tail}"

    def test_it_shows_what_each_algorithm_sends_and_which_is_taken(self):
        tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce())
        head, rows, tail = self.rows(tx, 8)
        assert head.split() == ["algorithm", "bytes", "sent", "messages", "predicted"]
        assert list(rows) == ["dense", "gather", "sharded", "root"]
        assert rows["gather"].endswith("taken: the fewest bytes, leaf by leaf")
        assert sum("taken" in row for row in rows.values()) == 1
        assert tail == "  predicted for the default link, 50 us and 1 Gbit/s"

    def test_it_says_what_a_link_has_been_chosen_by(self):
        tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce(link=gx.Link(0.0, 1.25e9)))
        _, rows, tail = self.rows(tx, 200)
        assert rows["sharded"].endswith("taken: the least time")
        assert rows["gather"].endswith("more than dense FP32")
        assert tail == (
            "  predicted for the given link, 0 us and 10 Gbit/s\n"
            "  what sends more than dense FP32 is not taken, however fast it is"
        )

    @pytest.mark.parametrize("algorithm", ["gather", "sharded", "root"])
    def test_or_that_it_was_asked_for(self, algorithm):
        tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce(algorithm=algorithm))
        assert "taken: it was asked for" in self.rows(tx, 4)[1][algorithm]

    def test_a_window_and_a_delay_and_a_filter_are_seen_through(self):
        parts = (gx.accumulate(4), gx.filter_params(gx.is_matrix), gx.topk(0.01), gx.ef())
        params = {"w": torch.zeros(300, 400), "b": torch.zeros(50_000)}
        for tx in (
            gx.chain(gx.unscale(), *parts, gx.allreduce()),
            gx.chain(*parts[1:], gx.delayed(steps=1), gx.allreduce()),
        ):
            rows = self.rows(tx, 4, params)[1]
            sent = {name: int(row.split()[1].replace(",", "")) for name, row in rows.items()}
            assert 1.5 * 4 * 50_000 <= sent["gather"] <= 1.5 * 4 * 50_000 + 3 * 6500

    def test_by_default_it_is_for_the_ranks_there_are(self):
        tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce())
        texts = run_ranks(3, lambda i: gx.explain(tx, {"w": torch.zeros(1000)}))
        assert all("on 3 ranks, for each of them" in text for text in texts)

    def test_for_a_mesh_it_says_that_it_does_not_know(self):
        jnp = pytest.importorskip("jax.numpy")
        tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce())
        assert "shown for torch tensors only" in gx.explain(tx, {"w": jnp.zeros(9)}, ranks=4)

    @pytest.mark.parametrize(
        ("tx", "arguments", "error", "text"),
        [
            (gx.chain(gx.topk(0.1), gx.ef()), {"ranks": 2}, ValueError, "expected params too"),
            (
                gx.chain(gx.topk(0.1), gx.ef()),
                {"params": [torch.zeros(3)]},
                ValueError,
                "no exchange",
            ),
            (
                gx.chain(gx.allreduce()),
                {"params": [torch.zeros(3)], "ranks": 0},
                ValueError,
                r"explain\(ranks=0\): expected a whole number of 1 or more",
            ),
            (
                gx.chain(gx.allreduce()),
                {"params": [torch.zeros(3)], "ranks": 2.0},
                TypeError,
                r"explain\(ranks=2.0\): expected a whole number",
            ),
        ],
    )
    def test_what_cannot_be_shown_is_refused(self, tx, arguments, error, text):
        with pytest.raises(error, match=text):
            gx.explain(tx, **arguments)
