"""Trees across DLPack: right or refused, shared only on request, each leaf named by its path."""

import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from gradtx.interop.dlpack import DTYPES, needs_copy

jax = pytest.importorskip("jax")
jnp = jax.numpy

ROOT = Path(gx.__file__).parents[1]
WIDE = ("int64", "uint64", "float64", "complex128")
NARROW = [name for name in DTYPES if name not in WIDE]


def refused(error, text):
    return pytest.raises(error, match=f"^{re.escape(text)}")


def bits(x):
    """The bytes of the values in C order, whichever library has them."""
    if isinstance(x, torch.Tensor):
        # A contiguous tensor with an axis of length one need not have strides that `view` likes.
        flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
        flat = flat.clone(memory_format=torch.contiguous_format)
        return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    return np.ascontiguousarray(np.asarray(x)).tobytes()


def filled(shape, dtype):
    """A tensor with bytes that differ; every bit pattern is a value of all these dtypes."""
    n = int(np.prod(shape, dtype=int))
    if dtype == "bool":
        return (torch.arange(n) % 3 == 0).reshape(shape)
    size = torch.empty(0, dtype=getattr(torch, dtype)).itemsize
    if not n:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    numbers = np.random.default_rng(n).integers(0, 120, n * size, dtype=np.uint8)
    return torch.tensor(numbers).view(getattr(torch, dtype)).reshape(shape)


def address(array):
    return array.unsafe_buffer_pointer()


class State(NamedTuple):
    count: torch.Tensor
    inner: tuple


@st.composite
def tensors(draw):
    """Views of all kinds: permuted, sliced, expanded, shifted, with axes of length 0 and 1."""
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8]), max_size=4))
    base = filled([2 * n for n in shape], draw(st.sampled_from(NARROW)))
    if draw(st.booleans()):
        base = base[tuple(slice(None, n) for n in shape)].clone()
    base = base.permute(draw(st.permutations(range(len(shape)))))
    steps = [slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 3))) for _ in shape]
    base = base[tuple(steps)] if draw(st.booleans()) else base
    if draw(st.booleans()):
        base = base.unsqueeze(draw(st.integers(0, base.ndim)))
    ones = [i for i, n in enumerate(base.shape) if n == 1]
    if ones and draw(st.booleans()):
        axis, odd = draw(st.sampled_from(ones)), draw(st.sampled_from([0, 7, 999]))
        if draw(st.booleans()):
            return base.expand([3 if i == axis else n for i, n in enumerate(base.shape)])
        strides = [odd if i == axis else s for i, s in enumerate(base.stride())]
        return base.as_strided(base.shape, strides, base.storage_offset())
    return base


@given(tensors(), st.sampled_from([True, None, False]))
def test_any_view_has_its_values_in_jax_or_is_not_shared(tensor, copy):
    if copy is False and needs_copy([tensor]):
        with refused(ValueError, "leaf '0' cannot be shared, "):
            gx.to_jax([tensor], copy=False)
        return
    (array,) = gx.to_jax([tensor], copy=copy)
    assert (array.shape, str(array.dtype)) == (tensor.shape, str(tensor.dtype)[6:])
    assert bits(array) == bits(tensor)
    # The compiler sees them so too, whatever the layout.
    assert bits(jax.jit(lambda x: jnp.reshape(x, -1))(array)) == bits(tensor)
    if tensor.numel():
        shared = copy is not True and not needs_copy([tensor])
        assert (address(array) == tensor.data_ptr()) == shared


@given(tensors(), st.sampled_from([True, None, False]), st.sampled_from([True, None, False]))
def test_any_view_comes_back(tensor, there, back):
    if there is False and needs_copy([tensor]):
        there = None
    arrays = gx.to_jax({"a": tensor}, copy=there)
    returned = gx.to_torch(arrays, copy=back)["a"]
    assert (returned.shape, returned.dtype) == (tensor.shape, tensor.dtype)
    assert bits(returned) == bits(tensor)
    if tensor.numel():
        assert (returned.data_ptr() == address(arrays["a"])) == (back is not True)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("copy", [True, None, False])
