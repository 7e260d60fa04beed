"""The two-shot exchange of 16- and 8-bit formats."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from damage import as_bytes, as_tensor, damaged
from gradtx.core.cast import encode_cast
from gradtx.core.transformation import Context
from gradtx.core.tree import layout_of
from gradtx.exchange.group import Group, default_group, find_group
from gradtx.exchange.outgoing import Outgoing
from gradtx.exchange.two_shot import Shards
from gradtx.testing import check_laws, run_ranks
from gradtx.wire import message_nbytes
from ranks import gloo_ranks, spied

FORMATS = {
    "fp16": (gx.cast("float16"),),
    "bf16": (gx.cast("bfloat16"),),
    "fp8": (gx.cast("float8_e4m3fn"),),
    "q8": (gx.quantize(8),),
    "q8 nearest": (gx.quantize(8, stochastic=False),),
}
TWO_SHOT = gx.allreduce(algorithm="two_shot")


def chain_of(name, *, exchange=TWO_SHOT):
    return gx.chain(gx.unscale(), *FORMATS[name], gx.ef(), exchange)


def normal(rank, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def run(tx, make, size, steps=1, **extra):
    """By rank, the result of the last step, the state after it, and the bytes sent in it."""

    def rank(i):
        state, sent = tx.init(make(i)), 0
        for _ in range(steps):
            before = find_group().sent
            out, state = tx.update(make(i), state, **extra)
            sent = find_group().sent - before
        return out, state, sent

    return run_ranks(size, rank)


def calls_of(tx, make, size, steps=2):
    """The collectives of a rank's last step, by name."""

    def rank(i):
        def steps_of(spy):
            state = tx.init(make(i))
            for _ in range(steps):
                spy.calls.clear()
                _, state = tx.update(make(i), state)
            return [name for name, _, _ in spy.calls]

        return spied(steps_of)

    return run_ranks(size, rank)[0]


def bits(tree):
    return {
        k: None if v is None else as_bytes(v.reshape(-1).view(torch.uint8)) for k, v in tree.items()
    }


