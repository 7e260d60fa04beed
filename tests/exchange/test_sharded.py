"""The sharded exchange: values at positions go to owners, and the sums come back."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from damage import as_bytes, as_tensor, damaged
from gradtx.exchange.group import Group, default_group, find_group
from gradtx.exchange.lanes import decode_part, encode_part, part_nbytes
from gradtx.exchange.owners import Owners
from gradtx.testing import check_laws, run_ranks
from gradtx.wire import WireFormatError, indices_nbytes, message_nbytes
from ranks import gloo_ranks, spied

SHARDED = gx.allreduce(algorithm="sharded")
# All that is not zero is sent.
ALL = (gx.threshold(0.0, capacity=1.0), gx.ef())
COMPRESSORS = {
    "topk": (gx.topk(0.05),),
    "all of it": (gx.topk(1.0),),
    "joined": (gx.topk(0.1, scope="global"),),
    "fp16": (gx.topk(0.1, values="float16"),),
    "bf16": (gx.topk(0.1, values="bfloat16"),),
    "fp8": (gx.topk(0.1), gx.cast("float8_e4m3fn")),
    "8 bits": (gx.topk(0.1), gx.quantize(8)),
    "signs": (gx.topk(0.1), gx.sign()),
    "powers": (gx.topk(0.1), gx.natural()),
    "threshold": (gx.threshold(1.5, capacity=0.2),),
    "threshold, fp16": (gx.threshold(1.5, capacity=0.2), gx.cast("float16")),
}


def tree(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = {"w": (30, 40), "b": (7,), "empty": (0, 3), "scalar": (), "one": (1,)}
    out = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return {**out, "d": torch.randn(100, generator=generator, dtype=torch.float64)}


def run(tx, make, size, steps=1, **extra):
    """By rank, the results of all steps, the last state, and the bytes sent in the last step."""

    def rank(i):
        state, outs, sent = tx.init(make(i, 0)), [], 0
        for step in range(steps):
            before = find_group().sent
            out, state = tx.update(make(i, step), state, **extra)
            outs.append(out)
            sent = find_group().sent - before
        return outs, state, sent

    return run_ranks(size, rank)


def bits(out):
    return {
        k: None if v is None else as_bytes(v.reshape(-1).view(torch.uint8)) for k, v in out.items()
    }


class TestOwners:
    @given(st.integers(0, 3000), st.integers(1, 70))
    def test_each_position_has_one_owner_and_comes_back(self, length, size):
        owners = Owners(length, size)
        owner, slots = owners.find(torch.arange(length))
        assert not length or int(slots.max()) + 1 == owners.slots
        for rank in range(size):
            own = slots[owner == rank]
            assert own.tolist() == list(range(owners.room(rank)))
            assert (
                owners.positions(rank, own).tolist() == (owner == rank).nonzero().view(-1).tolist()
            )
        rest = owners.positions(0, torch.tensor([owners.slots]))
        assert length <= int(rest)

    @given(st.integers(0, 5000), st.integers(1, 3000), st.integers(1, 70))
    def test_a_cluster_is_shared_out_evenly(self, start, count, size):
        owner, _ = Owners(10_000, size).find(torch.arange(start, start + count))
        counts = torch.bincount(owner, minlength=size)
        # Each whole run has one of each, and there is a part of one at either end.
        assert int(counts.max() - counts.min()) <= 2

    @pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16])
    @pytest.mark.parametrize("stride", [2, 3, 4, 8, 16, 49, 64, 256, 1000, 4096])
    def test_so_are_positions_at_a_stride(self, size, stride):
        owner, _ = Owners(4000 * stride, size).find(torch.arange(4000) * stride)
        counts = torch.bincount(owner, minlength=size)
        assert int(counts.max()) <= 1.15 * 4000 / size

    def test_positions_beyond_32_bits(self):
        owners = Owners(2**45, 1000)
        positions = torch.tensor([0, 2**31, 2**40 + 12345, 2**45 - 1])
        owner, slots = owners.find(positions)
        back = [owners.positions(r, s[None]) for r, s in zip(owner.tolist(), slots, strict=True)]
        assert torch.cat(back).tolist() == positions.tolist()


class TestParts:
    @given(st.sets(st.integers(0, 99)), st.sampled_from(["float32", "float64", "float16"]))
    def test_a_part_comes_back(self, slots, name):
        dtype = getattr(torch, name)
        where = torch.tensor(sorted(slots), dtype=torch.int64)
        values = torch.randn(len(slots)).to(dtype)
        data = encode_part((where, values), 100)
        assert data.numel() == part_nbytes(len(slots), 100, dtype.itemsize)
        assert data.numel() % 8 == 0
        found = decode_part(data, len(slots), 100, 100, dtype)
        assert torch.equal(found[0], where)
        assert torch.equal(found[1], values)

    def test_a_slot_that_is_that_of_no_position_is_refused(self):
        data = encode_part((torch.tensor([4]), torch.ones(1)), 5)
        with pytest.raises(WireFormatError, match="slot 4 is that of no position, of 4"):
            decode_part(data, 1, 5, 4, torch.float32)

    @given(st.data())
    def test_any_bytes_raise_nothing_else(self, data):
        part = torch.tensor([1, 5, 6, 40]), torch.randn(4)
        changed = as_tensor(data.draw(damaged(as_bytes(encode_part(part, 50)))))
        try:
            where, _ = decode_part(changed, 4, 50, 45, torch.float32)
        except WireFormatError:
            return
        assert int(where[0]) >= 0
        assert int(where[-1]) < 45


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_it_gives_what_a_gather_gives(name, size):
    """Bit for bit: both add in rank order, in the same dtype."""

    def make(rank, step):
        absent = {"w": None} if (rank, step) == (1, 1) else {}
        return {**tree(rank, step), **absent}

    parts = (*COMPRESSORS[name], gx.ef())
    sharded = run(gx.chain(*parts, SHARDED), make, size, steps=3)
    gathered = run(gx.chain(*parts, gx.allreduce(algorithm="gather")), make, size, steps=3)
    for (outs, state, _), (others, other, _) in zip(sharded, gathered, strict=True):
        for out, expected, (first, *_) in zip(
            outs, others, zip(*(x[0] for x in sharded), strict=True), strict=True
        ):
            assert bits(out) == bits(first)
            for path, leaf in expected.items():
                torch.testing.assert_close(out[path], leaf, rtol=2e-7, atol=0)
        for path, residual in other.residual.items():
            torch.testing.assert_close(state.residual[path], residual, rtol=2e-7, atol=1e-9)


@st.composite
def supports(draw):
    """Values of some ranks, most of them zero: anywhere, one region, equal, disjoint, or none."""
    size, n = draw(st.integers(1, 8)), draw(st.integers(0, 60))
    some = st.sets(st.integers(0, n - 1)) if n else st.just(set())
    how = draw(st.sampled_from(["any", "region", "equal", "disjoint", "one rank", "none", "all"]))
    rows = []
    for rank in range(size):
        anywhere = draw(some)
        places = {
            "any": anywhere,
            "region": set(range(min(3, n))),
            "equal": set(range(0, n, 7)),
            "disjoint": set(range(rank, n, size)),
            "one rank": anywhere if rank == size - 1 else set(),
            "none": set(),
            "all": set(range(n)),
        }[how]
        row = torch.zeros(n)
        for place in places:
            row[place] = draw(st.sampled_from([1.0, -1.0, 0.25, -3.0, 1e-20, 1e20]))
        rows.append(row)
    return rows


@settings(max_examples=60)
@given(supports(), st.booleans())
def test_any_supports_on_any_ranks(rows, split):
    def make(i, step):
        third = len(rows[i]) // 3
        return [rows[i][:third], rows[i][third:]] if split else [rows[i]]

    found = run(gx.chain(*ALL, SHARDED), make, len(rows))
    expected = run(gx.chain(*ALL, gx.allreduce(algorithm="gather")), make, len(rows))
    for ([out], _, _), ([other], _, _) in zip(found, expected, strict=True):
        assert all(map(torch.equal, out, found[0][0][0]))
        assert all(map(torch.equal, out, other))


@pytest.mark.parametrize("density", [None, 0.01])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_that_all_ranks_have_is_one_ranks(size, density):
    """And fewer values than there are ranks, at times."""
    owner, _ = Owners(500, size).find(torch.arange(500))
    exchange = gx.allreduce(op="sum", algorithm="sharded", density=density)
    for count in (1, 3, 60):
        row = torch.zeros(500)
        row[(owner == size - 1).nonzero().view(-1)[:count]] = 2.0
        found = run(gx.chain(*ALL, exchange), lambda i, step, row=row: [row], size)
        left = sum(state.residual[0] for _, state, _ in found)
        kept = min(count, max(1, round(0.01 * 500 / size))) if density else count
        for [[out]], _, _ in found:
            assert torch.equal(out + left, size * row)
            assert int(out.count_nonzero()) == kept


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("name", ["topk", "joined", "fp16", "threshold", "signs"])
def test_it_keeps_the_laws(name, op):
    exchange = gx.allreduce(op=op, algorithm="sharded")
    check_laws(gx.chain(gx.unscale(), *COMPRESSORS[name], gx.ef(), exchange), ranks=(1, 2, 3))


@pytest.mark.parametrize(
    "parts",
    [
        [gx.filter_params(gx.is_matrix), gx.topk(0.2), gx.ef(), SHARDED],
        [gx.topk(0.2), gx.momentum_correction(0.9), SHARDED],
        [gx.topk(0.2, feedback=False), SHARDED],
        [gx.topk(0.2), gx.ef(), gx.delayed(steps=2), SHARDED],
        [gx.accumulate(2), gx.topk(0.2), gx.ef(), SHARDED],
        [gx.sign(), gx.ef(), SHARDED],
        [SHARDED],
    ],
    ids=repr,
)
def test_with_what_stands_around_it_it_keeps_the_laws(parts):
    params = {"big": torch.zeros(20, 10), "half": torch.zeros(90, dtype=torch.float16)}
    params |= {"d": torch.zeros(30, dtype=torch.float64), "b": torch.zeros(7)}
    check_laws(gx.chain(gx.unscale(), *parts), ranks=(1, 3), params=params)


class TestTraffic:
    N = 10_000

    def sent(self, rows):
        """In bytes, by rank, in a step after the first."""
        outs = run(gx.chain(*ALL, SHARDED), lambda i, step: [rows[i]], len(rows), steps=2)
        return [sent for _, _, sent in outs]

    def rows(self, places):
        out = []
        for own in places:
            row = torch.zeros(self.N)
            row[own] = 1.0
            out.append(row)
        return out

    def random(self, size, k):
        generator = torch.Generator().manual_seed(0)
        return self.rows([torch.randperm(self.N, generator=generator)[:k] for _ in range(size)])

    def expected(self, rows, union):
        """With even shares: headers and counts, values, counts, and the sums."""
        size, slots = len(rows), -(-self.N // len(rows))
        k = int((rows[0] != 0).sum()) / size
        ahead = message_nbytes(1, [8, 0]) + 8
        own = 4 * k + indices_nbytes(math.ceil(k), slots)
        result = min(4 * union / size + indices_nbytes(math.ceil(union / size), slots), 4 * slots)
        return (size - 1) * (ahead + own + result)

    @pytest.mark.parametrize("size", [2, 4, 7, 8])
    def test_equal_supports_cost_no_more_on_more_ranks(self, size):
        k = 560
        rows = self.rows([torch.arange(0, self.N, 17)[:k]] * size)
        for sent in self.sent(rows):
            assert sent == pytest.approx(self.expected(rows, k), rel=0.06)

    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_random_supports(self, size):
        rows = self.random(size, 100)
        union = int(torch.stack(rows).any(0).sum())
        for sent in self.sent(rows):
            assert sent == pytest.approx(self.expected(rows, union), rel=0.2)

    @pytest.mark.parametrize("size", [4, 8])
    def test_it_never_sends_much_more_than_values_and_all_sums(self, size):
        """Once the union fills in, all values are fewer bytes."""
        rows = self.random(size, 8000)
        values = (size - 1) / size * (4 * 8000 + indices_nbytes(8000, self.N))
        sums = (size - 1) * 4 * self.N / size
        assert max(self.sent(rows)) <= 1.02 * (values + sums)

    @pytest.mark.parametrize("region", [slice(0, 400), slice(9600, None), slice(0, None, 25)])
    def test_one_region_is_not_that_of_one_rank(self, region):
        sent = self.sent(self.rows([region] * 8))
        assert max(sent) <= 1.1 * min(sent)

    def test_where_there_is_nothing_it_sends_headers_and_counts(self):
        ahead = message_nbytes(1, [8, 0]) + 8
        assert self.sent([torch.zeros(self.N)] * 3) == [2 * ahead] * 3

    def test_the_collectives_of_a_step(self):
        tx = gx.chain(gx.topk(0.1), gx.ef(), SHARDED)

        def rank(i):
            def steps(spy):
                state = tx.init(tree(i))
                for step in range(2):
                    spy.calls.clear()
                    _, state = tx.update(tree(i, step), state)
                return [name for name, _, _ in spy.calls]

            return spied(steps)

        wanted = ["all_to_all", "all_to_all", "all_gather", "all_gather"]
        assert run_ranks(3, rank) == [wanted] * 3


def _over_gloo(rank):
    found = []
    for name, compressors in COMPRESSORS.items():
        tx = gx.chain(*compressors, gx.ef(), SHARDED)
        state = tx.init(tree(rank))
        for step in range(2):
            before = find_group().sent
            out, state = tx.update(tree(rank, step), state)
            found.append((name, bits(out), find_group().sent - before))
    tx = gx.chain(*ALL, SHARDED)
    out, _ = tx.update([torch.zeros(5)], tx.init([torch.zeros(5)]))
    return found, out[0].tolist()


def test_over_gloo_it_gives_what_threads_give_and_sends_as_much():
    assert gloo_ranks(3, _over_gloo) == run_ranks(3, _over_gloo)


class TestBadSteps:
    @pytest.mark.parametrize("value", [math.inf, math.nan])
    @pytest.mark.parametrize("name", ["topk", "fp16", "threshold"])
    def test_a_bad_gradient_leaves_no_trace(self, name, value):
        tx = gx.chain(gx.unscale(), *COMPRESSORS[name], gx.ef(), SHARDED)

        def one(i):
            grads = {"w": torch.randn(100, generator=torch.Generator().manual_seed(i))}
            _, state = tx.update(grads, tx.init(grads), loss_scale=1.0)
            bad = {"w": grads["w"].clone()}
            if i == 1:
                bad["w"][70] = value
            out, after = tx.update(bad, state, loss_scale=1.0)
            same = torch.equal(after.residual["w"], state.residual["w"])
            return bool(out["w"].any()), same, bool(after.last_finite)

        assert run_ranks(3, one) == [(False, True, False)] * 3

    def test_an_overflow_in_a_sum_is_seen_by_all(self):
        tx = gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce(op="sum", algorithm="sharded"))
        grads = [torch.tensor([1.0, 2e38, 1.0, 1.0])]

        def one(i):
            out, after = tx.update(grads, tx.init(grads))
            return bool(out[0].any()), bool(after.last_finite)

        assert run_ranks(3, one) == [(False, False)] * 3


@pytest.mark.parametrize("name", ["topk", "joined"])
def test_a_leaf_that_all_lack_stays_none(name):
    tx = gx.chain(*COMPRESSORS[name], gx.ef(), SHARDED)

    def one(i):
        full = {"v": torch.full((70,), 1.0 + i), "w": torch.ones(60)}
        out, state = tx.update({**full, "w": None}, tx.init(full))
        return out["w"], bool(state.residual["w"].any()), bool(out["v"].any())

    assert run_ranks(3, one) == [(None, False, True)] * 3


class Noise(Group):
    """A group, one of whose ranks gets other bytes than were sent, in one round."""

    def __init__(self, inner, change, round_):
        super().__init__()
        self.rank, self.size, self._inner = inner.rank, inner.size, inner
        self._change, self._round, self._rounds = change, round_, 0

    def _all_to_all(self, parts, lengths):
        return self._changed(self._inner._all_to_all(parts, lengths))

    def _all_gather(self, message):
        received = self._inner._all_gather(message)
        # Not the handshake, nor words about what went wrong.
        return received if message.numel() == 1024 else self._changed(received)

    def _changed(self, received):
        self._rounds += 1
        if self.rank != 1 or self._rounds != self._round + 1:
            return received
        return [self._change(received[0]), *received[1:]]


def outcomes(change, round_, tx=None):
    tx = tx or gx.chain(gx.topk(0.1), gx.ef(), SHARDED)
    grads = {"w": torch.randn(300, generator=torch.Generator().manual_seed(0))}

    def rank(i):
        with default_group(Noise(find_group(), change, round_)):
            try:
                tx.update(grads, tx.init(grads), loss_scale=1.0)
            except Exception as error:
                return type(error).__name__
            return ""

    return run_ranks(3, rank)


class TestDamage:
    def test_an_owner_that_cannot_read_values_tells_the_others(self):
        def change(data):
            data[-9:] ^= 0xFF
            return data

        mismatch = "RankMismatchError"
        assert outcomes(change, 1) == [mismatch, "WireFormatError", mismatch]

    def test_a_header_of_another_chain_is_refused(self):
        def change(data):
            data[8] ^= 1
            return data

        # The others wait for values of this rank until it has ended.
        assert outcomes(change, 0)[1] == "WireFormatError"

    @pytest.mark.parametrize(("round_", "position"), [(0, -7), (2, 7)])
    def test_a_count_that_cannot_be_is_refused(self, round_, position):
        def change(data):
            data[position] ^= 0x40
            return data

        assert outcomes(change, round_)[1] == "WireFormatError"

    @settings(max_examples=40)
    @given(st.data())
    def test_any_bytes_for_values_raise_nothing_else(self, data):
        """Values may change and nobody can tell; all else is told to all."""
        seen = []
        assert outcomes(lambda found: seen.append(as_bytes(found)) or found, 1) == [""] * 3
        changed = as_tensor(data.draw(damaged(seen[0])))
        if changed.numel() == len(seen[0]):
            found = set(outcomes(lambda _: changed, 1))
            assert found <= {"", "WireFormatError", "RankMismatchError"}


def test_on_a_mesh_it_is_refused():
    text = (
        r"allreduce\(axis_name='data', algorithm='sharded'\): for torch tensors only; on a mesh "
        "write 'auto', 'gather' or 'two_shot'"
    )
    with pytest.raises(ValueError, match=text):
        gx.allreduce(axis_name="data", algorithm="sharded")


def test_jax_arrays_are_refused():
    jnp = pytest.importorskip("jax.numpy")
    tx = gx.chain(gx.topk(0.5), gx.ef(), SHARDED)
    grads = {"w": jnp.ones(4)}
    with pytest.raises(TypeError, match=r"exchanges torch tensors between processes, got JAX"):
        tx.update(grads, tx.init(grads))


class TestDensity:
    def chain(self, density, *compressors, op="mean", feedback=None):
        exchange = gx.allreduce(op=op, algorithm="sharded", density=density)
        return gx.chain(gx.unscale(), *compressors, feedback or gx.ef(), exchange)

    @pytest.mark.parametrize("op", ["mean", "sum"])
    @pytest.mark.parametrize("name", ["topk", "joined", "fp16", "threshold", "signs"])
    def test_it_keeps_the_laws(self, name, op):
        check_laws(self.chain(0.03, *COMPRESSORS[name], op=op), ranks=(1, 2, 3))

    @pytest.mark.parametrize(
        "parts",
        [
            [gx.filter_params(gx.is_matrix), gx.topk(0.2), gx.ef()],
            [gx.topk(0.2), gx.momentum_correction(0.9)],
            [gx.topk(0.2), gx.ef(), gx.delayed(steps=2)],
            [gx.accumulate(2), gx.topk(0.2), gx.ef()],
        ],
        ids=repr,
    )
    def test_with_what_stands_around_it_it_keeps_the_laws(self, parts):
        params = {"big": torch.zeros(20, 10), "d": torch.zeros(30, dtype=torch.float64)}
        exchange = gx.allreduce(algorithm="sharded", density=0.05)
        check_laws(gx.chain(gx.unscale(), *parts, exchange), ranks=(1, 3), params=params)

    def test_nothing_is_lost_over_many_steps(self):
        tx = self.chain(0.02, gx.topk(0.05))
        check_laws(tx, ranks=(2, 3, 4, 5), steps=30, laws=["L2"])

    @settings(max_examples=40)
    @given(supports(), st.sampled_from([0.02, 0.1, 0.5, 1.0]))
    def test_any_supports_on_any_ranks(self, rows, density):
        """Replicas agree, and what is left out is in the residuals: L2, by hand."""
        n, size = len(rows[0]), len(rows)
        tx = self.chain(density, gx.threshold(0.0, capacity=1.0))
        found = run(tx, lambda i, step: [rows[i]], size, loss_scale=1.0)
        total = torch.stack(rows).double().sum(0)
        left = torch.stack([state.residual[0] for _, state, _ in found]).double().sum(0)
        scale = torch.stack(rows).double().abs().sum(0)
        for [[out]], _, _ in found:
            assert torch.equal(out, found[0][0][0][0])
            error = (size * out.double() + left - total).abs()
            assert bool((error <= 1e-6 * scale).all())
            quota = max(1, round(density * n / size))
            slots = -(-n // size)
            if part_nbytes(min(quota, slots), slots, 4) < 4 * slots:
                assert int(out.count_nonzero()) <= size * quota

    def test_owners_send_on_the_largest_sums(self):
        """Of each owner's positions; the sums of what it has are compared by hand."""
        n, size = 4000, 4
        rows = [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i in range(size)]
        tx = self.chain(0.01, gx.topk(1.0))
        found = run(tx, lambda i, step: [rows[i]], size, loss_scale=1.0)
        total = rows[0] + rows[1] + rows[2] + rows[3]
        owner, _ = Owners(n, size).find(torch.arange(n))
        for rank, (_, state, _) in enumerate(found):
            own = (owner == rank).nonzero().view(-1)
            best = own[total[own].abs().topk(10).indices].sort().values
            sent = found[0][0][0][0]
            assert torch.equal(sent[own].nonzero().view(-1), torch.searchsorted(own, best))
            torch.testing.assert_close(sent[best], total[best] / size)
            rest = total.clone()
            rest[best] = 0
            torch.testing.assert_close(state.residual[0][own], rest[own])
            assert not state.residual[0][owner != rank].any()

    def test_a_rank_sends_no_more_on_many_ranks(self):
        """Values once, and 1 % of the sums; beside headers, which every rank gets from all."""
        n, k = 40_000, 400
        tx = gx.chain(gx.topk(k / n), gx.ef(), gx.allreduce(algorithm="sharded", density=k / n))
        for size in (2, 4, 8):

            def make(i, step):
                return [torch.randn(n, generator=torch.Generator().manual_seed(i + 10 * step))]

            values = 4 * k + indices_nbytes(k, n)
            for _, _, sent in run(tx, make, size, steps=2):
                limit = 2 * (size - 1) / size * values + (size - 1) * (message_nbytes(1, [8]) + 40)
                assert sent <= 1.12 * limit

    def test_of_all_sums_nothing_is_left_out(self):
        tx = self.chain(1.0, gx.topk(0.5))
        gathered = gx.chain(gx.unscale(), gx.topk(0.5), gx.ef(), gx.allreduce(algorithm="gather"))
        outs = run(tx, tree, 3, steps=2, loss_scale=1.0)
        for (found, _, _), (expected, _, _) in zip(
            outs, run(gathered, tree, 3, steps=2, loss_scale=1.0), strict=True
        ):
            for out, other in zip(found, expected, strict=True):
                assert all(torch.equal(out[path], leaf) for path, leaf in other.items())

    def test_the_collectives_of_a_step(self):
        tx = self.chain(0.1, gx.topk(0.1))

        def rank(i):
            def steps(spy):
                state = tx.init(tree(i))
                for step in range(2):
                    spy.calls.clear()
                    _, state = tx.update(tree(i, step), state, loss_scale=1.0)
                return [name for name, _, _ in spy.calls]

            return spied(steps)

        assert run_ranks(3, rank) == [["all_to_all", "all_to_all", "all_gather"]] * 3

    def test_an_owner_that_cannot_read_values_tells_the_others(self):
        def change(data):
            data[-9:] ^= 0xFF
            return data

        mismatch = "RankMismatchError"
        tx = self.chain(0.1, gx.topk(0.1))
        assert outcomes(change, 1, tx=tx) == [mismatch, "WireFormatError", mismatch]

    @pytest.mark.parametrize("density", [0.0, -0.1, 1.5, math.nan])
    def test_a_density_is_over_0_and_at_most_1(self, density):
        with pytest.raises(ValueError, match=r"allreduce\(density"):
            gx.allreduce(algorithm="sharded", density=density)

    @pytest.mark.parametrize("density", [1, "0.1", True])
    def test_a_density_is_a_float(self, density):
        with pytest.raises(TypeError, match=r"allreduce\(density"):
            gx.allreduce(algorithm="sharded", density=density)

    @pytest.mark.parametrize("algorithm", ["auto", "gather", "two_shot", "root"])
    def test_only_owners_of_positions_have_a_density(self, algorithm):
        text = rf"algorithm='{algorithm}', density=0.1\): it is for owners of positions; write "
        with pytest.raises(ValueError, match=text):
            gx.allreduce(algorithm=algorithm, density=0.1)

    def test_without_feedback_it_is_refused_since_sums_would_be_lost(self):
        exchange = gx.allreduce(algorithm="sharded", density=0.1)
        parts = (gx.topk(1.0, feedback=False), exchange)
        with pytest.raises(gx.ChainOrderError, match="GX307"):
            gx.chain(*parts)
        with pytest.raises(gx.ChainOrderError, match="GX307"):
            gx.chain(gx.masked(gx.error_feedback(gx.topk(0.1)), gx.is_matrix), *parts)
        # The witness: all is sent, and yet it is not in the result, nor anywhere else.
        tx = gx.chain(*parts, check=False)
        found = run(tx, lambda i, step: [torch.ones(100)], 2)
        assert int(found[0][0][0][0].count_nonzero()) == 10

    def test_without_compressors_it_is_refused_since_it_does_nothing(self):
        exchange = gx.allreduce(algorithm="sharded", density=0.1)
        with pytest.raises(gx.ChainOrderError, match="GX307"):
            gx.chain(exchange)
        found = run(gx.chain(exchange, check=False), lambda i, step: [torch.ones(100)], 2)
        assert bool((found[0][0][0][0] == 1).all())