def test_every_dtype_and_shape_goes_both_ways(dtype, shape, copy):
    tensor = filled(shape, dtype)
    (array,) = gx.to_jax([tensor], copy=copy)
    assert (array.shape, str(array.dtype)) == (shape, dtype)
    (back,) = gx.to_torch([array], copy=copy)
    assert (back.dtype, tuple(back.shape), bits(back)) == (tensor.dtype, shape, bits(tensor))


@pytest.mark.parametrize("dtype", WIDE)
class TestSixtyFourBits:
    @pytest.mark.parametrize("copy", [True, None, False])
    def test_are_refused_where_jax_would_narrow_them(self, dtype, copy):
        text = f"leaf 'a.1' has dtype {dtype} and JAX would narrow it to 32 bits: cast it yourself"
        with refused(TypeError, text):
            gx.to_jax({"a": [torch.zeros(1), filled((2,), dtype)]}, copy=copy)

    @pytest.mark.parametrize("copy", [True, None, False])
    def test_pass_where_jax_has_them(self, dtype, copy):
        tensor = filled((3,), dtype)
        with jax.enable_x64(True):
            (array,) = gx.to_jax([tensor], copy=copy)
            (back,) = gx.to_torch([array], copy=copy)
        assert str(array.dtype) == dtype
        assert bits(array) == bits(back) == bits(tensor)


class TestIndependence:
    def test_an_in_place_write_in_torch_does_not_change_the_jax_array(self):
        tensor = torch.zeros(1000)
        array = gx.to_jax([tensor])[0]
        tensor.fill_(7.0)
        assert not np.asarray(array).any()

    @pytest.mark.parametrize("index", [slice(None), slice(16, None), slice(1, None)])
    def test_a_donated_array_does_not_write_into_the_tensor(self, index):
        for copy in (True, None):
            tensor = torch.zeros(1000)[index]
            array = gx.to_jax([tensor], copy=copy)[0]
            out = jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
            assert out[0] == 1.0
            assert not tensor.any()

    @pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda x: x.add_(1), lambda x: x.t_()])
    def test_an_in_place_write_in_torch_does_not_change_the_jax_array_it_came_from(self, write):
        array = jnp.ones((20, 30))
        write(gx.to_torch([array])[0])
        assert array.shape == (20, 30)
        assert bool((array == 1).all())

    def test_a_numpy_array_that_jax_shares_is_not_written_into(self):
        numbers = np.zeros(1024, np.float32)
        gx.to_torch([jnp.asarray(numbers)])[0].add_(1)
        assert not numbers.any()

    @pytest.mark.parametrize("copy", [None, False])
    def test_memory_is_shared_on_request(self, copy):
        tensor = torch.zeros(100)
        (array,) = gx.to_jax([tensor], copy=copy)
        (back,) = gx.to_torch([array], copy=copy)
        assert back.data_ptr() == tensor.data_ptr() == address(array)

    def test_shared_memory_outlives_the_tensor_and_the_array(self):
        array = gx.to_jax([torch.arange(1000, dtype=torch.float32)], copy=False)[0]
        filler = [torch.zeros(1000) for _ in range(20)]
        assert array.tolist() == list(range(1000))
        tensor = gx.to_torch([jnp.arange(1000) * 2], copy=False)[0]
        filler += [torch.zeros(1000, dtype=torch.int32) for _ in range(20)]
        assert tensor.tolist() == list(range(0, 2000, 2))

    def test_an_array_whose_memory_torch_shares_is_not_donated(self):
        array = jnp.zeros(1000) + 0
        tensor = gx.to_torch([array], copy=False)[0]
        jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
        assert not tensor.any()

    def test_a_result_that_is_still_being_computed_is_waited_for(self):
        slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y @ x, x))
        array = slow(jnp.eye(200))
        assert torch.equal(gx.to_torch([array], copy=False)[0], torch.eye(200))

    def test_the_tensors_require_no_gradient(self):
        assert not gx.to_torch([jnp.ones(2)], copy=False)[0].requires_grad


