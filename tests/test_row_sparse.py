"""Row-sparse gradients, as ``Embedding(sparse=True)`` leaves them: exchanged as rows."""

import math

import hypothesis.strategies as st
import optax
import pytest
import torch
from hypothesis import given
from torch.nn.parallel import DistributedDataParallel

import gradtx as gx
from gradtx.checkpoint import flatten_state
from gradtx.core.errors import RankLostError
from gradtx.core.row_sparse import Rows, largest_rows
from gradtx.core.tree import parameters_of
from gradtx.exchange.group import default_group, find_group
from gradtx.stale.push import PushCodec
from gradtx.testing import run_ranks
from ranks import Spy, gloo_ranks, outcome

ROWS, WIDTH = 40, 3


class Words(torch.nn.Module):
    """Two tables, one of them looked up in bags, and a dense layer."""

    def __init__(self, sparse=True):
        super().__init__()
        self.words = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.bags = torch.nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse)
        self.out = torch.nn.Linear(WIDTH, 2)
        numbers = torch.Generator().manual_seed(0)  # Ranks are threads, with one generator.
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=numbers))

    def forward(self, x):
        return self.out(self.words(x).mean(1) + self.bags(x))


def batches(rank, steps, size=4):
    numbers = torch.Generator().manual_seed(rank)
    return [torch.randint(0, ROWS, (size, 2), generator=numbers) for _ in range(steps)]


def rows(indices, values, n=ROWS):
    values = torch.tensor(values)
    shape = (n, *values.shape[1:])
    return torch.sparse_coo_tensor([indices], values, shape, check_invariants=True)


def train(rank, chain, sparse, steps=4, lr=0.1):
    net = Words(sparse)
    pipe = gx.Pipeline(gx.chain(*chain), net)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.5)
    for x in batches(rank, steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        pipe.sync(optimizer)
        assert net.words.weight.grad.is_sparse is sparse
        optimizer.step()
    return dict(net.named_parameters()), pipe


CHAINS = {
    "dense": [gx.allreduce()],
    "sum, scaled": [gx.scale(0.5), gx.allreduce(op="sum")],
    "clipped": [gx.allreduce(), gx.clip_by_global_norm(0.01)],
    "clipped before": [gx.clip_by_local_norm(0.01), gx.allreduce()],
    "by a schedule": [gx.allreduce(), gx.scale_by_schedule(lambda step: 1 / (1 + step))],
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CHAINS)
def test_rows_are_what_a_dense_gradient_is(name, size):
    found = run_ranks(size, lambda rank: train(rank, CHAINS[name], sparse=True)[0])
    expected = run_ranks(size, lambda rank: train(rank, CHAINS[name], sparse=False)[0])
    for own, dense in zip(found, expected, strict=True):
        for path, value in own.items():
            assert torch.equal(value, found[0][path])
            torch.testing.assert_close(value, dense[path], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "chain",
    [
        [gx.topk(0.1), gx.ef(), gx.allreduce()],
        [gx.skip_bn(), gx.sign(), gx.ef(), gx.allreduce()],
        [gx.cast("float16"), gx.ef(), gx.allreduce()],
        [gx.powersgd(1), gx.ef(), gx.allreduce()],
        [gx.random_k(0.2), gx.ef(), gx.allreduce(algorithm="gather")],
    ],
    ids=repr,
)
def test_compressors_leave_rows_alone(chain):
    """No state is kept for them, and they are averaged in full."""

    def rank(number):
        params, pipe = train(number, chain, sparse=True, steps=1)
        return params["words.weight"], pipe.state_dict()["state"]

    def dense(number):
        return train(number, [gx.allreduce()], sparse=False, steps=1)[0]["words.weight"]

    expected = run_ranks(2, dense)[0]
    for weight, state in run_ranks(2, rank):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-8)
        assert not [key for key in state if "words" in key or "bags" in key]


tables = st.lists(
    st.one_of(
        st.none(),
        st.lists(st.tuples(st.integers(0, 6), st.integers(-8, 8)), max_size=12),
    ),
    min_size=1,
    max_size=5,
)


