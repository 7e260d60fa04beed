import builtins
import sys

import numpy as np
import pytest
import torch

from gradtx import demo
from gradtx.bench.gradients import BUILT_IN, built_in_path, load


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_gradient_is_that_of_the_demo(name):
    shapes = {path: p.shape for path, p in demo.network().named_parameters()}
    gradient = load(name)
    assert {path: leaf.shape for path, leaf in gradient.items()} == shapes
    assert {leaf.dtype for leaf in gradient.values()} == {torch.float32}
    assert built_in_path(name).stat().st_size < 300_000


def test_numpy_files_are_read(tmp_path):
    array = np.array([[1.0, -2.0]])
    np.save(tmp_path / "one.npy", array)
    np.savez(tmp_path / "some.npz", w=array, b=array[0].astype(np.float16))
    one, some = load(str(tmp_path / "one.npy")), load(str(tmp_path / "some.npz"))
    assert torch.equal(one["tensor"], torch.tensor([[1.0, -2.0]]))
    assert {path: leaf.shape for path, leaf in some.items()} == {"b": (2,), "w": (1, 2)}
    assert {leaf.dtype for leaf in [*one.values(), *some.values()]} == {torch.float32}


@pytest.mark.parametrize("suffix", ["pt", "pth"])
def test_torch_files_are_read_nested(tmp_path, suffix):
    path = tmp_path / f"grads.{suffix}"
    leaf = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    torch.save({"a": [leaf, None], "b": {"w": torch.ones(1)}}, path)
    gradient = load(str(path))
    assert list(gradient) == ["a.0", "b.w"]
    assert torch.equal(gradient["a.0"], torch.tensor([1.0, 2.0]))
    assert not gradient["a.0"].requires_grad


def test_safetensors_files_are_read(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"w": torch.ones(2, dtype=torch.float16)}, tmp_path / "grads.safetensors")
    assert torch.equal(load(str(tmp_path / "grads.safetensors"))["w"], torch.ones(2))
    (tmp_path / "bad.safetensors").write_bytes(b"1234567890")
    with pytest.raises(ValueError, match=r"bad\.safetensors: not read as \.safetensors: "):
        load(str(tmp_path / "bad.safetensors"))
    with pytest.raises(FileNotFoundError):
        load(str(tmp_path / "none.safetensors"))


def test_missing_safetensors_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"^safetensors not found: pip install safetensors$"):
        load(str(tmp_path / "grads.safetensors"))


class Evil:
    def __reduce__(self):
        return builtins.exec, ("raise SystemExit('it was run')",)


@pytest.mark.parametrize("name", ["evil.pt", "evil.npy"])
def test_code_in_a_file_is_not_run(tmp_path, name):
    if name == "evil.pt":
        torch.save({"w": Evil()}, tmp_path / name)
        reason = "Weights only load failed"
    else:
        np.save(tmp_path / name, np.array([Evil()]), allow_pickle=True)
        reason = "Array can.t be memory-mapped: Python objects"
    with pytest.raises(ValueError, match=f"{name}: not read as .*: {reason}") as caught:
        load(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["npy", "npz", "pt"])
@pytest.mark.parametrize("content", [b"", b"no such format"], ids=["empty", "text"])
def test_broken_file_is_refused_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"broken.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"broken\.{suffix}: not read as \.{suffix}: .") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"w": torch.arange(3)}, ": w is int64, expected dense floats"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, ": w is complex64, expected dense floats"),
        ({"w": torch.eye(2).to_sparse()}, ": w is sparse_coo, expected dense floats"),
        ({"w": torch.ones(1), "step": 3}, ": step is of type int, expected tensors only"),
        (torch.tensor([1.0, np.nan, np.inf]), ": the tensor holds 2 of 3 values not finite"),
        (torch.tensor([1e300], dtype=torch.float64), ": the tensor holds 1 of 1 values not"),
        (torch.zeros(3), ": holds no value other than zero: there is nothing to compare"),
        ({}, ": holds no value other than zero: there is nothing to compare"),
    ],
    ids=["int", "complex", "sparse", "number", "not-finite", "too-large", "zeros", "empty"],
)
def test_what_is_no_gradient_is_refused(tmp_path, content, message):
    path = tmp_path / "grads.pt"
    torch.save(content, path)
    with pytest.raises(ValueError, match=rf"grads\.pt{message}"):
        load(str(path))


def test_unknown_kind_of_file_is_refused():
    with pytest.raises(ValueError, match=r"^grads\.csv: expected early, late, or a file that ends"):
        load("grads.csv")