LEAVES = {
    "negated": (
        torch._neg_view(torch.arange(16.0)),
        "it is negated only when it is read",
    ),
    "conjugated": (
        torch.arange(16.0).mul(1j).conj(),
        "it is conjugated only when it is read",
    ),
    "imaginary part of a conjugate": (
        torch.arange(16.0).mul(1j).conj().imag,
        "it is negated only when it is read",
    ),
    "expanded": (torch.ones(1).expand(4), "its values have gaps or overlaps between them"),
    "sliced": (torch.arange(12.0)[::3], "its values have gaps or overlaps between them"),
    "column": (torch.eye(4)[:, 1], "its values have gaps or overlaps between them"),
    "windows": (
        torch.arange(6.0).unfold(0, 3, 1),
        "its values have gaps or overlaps between them",
    ),
    "shifted": (torch.arange(64.0)[1:], "its memory does not begin at a multiple of 64 bytes"),
}


@pytest.mark.parametrize(("tensor", "reason"), LEAVES.values(), ids=LEAVES)
class TestWhatCannotBeShared:
    def test_is_copied(self, tensor, reason):
        for copy in (True, None):
            assert bits(gx.to_jax([tensor], copy=copy)[0]) == bits(tensor)

    def test_is_refused_without_a_copy_naming_the_path(self, tensor, reason):
        with refused(
            ValueError,
            f"leaf 'a.w' cannot be shared, {reason}: use copy=None or copy=True",
        ):
            gx.to_jax({"a": {"w": tensor}}, copy=False)

    def test_is_named_on_request(self, tensor, reason):
        tree = {"a": [tensor, torch.zeros(2)], "b": None, "c": jnp.ones(2)}
        assert needs_copy(tree) == {"a.0": reason}


SHARED = {
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "odd stride": torch.arange(8.0).as_strided((1, 8), (3, 1)),
    "odd strides": torch.arange(8.0).as_strided((2, 1, 4, 1), (4, 999, 1, 0)),
    "contiguous with an odd stride": torch.zeros(8, 2)[:, :1].t().contiguous(),
    "0-d": torch.tensor(3.0),
    "empty": torch.zeros(4, 0)[::2],
    "from the end of a storage": torch.arange(64.0)[16:],
    "frozen parameter": torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "detached": torch.ones(3, requires_grad=True).detach(),
}


@pytest.mark.parametrize("tensor", SHARED.values(), ids=SHARED)
def test_what_can_be_shared_is_shared(tensor):
    assert needs_copy([tensor]) == {}
    (array,) = gx.to_jax([tensor], copy=False)
    assert array.tolist() == tensor.tolist()
    assert not tensor.numel() or address(array) == tensor.data_ptr()


def test_what_has_no_bit_to_undo_is_shared():
    real = torch.arange(16.0).to(torch.complex64)
    assert needs_copy([real]) == {}


def test_read_only_memory_is_taken_and_given():
    numbers = np.arange(16, dtype=np.float32)
    numbers.flags.writeable = False
    array = jnp.asarray(numbers)
    tensor = gx.to_torch([array])[0]
    tensor += 1
    assert numbers.tolist() == array.tolist() == list(range(16))


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["leaf", "parameter", "result"],
)
@pytest.mark.parametrize("copy", [True, None, False])
def test_a_leaf_that_requires_a_gradient_is_refused_as_torch_and_numpy_do(leaf, copy):
    with pytest.raises(BufferError):
        leaf.__dlpack__()
    text = "leaf 'layer.w' requires a gradient, which would stop at JAX: give leaf.detach()"
    with refused(ValueError, text):
        gx.to_jax({"layer": {"w": leaf}}, copy=copy)