@given(tables, st.sampled_from(["mean", "sum"]))
def test_any_rows_of_any_ranks(given_rows, op):
    """Rows that come twice are added up; a rank without a gradient takes part."""
    size = len(given_rows)
    tx = gx.chain(gx.allreduce(op=op))

    def gradient(own):
        indices, values = [i for i, _ in own], [[float(x)] * 2 for _, x in own]
        values = torch.tensor(values).reshape(-1, 2)
        return torch.sparse_coo_tensor([indices], values, (7, 2), check_invariants=True)

    def rank(number):
        own = given_rows[number]
        grad = None if own is None else gradient(own)
        state = tx.init({"t": torch.zeros(7, 2).to_sparse(), "w": torch.zeros(1)})
        updates, _ = tx.update({"t": grad, "w": torch.ones(1)}, state)
        return updates["t"]

    found = run_ranks(size, rank)
    there = [own for own in given_rows if own is not None]
    if not there:
        assert found == [None] * size
        return
    total = sum(gradient(own).to_dense() for own in there) / (size if op == "mean" else 1)
    touched = sorted({i for own in there for i, _ in own})
    for result in found:
        assert result.is_coalesced()
        assert result.indices()[0].tolist() == touched
        torch.testing.assert_close(result.to_dense(), total, rtol=1e-6, atol=0)
        assert torch.equal(result.values(), found[0].values())


def test_what_is_sent_follows_the_rows():
    """And not the table."""

    def rank(number):
        net = torch.nn.Embedding(200_000, 8, sparse=True)
        pipe = gx.Pipeline(gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce()), net)
        sent = []
        for count in (10, 1000):
            net.zero_grad()
            net(torch.arange(count) * 7 + number).sum().backward()
            sent.append(pipe.sync().wire_bytes)
        assert pipe.state_dict()["state"].keys() == {
            "states.0.last_finite",
            "states.0.total_notfinite",
            "states.0.inner_states.1.count",
            "states.0.inner_states.1.finite",
        }
        return sent

    for few, many in run_ranks(2, rank):
        assert few < 1024 + 600  # With the handshake.
        assert 1000 * 8 * 4 < many < 1000 * (8 * 4 + 3)


def test_the_given_gradient_stays_as_it_is():
    tx = gx.chain(gx.unscale(), gx.allreduce())
    grad = rows([3, 1, 3], [[1.0], [2.0], [4.0]])
    state = tx.init({"t": torch.zeros(ROWS, 1).to_sparse()})
    updates, _ = tx.update({"t": grad}, state, loss_scale=2.0)
    assert updates["t"].indices().tolist() == [[1, 3]]
    assert updates["t"].values().tolist() == [[1.0], [2.5]]
    assert not grad.is_coalesced()
    assert grad._values().tolist() == [[1.0], [2.0], [4.0]]


def test_a_result_may_be_written_to():
    tx = gx.chain(gx.allreduce())
    grad = rows([1, 3], [[1.0], [2.0]]).coalesce()
    updates, _ = tx.update({"t": grad}, tx.init({"t": torch.zeros(ROWS, 1).to_sparse()}))
    updates["t"].values().mul_(2)
    assert grad.values().tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_row_skips_the_step_on_all_ranks(bad):
    tx = gx.chain(gx.unscale(), gx.topk(0.5), gx.ef(), gx.allreduce())
    params = {"t": torch.zeros(ROWS, 1).to_sparse(), "w": torch.zeros(4)}

    def rank(number):
        state = tx.init(params)
        values = [[bad if number else 1.0]]
        grads = {"t": rows([number], values), "w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
        updates, after = tx.update(grads, state, loss_scale=1.0)
        assert updates["t"]._nnz() == 0
        assert updates["t"].shape == (ROWS, 1)
        assert updates["w"].tolist() == [0.0] * 4
        assert after.residual["w"].tolist() == [0.0] * 4
        assert int(after.total_notfinite) == 1
        return True

    assert all(run_ranks(2, rank))


def test_a_bad_step_gives_the_same_on_a_rank_without_a_gradient():
    """And None for a table that no rank has used."""
    tx = gx.chain(gx.unscale(), gx.topk(0.5), gx.ef(), gx.allreduce())

    def rank(number):
        state = tx.init({k: torch.zeros(ROWS, 1).to_sparse() for k in "tu"})
        grads = {"t": None if number else rows([1], [[math.nan]]), "u": None}
        updates, _ = tx.update(grads, state, loss_scale=1.0)
        return updates["t"]._nnz(), updates["t"].shape, updates["u"]

    assert run_ranks(3, rank) == [(0, (ROWS, 1), None)] * 3


def test_a_gate_of_one_rank_alone_drops_its_rows():
    """It stands before the exchange, and only that rank knows of it."""
    gated = gx.masked(gx.apply_if_finite(gx.scale(2.0)), lambda path, leaf, info: path == "t")
    tx = gx.chain(gated, gx.allreduce())

    def rank(number):
        state = tx.init({k: torch.zeros(ROWS, 1).to_sparse() for k in "tu"})
        grads = {k: rows([number], [[1.0 if number else math.inf]]) for k in "t"}
        updates, _ = tx.update({**grads, "u": rows([2], [[3.0]])}, state)
        return [(updates[k].indices().tolist(), updates[k].values().tolist()) for k in "tu"]

    assert run_ranks(2, rank) == [[([[1]], [[1.0]]), ([[2]], [[3.0]])]] * 2


def test_a_sum_that_overflows_is_a_bad_step():
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())

    def rank(number):
        state = tx.init({"t": torch.zeros(ROWS, 1).to_sparse()})
        updates, after = tx.update({"t": rows([2], [[3e38]])}, state)
        return updates["t"]._nnz(), int(after.total_notfinite)

    assert run_ranks(2, rank) == [(0, 1)] * 2


