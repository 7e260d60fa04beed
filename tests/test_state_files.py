"""The per-rank files of a dead job, for another number of ranks."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

import gradtx as gx
from fuzz.memory import Memory
from gradtx.__main__ import main
from gradtx.state_files import added, reshard_files
from gradtx.testing import run_ranks
from ranks import gloo_ranks

CHAINS = {
    "ef": gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce()),
    "momentum": gx.chain(
        gx.skip_bn(), gx.topk(0.2), gx.momentum_correction(0.5, masking=False), gx.allreduce()
    ),
}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4))


def step(net, pipe, optimizer, number, rank):
    generator = torch.Generator().manual_seed(100 * number + rank)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    pipe.sync(optimizer)
    moved = {key: p.grad.double() for key, p in net.named_parameters()}
    optimizer.step()
    return moved


def train(rank, chain, steps, folder, first=0, make=model):
    """Trains, from the rank's file if there is one; what has come out, and the file."""
    net = make()
    pipe = gx.Pipeline(CHAINS[chain], net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    path = os.path.join(folder, f"state_{rank}.pt")
    if first:
        pipe.load_state_dict(torch.load(path, weights_only=True))
    total = {key: torch.zeros_like(p, dtype=torch.float64) for key, p in net.named_parameters()}
    for number in range(first, first + steps):
        moved = step(net, pipe, optimizer, number, rank)
        total = {key: x + moved[key] for key, x in total.items()}
    path = os.path.join(folder, f"after_{rank}.pt" if first else f"state_{rank}.pt")
    torch.save(pipe.state_dict(), path)
    return {key: x.detach() for key, x in total.items()}, path


def owed(paths):
    """What residuals add to the result."""
    return {k.split("residual.")[1]: x for k, x in added(paths) if ".residual." in k}


def fed(ranks, numbers):
    """The mean gradients of all ranks, added up."""
    net = model()
    total = {key: torch.zeros_like(p, dtype=torch.float64) for key, p in net.named_parameters()}
    for number in numbers:
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(100 * number + rank)
            for key, p in net.named_parameters():
                total[key] += torch.randn(p.shape, generator=generator).double() / ranks
    return total


@pytest.mark.parametrize(("old", "new"), [(4, 3), (3, 4), (2, 1), (1, 2)])
def test_a_job_over_gloo_goes_on_with_another_number_of_ranks(old, new, tmp_path):
    """Law L2, over both jobs: what was fed in has come out, or is owed."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    first = gloo_ranks(old, train, "ef", 3, str(before))
    written = reshard_files([path for _, path in first], new, after)
    assert [path.name for path in written] == [f"state_{rank}.pt" for rank in range(new)]
    owing = owed([path for _, path in first])
    for key, x in owed(written).items():
        assert torch.allclose(x, owing[key], rtol=2**-23, atol=0), key
        assert x.any()
    second = gloo_ranks(new, train, "ef", 4, str(after), 3)
    owing = owed([path for _, path in second])
    given = [fed(old, range(3)), fed(new, range(3, 7))]
    for key, out in first[0][0].items():
        total = out + second[0][0][key] + owing[key]
        assert torch.allclose(total, given[0][key] + given[1][key], rtol=0, atol=1e-5), key


def test_files_and_memory_give_the_same(tmp_path):
    ranks = run_ranks(3, lambda i: train(i, "momentum", 2, str(tmp_path)))
    paths = [path for _, path in ranks]
    states = [torch.load(path, weights_only=True) for path in paths]
    written = reshard_files(paths, 2, tmp_path / "out")
    for path, expected in zip(written, gx.reshard(states, 2), strict=True):
        found = torch.load(path, weights_only=True)
        assert list(found) == list(expected)
        assert list(found["state"]) == list(expected["state"])
        for key, x in expected.pop("state").items():
            assert torch.equal(found["state"][key], x), key
            assert found["state"][key].dtype == x.dtype
        del found["state"]
        assert found == expected
        assert os.path.getsize(path) < 1.1 * os.path.getsize(paths[0])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of three ranks."""
    folder = tmp_path_factory.mktemp("states")
    return [path for _, path in run_ranks(3, lambda i: train(i, "momentum", 2, str(folder)))]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_nothing_is_overwritten(files, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "state_0.pt").write_bytes(b"dear")
    with pytest.raises(FileExistsError, match="full is there already, and not empty"):
        reshard_files(files, 2, tmp_path / "full")
    (tmp_path / "file").write_bytes(b"dear too")
    with pytest.raises(FileExistsError, match="file is there already, and not empty"):
        reshard_files(files, 2, tmp_path / "file")
    assert contents(tmp_path / "full") == {"state_0.pt": b"dear"}
    assert contents(tmp_path) == {"file": b"dear too"}


def test_an_empty_folder_is_filled(files, tmp_path):
    (tmp_path / "new").mkdir()
    reshard_files(files, 2, tmp_path / "new")
    assert sorted(contents(tmp_path / "new")) == ["state_0.pt", "state_1.pt"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_the_old_files_stay_as_they_are(files, tmp_path):
    before = [Path(path).read_bytes() for path in files]
    reshard_files(files, 2, tmp_path / "new")
    assert [Path(path).read_bytes() for path in files] == before


@pytest.mark.parametrize("when", [0, 1])
def test_what_fails_while_it_is_written_leaves_nothing(files, tmp_path, monkeypatch, when):
    save, calls = torch.save, []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) > when:
            raise OSError("no space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        reshard_files(files, 2, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error(files, tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        reshard_files(files, 2, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_files_cut_off_are_refused_by_name(files, tmp_path):
    whole = Path(files[1]).read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        cut = tmp_path / "cut.pt"
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=re.escape(f"{cut} is no checkpoint, or is cut off")):
            reshard_files([files[0], cut, files[2]], 2, tmp_path / "new")
        assert [path.name for path in tmp_path.iterdir()] == ["cut.pt"]


class Spy:
    """What is run where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.environ["SPIED"],)


def test_nothing_is_unpickled(files, tmp_path, monkeypatch):
    monkeypatch.setenv("SPIED", str(tmp_path / "spied"))
    torch.save({"state": Spy()}, tmp_path / "hostile.pt")
    with pytest.raises(ValueError, match=r"hostile\.pt is no checkpoint, or is cut off"):
        reshard_files([tmp_path / "hostile.pt"], 2, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.pt"]


def test_errors_name_the_files(files, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"rank 0 is there twice: {files[0]} and ")):
        reshard_files([files[0], files[1], files[0]], 2, tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        reshard_files([*files[:2], tmp_path / "none.pt"], 2, tmp_path / "new")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    with pytest.raises(TypeError, match=r"tensor\.pt is a Tensor: expected what Pipeline"):
        reshard_files([tmp_path / "tensor.pt"], 2, tmp_path / "new")
    with pytest.raises(ValueError, match=re.escape("reshard_files(new_size=0")):
        reshard_files(files, 0, tmp_path / "new")


def layers(count):
    """Each with a leaf of 40,000 bytes."""
    return torch.nn.Sequential(*(torch.nn.Linear(100, 100, bias=False) for _ in range(count)))


@pytest.mark.parametrize("count", [1, 12])
def test_one_leaf_is_in_memory_at_a_time(count, tmp_path):
    """In FP64, however many there are."""
    tx = gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce())
    for rank, state in enumerate(
        run_ranks(3, lambda i: gx.Pipeline(tx, layers(count)).state_dict())
    ):
        for key, x in state["state"].items():
            if ".residual." in key:
                x += rank
        torch.save(state, tmp_path / f"{rank}.pt")
    with Memory() as memory:
        written = reshard_files(sorted(tmp_path.glob("*.pt")), 2, tmp_path / "out")
    assert 80_000 <= memory.most <= 90_000
    for _, x in added(written):
        assert bool((x == 1).all())


def test_the_command_line(files, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["reshard", "--ranks", "2", *files, "--out", str(out)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"3 ranks to 2: {out}/state_0.pt to state_1.pt"
    number = r"[0-9.]+(e-[0-9]+)?"
    for line, field in zip(told[1:], ("velocity", "residual"), strict=True):
        found = re.fullmatch(
            rf"{field}: norm ({number}) before, ({number}) after, ({number}) of the difference",
            line,
        )
        before, after, apart = (float(found[i]) for i in (1, 3, 5))
        assert before == pytest.approx(after, rel=1e-6)
        assert 0 <= apart < 1e-6 * before


def test_the_command_line_says_what_is_wrong(files, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["reshard", "--ranks", "2", *files[1:], "--out", str(out)]) == 2
    expected = "gradtx reshard: the states are those of 2 of 3 ranks: rank 0 is missing\n"
    assert capsys.readouterr().err == expected
    assert not out.exists()


def test_the_new_folder_may_be_a_link_to_an_empty_one(tmp_path):
    pipe = gx.Pipeline(CHAINS["ef"], model())
    torch.save(pipe.state_dict(), tmp_path / "state_0.pt")
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    assert reshard_files([tmp_path / "state_0.pt"], 2, tmp_path / "out")[1].exists()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == [
        "state_0.pt",
        "state_1.pt",
    ]
