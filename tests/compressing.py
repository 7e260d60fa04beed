"""What the tests of the compressors share."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradtx as gx
from gradtx.exchange.message import fields
from gradtx.testing import run_ranks

try:
    import jax.numpy as jnp
except ImportError:
    jnp = None


INF, NAN = math.inf, math.nan
# Up to FP32's smallest normal number, and with no sum of squares that overflows.
FLOATS = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)
LEAVES = hnp.arrays(np.float32, st.integers(0, 300), elements=FLOATS)
# No product with 2**20 or 2**-20 leaves the normal range.
MODERATE = hnp.arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.floats(2.0**-30, 2.0**30, width=32) | st.floats(-(2.0**30), -(2.0**-30), width=32),
)
# XLA compiles anew for every length.
FEW_LENGTHS = st.sampled_from([1, 7, 257]).flatmap(
    lambda n: hnp.arrays(np.float32, n, elements=FLOATS)
)
SHAPES = [(), (0,), (1,), (2, 0), (7,), (3, 5), (257,), (1000,)]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_jax(values):
    """A NumPy array as one of JAX's; skips the test without JAX."""
    if jnp is None:
        pytest.skip("jax is not installed")
    return jnp.asarray(values)


def encoded(tx, leaf):
    """The payload of one leaf in the first step."""
    return tx.update([leaf], tx.init([leaf]))[0][0]


def payload_nbytes(payload):
    """What a payload takes on the wire, in bytes, without header."""
    return sum(field.nbytes for field in fields(payload))


def decoded(tx, leaf):
    """What becomes of one leaf, flat, as a NumPy array."""
    return np.asarray(encoded(tx, leaf).decode())


def share_lost(tx, values):
    """The error's sum of squares and that of the values, in FP64."""
    wide = values.astype(np.float64)
    return float(((decoded(tx, torch.from_numpy(values)) - wide) ** 2).sum()), float(
        (wide**2).sum()
    )


def same_under_jax(tx, values):
    """Whether torch and JAX give the same bits; skips the test without JAX."""
    mine, theirs = decoded(tx, torch.from_numpy(values)), decoded(tx, on_jax(values))
    return mine.dtype == theirs.dtype and np.array_equal(mine, theirs, equal_nan=True)


def draws(tx, values, copies):
    """`copies` independent draws of what becomes of some values: ``[copies, n]``, FP64."""
    leaf = torch.tensor(values, dtype=torch.float32).repeat(copies)
    return encoded(tx, leaf).decode().view(copies, -1).double()


def tolerated_bias(step, samples, values, false_alarms=1e-6):
    """Hoeffding's bound on the error of the means of samples that lie within a step each.

    All of the means keep it but with the probability `false_alarms`.
    """
    return step * math.sqrt(math.log(2 * values / false_alarms) / (2 * samples))


def check_shapes_and_dtypes(tx):
    """Every shape and dtype decodes to its own, zeros to zeros."""
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            leaf = normal(*shape, dtype=dtype)
            flat = encoded(tx, leaf).decode()
            assert flat.shape == (leaf.numel(),)
            assert flat.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert torch.equal(encoded(tx, torch.zeros_like(leaf)).decode(), torch.zeros_like(flat))


def check_not_finite_is_seen(tx):
    """An infinity or a NaN, at any place, decodes to one, on all backends that are there."""
    for bad in (INF, -INF, NAN):
        for place in (0, 5, 299):
            leaf = normal(300)
            leaf[place] = bad
            assert not np.isfinite(decoded(tx, leaf)[place])
            if jnp is not None:
                assert not np.isfinite(decoded(tx, jnp.asarray(leaf.numpy()))[place])


def check_draws(make):
    """Same seed, same bits; another step, rank, leaf or seed, other draws; no global generator."""
    leaf = normal(500)
    grads = {"ab": leaf, "ba": leaf}
    torch.manual_seed(1)
    before = torch.get_rng_state()

    def run(tx):
        first, state = tx.update(grads, tx.init(grads))
        second, _ = tx.update(grads, state)
        return [updates[key].decode() for updates in (first, second) for key in grads]

    one, again, other = run(make(seed=3)), run(make(seed=3)), run(make(seed=4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, one, again))
    first, second = (sent_by_rank(make(seed=3), leaf, rank) for rank in range(2))
    assert torch.equal(first, one[0])
    different = [*one, *other, second]
    assert not any(torch.equal(a, b) for i, a in enumerate(different) for b in different[i + 1 :])


def sent_by_rank(tx, leaf, sender):
    """What one of two ranks sends, when the other has zeros."""
    chain = gx.chain(tx, gx.allreduce(op="sum", algorithm="gather"))

    def rank(i):
        grads = {"ab": leaf if i == sender else torch.zeros_like(leaf)}
        return chain.update(grads, chain.init(grads))[0]["ab"]

    return run_ranks(2, rank)[0]


def check_nothing_is_lost(tx, *, steps=5, n=700):
    """L2 by hand, on two ranks: what was given, plus the mean residual, is what came in."""
    grads = [
        [{"w": normal(n, seed=10 * step + rank)} for rank in range(2)] for step in range(steps)
    ]
    chain = gx.chain(tx, gx.ef(), gx.allreduce(algorithm="gather"))

    def rank(i):
        state, total = chain.init(grads[0][i]), torch.zeros(n, dtype=torch.float64)
        for step in range(steps):
            updates, state = chain.update(grads[step][i], state)
            total += updates["w"].double()
        return total, residual_in(state).double()

    (total, mine), (same, theirs) = run_ranks(2, rank)
    came_in = sum(leaf["w"].double() for pair in grads for leaf in pair) / 2
    assert torch.equal(total, same)
    torch.testing.assert_close(total + (mine + theirs) / 2, came_in, rtol=0, atol=2e-5)


def residual_in(state):
    """The residual of the only leaf, wherever the feedback stands."""
    if hasattr(state, "residual"):
        return state.residual["w"]
    inner = getattr(state, "states", None) or getattr(state, "inner_states", ())
    for part in inner:
        found = residual_in(part)
        if found is not None:
            return found
    return None
