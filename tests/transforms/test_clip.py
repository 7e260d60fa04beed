"""`clip_by_global_norm` and `clip_by_local_norm`: all leaves shrunk together."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core.tree import flatten, map_leaves
from gradtx.testing import check_laws, run_ranks

INF, NAN = float("inf"), float("nan")
SHAPES = {"b": (3,), "empty": (0, 2), "s": (), "w": (6, 5)}


def drawn(seed, dtype=torch.float32, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (factor * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for name, shape in SHAPES.items()
    }


def updated(tx, grads, *rest):
    return tx.update(grads, tx.init(grads), *rest)[0]


def norm(tree):
    leaves = [leaf.double().reshape(-1) for leaf in flatten(tree)[0] if leaf is not None]
    return torch.cat(leaves).norm().item()


BOTH = [gx.clip_by_global_norm, gx.clip_by_local_norm]


@pytest.mark.parametrize("clip", BOTH)
@pytest.mark.parametrize("max_norm", [0.1, 1, 3.0, 100.0])
def test_it_is_what_torch_does(clip, max_norm):
    grads = drawn(0)
    parameters = [torch.nn.Parameter(torch.zeros_like(leaf)) for leaf in grads.values()]
    for parameter, leaf in zip(parameters, grads.values(), strict=True):
        parameter.grad = leaf.clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    out = updated(clip(max_norm), grads)
    for parameter, leaf in zip(parameters, out.values(), strict=True):
        # torch divides by the norm and a millionth more.
        torch.testing.assert_close(leaf, parameter.grad, rtol=3e-6, atol=0.0)


@pytest.mark.parametrize("clip", BOTH)
@given(seed=st.integers(0, 99), exponent=st.integers(-60, 60), max_norm=st.floats(1e-3, 1e3))
def test_one_factor_brings_the_norm_to_the_limit(clip, seed, exponent, max_norm):
    grads = drawn(seed, factor=2.0**exponent)
    out, factor = updated(clip(max_norm), grads), min(1.0, max_norm / norm(grads))
    assert norm(out) == pytest.approx(factor * norm(grads), rel=1e-6)
    for got, given_ in zip(out.values(), grads.values(), strict=True):
        torch.testing.assert_close(got.double(), factor * given_.double(), rtol=3e-7, atol=0.0)


@pytest.mark.parametrize("clip", BOTH)
def test_a_gradient_within_the_limit_is_untouched(clip):
    grads = drawn(0)
    for got, given_ in zip(updated(clip(1000.0), grads).values(), grads.values(), strict=True):
        assert torch.equal(got, given_)


@pytest.mark.parametrize("clip", BOTH)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30, 3e38])
def test_no_overflow_nor_division_by_zero(clip, scale):
    """The norm of the last one is itself too large for FP32."""
    out = updated(clip(1.0), {"w": torch.full((4,), scale)})["w"]
    assert out.tolist() == pytest.approx([min(scale, 0.5)] * 4)


@pytest.mark.parametrize("clip", BOTH)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_of_16_bit_leaves_is_computed_in_fp32(clip, dtype):
    # 70,000 ones: in FP16 neither their squares' sum nor the norm's square would be finite.
    grads = {"w": torch.full((70_000,), 2.0, dtype=dtype)}
    out = updated(clip(1.0), grads)
    assert out["w"].dtype == dtype
    assert out["w"].double().mean().item() == pytest.approx(70_000**-0.5, rel=5e-3)


def test_fp64_leaves_are_clipped_in_fp64():
    grads = drawn(0, torch.float64)
    out, factor = updated(gx.clip_by_global_norm(0.5), grads), 0.5 / norm(grads)
    assert out["w"].dtype == torch.float64
    torch.testing.assert_close(out["w"], grads["w"] * factor, rtol=1e-14, atol=0.0)


def test_leaves_of_both_dtypes_have_one_norm():
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.float64)}
    out = updated(gx.clip_by_global_norm(1.0), grads)
    assert (out["a"].dtype, out["b"].dtype) == (torch.float32, torch.float64)
    assert [out["a"].item(), out["b"].item()] == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("clip", BOTH)
@pytest.mark.parametrize("grads", [{}, {"a": None}, {"a": None, "b": torch.tensor([4.0])}])
def test_leaves_that_are_not_there_count_for_nothing(clip, grads):
    out = updated(clip(1.0), grads)
    assert map_leaves(lambda leaf: leaf.item(), out) == {
        key: None if leaf is None else 1.0 for key, leaf in grads.items()
    }


@pytest.mark.parametrize("clip", BOTH)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_is_not_hidden(clip, bad):
    """In a chain the gate sees it first; alone, whoever checks downstream."""
    out = updated(clip(1.0), {"w": torch.tensor([bad, 1.0])})["w"]
    assert out.isnan().all()


def test_the_global_norm_is_that_of_the_reduced_gradient():
    tx = gx.chain(gx.unscale(), gx.topk(0.3), gx.ef(), gx.allreduce(), gx.clip_by_global_norm(0.5))
    plain = gx.chain(*tx.transformations[:-1])

    def rank(i):
        grads = drawn(i)
        extra = {"loss_scale": 1.0}
        return tx.update(grads, tx.init(grads), **extra)[0], plain.update(
            grads, plain.init(grads), **extra
        )[0]

    (first, reduced), *others = run_ranks(3, rank)
    factor = 0.5 / norm(reduced)
    assert factor < 1.0
    for name, leaf in first.items():
        torch.testing.assert_close(leaf.double(), reduced[name].double() * factor)
        assert all(torch.equal(leaf, other[name]) for other, _ in others)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_local_limit_is_divided_by_the_root_of_the_ranks(size):
    tx = gx.chain(gx.clip_by_local_norm(2.0), gx.allreduce())
    # Orthogonal gradients, each clipped on its own: their sum has the norm 2.
    results = run_ranks(size, lambda i: updated(tx, {"w": 10.0 * torch.eye(size)[i]})["w"])
    assert all(result.norm().item() * size == pytest.approx(2.0) for result in results)


def test_the_local_clip_is_the_one_in_momentum_correction():
    grads = [drawn(step) for step in range(3)]
    one = gx.chain(gx.topk(0.2), gx.momentum_correction(0.9, clip=1.0), gx.allreduce())
    two = gx.chain(
        gx.clip_by_local_norm(1.0), gx.topk(0.2), gx.momentum_correction(0.9), gx.allreduce()
    )

    def run(tx):
        state, out = tx.init(grads[0]), []
        for tree in grads:
            updates, state = tx.update(tree, state)
            out.append(updates)
        return out

    for a, b in zip(*run_ranks(2, lambda i: (run(one), run(two)))[0], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("clip", BOTH)
def test_inputs_are_not_written_into(clip):
    grads = {"w": torch.tensor([30.0, 40.0])}
    updated(clip(1.0), grads)
    assert grads["w"].tolist() == [30.0, 40.0]


CHAIN = (
    gx.unscale(),
    gx.clip_by_local_norm(1.0),
    gx.topk(0.1),
    gx.ef(),
    gx.allreduce(),
    gx.clip_by_global_norm(1.0),
    gx.add_decayed_weights(0.01),
    gx.scale(-0.1),
)


def test_laws():
    check_laws(gx.chain(*CHAIN), ranks=(1, 2), steps=2)
    check_laws(gx.chain(gx.allreduce(), gx.clip_by_global_norm(0.5)), ranks=(3,), steps=2)


@pytest.mark.parametrize(
    ("parts", "codes"),
    [
        ((gx.clip_by_global_norm(1.0), gx.allreduce()), ["GX403"]),
        ((gx.clip_by_global_norm(1.0), gx.topk(0.1), gx.ef(), gx.allreduce()), ["GX403"]),
        ((gx.clip_by_global_norm(1.0), gx.unscale(), gx.allreduce()), ["GX102", "GX403"]),
        ((gx.allreduce(), gx.clip_by_global_norm(1.0), gx.unscale()), ["GX102"]),
        ((gx.clip_by_local_norm(1.0), gx.unscale(), gx.allreduce()), ["GX102"]),
        ((gx.topk(0.1), gx.ef(), gx.clip_by_local_norm(1.0), gx.allreduce()), ["GX401"]),
        ((gx.topk(0.1), gx.ef(), gx.clip_by_global_norm(1.0)), ["GX401"]),
    ],
    ids=lambda value: None if isinstance(value, list) else repr(gx.chain(*value, check=False)),
)
def test_wrong_order_is_refused(parts, codes):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    assert [violation.code for violation in caught.value.violations] == codes
    assert caught.value.suggestion is not None


def test_the_refusal_says_why_and_what_to_write():
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(gx.clip_by_global_norm(1.0), gx.allreduce())
    [violation] = caught.value.violations
    assert violation.reason == (
        "clip_by_global_norm(1.0) needs the gradient of all ranks and stands before allreduce(): "
        "every rank would act on its own, and the replicas part"
    )
    assert violation.fix.startswith("put clip_by_global_norm(1.0) behind allreduce()")
    assert repr(caught.value.suggestion) == (
        "gx.chain(gx.allreduce(), gx.clip_by_global_norm(1.0))"
    )


@pytest.mark.parametrize("clip", BOTH)
def test_a_payload_is_refused(clip):
    tx = gx.chain(gx.topk(0.5, feedback=False), clip(1.0), check=False)
    with pytest.raises(TypeError, match=rf"^{clip.__name__}\(\) takes dense gradients only, got S"):
        updated(tx, {"w": torch.ones(4)})


def test_they_print_as_the_calls_that_make_them():
    assert repr(gx.clip_by_global_norm(1.0)) == "gx.clip_by_global_norm(1.0)"
    named = gx.clip_by_global_norm(np.float64(2), axis_name="model")
    assert repr(named) == "gx.clip_by_global_norm(2.0, axis_name='model')"
    assert repr(gx.clip_by_local_norm(3)) == "gx.clip_by_local_norm(3)"


@pytest.mark.parametrize("clip", BOTH)
@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0, NAN, INF, 1e39, 10**400])
def test_norm_that_is_not_positive_and_finite_is_refused(clip, max_norm):
    text = f"{clip.__name__}(max_norm={max_norm!r}): expected a finite number over 0"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        clip(max_norm)


@pytest.mark.parametrize("clip", BOTH)
@pytest.mark.parametrize("max_norm", [True, "1", None, 1j])
def test_norm_that_is_no_number_is_refused(clip, max_norm):
    text = f"{clip.__name__}(max_norm={max_norm!r}): expected a number over 0"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        clip(max_norm)


@pytest.mark.parametrize("axis_name", [1, ["model"], ("model", 2)])
def test_axis_that_is_no_name_is_refused(axis_name):
    text = f"clip_by_global_norm(axis_name={axis_name!r}): expected the name of a mesh axis, "
    with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
        gx.clip_by_global_norm(1.0, axis_name=axis_name)


def test_an_axis_for_torch_tensors_is_refused():
    with pytest.raises(TypeError, match=r"'model'\): an axis is for JAX arrays, and these are tor"):
        updated(gx.clip_by_global_norm(1.0, axis_name="model"), {"w": torch.ones(2)})


def test_a_dtensor_is_refused():
    distributed = pytest.importorskip("torch.distributed.tensor")
    with OneRank():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        part = distributed.distribute_tensor(torch.ones(4), mesh, [distributed.Shard(0)])
        with pytest.raises(TypeError, match=r"^clip_by_global_norm\(\) got a DTensor, a part of"):
            updated(gx.clip_by_global_norm(1.0), {"w": part})


class OneRank:
    """A process group of this process alone."""

    def __enter__(self):
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )

    def __exit__(self, *error):
        torch.distributed.destroy_process_group()


def test_the_factor_is_independent_of_how_leaves_are_nested_and_laid_out():
    grads = drawn(0)
    nested = {"x": {"b": grads["b"], "w": grads["w"].t()}, "y": [grads["s"], grads["empty"]]}
    flat_out = updated(gx.clip_by_global_norm(0.5), grads)
    nested_out = updated(gx.clip_by_global_norm(0.5), nested)
    torch.testing.assert_close(nested_out["x"]["w"].t(), flat_out["w"])
    assert math.isclose(norm(nested_out), 0.5, rel_tol=1e-6)
