"""What comes from files: states, measured links and runs, gradients; and chains as text."""

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import gradtx as gx
from gradtx.bench import results
from gradtx.bench.gradients import load
from gradtx.bench.training import Job, Record
from gradtx.core.errors import ChainOrderError
from gradtx.core.explain import explain
from gradtx.core.parse import FAILURES, parse
from gradtx.state_files import reshard_files

from .target import Target, target

CHAINS = [
    gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce()),
    gx.chain(gx.accumulate(2), gx.random_k(0.5, feedback=False), gx.allreduce(op="sum")),
    gx.chain(gx.powersgd(1), gx.ef(), gx.allreduce(), gx.clip_by_global_norm(1.0)),
    gx.chain(gx.dynamic_loss_scale(), gx.sign(), gx.ef(), gx.allreduce()),
    gx.chain(gx.topk(0.2), gx.momentum_correction(0.9), gx.delayed(gx.allreduce(), steps=1)),
    gx.chain(gx.cast("float16"), gx.ef(), gx.allreduce(), gx.master_weights()),
]


def parameters(i: int) -> dict[str, torch.Tensor]:
    dtype = torch.bfloat16 if i == len(CHAINS) - 1 else torch.float32
    found = {"w": torch.ones(3, 4, dtype=dtype), "b": torch.ones(2, dtype=dtype)}
    for leaf in found.values():
        leaf.grad = torch.ones_like(leaf)
    return found


def pipeline(i: int) -> gx.Pipeline:
    return gx.Pipeline(CHAINS[i], parameters(i))


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(x, b[key]) for key, x in a.items())
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = found
    return found


# What may stand in the place of a value that is right.
OTHERS: list[Callable[[Any], Any]] = [
    lambda x: None,
    lambda x: True,
    lambda x: -1,
    lambda x: 2**70,
    lambda x: 2**30,
    lambda x: float("nan"),
    lambda x: "text",
    lambda x: b"bytes",
    lambda x: [],
    lambda x: {},
    lambda x: {"a": [x, (x, None)]},
    lambda x: cyclic(),
    lambda x: torch.zeros(0),
    lambda x: torch.zeros(3, 4),
    lambda x: torch.zeros(2, dtype=torch.float64),
    lambda x: torch.tensor([1, 2]),
    lambda x: torch.tensor(7),
    lambda x: torch.tensor(-(2**31), dtype=torch.int32),
    lambda x: torch.full_like(x, 3) if torch.is_tensor(x) else x,
    lambda x: x.to(torch.complex64) if torch.is_tensor(x) else 1j,
    lambda x: x.to("meta") if torch.is_tensor(x) else x,
    lambda x: x.to_sparse() if torch.is_tensor(x) and x.ndim else x,
    lambda x: x.float().clone().requires_grad_() if torch.is_tensor(x) else x,
    lambda x: torch.nn.Parameter(x.float().clone()) if torch.is_tensor(x) else x,
    lambda x: torch._neg_view(x) if torch.is_tensor(x) and x.is_floating_point() else x,
    lambda x: x.flatten()[:1].expand(x.shape) if torch.is_tensor(x) and x.numel() else x,
    lambda x: x.mT.contiguous().mT if torch.is_tensor(x) and x.ndim == 2 else x,
    lambda x: torch.full(x.shape, torch.inf) if torch.is_tensor(x) else x,
    lambda x: torch.quantize_per_tensor(torch.zeros(3, 4), 0.1, 0, torch.qint8),
    lambda x: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    lambda x: torch.bool,
    lambda x: torch.zeros(1).expand(2**40),
    lambda x: "mean",
    lambda x: "sum",
]
_GONE, _MORE = len(OTHERS), len(OTHERS) + 1