def test_what_overflows_in_16_bits_is_a_bad_step():
    for tx in (gx.chain(gx.topk(0.5), gx.ef()), gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())):
        state = tx.init({"t": torch.zeros(ROWS, 1, dtype=torch.float16).to_sparse()})
        values = torch.tensor([[60000.0], [60000.0]], dtype=torch.float16)
        grad = torch.sparse_coo_tensor([[1, 1]], values, (ROWS, 1), check_invariants=True)
        updates, after = tx.update({"t": grad}, state)
        assert (updates["t"]._nnz(), int(after.total_notfinite)) == (0, 1)


def test_a_chain_that_is_not_gated_hands_on_what_is_not_finite():
    def rank(number):
        tx = gx.chain(gx.allreduce())
        state = tx.init({"t": torch.zeros(ROWS, 1).to_sparse()})
        return tx.update({"t": rows([2], [[math.inf]])}, state)[0]["t"].values().tolist()

    assert run_ranks(2, rank) == [[[math.inf]]] * 2


def test_16_bits_are_added_up_in_32():
    """Also rows that come twice on one rank, for which torch would round."""
    tx = gx.chain(gx.unscale(), gx.cast("float16"), gx.ef(), gx.allreduce())

    def rank(number):
        state = tx.init({"t": torch.zeros(ROWS, 1, dtype=torch.float16).to_sparse()})
        values = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
        grad = torch.sparse_coo_tensor([[5, 5, 5]], values, (ROWS, 1), check_invariants=True)
        return tx.update({"t": grad}, state, loss_scale=1.0)[0]["t"]

    for found in run_ranks(2, rank):
        assert found.dtype == torch.float16
        assert found.values().tolist() == [[2050.0]]


def test_a_rank_that_fails_tells_the_others():
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())

    def rank(number):
        state = tx.init({"t": torch.zeros(ROWS, 1).to_sparse(), "w": torch.zeros(4)})
        good = {"t": rows([1], [[1.0]]), "w": torch.ones(4)}
        _, state = tx.update(good, state)
        bad = {"t": torch.zeros(ROWS, 1) if number else rows([1], [[1.0]]), "w": torch.ones(4)}
        said = outcome(tx.update, bad, state)
        updates, _ = tx.update(good, state)
        return said, updates["t"].values().tolist()

    first, second = run_ranks(2, rank)
    assert first[0][0] == "RankMismatchError"
    assert "rank 1 failed" in first[0][1]
    assert second[0] == (
        "TypeError",
        "leaf 't' was row-sparse at init and has a dense gradient: build the layer with "
        "sparse=False if it is used in another way too",
    )
    assert first[1] == second[1] == [[1.0]]


def test_ranks_that_disagree_on_what_is_sparse_are_told():
    tx = gx.chain(gx.allreduce())

    def rank(number):
        params = {"t": torch.zeros(ROWS, 1)}
        grad = torch.zeros(ROWS, 1)
        if number:
            params, grad = {"t": params["t"].to_sparse()}, rows([1], [[1.0]])
        return outcome(tx.update, {"t": grad}, tx.init(params))

    for kind, text in run_ranks(2, rank):
        assert kind == "RankMismatchError"
        assert f"[{ROWS}, 1] float32 in rows" in text


