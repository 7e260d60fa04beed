"""Chains that the laws run on JAX arrays: what goes in and comes out, and what is refused."""

import pytest
import torch

import gradtx as gx
from gradtx.core.tree import flatten_with_paths
from gradtx.testing import check_laws
from gradtx.testing.trace import Case, Step, measure, trace

jax = pytest.importorskip("jax")

from gradtx.testing.one_program import Program, _to_jax, _to_torch  # noqa: E402
from meshes import OnMesh, over_axis  # noqa: E402

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32"),
    *("float8_e4m3fn", "float8_e5m2"),
]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 4)], ids=str)
def test_arrays_come_back_bit_for_bit(name, shape):
    dtype = getattr(torch, name)
    n = torch.Size(shape).numel()
    seeded = torch.Generator().manual_seed(0)
    high, nbytes = 2 if name == "bool" else 256, n * dtype.itemsize
    bits = torch.randint(high, (nbytes,), dtype=torch.uint8, generator=seeded)
    tensor = bits.view(dtype).reshape(shape)
    there = _to_jax(tensor)
    back = _to_torch(there)
    assert (str(there.dtype), there.shape) == (name, shape)
    assert (back.dtype, tuple(back.shape)) == (dtype, shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), bits)


def test_what_is_not_contiguous_comes_back():
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(_to_torch(_to_jax(tensor)), tensor)


PARAMS = {"w": torch.zeros(6, 5), "s": torch.zeros(())}


def steps_of(count, size, params=PARAMS):
    generator = torch.Generator().manual_seed(1)

    def tree():
        return {k: torch.randn(v.shape, generator=generator) for k, v in params.items()}

    return [Step(tuple(tree() for _ in range(size)), 2.0) for _ in range(count)]


def test_traces_are_those_of_threads():
    tx = gx.chain(gx.unscale(), gx.topk(0.2), gx.ef(), gx.allreduce(algorithm="gather"))
    steps = steps_of(2, 3)
    on_torch = trace(tx, PARAMS, steps, 3)
    on_jax = trace(over_axis(tx), PARAMS, steps, 3, "jax")
    for one, other in zip(on_torch, on_jax, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(one.states, other.states, strict=True):
            torch.testing.assert_close(a.residual, b.residual)
            assert torch.equal(a.total_notfinite, b.total_notfinite)


def test_payloads_of_a_fragment_come_back():
    tx = gx.chain(gx.topk(0.2), gx.sign(), check=False)
    [step] = steps_of(1, 1)
    found, expected = (trace(tx, PARAMS, [step], 1, b)[0].outputs[0] for b in ("jax", "torch"))
    assert type(found["w"]) is type(expected["w"])
    assert torch.equal(found["w"].indices, expected["w"].indices.int())
    assert torch.equal(found["w"].values.bits, expected["w"].values.bits)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("parts", [[], [gx.topk(0.1), gx.ef()]], ids=["dense", "topk"])
def test_bytes_are_those_of_the_compiled_program(parts, size):
    tx = gx.chain(gx.unscale(), *parts, gx.allreduce(axis_name="data", algorithm="gather"))
    params = {"w": torch.zeros(1000)}
    [step] = steps_of(1, size, params)
    sent = measure(tx, params, step, size, "jax").sent
    stacked = {"w": torch.stack([tree["w"] for tree in step.gradients]).numpy()}
    compiled = OnMesh(tx, {"w": jax.numpy.zeros(1000)}, size).sent(stacked)
    gathered, reduced = compiled.get("all-gather", 0), compiled.get("all-reduce", 0)
    assert sent == (size - 1) * gathered + 2 * (size - 1) * reduced // size
    assert trace(tx, params, [step, step], size, "jax")[1].sent == [sent, sent]


def test_bytes_follow_a_schedule():
    schedule = gx.warmup_density([0.25, 0.05], 1)
    tx = gx.chain(gx.topk(schedule), gx.ef(), gx.allreduce(axis_name="data"))
    params = {"w": torch.zeros(1000)}
    [one, _] = trace(tx, params, steps_of(3, 2, params), 2, "jax")
    assert one.sent == [6 * 250 + 1, 6 * 50 + 1, 6 * 50 + 1]


def test_one_structure_is_compiled_once():
    tx = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(axis_name="data"))
    compiled, steps = [], steps_of(2, 2)
    lacking = Step(tuple({**tree, "s": None} for tree in steps[0].gradients))
    for _ in range(2):
        traces = trace(tx, PARAMS, [*steps, lacking, *steps], 2, "jax")
        compiled.append(len(Program.of(tx, 2)._lowered))
    assert compiled == [2, 2]
    assert traces[0].outputs[2]["s"] is None