class TestShards:
    def shards(self, sizes, size, kinds=("float16", "float8_e5m2", "q8")):
        payloads = {}
        for i, (n, kind) in enumerate(zip(sizes, itertools.cycle(kinds), strict=False)):
            if n and kind == "q8":
                tx = gx.quantize(8, block=100, stochastic=False, feedback=False)
                payloads[i] = tx.update([normal(i, n)], tx.init([torch.zeros(n)]))[0][0]
            elif n:
                payloads[i] = encode_cast(normal(i, n), (n,), kind)
        return Shards(payloads, size)

    @given(st.lists(st.integers(0, 3000), max_size=6), st.integers(1, 9))
    def test_each_value_has_one_owner(self, sizes, size):
        shards = self.shards(sizes, size)
        assert len(shards.pieces) == size
        for place, payload in shards.payloads.items():
            runs = [(x.start, x.stop) for own in shards.pieces for x in own if x.place == place]
            assert [runs[0][0], *(stop for _, stop in runs)] == [
                *(start for start, _ in runs),
                payload.size,
            ]
            assert runs[0][0] == 0
            assert all(start % payload.grain == 0 for start, _ in runs)

    @given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(2, 9))
    def test_nobody_owns_much_more_than_a_share(self, sizes, size):
        owned = list(map(sum, self.shards(sizes, size).sizes))
        # A grain of 256 values, and a scale for each leaf that is cut.
        assert max(owned) <= sum(owned) / size + 256 + 2 + 2 * len(sizes)

    @given(st.sampled_from(sorted(FORMATS)), st.integers(1, 1500), st.integers(1, 5))
    def test_cut_in_any_way_it_decodes_to_the_same_values(self, name, n, count):
        tx = gx.chain(*FORMATS[name], gx.ef())
        payload = tx.update([normal(0, n)], tx.init([torch.zeros(n)]))[0][0]
        length = -(-n // (count * payload.grain)) * payload.grain
        edges = [min(i * length, n) for i in range(count + 1)]
        parts = [payload.cut(*edge).decode() for edge in itertools.pairwise(edges)]
        assert torch.equal(torch.cat(parts), payload.decode())

    @pytest.mark.parametrize("name", FORMATS)
    def test_what_has_been_encoded_is_encoded_again_as_it_was(self, name):
        tx = gx.chain(*FORMATS[name], gx.ef())
        payload = tx.update([normal(0, 1000)], tx.init([torch.zeros(1000)]))[0][0]
        again = payload.again(payload.decode(), 0)
        torch.testing.assert_close(again.decode(), payload.decode(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_does_not_grow_with_the_number_of_ranks(name):
    """That of the sum is rounded once, those of what comes in average out."""
    n, errors, worst = 20_000, [], []
    for size in (2, 4, 8):
        outs = run(chain_of(name), lambda i: {"w": normal(i, n)}, size, loss_scale=1.0)
        mean = sum(normal(i, n).double() for i in range(size)) / size
        left = outs[0][0]["w"].double() - mean
        errors.append(float(left.norm() / mean.norm()))
        worst.append(float(left.abs().max() / mean.abs().max()))
    # The smaller the mean of independent gradients, the smaller what one rounding of it costs.
    assert max(errors) <= 1.05 * errors[0]
    assert max(worst) <= 1.5 * worst[0]
    unit = {"fp16": 2**-11, "bf16": 2**-8, "fp8": 2**-4}.get(name, 1 / 40)
    assert errors[-1] < unit


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("name", FORMATS)
def test_it_keeps_the_laws(name, op):
    exchange = gx.allreduce(op=op, algorithm="two_shot")
    check_laws(chain_of(name, exchange=exchange), ranks=(2, 3))


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_lost_over_many_steps(name):
    check_laws(chain_of(name), ranks=(2, 3, 4, 5), steps=30, laws=["L2"])


@pytest.mark.parametrize(
    "parts",
    [
        [gx.cast("float16"), gx.ef()],
        [gx.filter_params(gx.is_matrix), gx.cast("float8_e4m3fn"), gx.ef()],
        [gx.cast("float8_e5m2"), gx.momentum_correction(0.9, masking=False)],
        [gx.cast("bfloat16", feedback=False)],
        [gx.quantize(8)],
        [],
    ],
    ids=repr,
)
def test_auto_keeps_the_laws(parts):
    params = {"big": torch.zeros(50, 60), "half": torch.zeros(900, dtype=torch.float16)}
    params |= {"d": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(7)}
    check_laws(gx.chain(gx.unscale(), *parts, gx.allreduce()), ranks=(3, 4), params=params)


def test_quantize_is_right_on_average_in_both_shots():
    """Over many seeds and one step; no feedback makes up for it."""
    draws, grads = 400, [normal(i, 600) for i in range(3)]
    mean = sum(g.double() for g in grads) / 3
    total, squares = torch.zeros(600).double(), torch.zeros(600).double()
    for seed in range(draws):
        tx = gx.chain(gx.quantize(8, seed=seed), TWO_SHOT)
        error = run(tx, lambda i: [grads[i]], 3)[0][0][0].double() - mean
        total += error
        squares += error.square()
    spread = (squares / draws).sqrt() / math.sqrt(draws)
    assert float((total / draws / spread).abs().max()) < 5.5
    assert float((total / draws / spread).square().mean()) < 1.4


SHAPES = {
    "one": [(100_003,)],
    "many": [(3, 5), (), (1,), (0,), (777,), (40, 30), (2,), (513,)],
    "tiny": [(1,), (1,)],
    "few": [(3,)],
    "empty": [(0,), (2, 0)],
}
BITS = {"fp16": 16, "bf16": 16, "fp8": 8 + 16 / 256, "q8": 8 + 32 / 256, "q8 nearest": 8 + 32 / 256}


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", ["fp16", "fp8", "q8"])
def test_a_rank_sends_twice_its_share_of_the_small_format(name, shapes, size):
    """Beside headers, a scale for each piece, and a grain: nobody owns a part of one."""

    def make(i):
        return [normal(i, *shape) for shape in SHAPES[shapes]]

    values = sum(math.prod(shape) for shape in SHAPES[shapes])
    pieces = len(SHAPES[shapes]) + 1
    header = message_nbytes(len(SHAPES[shapes]), []) + 7
    grain = 1 if name == "fp16" else 256
    besides = 2 * header + 12 * pieces + 2 * grain * BITS[name] / 8
    outs = run(chain_of(name), make, size, steps=2, loss_scale=1.0)
    limit = 2 * (size - 1) / size * values * BITS[name] / 8 + (size - 1) * besides
    assert max(sent for _, _, sent in outs) <= limit


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("name", FORMATS)
def test_of_a_large_leaf_it_sends_at_most_twice_the_share(name, size):
    n = 1_000_000
    outs = run(chain_of(name), lambda i: {"w": normal(i, n)}, size, steps=2, loss_scale=1.0)
    limit = 2 * (size - 1) / size * n * BITS[name] / 8
    assert max(sent for _, _, sent in outs) <= 1.005 * limit


class TestAuto:
    def places(self, compressor, leaves, size, algorithm="auto"):
        """Positions: gathered, shared out, and dense."""
        tx = gx.chain(compressor) if compressor else gx.chain()
        payloads, _ = tx.update(leaves, tx.init(leaves))
        context = Context(layout_of(leaves), "")
        out = Outgoing([payloads[k] for k in sorted(leaves)], context, size, algorithm)
        return [i for own in out.places for i in own], list(out.shared), sorted(out.parts)

    @pytest.mark.parametrize(
        "compressor",
        [
            gx.cast("float16", feedback=False),
            gx.cast("float8_e5m2", feedback=False),
            gx.quantize(8),
        ],
        ids=repr,
    )
    def test_two_ranks_gather_more_share(self, compressor):
        leaves = {"w": torch.ones(10_000)}
        assert self.places(compressor, leaves, 2) == ([0], [], [])
        for size in (3, 4, 8, 16):
            assert self.places(compressor, leaves, size) == ([], [0], [])
        assert self.places(compressor, leaves, 1) == ([0], [], [])

    def test_forced_even_two_ranks_share(self):
        leaves = {"w": torch.ones(10)}
        compressor = gx.cast("float16", feedback=False)
        assert self.places(compressor, leaves, 2, "two_shot") == ([], [0], [])
        assert self.places(compressor, leaves, 8, "gather") == ([0], [], [])

    def test_small_leaves_go_dense(self):
        leaves = {"big": torch.ones(100_000), "small": torch.ones(1)}
        compressor = gx.cast("float8_e4m3fn", feedback=False)
        assert self.places(compressor, leaves, 8) == ([], [0], [1])
        assert self.places(compressor, {"small": torch.ones(20)}, 4) == ([], [], [0])

    @pytest.mark.parametrize(
        "compressor",
        [gx.quantize(4), gx.topk(0.01, values="float16", feedback=False), gx.sign(feedback=False)],
        ids=repr,
    )
    @pytest.mark.parametrize("algorithm", ["auto", "two_shot"])
    def test_what_cannot_be_cut_is_gathered(self, compressor, algorithm):
        assert self.places(compressor, {"w": torch.ones(10_000)}, 3, algorithm) == ([0], [], [])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_16_bits_travel_in_16_bits_if_nothing_compresses_them(self, dtype):
        leaves = {"a": torch.ones(5000), "b": torch.ones(5000, dtype=dtype)}
        assert self.places(None, leaves, 1) == ([], [], [0, 1])
        assert self.places(None, leaves, 2) == ([1], [], [0])
        assert self.places(None, leaves, 3) == ([], [1], [0])
        assert self.places(None, leaves, 3, "gather") == ([], [], [0, 1])

    def test_those_of_a_dtype_travel_together(self):
        kinds = [torch.bfloat16, torch.float16, torch.float32, torch.bfloat16, torch.float16]
        leaves = {f"p{i}": torch.ones(700, dtype=kind) for i, kind in enumerate(kinds)}
        assert self.places(None, leaves, 3) == ([], [0, 1], [2])
        assert self.places(None, leaves, 2) == ([0, 3, 1, 4], [], [2])

    @pytest.mark.parametrize(
        ("size", "calls"), [(2, ["all_gather"]), (3, ["all_to_all", "all_gather"])]
    )
    def test_that_takes_one_call_a_shot(self, size, calls):
        tx = gx.chain(gx.cast("float16"), gx.ef(), gx.allreduce())
        assert calls_of(tx, lambda i: {"w": torch.ones(9000), "v": torch.ones(500)}, size) == calls

    def test_the_bytes_of_16_bit_leaves_are_half_of_a_ring(self):
        def sent(dtype, size):
            outs = run(gx.chain(gx.allreduce()), lambda i: [normal(i, 100_000).to(dtype)], size, 2)
            return max(sent for _, _, sent in outs)

        for size in (2, 3, 5):
            assert sent(torch.bfloat16, size) <= 0.501 * sent(torch.float32, size)


def mixed(rank, step=0):
    seed = 10 * step + rank
    return {
        "conv": normal(seed, 60, 50),
        "d": normal(seed, 40, dtype=torch.float64),
        "d_small": normal(seed, 3, dtype=torch.float64),
        "half": normal(seed, 3000, dtype=torch.float16),
        "norm": normal(seed, 5),
        "proj": normal(seed, 30, 40),
        "top": normal(seed, 70, 30),
    }


MIXED = gx.chain(
    gx.unscale(),
    gx.masked(gx.error_feedback(gx.topk(0.05)), gx.path_glob("top")),
    gx.masked(gx.error_feedback(gx.cast("float8_e4m3fn")), gx.path_glob("conv")),
    gx.masked(gx.error_feedback(gx.cast("float16")), gx.path_glob("d")),
    gx.allreduce(),
    check=False,
)


def _mixed_steps(rank, steps=3):
    state, outs = MIXED.init(mixed(rank)), []
    for step in range(steps):
        out, state = MIXED.update(mixed(rank, step), state, loss_scale=2.0)
        outs.append(bits(out))
    return outs, out


class TestMixed:
    def test_topk_and_dense_and_fp64_and_16_bit_leaves_go_in_one_step(self):
        def scaled(i):
            return {k: v * 2.0 for k, v in mixed(i).items()}

        outs = run(MIXED, scaled, 4, loss_scale=2.0)
        for path in ("conv", "d", "half", "norm", "proj", "d_small"):
            mean = sum(mixed(i)[path].double() for i in range(4)) / 4
            unit = {"conv": 2**-4, "half": 2**-11, "d": 2**-11}.get(path, 2**-22)
            left = (outs[0][0][path].double() - mean).abs().max()
            assert float(left) <= 2 * unit * float(
                max(mixed(i)[path].abs().max() for i in range(4))
            )
        assert all(bits(out) == bits(outs[0][0]) for out, _, _ in outs)

    def test_each_kind_has_its_collective(self):
        def scaled(spy):
            state = MIXED.init(mixed(spy.rank))
            for _ in range(2):
                spy.calls.clear()
                _, state = MIXED.update(mixed(spy.rank), state, loss_scale=1.0)
            return [(name, dtype) for name, dtype, _ in spy.calls]

        calls = run_ranks(4, lambda i: spied(scaled))
        assert (
            calls
            == [
                [
                    ("all_gather", "uint8"),
                    ("all_to_all", "uint8"),
                    ("all_reduce", "float32"),
                    ("all_reduce", "float64"),
                    ("all_gather", "uint8"),
                ]
            ]
            * 4
        )

    @pytest.mark.parametrize("size", [2, 4])
    def test_over_gloo_it_gives_what_threads_give(self, size):
        found = gloo_ranks(size, _mixed_steps)
        assert all(outs == found[0][0] for outs, _ in found)
        threads = run_ranks(size, _mixed_steps)
        # What the ring sums, it sums in another order.
        for path, leaf in threads[0][1].items():
            torch.testing.assert_close(found[0][1][path], leaf, rtol=1e-3, atol=1e-6)


class TestLargeAndSmall:
    @pytest.mark.parametrize("parts", [(), FORMATS["fp16"], FORMATS["bf16"]], ids=repr)
    @pytest.mark.parametrize("size", [3, 8])
    def test_fp16_gradients_do_not_overflow_in_the_sum(self, size, parts):
        tx = gx.chain(*parts, *([gx.ef()] if parts else []), TWO_SHOT)
        grads = torch.tensor([60000.0, -60000.0, 49152.0, 1.0], dtype=torch.float16)
        for out, _, _ in run(tx, lambda i: [grads], size):
            torch.testing.assert_close(out[0], grads, rtol=2**-8, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_mean_of_the_largest_numbers_is_that_number(self, dtype):
        grads = torch.full((3,), torch.finfo(dtype).max / (1 if dtype == torch.float16 else 4))
        for out, _, _ in run(gx.chain(TWO_SHOT), lambda i: [grads.to(dtype)], 3):
            assert torch.equal(out[0], grads.to(dtype))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("op", ["mean", "sum"])
    @pytest.mark.parametrize("size", [2, 3, 4, 8])
    def test_16_bit_leaves_are_the_fp32_sum_rounded_once(self, size, op, dtype):
        """As if they had travelled in FP32."""
        tx = gx.chain(gx.allreduce(op=op))

        def make(i):
            return [(normal(i, 3000) * 2.0 ** -(torch.arange(3000) % 9)).to(dtype)]

        total = make(0)[0].float()
        for i in range(1, size):
            total = total + make(i)[0].float()
        expected = (total / (size if op == "mean" else 1)).to(dtype)
        found = run(tx, make, size)[0][0][0]
        # Below the normal range of FP16 the last step rounds once more.
        normal_range = expected.abs() >= torch.finfo(dtype).tiny
        assert torch.equal(found[normal_range], expected[normal_range])
        torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-24)

    def test_large_ones_in_other_leaves_take_nothing_from_small_ones(self):
        tx = gx.chain(gx.allreduce())
        grads = {
            "v": torch.full((3000,), 2.0**120, dtype=torch.bfloat16),
            "w": torch.full((3000,), 2.0**-120, dtype=torch.bfloat16),
        }
        for out, _, _ in run(tx, lambda i: grads, 4):
            assert torch.equal(out["v"], grads["v"])
            assert torch.equal(out["w"], grads["w"])

    def test_small_ones_do_not_vanish(self):
        tx = gx.chain(gx.unscale(), TWO_SHOT)
        grads = torch.tensor([2.0**-14, 3 * 2.0**-16, 2.0**-20], dtype=torch.float16)
        for out, _, _ in run(tx, lambda i: [grads * 16], 3, loss_scale=16.0):
            assert torch.equal(out[0], grads)


class TestBadSteps:
    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("rank", [0, 2])
    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_a_bad_gradient_leaves_no_trace(self, name, rank, value):
        tx = chain_of(name)

        def one(i):
            grads = {"w": normal(i, 1000)}
            _, state = tx.update(grads, tx.init(grads), loss_scale=1.0)
            bad = {"w": grads["w"].clone()}
            if i == rank:
                bad["w"][700] = value
            out, after = tx.update(bad, state, loss_scale=1.0)
            same = torch.equal(after.residual["w"], state.residual["w"])
            return bool(out["w"].any()), same, bool(after.last_finite)

        assert run_ranks(3, one) == [(False, True, False)] * 3

    @pytest.mark.parametrize("name", FORMATS)
    def test_an_overflow_that_only_the_owner_sees(self, name):
        """Each gradient is finite, and no other rank ever has the sum."""
        tx = chain_of(name, exchange=gx.allreduce(op="sum", algorithm="two_shot"))

        def one(i):
            grads = {"w": torch.full((2000,), 0.01)}
            _, state = tx.update(grads, tx.init(grads), loss_scale=1.0)
            grads["w"][1999] = 2e38
            out, after = tx.update(grads, state, loss_scale=1.0)
            same = torch.equal(after.residual["w"], state.residual["w"])
            return bool(out["w"].any()), same, bool(after.last_finite)

        assert run_ranks(4, one) == [(False, True, False)] * 4

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_without_a_gate_it_comes_through(self, value):
        tx = gx.chain(gx.allreduce())
        grads = torch.ones(3000, dtype=torch.bfloat16)

        def make(i):
            return [grads.index_fill(0, torch.tensor([2999]), value) if i == 1 else grads]

        for out, _, _ in run(tx, make, 3):
            assert not bool(out[0].isfinite().all())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("size", [2, 3])
    def test_and_spoils_no_other_value(self, size, dtype):
        """As in a dense all-reduce: an optimizer of other parameters may still step."""
        tx = gx.chain(gx.allreduce())
        ones = torch.ones(3000, dtype=dtype)
        bad = ones.index_put((torch.tensor([5]),), torch.tensor(-math.inf, dtype=dtype))

        for out, _, _ in run(tx, lambda i: {"v": bad if i == 1 else ones, "w": ones}, size):
            assert torch.equal(out["v"], bad)
            assert torch.equal(out["w"], ones)


class TestAbsentLeaves:
    @pytest.mark.parametrize("name", FORMATS)
    def test_it_counts_as_zero_and_keeps_its_residual(self, name):
        tx = chain_of(name)

        def one(i):
            grads = {"v": torch.ones(700), "w": torch.full((600,), 3.0)}
            state = tx.init(grads)
            if i == 1:
                grads["w"] = None
            out, after = tx.update(grads, state, loss_scale=1.0)
            return out["w"], after.residual["w"]

        found = run_ranks(3, one)
        mean = found[0][0] + sum(residual for _, residual in found) / 3
        torch.testing.assert_close(found[0][0], torch.full((600,), 2.0), rtol=2**-4, atol=0)
        torch.testing.assert_close(mean, torch.full((600,), 2.0))

    @pytest.mark.parametrize("name", FORMATS)
    def test_if_all_lack_it_it_stays_none(self, name):
        tx = chain_of(name)

        def one(i):
            full = {"v": torch.full((700,), 1.0 + i), "w": torch.ones(600)}
            out, state = tx.update({**full, "w": None}, tx.init(full), loss_scale=1.0)
            return out["w"], bool(state.residual["w"].any()), float(out["v"].mean())

        for nothing, left, mean in run_ranks(3, one):
            assert (nothing, left) == (None, False)
            assert mean == pytest.approx(2.0, rel=0.05)

    @pytest.mark.parametrize("size", [2, 3])
    def test_16_bit_leaves_that_nothing_compresses(self, size):
        tx = gx.chain(gx.allreduce())

        def one(i):
            full = {k: torch.full((600,), 3.0, dtype=torch.bfloat16) for k in "uvwx"}
            state = tx.init(full)
            return tx.update({**full, "u": None if i == 1 else full["u"], "w": None}, state)[0]

        for out in run_ranks(size, one):
            assert out["w"] is None
            assert set(out["u"].tolist()) == {1.5 if size == 2 else 2.0}
            assert set(out["v"].tolist()) == set(out["x"].tolist()) == {3.0}


class Noise(Group):
    """A group, one of whose ranks gets other bytes than were sent."""

    def __init__(self, inner, change, shot):
        super().__init__()
        self.rank, self.size, self._inner = inner.rank, inner.size, inner
        self._change, self._shot = change, shot
        self._shots = 0

    def _all_to_all(self, parts, lengths):
        return self._changed(self._inner._all_to_all(parts, lengths), 0)

    def _all_gather(self, message):
        received = self._inner._all_gather(message)
        # Not the handshake, nor words about what went wrong.
        return received if message.numel() == 1024 else self._changed(received, 1)

    def _all_reduce(self, buffer):
        return self._inner._all_reduce(buffer)

    def _changed(self, received, shot):
        if self.rank != 1 or shot != self._shot:
            return received
        return [self._change(received[0]), *received[1:]]


def outcomes(change, shot, name="fp8"):
    tx, grads = chain_of(name), {"v": normal(0, 10), "w": normal(0, 600)}

    def rank(i):
        with default_group(Noise(find_group(), change, shot)):
            try:
                tx.update(grads, tx.init(grads), loss_scale=1.0)
            except Exception as error:
                return type(error).__name__
            return ""

    return run_ranks(3, rank)


@functools.cache
def sent(shot, name):
    """What rank 0 sends to rank 1."""
    seen = []

    def note(message):
        seen.append(as_bytes(message))
        return message

    assert outcomes(note, shot, name) == [""] * 3
    return seen[0]


class TestDamage:
    @pytest.mark.parametrize("position", [0, 4, 7, 8, 20, 24, 40])
    def test_an_owner_that_cannot_read_tells_the_others(self, position):
        def change(message):
            message[position] ^= 0xFC
            return message

        mismatch = "RankMismatchError"
        assert outcomes(change, 0) == [mismatch, "WireFormatError", mismatch]

    def test_a_step_that_only_one_sees(self):
        def change(message):
            message[16] ^= 1
            return message

        assert outcomes(change, 0) == ["RankMismatchError"] * 3

    @pytest.mark.parametrize("name", ["fp8", "q8"])
    @pytest.mark.parametrize("shot", [0, 1])
    @settings(max_examples=40)
    @given(st.data())
    def test_any_bytes_raise_nothing_else(self, shot, name, data):
        message = sent(shot, name)
        changed = as_tensor(data.draw(damaged(message)))

        def change(found):
            assert as_bytes(found) == message
            return changed

        found = set(outcomes(change, shot, name))
        assert found <= {"", "WireFormatError", "RankMismatchError"}