# Top-k of rows.


def reference(gradients, share):
    """The rows of the largest norm, of what is left and what comes: one rank, loops."""
    residual = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    k = max(1, round(share * ROWS))
    for grad in gradients:
        residual += grad
        norms = [(-float(row.square().sum()), i) for i, row in enumerate(residual)]
        chosen = [i for norm, i in sorted(norms)[:k] if norm < 0]
        sent = torch.zeros_like(residual)
        for i in chosen:
            sent[i], residual[i] = residual[i], 0
        yield sent, residual.clone()


@pytest.mark.parametrize(
    "options", [{}, {"values": "float16"}, {"scope": "global"}], ids=["plain", "fp16", "global"]
)
def test_the_rows_of_the_largest_norm_are_sent(options):
    share, size, steps = 0.1, 2, 6
    tx = gx.chain(gx.topk(0.5, rows=share, **options), gx.ef(), gx.allreduce(op="sum"))

    def gradients(number):
        numbers = torch.Generator().manual_seed(number)
        for _ in range(steps):
            indices = torch.randint(0, ROWS, (1, 9), generator=numbers)
            values = torch.randn(9, WIDTH, generator=numbers)
            yield torch.sparse_coo_tensor(indices, values, (ROWS, WIDTH), check_invariants=True)

    def rank(number):
        state = tx.init({"t": torch.zeros(ROWS, WIDTH).to_sparse(), "w": torch.zeros(8)})
        out = []
        for grad in gradients(number):
            updates, state = tx.update({"t": grad, "w": torch.ones(8)}, state)
            out.append((updates["t"].to_dense(), state.residual["t"]))
        return out

    found = run_ranks(size, rank)
    expected = [
        list(reference([g.to_dense().double() for g in gradients(i)], share)) for i in range(size)
    ]
    for step in range(steps):
        total = sum(expected[i][step][0] for i in range(size)).float()
        for i in range(size):
            sent, residual = found[i][step]
            torch.testing.assert_close(sent, total, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(residual, expected[i][step][1].float(), rtol=1e-5, atol=1e-6)


def test_a_rank_without_a_gradient_keeps_its_residual():
    tx = gx.chain(gx.topk(0.5, rows=1 / ROWS), gx.ef(), gx.allreduce())

    def rank(number):
        state = tx.init({"t": torch.zeros(ROWS, 1).to_sparse()})
        updates, state = tx.update({"t": rows([1, 2], [[3.0], [1.0]])}, state)
        assert updates["t"].indices().tolist() == [[1]]
        grad = None if number else rows([4], [[0.5]])
        updates, after = tx.update({"t": grad}, state)
        return updates["t"].to_dense()[2].item(), after.residual["t"][2].item()

    assert run_ranks(2, rank) == [(0.5, 0.0), (0.5, 1.0)]


def test_no_feedback_chooses_among_the_rows_that_come():
    tx = gx.chain(gx.topk(0.5, rows=2 / ROWS, feedback=False), gx.allreduce())
    state = tx.init({"t": torch.zeros(ROWS, 2).to_sparse()})
    grad = rows([9, 4, 7, 1], [[3.0, 4.0], [5.0, 0.0], [4.0, 4.0], [0.0, 1.0]])
    updates, _ = tx.update({"t": grad}, state)
    # 4 and 9 have the same norm.
    assert updates["t"].indices().tolist() == [[4, 7]]
    assert state.residual is None


@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.topk(gx.warmup_density([0.5, 0.25], 1), rows=1 / ROWS), gx.ef()),
        gx.chain(gx.masked(gx.topk(0.5, rows=1 / ROWS), gx.is_matrix), gx.ef()),
        gx.chain(gx.topk(0.5, rows=3 / ROWS), gx.topk(0.5, rows=1 / ROWS), gx.ef()),
    ],
    ids=["by a schedule", "masked", "twice"],
)
def test_rows_are_chosen_wherever_the_compressor_stands(tx):
    tx = gx.chain(tx, gx.allreduce())
    state = tx.init({"t": torch.zeros(ROWS, 1).to_sparse(), "w": torch.zeros(4, 1)})
    given = rows([1, 2], [[3.0], [2.0]]), rows([1], [[0.0]])
    for grad, sent, left in zip(given, (1, 2), (2.0, 0.0), strict=True):
        updates, state = tx.update({"t": grad, "w": torch.ones(4, 1)}, state)
        assert updates["t"].indices().tolist() == [[sent]]
        assert float(state.residual["t"].sum()) == left