@pytest.mark.parametrize(
    ("leaf", "error", "text"),
    [
        (torch.eye(3).to_sparse(), TypeError, "leaf 'w' is sparse (torch.sparse_coo)"),
        (torch.zeros(2, device="meta"), ValueError, "leaf 'w' is on the meta device: it has no"),
        (torch.empty(2, dtype=torch.bits8), TypeError, "leaf 'w' has dtype bits8, which"),
        (np.zeros(2), TypeError, "leaf 'w' is a ndarray: expected a torch tensor"),
        (1.0, TypeError, "leaf 'w' is a float: expected a torch tensor"),
        (jnp.zeros(2), TypeError, "leaf 'w' is a ArrayImpl: expected a torch tensor"),
    ],
    ids=["sparse", "meta", "bits", "numpy", "number", "jax"],
)
def test_what_is_not_for_jax_is_refused_naming_the_path(leaf, error, text):
    for copy in (True, None, False):
        with refused(error, text):
            gx.to_jax({"v": torch.ones(1), "w": leaf}, copy=copy)


def test_a_tensor_that_torch_transforms_is_refused():
    def convert(x):
        gx.to_jax({"w": x})

    with refused(ValueError, "leaf 'w' is being transformed by torch.func"):
        torch.func.vmap(convert)(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("leaf", "error", "text"),
    [
        (torch.zeros(2), TypeError, "leaf 'w' is a Tensor: expected a JAX array"),
        (np.zeros(2), TypeError, "leaf 'w' is a ndarray: expected a JAX array"),
        (True, TypeError, "leaf 'w' is a bool: expected a JAX array"),
        (jnp.zeros(2, "int4"), TypeError, "leaf 'w' has dtype int4, which cannot be handed to"),
        (jax.random.key(0), TypeError, "leaf 'w' has dtype key<fry>, which cannot be handed to"),
    ],
    ids=["torch", "numpy", "bool", "int4", "key"],
)
def test_what_is_not_for_torch_is_refused_naming_the_path(leaf, error, text):
    for copy in (True, None, False):
        with refused(error, text):
            gx.to_torch({"v": jnp.ones(1), "w": leaf}, copy=copy)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_a_traced_array_is_refused(transform):
    def convert(x):
        gx.to_torch({"w": x})

    with refused(ValueError, "leaf 'w' is being traced by JAX and has no values yet"):
        transform(convert)(jnp.ones(2) if transform is not jax.grad else 1.0)


def test_a_donated_array_is_refused():
    array = jnp.zeros(4) + 0
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    with refused(ValueError, "leaf '0' has been deleted, or donated to a jitted function"):
        gx.to_torch([array])