def changed(state: dict[str, Any], data: bytes) -> dict[str, Any]:
    """A state in which each three bytes have changed one value: where, which, and to what."""
    given, state = state, copied(state)
    for where, which, what in zip(data[0::3], data[1::3], data[2::3], strict=False):
        names = [name for name in state if isinstance(state[name], dict)]
        name = names[where // 2 % len(names)] if names and where % 2 else None
        inner, old = (state, given) if name is None else (state[name], given.get(name))
        keys = list(inner)
        if not keys:
            continue
        key = keys[which % len(keys)]
        what %= len(OTHERS) + 3
        if what < len(OTHERS):
            # Some make sense of some values alone.
            with suppress(Exception):
                inner[key] = OTHERS[what](copied(old[key]))
        elif what == _GONE:
            del inner[key]
        elif what == _MORE:
            inner[("x", 1) if which % 2 else "unknown"] = inner[key]
        else:
            inner[7] = inner.pop(key)
    return state


@target
def states() -> Target:
    """States of pipelines whose values others have changed: refused, or as good as any."""
    pipes = [pipeline(i) for i in range(len(CHAINS))]
    saved = [pipe.state_dict() for pipe in pipes]

    def run(data: bytes) -> None:
        which = data[0] % len(CHAINS)
        pipe, before = pipes[which], saved[which]
        given: Any = changed(before, data[1:])
        try:
            pipe.load_state_dict(given)
        except ValueError:
            assert len(data) > 3
            assert same(pipe.state_dict(), before)
            return
        now = pipe.state_dict()
        for key, value in before["state"].items():
            found = now["state"][key]
            assert type(found) is type(value)
            if isinstance(value, torch.Tensor):
                assert (found.shape, found.dtype, found.layout) == (
                    value.shape, value.dtype, value.layout
                )  # fmt: skip
                assert not found.requires_grad
        pipe.load_state_dict(before)

    seeds = [bytes([i]) + bytes([1, j, j]) for i in range(len(CHAINS)) for j in range(12)]
    return Target([*seeds, *(bytes([i]) for i in range(len(CHAINS)))], run, known=65_536)


@target
def resharded() -> Target:
    """States of two ranks, one of them changed by others, for three ranks."""

    def run(data: bytes) -> None:
        data = data.ljust(2, b"\0")
        first, second = copied(both[data[0] % len(both)])
        other = changed(second, data[2:])
        if data[1] % 2:
            first = changed(first, data[2:])
        try:
            gx.reshard([first, other], 1 + data[1] // 2 % 4)
        except (TypeError, ValueError):
            assert len(data) > 4
            return

    def copied(pair):
        return [{**state, "state": dict(state["state"])} for state in pair]

    both = []
    for i in range(len(CHAINS)):
        state = pipeline(i).state_dict()
        both.append([{**state, "rank": rank, "world_size": 2} for rank in range(2)])
    seeds = [bytes([i, j, 1, j, j]) for i in range(len(CHAINS)) for j in range(12)]
    seeds += [bytes([i, j]) for i in range(len(CHAINS)) for j in range(8)]
    return Target(seeds, run, known=65_536)


def saved_bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def pickled(archive: bytes) -> bytes:
    """The stream of instructions in what `torch.save` wrote."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


def with_pickle(archive: bytes, stream: bytes) -> bytes:
    """An archive with another stream, and right sums over it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, stream if name.endswith("data.pkl") else old.read(name))
    return out.getvalue()


@target
def state_files() -> Target:
    """Files of two ranks, one of them other bytes, for three ranks; old files are left alone."""
    state = pipeline(0).state_dict()
    first, second = (
        saved_bytes({**state, "rank": rank, "world_size": 2}) for rank in range(2)
    )  # fmt: skip

    def run(data: bytes) -> None:
        given = with_pickle(second, data[1:]) if data[0] % 2 else data[1:]
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, "0.pt"), Path(folder, "1.pt")]
            for path, content in zip(paths, (first, given), strict=True):
                path.write_bytes(content)
            try:
                reshard_files(paths, 3, Path(folder, "out"))
            except (TypeError, ValueError, OSError):
                assert given != second
                assert sorted(os.listdir(folder)) == ["0.pt", "1.pt"]
            assert paths[0].read_bytes() == first

    return Target([b"\0" + second, b"\1" + pickled(second)], run, known=len(first) + len(second))