def test_only_what_chooses_rows_keeps_something_of_a_table():
    chosen = gx.error_feedback(gx.topk(0.5, rows=0.5))
    parts = [gx.masked(chosen, lambda path, leaf, info: path == "a")]
    for inner in (gx.error_feedback(gx.powersgd(1)), gx.error_feedback(gx.sign())):
        parts.append(gx.masked(inner, lambda path, leaf, info: path == "b"))
        tx = gx.chain(*parts, gx.allreduce(), check=False)
        state = tx.init({k: torch.zeros(ROWS, 8).to_sparse() for k in "ab"})
        kept = [key for key, x in flatten_state(state).items() if getattr(x, "ndim", 0)]
        assert kept == ["states.0.inner_states.0.inner_state.residual.a"]
        grads = {k: rows([1, 2], [[3.0] * 8, [1.0] * 8]) for k in "ab"}
        updates, state = tx.update(grads, state)
        assert updates["b"].indices().tolist() == [[1, 2]]
        parts.pop()


def test_a_mask_within_feedback_lets_other_rows_past():
    tx = gx.chain(
        gx.masked(gx.topk(0.5, rows=1 / ROWS), lambda path, leaf, info: path == "b"),
        gx.ef(),
        gx.allreduce(),
    )
    state = tx.init({k: torch.zeros(ROWS, 1).to_sparse() for k in "ab"})
    updates, state = tx.update({k: rows([1, 2], [[3.0], [1.0]]) for k in "ab"}, state)
    assert updates["a"].indices().tolist() == [[1, 2]]
    assert updates["b"].indices().tolist() == [[1]]
    assert float(state.residual["b"].sum()) == 1.0


def test_a_filter_keeps_rows_whole():
    tx = gx.chain(
        gx.filter_params(lambda path, leaf, info: path != "a"),
        gx.topk(0.5, rows=1 / ROWS),
        gx.ef(),
        gx.allreduce(),
    )
    state = tx.init({k: torch.zeros(ROWS, 1).to_sparse() for k in "ab"})
    grads = {k: rows([1, 2], [[3.0], [1.0]]) for k in "ab"}
    updates, state = tx.update(grads, state)
    assert updates["a"].indices().tolist() == [[1, 2]]
    assert updates["b"].indices().tolist() == [[1]]
    assert state.residual["a"] is None
    assert state.residual["b"][2].item() == 1.0


def test_a_bad_step_leaves_no_trace_in_the_residual():
    tx = gx.chain(gx.unscale(), gx.topk(0.5, rows=1 / ROWS), gx.ef(), gx.allreduce())
    state = tx.init({"t": torch.zeros(ROWS, 1).to_sparse()})
    _, state = tx.update({"t": rows([1, 2], [[3.0], [1.0]])}, state, loss_scale=1.0)
    before = state.residual["t"].clone()
    updates, after = tx.update({"t": rows([1], [[math.nan]])}, state, loss_scale=1.0)
    assert updates["t"]._nnz() == 0
    assert torch.equal(after.residual["t"], before)


def test_tiny_and_huge_rows_are_told_apart():
    """Their squares are zero or infinite in FP32."""
    for scale in (1e-30, 1e30):
        values = torch.tensor([[1.0], [3.0], [2.0]]) * scale
        found = largest_rows(0.1, Rows(values, torch.arange(3), (10, 1), "float32"))
        assert found.indices.tolist() == [1]


def test_a_checkpoint_has_the_residual_and_goes_on_as_before():
    chain = [gx.topk(0.5, rows=0.1), gx.ef(), gx.allreduce()]
    params, pipe = train(0, chain, sparse=True)
    saved = pipe.state_dict()
    assert saved["state"]["states.0.inner_states.0.residual.words.weight"].shape == (ROWS, WIDTH)
    net = Words()
    net.load_state_dict(params)
    other = gx.Pipeline(gx.chain(*chain), net)
    other.load_state_dict(saved)
    for pipeline, model in ((pipe, None), (other, net)):
        weight = params["words.weight"] if model is None else model.words.weight
        weight.grad = rows([5], [[1.0, 2.0, 3.0]])
        pipeline.sync()
    assert torch.equal(params["words.weight"].grad.to_dense(), net.words.weight.grad.to_dense())


