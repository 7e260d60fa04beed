import time

import jax
import jax.numpy as jnp
import pytest
import torch

import gradtx as gx
from gradtx.core.phases import PHASES, PhaseClock, in_phase
from gradtx.testing import run_ranks


@in_phase("outer")
def outer(seconds: float, inner=lambda: None) -> float:
    """Takes its time."""
    time.sleep(seconds)
    inner()
    return seconds


@in_phase("inner")
def inner() -> None:
    time.sleep(0.02)


@in_phase("inner")
def fail() -> None:
    raise RuntimeError("within")


def test_a_phase_within_another_is_counted_once() -> None:
    clock, start = PhaseClock(), time.perf_counter()
    with clock.running():
        assert outer(0.01, inner) == 0.01
    whole = time.perf_counter() - start
    assert clock.seconds["outer"] >= 0.01
    assert clock.seconds["inner"] >= 0.02
    assert sum(clock.seconds.values()) <= whole


def test_nothing_is_counted_without_a_clock() -> None:
    clock = PhaseClock()
    with clock.running():
        pass
    outer(0.0)
    assert clock.seconds == {}
    assert (outer.__name__, outer.__doc__) == ("outer", "Takes its time.")


def test_an_error_ends_its_phase_only() -> None:
    clock = PhaseClock()
    with clock.running():
        with pytest.raises(RuntimeError, match="within"):
            outer(0.0, fail)
        before = clock.seconds["inner"]
        outer(0.0)
    assert clock.seconds["inner"] == before


@pytest.mark.parametrize(
    ("stages", "phases"),
    [
        ([gx.topk(0.1), gx.ef()], PHASES),
        ([gx.topk(0.1, scope="global"), gx.ef()], PHASES),
        ([gx.quantize(8, seed=1), gx.ef()], PHASES),
        ([gx.random_k(0.1), gx.ef()], {*PHASES} - {"decode"}),
        ([gx.powersgd(1), gx.ef()], {*PHASES}),
        ([gx.topk(0.1), gx.momentum_correction(0.9)], PHASES),
        ([], {"encode", "transport", "apply"}),
    ],
    ids=["topk", "global", "two shots", "summed", "two rounds", "momentum", "dense"],
)
def test_all_that_a_chain_does_is_found(stages, phases) -> None:
    def rank(number: int):
        tx, clock = gx.chain(*stages, gx.allreduce()), PhaseClock()
        parameter = torch.zeros(40, 50)
        pipe = gx.Pipeline(tx, {"w": parameter})
        parameter.grad = torch.randn(40, 50, generator=torch.Generator().manual_seed(number))
        with clock.running():
            pipe.sync()
        return set(clock.seconds)

    assert run_ranks(3, rank) == [set(phases)] * 3


def test_jax_traces_the_same_with_and_without() -> None:
    tx = gx.chain(gx.topk(0.1), gx.ef())
    grads = {"w": jnp.arange(100.0)}
    state = tx.init(grads)

    def traced():
        return str(jax.make_jaxpr(lambda g: tx.update(g, state)[0])(grads))

    plain = traced()
    with PhaseClock().running():
        assert traced() == plain