@target
def checkpoints() -> Target:
    """Files of `save_checkpoint`, in both formats."""
    folder = tempfile.TemporaryDirectory()
    paths = [Path(folder.name, name) for name in ("saved.pt", "saved.safetensors")]
    saved = {"step": 3, "pipe": pipeline(0).state_dict(), "list": [1, (2.0, None), torch.ones(2)]}

    def run(data: bytes) -> None:
        assert folder
        path = paths[data[0] % 2]
        path.write_bytes(data[1:])
        with suppress(ValueError):
            gx.load_checkpoint(path)

    seeds = []
    for i, path in enumerate(paths):
        gx.save_checkpoint(saved, path)
        seeds.append(bytes([i]) + path.read_bytes())
    return Target(seeds, run)


@target
def gradient_files() -> Target:
    """Gradients in files of numpy, torch and safetensors."""
    import numpy as np
    from safetensors.torch import save

    one, some, plain = io.BytesIO(), io.BytesIO(), {"a": torch.ones(2), "b": torch.ones(3).half()}
    np.save(one, np.ones((2, 3), np.float32))
    np.savez(some, a=np.ones(2), b=np.ones((1, 2), np.float16))
    kinds = {
        ".npy": one.getvalue(),
        ".npz": some.getvalue(),
        ".pt": saved_bytes(plain),
        ".safetensors": save(plain),
    }
    suffixes = list(kinds)

    def run(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "gradient" + suffixes[data[0] % len(suffixes)])
            path.write_bytes(data[1:])
            try:
                found = load(str(path))
            except ValueError:
                return
        assert all(leaf.dtype == torch.float32 for leaf in found.values())

    seeds = [bytes([i]) + content for i, content in enumerate(kinds.values())]
    return Target(seeds, run, known=4096)


@target
def measurements() -> Target:
    """Measured links, and runs of ``bench convergence``, in JSON."""
    job = Job("digits", "allreduce()", 0, 3, 2)
    curves = [0.5, float("nan"), 0.25]
    record = Record(job, "0.1", 0.1, curves, curves, curves, [1, 2, 3], 12, 3, 0, 1.5)

    def run(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "file.json")
            path.write_bytes(data[1:])
            for read in (gx.Link.load, results.read, results.mend):
                try:
                    read(path)
                except ValueError:
                    continue

    seeds = [
        b"\0" + json.dumps({"latency": 1e-4, "bandwidth": 1e8}).encode(),
        b"\0" + json.dumps(record.to_json()).encode() + b"\n",
        b"\0" + b"[" * 2000 + b"\n",
        b"\0" + b'{"latency": 1' + b"0" * 400 + b', "bandwidth": 1}',
    ]
    return Target(seeds, run, known=4096)


@target
def chains() -> Target:
    """Text on the command line, for ``explain``."""
    names = {name: getattr(gx, name) for name in gx.__all__}

    def run(data: bytes) -> None:
        try:
            explain(parse(data.decode(errors="replace"), names))
        except (ChainOrderError, *FAILURES):
            return

    texts = [
        "chain(unscale(), topk(0.01), ef(), allreduce())",
        "gx.chain(filter_params(named('a') & ~is_bn | larger_than(3)), gx.sign(), gx.ef())",
        "chain(accumulate(4), clip_by_local_norm(1.0), powersgd(2), ef(), allreduce(op='sum'))",
        "chain(topk(0.1), momentum_correction(0.9, masking=False), delayed(allreduce(), steps=2))",
        "chain(topk(linear(0.5, 0.1, steps=10)), ef(), allreduce(link=Link(1e-4, 1e8)))",
        "topk(ratio=-1e400)",
        "-" * 2000 + "1",
        "chain(" * 90 + ")" * 90,
        "__import__('os').mkdir('hostile')",
        "chain().__class__",
    ]
    return Target([text.encode() for text in texts], run, known=65_536)