# What takes part, and what does not.


@pytest.mark.parametrize(
    "chain",
    [
        [gx.accumulate(2), gx.allreduce()],
        [gx.delayed(steps=1), gx.allreduce()],
        [gx.topk(0.1), gx.momentum_correction(0.9), gx.allreduce()],
        [gx.allreduce(), gx.add_decayed_weights(0.1)],
        [gx.allreduce(), gx.from_optax(optax.trace(0.9))],
    ],
    ids=lambda chain: gx.chain(*chain).code()[9:40],
)
def test_stages_that_need_dense_gradients_say_so(chain):
    tx = gx.chain(*chain)
    with pytest.raises(ValueError, match=r"leaf 'bags.weight' has row-sparse gradients, and gx\."):
        tx.init(Words())
    tx.init(Words(sparse=False))


def test_a_window_says_what_to_do_instead():
    with pytest.raises(ValueError, match="sync once for several backward passes"):
        gx.Pipeline(gx.chain(gx.accumulate(2), gx.allreduce()), Words())


@pytest.mark.parametrize(
    ("chain", "options", "text"),
    [
        ([gx.allreduce(), gx.master_weights()], {}, "the chain has master_weights()"),
        ([gx.allreduce()], {"overlap": True}, "overlap=True, for dense ones: build"),
    ],
)
def test_a_pipeline_refuses_what_it_cannot_do_with_rows(chain, options, text):
    with pytest.raises(ValueError, match=r"'bags.weight' has row-sparse gradients") as error:
        gx.Pipeline(gx.chain(*chain), Words(), **options)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("grad", "kind", "text"),
    [
        (torch.eye(ROWS).to_sparse(), TypeError, "leaf 't' is sparse in 2 dimensions: expected"),
        (torch.zeros(ROWS, ROWS), TypeError, "was row-sparse at init and has a dense gradient"),
        (rows([1], [[1.0]]), ValueError, "has shape (40, 1): expected (40, 40), as at init"),
        (rows([1], [[1.0] * ROWS]).double(), TypeError, "has dtype float64: expected float32"),
        (3.0, TypeError, "leaf 't' is a float: expected rows of [40, 40]"),
    ],
)
def test_a_gradient_of_another_kind_is_refused(grad, kind, text):
    tx = gx.chain(gx.allreduce())
    state = tx.init({"t": torch.zeros(ROWS, ROWS).to_sparse()})
    with pytest.raises(kind) as error:
        tx.update({"t": grad}, state)
    assert text in str(error.value)


def test_rows_without_a_word_at_init_are_refused():
    tx = gx.chain(gx.allreduce())
    state = tx.init({"t": torch.zeros(ROWS, 1)})
    with pytest.raises(TypeError, match="dense gradient, as at init; write sparse=False"):
        tx.update({"t": rows([1], [[1.0]])}, state)


def test_a_table_that_is_used_densely_too_counts_as_dense():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
            self.out = torch.nn.Linear(WIDTH, ROWS, bias=False)
            self.out.weight = self.words.weight

    net = Tied()
    pipe = gx.Pipeline(gx.chain(gx.allreduce()), net)
    net.out(net.words(torch.tensor([1, 2]))).square().mean().backward()
    pipe.sync()
    assert not net.words.weight.grad.is_sparse


def test_only_the_table_of_a_lookup_is_row_sparse():
    class Scaled(torch.nn.Embedding):
        def __init__(self):
            super().__init__(ROWS, WIDTH, sparse=True)
            self.gain = torch.nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return super().forward(x) * self.gain

    net = Scaled()
    pipe = gx.Pipeline(gx.chain(gx.allreduce()), net)
    net(torch.tensor([1, 2])).sum().backward()
    pipe.sync()
    assert net.weight.grad.is_sparse
    assert not net.gain.grad.is_sparse