def test_equal_chains_that_do_different_things_are_not_taken_for_each_other():
    def times(factor):
        part = gx.topk(1.0, feedback=False)
        plain = part.step
        part.step = lambda updates, state, params=None, **extra: plain(
            {k: factor * v for k, v in updates.items()}, state, params, **extra
        )
        return gx.chain(part)

    [step] = steps_of(1, 1)
    one, three = (trace(times(f), PARAMS, [step], 1, "jax")[0].outputs[0]["w"] for f in (1, 3))
    assert torch.equal(3 * one.values, three.values)


def test_residuals_of_scalars_are_scalars_again():
    tx = gx.chain(gx.sign(), gx.ef(), gx.allreduce(axis_name="data"))
    for one in trace(tx, PARAMS, steps_of(1, 2), 2, "jax"):
        assert [state.residual["s"].shape for state in one.states] == [(), ()]


def test_gradients_lack_a_leaf_on_all_ranks_or_none():
    case = Case(gx.allreduce(axis_name="data"), ranks=(3,))
    for number, step in enumerate(case.draw(3)):
        lacking = [
            [path for path, leaf in zip(*flatten_with_paths(tree)[:2], strict=True) if leaf is None]
            for tree in step.gradients
        ]
        assert lacking[0] == lacking[1] == lacking[2]
        assert len(lacking[0]) == number % 2


def test_a_leaf_that_one_rank_lacks_is_refused():
    tx = gx.chain(gx.allreduce(axis_name="data"))
    one, other = steps_of(1, 2)[0].gradients
    with pytest.raises(ValueError, match="leaf 's' is None on 1 of 2 ranks: in one program"):
        trace(tx, PARAMS, [Step((one, {**other, "s": None}))], 2, "jax")


def test_float64_is_left_out_and_refused():
    tx = gx.chain(gx.allreduce(axis_name="data"))
    assert "double" not in Case(tx).params
    with pytest.raises(ValueError, match=r"leaf 'd' is float64, which JAX would narrow .*x64"):
        check_laws(tx, params={"d": torch.zeros(2, dtype=torch.float64)})


def test_float64_is_kept_where_jax_has_it():
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(axis_name="data"))
    jax.config.update("jax_enable_x64", True)
    try:
        case = Case(tx)
        assert case.params["double"].dtype == torch.float64
        check_laws(tx, ranks=(2,), steps=1)
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(
    ("tx", "backend", "message"),
    [
        (gx.chain(), "numpy", "backend='numpy': expected 'torch' or 'jax'"),
        (
            gx.chain(gx.allreduce(axis_name="data")),
            "torch",
            r"exchanges JAX arrays; for torch tensors write allreduce\(\)",
        ),
        (
            gx.chain(gx.allreduce()),
            "jax",
            r"exchanges torch tensors on several ranks; for JAX arrays write "
            r"allreduce\(axis_name=\.\.\.\)",
        ),
    ],
    ids=["unknown", "torch", "jax"],
)
def test_backends_that_do_not_suit_the_exchange_are_refused(tx, backend, message):
    with pytest.raises(ValueError, match=message):
        check_laws(tx, backend=backend)


def test_one_device_needs_no_axis():
    check_laws(gx.chain(gx.unscale(), gx.allreduce()), ranks=(1,), steps=1, backend="jax")
