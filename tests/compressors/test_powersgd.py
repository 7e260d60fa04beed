"""`powersgd`: matrices of low rank, in two summed rounds."""

import re

import pytest
import torch

import gradtx as gx
from gradtx.compressors.powersgd import RowRound, orthonormal_each
from gradtx.exchange.group import find_group
from gradtx.testing import check_laws, run_ranks

INF, NAN = float("inf"), float("nan")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def of_rank(r, n, m, seed=0):
    return normal(n, r, seed=seed) @ normal(r, m, seed=seed + 1000)


def run(tx, trees, steps=1, size=1):
    """Outputs and states of each rank; ``trees[i]`` are the gradients of rank i, in every step."""

    def rank(i):
        state, outputs, states = tx.init(trees[i]), [], []
        for _ in range(steps):
            updates, state = tx.update(trees[i], state)
            outputs.append(updates)
            states.append(state)
        return outputs, states

    return run_ranks(size, rank)


def chained(rank=2, **options):
    return gx.chain(gx.powersgd(rank, **options), gx.ef(), gx.allreduce())


def feedback_of(state):
    return state.gate.inner_states[0]


def guess_of(state):
    return feedback_of(state).inner_states[0].guess


def close(a, b, rel=1e-5):
    return (a - b).norm() <= rel * b.norm()


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_zero_gradient_gives_zeros_and_the_next_is_seen(warm_start, size):
    tx, zero, matrix = chained(warm_start=warm_start), torch.zeros(12, 9), of_rank(2, 12, 9)

    def rank(i):
        state = tx.init([zero])
        for _ in range(3):
            updates, state = tx.update([zero], state)
            assert torch.equal(updates[0], zero)
        return tx.update([matrix], state)[0][0]

    assert all(close(result, matrix) for result in run_ranks(size, rank))


def test_matrix_that_is_zero_where_a_plain_guess_would_look_is_seen():
    matrix = torch.zeros(12, 9)
    matrix[7, 8] = 3.0
    tx = chained()
    state = tx.init([matrix])
    _, state = tx.update([torch.zeros(12, 9)], state)
    updates, _ = tx.update([matrix], state)
    assert close(updates[0], matrix)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ones_at_rank_2_are_exact_and_not_doubled(size):
    ones = torch.ones(64, 32)
    for outputs, states in run(chained(2), [[ones]] * size, steps=3, size=size):
        assert all(close(updates[0], ones, 1e-6) for updates in outputs)
        assert feedback_of(states[-1]).residual[0].norm() < 1e-5 * ones.norm()