def test_a_worker_at_its_own_pace_is_refused():
    tx = gx.chain(gx.topk(0.1), gx.ef())
    with pytest.raises(ValueError, match=r"leaf 'bags.weight' has row-sparse gradients, and what"):
        PushCodec(tx, *parameters_of(Words()))


def test_explain_names_the_leaves_that_go_as_rows():
    text = gx.explain(gx.chain(gx.allreduce()), Words(), ranks=2)
    assert "and the rows of 'bags.weight', 'words.weight', as many as a step has" in text
    text = gx.explain(gx.chain(gx.allreduce()), torch.nn.Embedding(4, 2, sparse=True), ranks=2)
    assert text.endswith("at most\n  and the rows of 'weight', as many as a step has")


@pytest.mark.parametrize("share", [0.0, 1.5, 1, "0.1"])
def test_a_share_of_rows_is_a_ratio(share):
    with pytest.raises((TypeError, ValueError), match=r"topk\(rows="):
        gx.topk(0.1, rows=share)


def test_the_code_of_a_chain_tells_of_rows():
    tx = gx.chain(gx.topk(0.1, rows=0.2), gx.ef(), gx.allreduce())
    assert tx.code() == "gx.chain(gx.topk(0.1, rows=0.2), gx.ef(), gx.allreduce())"
    assert tx != gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce())


# Two exchanges.


@pytest.mark.parametrize("share", [None, 0.1])
def test_a_node_is_one_rank_with_the_mean_of_its_rows(share):
    steps = 3

    def gradient(number, step):
        numbers = torch.Generator().manual_seed(10 * step + number)
        indices = torch.randint(0, ROWS, (1, 6), generator=numbers)
        values = torch.randint(-8, 8, (6, 2), generator=numbers).float()
        grad = torch.sparse_coo_tensor(indices, values, (ROWS, 2), check_invariants=True)
        return None if (number, step) == (1, 1) else grad

    def run(tx, given):
        state, out = tx.init({"t": torch.zeros(ROWS, 2).to_sparse(), "w": torch.zeros(4)}), []
        for step in range(steps):
            updates, state = tx.update({"t": given(step), "w": torch.ones(4)}, state)
            out.append(updates["t"].to_dense())
        return out

    def rank(number):
        inner, outer = gx.node_groups(2)
        parts = gx.allreduce(inner), gx.topk(0.5, rows=share), gx.ef(), gx.allreduce(outer)
        return run(gx.chain(*parts), lambda step: gradient(number, step))

    def node(number):
        def mean(step):
            own = [gradient(2 * number + i, step) for i in range(2)]
            first, *others = [g / 2 for g in own if g is not None]
            return sum(others, first)

        return run(gx.chain(gx.topk(0.5, rows=share), gx.ef(), gx.allreduce()), mean)

    found, expected = run_ranks(4, rank), run_ranks(2, node)
    for own in found:
        for one, other in zip(own, expected[0], strict=True):
            assert torch.equal(one, other)


def test_rows_of_a_node_that_overflow_are_a_bad_step_on_all_nodes():
    def rank(number):
        inner, outer = gx.node_groups(2)
        tx = gx.chain(gx.allreduce(inner), gx.topk(0.5, rows=0.1), gx.ef(), gx.allreduce(outer))
        state = tx.init({"t": torch.zeros(ROWS, 1).to_sparse()})
        grad = rows([2], [[3e38 if number < 2 else 1.0]])
        updates, after = tx.update({"t": grad}, state)
        return updates["t"]._nnz(), int(after.total_notfinite), float(after.residual["t"].sum())

    assert run_ranks(4, rank) == [(0, 1, 0.0)] * 4


@pytest.mark.parametrize("sparse", [True, False])
def test_a_table_that_forward_passes_shrink_is_refused_on_several_ranks(sparse):
    """Each shrinks the rows that it looks up."""
    net = torch.nn.Sequential(torch.nn.Embedding(ROWS, WIDTH, max_norm=1.0, sparse=sparse))
    text = "layer '0' has max_norm=1.0: its forward pass shrinks the rows that this rank looks up"
    tx = gx.chain(gx.allreduce())
    for kind, said in run_ranks(2, lambda rank: outcome(gx.Pipeline, tx, net)):
        assert (kind, said[: len(text)]) == ("ValueError", text)
    gx.Pipeline(tx, net)


# Real ranks.


