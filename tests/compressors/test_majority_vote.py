"""`sign(majority_vote=True)`: the sign that most ranks have."""

import re

import pytest
import torch

import gradtx as gx
from gradtx.exchange.group import find_group
from gradtx.testing import check_laws, run_ranks


def vote(rows, algorithm="auto", op="mean"):
    """The result on the first rank, each row being the gradient of a rank (None: no gradient)."""
    tx = gx.chain(gx.sign(majority_vote=True), gx.allreduce(algorithm=algorithm, op=op))
    like = next(row for row in rows if row is not None)

    def rank(i):
        leaf = None if rows[i] is None else torch.tensor(rows[i])
        return tx.update({"w": leaf}, tx.init({"w": torch.tensor(like)}))[0]["w"]

    first, *others = run_ranks(len(rows), rank)
    assert all(torch.equal(first, other) for other in others)
    return first.tolist()


@pytest.mark.parametrize("algorithm", ["auto", "gather"])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_most_ranks_decide_whatever_the_magnitudes(algorithm, op):
    rows = [[1.0, -1.0, 5.0], [1.0, -1.0, -0.1], [-9.0, 8.0, -0.1]]
    assert vote(rows, algorithm, op) == [1, -1, -1]


@pytest.mark.parametrize("algorithm", ["auto", "gather"])
def test_tie_gives_zero(algorithm):
    assert vote([[3.0, -1.0, 1.0], [-1.0, 1.0, 1.0]], algorithm) == [0, 0, 1]


@pytest.mark.parametrize("algorithm", ["auto", "gather"])
def test_zero_votes_for_one(algorithm):
    assert vote([[0.0, -0.0], [-1.0, 1.0]], algorithm) == [0, 1]


@pytest.mark.parametrize("algorithm", ["auto", "gather"])
def test_rank_without_a_gradient_does_not_vote(algorithm):
    assert vote([[-1.0, 1.0], None, None], algorithm) == [-1, 1]


def test_one_rank_gives_its_signs():
    assert vote([[2.0, -3.0, 0.0]]) == [1, -1, 1]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 65])
def test_length_need_not_be_a_multiple_of_eight(n):
    leaves = [torch.randn(n, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    expected = sum(leaf.sign() for leaf in leaves).sign().tolist()
    assert vote([leaf.tolist() for leaf in leaves], "gather") == expected


def test_large_leaf_costs_one_bit_a_value():
    n = 8000
    tx = gx.chain(gx.sign(majority_vote=True), gx.allreduce())

    def rank(i):
        group, grads = find_group(), [torch.randn(n, generator=torch.Generator().manual_seed(i))]
        _, state = tx.update(grads, tx.init(grads))
        before = group.sent
        tx.update(grads, state)
        return group.sent - before

    assert run_ranks(2, rank) == [n // 8 + 48] * 2


def test_many_ranks_travel_dense_and_give_the_same():
    rows = [[float((i + j) % 3 - 1) or 1.0 for j in range(300)] for i in range(5)]
    assert vote(rows) == vote(rows, "gather")


def test_fragment_gives_signs():
    tx = gx.sign(majority_vote=True)
    grads = [torch.tensor([2.0, -3.0])]
    assert tx.update(grads, tx.init(grads))[0][0].decode().tolist() == [1, -1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_result_has_the_dtype_of_the_leaf(dtype):
    tx = gx.chain(gx.sign(majority_vote=True), gx.allreduce())
    grads = [torch.tensor([2.0, -3.0], dtype=dtype)]
    assert torch.equal(tx.update(grads, tx.init(grads))[0][0], grads[0].sign())


@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.unscale(), gx.sign(majority_vote=True), gx.allreduce()),
        gx.chain(gx.skip_bn(), gx.sign(majority_vote=True), gx.allreduce(op="sum")),
    ],
    ids=repr,
)
def test_laws(tx):
    check_laws(tx, steps=3)


def test_no_feedback_is_asked_for():
    assert gx.chain(gx.sign(majority_vote=True), gx.allreduce()).exchange is not None


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((gx.sign(majority_vote=True), gx.ef()), "GX306"),
        ((gx.sign(majority_vote=True), gx.momentum_correction(0.9)), "GX306"),
        ((gx.topk(0.5, feedback=False), gx.sign(majority_vote=True)), "GX301"),
        ((gx.sign(majority_vote=True), gx.topk(0.5, feedback=False)), "GX301"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(gx.chain(*value, check=False)),
)
def test_wrong_order_is_refused(parts, code):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts, gx.allreduce())
    assert [violation.code for violation in caught.value.violations] == [code]


@pytest.mark.parametrize(
    "parts",
    [
        (gx.topk(0.5), gx.sign(majority_vote=True)),
        (gx.sign(majority_vote=True), gx.topk(0.5)),
    ],
    ids=repr,
)
def test_form_that_is_refused_fails_unchecked(parts):
    tx = gx.chain(*parts, check=False)
    with pytest.raises(TypeError):
        tx.update([torch.ones(8)], tx.init([torch.ones(8)]))


def test_feedback_over_a_vote_loses_gradient():
    # The witness of GX306: what the ranks believe to have sent is not what the vote makes of it.
    tx = gx.chain(gx.sign(majority_vote=True), gx.ef(), gx.allreduce(), check=False)

    def rank(i):
        grads = {"w": torch.tensor([4.0 if i == 0 else -1.0])}
        updates, state = tx.update(grads, tx.init(grads))
        return updates["w"].item(), state.gate.inner_states[0].residual["w"].item()

    results = run_ranks(3, rank)
    mean_residual = sum(residual for _, residual in results) / 3
    assert results[0][0] + mean_residual != pytest.approx((4.0 - 1.0 - 1.0) / 3)


def test_a_bad_step_of_a_fragment_votes_for_nothing():
    tx = gx.chain(gx.sign(majority_vote=True))
    grads = {"w": torch.tensor([1.0, torch.inf])}
    updates, _ = tx.update(grads, tx.init(grads))
    assert torch.equal(updates["w"].decode(), torch.zeros(2))


def test_mean_square_scale_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"^sign\(scale='rms'\): the root mean square is no contr"):
        gx.sign(scale="rms")


def test_mean_square_scale_is_no_contraction():
    leaf = torch.tensor([10.0] + [0.1] * 15)
    error = leaf - leaf.sign() * leaf.square().mean().sqrt()
    assert error.norm() > leaf.norm()


@pytest.mark.parametrize("scale", ["L1", "max", None, 1])
def test_other_scale_is_refused(scale):
    text = f"sign(scale={scale!r}): expected 'l1', the mean magnitude"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        gx.sign(scale=scale)


def test_vote_that_is_no_bool_is_refused():
    text = re.escape("sign(majority_vote=1): expected True or False")
    with pytest.raises(TypeError, match=f"^{text}$"):
        gx.sign(majority_vote=1)