def test_several_matrices_of_one_shape_are_each_exact():
    # Normalised over the whole batch, the small ones would vanish.
    grads = {str(i): of_rank(1, 20, 10, seed=i) * 10.0 ** (3 * i - 6) for i in range(5)}
    ((outputs, _),) = run(chained(2), [grads])
    assert all(close(outputs[0][path], grads[path]) for path in grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_columns_whose_norm_overflows(dtype):
    matrix = torch.full((64, 32), 3e4).to(dtype)
    ((outputs, _),) = run(chained(1), [[matrix]])
    assert outputs[0][0].dtype == dtype
    assert close(outputs[0][0].float(), matrix.float(), 1e-2)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("warm_start", [True, False])
def test_squares_that_overflow_or_underflow_do_no_harm(scale, warm_start):
    matrix = of_rank(2, 16, 12) * scale
    ((outputs, _),) = run(chained(2, warm_start=warm_start), [[matrix]], steps=3)
    assert all(close(updates[0] / scale, matrix / scale, 1e-4) for updates in outputs)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_bad_step_leaves_residual_and_guess_untouched(bad):
    tx = chained(1)

    def rank(i):
        grads = [normal(8, 6, seed=i)]
        _, state = tx.update(grads, tx.init(grads))
        wrong = [grads[0].clone()]
        wrong[0][3, 3] = bad if i == 1 else 0.0
        updates, after = tx.update(wrong, state)
        assert not updates[0].any()
        assert int(after.total_notfinite) == 1
        assert torch.equal(feedback_of(after).residual[0], feedback_of(state).residual[0])
        assert torch.equal(guess_of(after)[0], guess_of(state)[0])
        one, other = tx.update(grads, after), tx.update(grads, state)
        return torch.equal(one[0][0], other[0][0])

    assert all(run_ranks(2, rank))


def test_overflow_in_the_sum_is_a_bad_step():
    tx, matrix = chained(1), torch.full((8, 6), 3e38)
    for outputs, states in run(tx, [[matrix]] * 2, size=2):
        assert not outputs[0][0].any()
        assert int(states[0].total_notfinite) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("r", [1, 3])
def test_exact_when_the_mean_has_low_rank(size, r):
    # Each rank's own matrix has full rank; only their mean does not.
    mean, noise = of_rank(r, 15, 14), [normal(15, 14, seed=i) for i in range(size)]
    drift = sum(noise) / size
    trees = [[mean + (own - drift)] for own in noise]
    for outputs, states in run(chained(r), trees, size=size):
        assert close(outputs[0][0], mean, 1e-5)
        del states


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("warm_start", [True, False])
def test_mean_residual_is_the_mean_matrix_less_the_result(size, warm_start):
    trees = [[normal(10, 12, seed=i)] for i in range(size)]
    results = run(chained(2, warm_start=warm_start), trees, steps=3, size=size)
    sent = sum(updates[0] for updates in results[0][0])
    left = sum(feedback_of(states[-1]).residual[0] for _, states in results) / size
    assert close(sent + left, 3 * sum(tree[0] for tree in trees) / size)
    last = results[0][0][-1][0]
    for rank, (outputs, states) in enumerate(results):
        before = feedback_of(states[-2]).residual[0] + trees[rank][0]
        assert torch.allclose(feedback_of(states[-1]).residual[0], before - last, atol=1e-5)
        assert torch.equal(outputs[-1][0], last)


def test_result_depends_on_the_mean_only():
    matrices = [normal(10, 12, seed=i) for i in range(4)]
    shuffled = [matrices[0] + matrices[1], matrices[2] - matrices[1], matrices[1], matrices[3]]
    shuffled[2] = sum(matrices) - shuffled[0] - shuffled[1] - shuffled[3]
    ((one, _), *_) = run(chained(2), [[m] for m in matrices], size=4)
    ((other, _), *_) = run(chained(2), [[m] for m in shuffled], size=4)
    ((alone, _),) = run(chained(2), [[sum(matrices) / 4]])
    assert close(one[0][0], other[0][0], 1e-4)
    assert close(one[0][0], alone[0][0], 1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_it_is_a_projection(seed):
    # Pythagoras: it is a contraction, by just what it keeps.
    matrix = normal(12, 9, seed=seed)
    ((outputs, states),) = run(chained(2, seed=seed), [[matrix]])
    kept, left = outputs[0][0].square().sum(), feedback_of(states[0]).residual[0].square().sum()
    assert (kept + left).item() == pytest.approx(matrix.square().sum().item(), rel=1e-5)
    assert 0 < kept <= matrix.square().sum() * (1 + 1e-6)
    assert torch.linalg.matrix_rank(outputs[0][0]) == 2


def test_warm_start_converges_to_the_best_approximation():
    u, _ = torch.linalg.qr(normal(20, 8))
    v, _ = torch.linalg.qr(normal(15, 8, seed=1))
    values = torch.tensor([8.0, 6.0, 2.0, 1.0, 0.5, 0.25, 0.1, 0.05])
    matrix = u @ values.diag() @ v.T
    tx = gx.chain(gx.powersgd(2, feedback=False), gx.allreduce())
    ((outputs, _),) = run(tx, [[matrix]], steps=8)
    best = (matrix - u[:, :2] @ values[:2].diag() @ v[:, :2].T).norm()
    errors = [(matrix - updates[0]).norm() for updates in outputs]
    assert errors[-1] <= 1.001 * best
    assert errors[0] > 1.01 * best


def test_warm_start_finds_a_direction_that_the_last_step_did_not_have():
    one, other = of_rank(1, 16, 12), of_rank(2, 16, 12, seed=5)
    tx = gx.chain(gx.powersgd(2, feedback=False), gx.allreduce())
    _, state = tx.update([one], tx.init([one]))
    updates, _ = tx.update([other], state)
    assert close(updates[0], other, 1e-4)


def test_guess_stays_orthonormal_and_the_same_on_all_ranks():
    trees = [[normal(10, 12, seed=i), normal(10, 12, seed=i + 9)] for i in range(3)]
    results = run(chained(2), trees, steps=5, size=3)
    first = guess_of(results[0][1][-1])
    for _, states in results:
        for own, guess in zip(first, guess_of(states[-1]), strict=True):
            assert torch.equal(own, guess)
            assert torch.allclose(guess.T @ guess, torch.eye(2), atol=1e-5)


def test_feedback_drains():
    grads, steps = [normal(12, 10)], 150
    ((outputs, _),) = run(chained(1), [grads], steps=steps)
    mean = sum(updates[0] for updates in outputs) / steps
    assert close(mean, grads[0], 0.1)


def test_leaves_that_do_not_pay_are_exact():
    grads = {
        "bias": normal(7),
        "scalar": normal(1)[0],
        "tiny": normal(3, 3),
        "row": normal(1, 50),
        "empty": torch.zeros(0, 4),
        "matrix": normal(20, 10),
    }
    ((outputs, states),) = run(chained(2), [grads])
    residual = feedback_of(states[0]).residual
    for path in ("bias", "scalar", "tiny", "row", "empty"):
        assert torch.equal(outputs[0][path], grads[path])
        assert not residual[path].any()
        assert guess_of(states[0])[path] is None
    assert not torch.equal(outputs[0]["matrix"], grads["matrix"])


@pytest.mark.parametrize(("factor", "compressed"), [(1.0, True), (3.3, True), (3.4, False)])
def test_min_compression(factor, compressed):
    ((_, states),) = run(chained(2, min_compression=factor), [[torch.zeros(20, 10)]])
    assert (guess_of(states[0])[0] is not None) == (2 * 30 * factor < 200) == compressed


def test_convolution_kernels_are_taken_as_out_times_rest():
    kernel = of_rank(2, 16, 27).reshape(16, 3, 3, 3)
    ((outputs, states),) = run(chained(2), [[kernel]])
    assert outputs[0][0].shape == kernel.shape
    assert close(outputs[0][0], kernel)
    assert guess_of(states[0])[0].shape == (27, 2)


def test_transposed_leaf_is_taken():
    matrix = of_rank(2, 12, 10).T
    ((outputs, _),) = run(chained(2), [[matrix]])
    assert close(outputs[0][0], matrix)


def test_fp64_leaf_is_compressed_in_fp64():
    matrix = of_rank(2, 16, 12).double() + 0.0
    ((outputs, states),) = run(chained(2), [[matrix]] * 2, size=2)[:1]
    assert outputs[0][0].dtype == torch.float64
    assert guess_of(states[0])[0].dtype == torch.float64
    exact = normal(16, 2, dtype=torch.float64) @ normal(2, 12, seed=1, dtype=torch.float64)
    ((outputs, _),) = run(chained(2), [[exact]])
    assert close(outputs[0][0], exact, 1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_on_the_wire_are_those_of_the_two_factors(size):
    n, m, r, rest = 40, 30, 2, 5
    tx = chained(r)

    def rank(i):
        group, grads = find_group(), [normal(n, m, seed=i), normal(rest, seed=i)]
        state = tx.init(grads)
        _, state = tx.update(grads, state)
        before = group.sent
        tx.update(grads, state)
        return group.sent - before

    flags = 5
    first, second = n * r + rest + flags, m * r
    expected = sum(2 * (size - 1) * 4 * values // size for values in (first, second))
    assert run_ranks(size, rank) == [expected] * size


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.unscale(), gx.skip_bn(), gx.powersgd(1), gx.ef(), gx.allreduce()),
        gx.chain(gx.powersgd(2, warm_start=False), gx.ef(), gx.allreduce(op="sum")),
        gx.chain(gx.powersgd(1), gx.ef()),
    ],
    ids=repr,
)
def test_laws(tx, seed):
    check_laws(tx, seed=seed, steps=3, ranks=(1, 3))


def test_leaf_that_one_rank_lacks():
    tx, whole = chained(1), [normal(8, 6, seed=i) for i in range(2)]

    def rank(i):
        state = tx.init({"w": whole[i]})
        _, state = tx.update({"w": whole[i]}, state)
        old = feedback_of(state).residual["w"]
        updates, state = tx.update({"w": None if i else whole[0]}, state)
        return updates["w"], old, feedback_of(state).residual["w"]

    (result, old, new), (_, other_old, other_new) = run_ranks(2, rank)
    assert close(result + (new + other_new) / 2, (old + other_old) / 2 + whole[0] / 2)


def test_leaf_that_all_ranks_lack_stays_none_and_keeps_its_residual():
    tx = chained(1)
    _, state = tx.update({"w": normal(8, 6)}, tx.init({"w": normal(8, 6)}))
    updates, after = tx.update({"w": None}, state)
    assert updates["w"] is None
    assert torch.equal(feedback_of(after).residual["w"], feedback_of(state).residual["w"])


def test_resumed_state_goes_on_the_same():
    parameters = {
        "w": torch.nn.Parameter(torch.zeros(8, 6)),
        "b": torch.nn.Parameter(torch.zeros(3)),
    }
    one, other = (gx.Pipeline(chained(1), parameters) for _ in range(2))

    def step(pipeline, seed):
        parameters["w"].grad, parameters["b"].grad = normal(8, 6, seed=seed), normal(3, seed=seed)
        pipeline.sync()
        return parameters["w"].grad.clone()

    step(one, 0)
    other.load_state_dict(one.state_dict())
    assert torch.equal(step(one, 1), step(other, 1))


def test_alone_it_gives_the_two_factors():
    tx = gx.powersgd(1, feedback=False)
    grads = [of_rank(1, 8, 6)]
    updates, state = tx.update(grads, tx.init(grads))
    assert isinstance(updates[0], gx.LowRank)
    assert close(updates[0].decode().reshape(8, 6), grads[0])
    assert not torch.equal(state.guess[0], tx.init(grads).guess[0])


def test_before_the_exchange_nothing_is_sent():
    matrix = normal(8, 6)
    payload = RowRound(matrix, normal(6, 1), (8, 6), "float32")
    assert not payload.decode().any()
    assert not payload.receive(payload.summand(), 1).decode().any()


def test_orthonormal_each_treats_matrices_of_one_shape_apart():
    matrices = [normal(5, 2, seed=i) * 100.0**i for i in range(3)] + [normal(4, 2)]
    for matrix, columns in zip(matrices, orthonormal_each(matrices), strict=True):
        assert torch.allclose(columns.T @ columns, torch.eye(2), atol=1e-6)
        assert close(columns @ (columns.T @ matrix), matrix)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((gx.powersgd(2),), "GX302"),
        ((gx.powersgd(2, feedback=False), gx.ef()), "GX303"),
        ((gx.topk(0.5), gx.powersgd(2), gx.ef()), "GX301"),
        ((gx.powersgd(2), gx.topk(0.5), gx.ef()), "GX301"),
        ((gx.powersgd(2), gx.sign(), gx.ef()), "GX301"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(gx.chain(*value, check=False)),
)
def test_wrong_order_is_refused(parts, code):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    assert [violation.code for violation in caught.value.violations] == [code]


@pytest.mark.parametrize(
    "parts",
    [
        (gx.topk(0.5), gx.powersgd(1)),
        (gx.powersgd(1), gx.topk(0.5)),
        (gx.powersgd(1), gx.sign()),
    ],
    ids=repr,
)
def test_form_that_is_refused_fails_unchecked(parts):
    tx = gx.chain(*parts, gx.allreduce(), check=False)
    with pytest.raises(TypeError, match=r"takes dense leaves only|no values left to compress"):
        tx.update([torch.ones(8, 6)], tx.init([torch.ones(8, 6)]))


def test_jax_gives_the_same():
    jax = pytest.importorskip("jax")
    tx = gx.chain(gx.powersgd(2), gx.ef())
    matrix = normal(12, 9)
    grads, theirs = {"w": matrix}, {"w": jax.numpy.asarray(matrix.numpy())}
    state, their_state = tx.init(grads), tx.init(theirs)
    update = jax.jit(tx.update)
    for _ in range(3):
        ours, state = tx.update(grads, state)
        out, their_state = update(theirs, their_state)
        decoded = torch.tensor(out["w"].decode().tolist())
        assert close(decoded, ours["w"].decode(), 1e-4)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: gx.powersgd(0),
            ValueError,
            "powersgd(rank=0): expected a whole number of 1 or more",
        ),
        (
            lambda: gx.powersgd(2.0),
            TypeError,
            "powersgd(rank=2.0): expected a whole number of 1 or more",
        ),
        (
            lambda: gx.powersgd(2, warm_start=1),
            TypeError,
            "powersgd(warm_start=1): expected True or False",
        ),
        (
            lambda: gx.powersgd(2, min_compression=0.5),
            ValueError,
            "powersgd(min_compression=0.5): expected at least 1",
        ),
        (
            lambda: gx.powersgd(2, min_compression=NAN),
            ValueError,
            "powersgd(min_compression=nan): expected at least 1",
        ),
        (
            lambda: gx.powersgd(2, min_compression="2"),
            TypeError,
            "powersgd(min_compression='2'): expected a number",
        ),
    ],
)
def test_wrong_argument_is_refused(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()