def over_gloo(rank):
    """A Pipeline, DDP with a hook, and plain dense DDP, on the same batches; then two stages."""
    found = {}
    for share in (None, 0.1):
        chain = [gx.unscale(), gx.topk(1.0, rows=share), gx.ef(), gx.allreduce()]
        for name in ("pipe", "hook"):
            net = Words()
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            model, pipe = net, None
            if name == "pipe":
                pipe = gx.Pipeline(gx.chain(*chain), net, scaler=scaler)
            else:
                model = DistributedDataParallel(net, bucket_cap_mb=1e-4)
                hook = gx.ddp_hook(gx.chain(*chain), model, scaler=scaler)
                model.register_comm_hook(None, hook)
            skipped = []
            for t, x in enumerate(batches(rank, 4)):
                optimizer.zero_grad()
                handle = net.words.weight.register_hook(spoil if t == 2 and rank == 1 else same)
                scaler.scale(model(x).square().mean()).backward()
                handle.remove()
                report = hook.report if pipe is None else pipe.sync(optimizer)
                skipped.append(report.skipped)
                scaler.step(optimizer)
                scaler.update()
            found[name, share] = dict(net.named_parameters()), skipped, scaler.get_scale()
    model = DistributedDataParallel(Words())
    model.register_comm_hook(
        None, gx.ddp_hook(gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce()), model)
    )
    own = batches(rank, 3)
    with model.no_sync():
        model(own[0]).square().mean().backward()
    model(own[1]).square().mean().backward()
    found["window"] = model.module.words.weight.grad.to_dense()
    found["again"] = outcome(lambda: model(own[2]).square().mean().backward())
    shrinking = DistributedDataParallel(torch.nn.Embedding(4, 2, max_norm=1.0))
    found["max_norm"] = outcome(gx.ddp_hook, gx.chain(gx.allreduce()), shrinking)
    net = Words(sparse=False)
    model = DistributedDataParallel(net)
    with model.no_sync():
        model(own[0]).square().mean().backward()
    model(own[1]).square().mean().backward()
    found["dense window"] = net.words.weight.grad.clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for t, x in enumerate(batches(rank, 4)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if t != 2:
            optimizer.step()
    found["dense"] = dict(net.named_parameters())
    return found


def same(grad):
    return grad


def spoil(grad):
    return torch.sparse_coo_tensor(
        grad._indices(), grad._values() * math.inf, grad.shape, check_invariants=True
    )


def test_a_pipeline_and_ddp_do_the_same():
    found = gloo_ranks(2, over_gloo)
    skipped = [False, False, True, False]
    for own in found:
        for share in (None, 0.1):
            for name in ("pipe", "hook"):
                params, when, scale = own[name, share]
                assert (when, scale) == (skipped, 128.0)
                for path, value in params.items():
                    assert torch.equal(value, found[0]["pipe", share][0][path])
        for path, value in own["pipe", None][0].items():
            torch.testing.assert_close(value, own["dense"][path], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(own["window"], own["dense window"], rtol=1e-5, atol=1e-7)
        kind, text = own["max_norm"]
        assert (kind, text[:27]) == ("ValueError", "layer '' has max_norm=1.0: ")
        kind, text = own["again"]
        assert kind == "RuntimeError"
        assert "'words.weight' were added to what the last exchange had left" in text


class Breaking(Spy):
    """A group that breaks off at the last gather of a step, that of rows, once it is told to."""

    last = None

    def all_gather(self, message):
        if self.last is not None:
            self.last -= 1
            if self.last < 0:
                raise RankLostError("gone")
        return super().all_gather(message)


def test_gradients_are_as_they_were_where_the_exchange_of_rows_breaks_off():
    """Sums take their place, but only once all ranks have answered to the end."""

    def rank(number):
        group = Breaking(find_group(None))
        with default_group(group):
            net = Words()
            tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(algorithm="gather"))
            pipe = gx.Pipeline(tx, net)
            for step, x in enumerate(batches(number, 2)):
                net.zero_grad()
                net(x).square().mean().backward()
                before = net.out.weight.grad.clone()
                group.last = 2 if step else None  # After the message, and the counts of rows.
                said = outcome(pipe.sync)
        return said, torch.equal(net.out.weight.grad, before)

    for said, same in run_ranks(2, rank):
        assert said == ("RankLostError", "gone")
        assert same