def test_several_devices():
    code = """
import jax, jax.numpy as jnp, gradtx as gx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
second = jax.device_put(jnp.arange(4.0), jax.devices()[1])
print(gx.to_torch([second])[0].tolist())
mesh = Mesh(jax.devices(), ("data",))
for spec in (P("data"), P()):
    try:
        gx.to_torch({"w": jax.device_put(jnp.arange(4.0), NamedSharding(mesh, spec))})
    except ValueError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
    )
    values, *errors = done.stdout.splitlines()
    assert values == "[0.0, 1.0, 2.0, 3.0]"
    text = (
        "leaf 'w' is on 2 devices: hand over one shard at a time (leaf.addressable_shards), or "
        "gather it first (jax.device_put)"
    )
    assert errors == [text, text]


class TestContainers:
    def test_structure_is_kept(self):
        tree = {
            "state": State(torch.tensor(1, dtype=torch.int32), (torch.ones(2), None)),
            "list": [torch.zeros(1), {"z": torch.ones(1), "a": torch.zeros(1)}],
            "ordered": OrderedDict(z=torch.ones(1), a=torch.zeros(1)),
            "nothing": (),
        }
        there = gx.to_jax(tree)
        assert isinstance(there["state"], State)
        assert there["state"].inner[1] is None
        assert list(there["ordered"]) == ["z", "a"]
        assert there["list"][1]["z"].tolist() == [1.0]
        back = gx.to_torch(there)
        assert back["state"].count.dtype == torch.int32
        assert torch.equal(back["list"][1]["z"], torch.ones(1))

    def test_a_single_leaf_is_a_tree(self):
        assert gx.to_torch(gx.to_jax(torch.ones(2))).tolist() == [1.0, 1.0]

    def test_nothing_is_a_tree(self):
        assert gx.to_jax({}) == {}
        assert gx.to_torch(None) is None

    def test_the_state_of_a_chain_crosses_both_ways(self):
        tx = gx.chain(gx.topk(0.5), gx.ef())
        grads = {"w": torch.tensor([3.0, 1.0, 2.0, 4.0])}
        _, state = tx.update(grads, tx.init(grads))
        _, ours = tx.update(grads, state)
        _, theirs = tx.update(gx.to_jax(grads), gx.to_jax(state))
        back = gx.to_torch(theirs)
        assert torch.equal(back.residual["w"], ours.residual["w"])
        assert back.layout == ours.layout

    def test_a_payload_crosses(self):
        tx = gx.chain(gx.topk(0.5, feedback=False))
        grads = {"w": torch.tensor([3.0, 1.0, 2.0, 4.0])}
        payload = tx.update(grads, tx.init(grads))[0]["w"]
        payload.indices = payload.indices.to(torch.int32)
        there = gx.to_jax({"w": payload})["w"]
        assert there.decode().tolist() == [3.0, 0.0, 0.0, 4.0]


@pytest.mark.parametrize("convert", [gx.to_jax, gx.to_torch])
@pytest.mark.parametrize("copy", [0, 1, "always"])
def test_another_word_for_copy_is_refused(convert, copy):
    text = f"{convert.__name__}(copy={copy!r}): expected True, False or None"
    with refused(TypeError, text):
        convert({}, copy=copy)


@pytest.mark.parametrize("convert", [gx.to_jax, gx.to_torch])
def test_without_jax_it_says_how_to_install_it(convert, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    text = f"{convert.__name__} needs jax, which is not installed: pip install 'gradtx[jax]'"
    with refused(ImportError, text):
        convert({})


class TestContainersOfOthers:
    def test_a_frozen_dict_goes_there_and_back(self):
        core = pytest.importorskip("flax.core")
        there = gx.to_jax(core.FrozenDict({"a": {"w": torch.arange(3.0)}, "none": None}))
        assert type(there) is core.FrozenDict
        assert isinstance(there["a"]["w"], jax.Array)
        assert there["none"] is None
        back = gx.to_torch(there)
        assert type(back) is core.FrozenDict
        assert torch.equal(back["a"]["w"], torch.arange(3.0))

    def test_the_variables_of_nnx(self):
        nnx = pytest.importorskip("flax.nnx")
        params = nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Param)
        there = gx.to_torch(params)
        assert type(there) is type(params)
        back = gx.to_jax(there)
        assert jax.tree.structure(back) == jax.tree.structure(params)
        assert bits(back["kernel"][...]) == bits(params["kernel"][...])

    def test_the_path_in_an_error(self):
        core = pytest.importorskip("flax.core")
        with refused(TypeError, "leaf 'a.w' is a float: expected a torch tensor"):
            gx.to_jax(core.FrozenDict({"a": {"w": 1.0}}))

    def test_the_state_of_a_chain_over_one(self):
        core = pytest.importorskip("flax.core")
        tx = gx.chain(gx.unscale(), gx.topk(0.5), gx.ef(), gx.allreduce())
        grads = core.FrozenDict({"w": jnp.asarray([3.0, 1.0])})
        _, state = tx.update(grads, tx.init(grads), loss_scale=1.0)
        there = gx.to_torch(state)
        assert there.residual["w"].tolist() == [0, 1]
        on_torch, _ = tx.update(gx.to_torch(grads), there, loss_scale=1.0)
        on_jax, _ = tx.update(grads, gx.to_jax(there), loss_scale=1.0)
        assert on_torch["w"].tolist() == on_jax["w"].tolist() == [3, 0]
