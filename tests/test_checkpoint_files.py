"""Checkpoints in three formats, each of a rank: whole or refused, and never the end of the old."""

import contextlib
import copy
import errno
import os
import random
import signal
import time
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import gradtx as gx
from forked import forked
from gradtx.testing import run_ranks
from killing import same, save_for_ever
from ranks import gloo_ranks, outcome

FILES = ["pt", "safetensors"]


def model(width=12):
    torch.manual_seed(0)
    layers = torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)
    return torch.nn.Sequential(*layers)


class Run:
    """A loop of which everything is kept: so it can go on as if it had not ended."""

    def __init__(self, rank, ratio=0.1, width=12):
        self.rank, self.net = rank, model(width)
        parts = gx.topk(ratio), gx.momentum_correction(0.5), gx.allreduce()
        self.pipe = gx.Pipeline(gx.chain(gx.skip_bn(), *parts), self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + self.rank)
            self.optimizer.zero_grad()
            self.net(torch.randn(6, 12, generator=generator)).pow(2).mean().backward()
            assert self.pipe.sync().ready
            self.optimizer.step()

    def kept(self):
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "pipe": self.pipe.state_dict(),
        }

    def take_up(self, kept):
        self.net.load_state_dict(kept["net"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.pipe.load_state_dict(kept["pipe"])


def through_a_file(run, path):
    gx.save_checkpoint(run.kept(), path)
    again = Run(run.rank)
    again.take_up(gx.load_checkpoint(path))
    return again


def through_dcp(run, folder):
    """What all ranks have alike once, what each has of its own under its number."""
    again = Run(run.rank)
    for each, do in ((run, dcp.save), (again, dcp.load)):
        state = {"net": each.net.state_dict(), "pipe": gx.PerRank(each.pipe)}
        do(state, checkpoint_id=folder)
        each.net.load_state_dict(state["net"])
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return again


def continued(rank, folder):
    """Whether a loop that was saved after three steps goes on as one that was not."""
    whole = Run(rank)
    whole.train(range(3))
    runs = {kind: through_a_file(whole, f"{folder}/rank_{rank}.{kind}") for kind in FILES}
    runs["dcp"] = through_dcp(whole, f"{folder}/dcp")
    saved = whole.pipe.state_dict()["state"]
    whole.train(range(3, 6))
    told = {}
    for kind, run in runs.items():
        restored = same(run.pipe.state_dict()["state"], saved)
        run.train(range(3, 6))
        alike = [same(run.kept()[part], whole.kept()[part]) for part in ("optimizer", "pipe")]
        # Its statistics are a rank's own, and DCP has one model.
        ours = [p for run in (run, whole) for p in (dict(run.net.named_parameters()),)]
        told[kind] = [restored, *alike, same(*ours)]
    rank_0 = gx.load_checkpoint(f"{folder}/rank_0.pt")["pipe"]
    before = whole.pipe.state_dict()
    told["that of rank 0"] = outcome(whole.pipe.load_state_dict, rank_0)
    told["as it was"] = same(before, whole.pipe.state_dict()) or rank == 0
    return told, saved


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, gloo_ranks(2, continued, str(folder))


@pytest.mark.parametrize("kind", [*FILES, "dcp"])
def test_a_loop_goes_on_bit_for_bit(ranks, kind):
    for told, _ in ranks[1]:
        assert told[kind] == [True] * 4


def test_the_state_of_rank_0_is_refused_on_the_others(ranks):
    (first, _), (second, _) = ranks[1]
    assert first["that of rank 0"] == "fine"
    assert second["that of rank 0"] == ("ValueError", "this state_dict has rank 0: expected 1")
    assert second["as it was"]


@pytest.mark.parametrize("kind", [*FILES, "dcp"])
def test_ranks_differ_and_all_of_them_can_be_resharded(ranks, kind, tmp_path):
    folder, told = ranks
    if kind == "dcp":
        dcp_to_torch_save(folder / "dcp", tmp_path / "all.pt")
        states = list(gx.load_checkpoint(tmp_path / "all.pt")["pipe"].values())
    else:
        states = [gx.load_checkpoint(folder / f"rank_{i}.{kind}")["pipe"] for i in range(2)]
    assert [same(state["state"], own) for state, (_, own) in zip(states, told, strict=True)]
    assert not same(states[0]["state"], states[1]["state"])
    [one] = gx.reshard(states, 1)
    for key, rule in one["per_rank"].items():
        mean = torch.stack([state["state"][key].double() for state in states]).mean(0)
        assert rule == "mean"
        assert torch.equal(one["state"][key], mean.float()), key


@pytest.mark.parametrize("kind", FILES)
def test_what_is_of_another_run_is_refused_by_name(kind, tmp_path):
    run = Run(0)
    path = tmp_path / f"state.{kind}"
    gx.save_checkpoint(run.pipe.state_dict(), path)
    here = gx.load_checkpoint(path)
    cases = [
        (Run(0, ratio=0.2), here, r"has chain 'gx\.chain.*0\.1.*expected 'gx\.chain.*0\.2"),
        (Run(0, width=14), here, r"has shape \(12,\) .* expected \(14,\)"),
        (run, {**here, "rank": 3, "world_size": 4}, "has rank 3: expected 0"),
        (run, {**here, "world_size": 4}, "has world_size 4: expected 1; gx.reshard"),
        (run, {**here, "format": 7}, "has format 7: expected 1"),
        (run, {**here, "state": []}, r"\['state'\] is a list: expected a dict"),
        (run, {"state": here["state"]}, "is no state_dict of a Pipeline: it lacks"),
        (run, [here], "is no state_dict of a Pipeline: it is a list"),
    ]
    for other, state, text in cases:
        other.train(range(0 if other is not run else 1))
        before = other.pipe.state_dict()
        with pytest.raises(ValueError, match=text):
            other.pipe.load_state_dict(state)
        assert same(before, other.pipe.state_dict())


@pytest.mark.parametrize("kind", FILES)
def test_a_file_cut_off_anywhere_is_refused_by_name(kind, tmp_path):
    run = Run(0)
    run.train(range(1))
    path = tmp_path / f"rank_0.{kind}"
    gx.save_checkpoint(run.kept(), path)
    whole, draw = path.read_bytes(), random.Random(0)
    lengths = [0, 1, 7, 8, 9, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(60))]
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"rank_0\.{kind} is no checkpoint, or is cut off"):
            gx.load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        gx.load_checkpoint(tmp_path / f"none.{kind}")


def cut_off(rank, folder):
    run = Run(rank)
    run.train(range(2))
    dcp.save({"pipe": gx.PerRank(run.pipe)}, checkpoint_id=folder)
    [data] = folder.glob("*.distcp")
    whole, draw = data.read_bytes(), random.Random(0)
    run.train(range(2, 4))
    before = run.pipe.state_dict()
    for length in [0, *(draw.randrange(len(whole) // 2) for _ in range(5))]:
        data.write_bytes(whole[:length])
        with pytest.raises(dcp.api.CheckpointException):
            dcp.load({"pipe": gx.PerRank(run.pipe)}, checkpoint_id=folder)
        assert same(before, run.pipe.state_dict())
    (folder / ".metadata").unlink()  # It is written last.
    with pytest.raises(dcp.api.CheckpointException, match="metadata"):
        dcp.load({"pipe": gx.PerRank(run.pipe)}, checkpoint_id=folder)


def test_a_dcp_checkpoint_cut_off_is_refused_and_the_state_as_it_was(tmp_path):
    gloo_ranks(1, cut_off, tmp_path / "whole")


def test_per_rank_takes_what_is_there_for_its_rank():
    def rank(i):
        pipe = gx.Pipeline(gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()), [torch.ones(4)])
        state = gx.PerRank(pipe).state_dict()
        return list(state), outcome(gx.PerRank(pipe).load_state_dict, {"rank_0": state})

    (own, _), (other, missing) = run_ranks(2, rank)
    assert (own, other) == (["rank_0"], ["rank_1"])
    assert missing == ("ValueError", "this state_dict has ['rank_0']: expected 'rank_1'")
    with pytest.raises(TypeError, match=r"PerRank\(3\): expected what has a state_dict"):
        gx.PerRank(3)


@pytest.mark.parametrize("kind", FILES)
def test_whatever_is_plain_comes_back(kind, tmp_path):
    tied = torch.arange(6.0).reshape(2, 3)
    checkpoint = {
        "a": {"b": tied, "b/c": torch.tensor(True), "": [1, (2, "three", None), float("inf")]},
        "a/b": tied.T,
        3: {1.5: torch.zeros(0, dtype=torch.float16), None: -0.0, True: {}},
        "again": torch.nn.Parameter(tied),
        "bf": torch.ones(3, dtype=torch.bfloat16),
    }
    gx.save_checkpoint(checkpoint, tmp_path / f"x.{kind}")
    found = gx.load_checkpoint(tmp_path / f"x.{kind}")
    assert list(found) == list(checkpoint)
    assert same({**found, "again": 0}, {**checkpoint, "again": 0})
    assert torch.equal(found["again"], tied)
    assert [path.name for path in tmp_path.iterdir()] == [f"x.{kind}"]


@pytest.mark.parametrize("kind", FILES)
def test_what_is_tied_to_values_does_not_keep_them_from_being_read(kind, tmp_path):
    tagged = torch.nn.Parameter(torch.ones(2))
    tagged.tag = time.sleep
    net = torch.nn.BatchNorm1d(3)
    mappings = {"default": defaultdict(list, a=[tagged]), "net": net.state_dict()}
    gx.save_checkpoint(mappings, tmp_path / f"x.{kind}")
    found = gx.load_checkpoint(tmp_path / f"x.{kind}")
    assert type(found["default"]) is dict
    assert torch.equal(found["default"]["a"][0], torch.ones(2))
    assert not found["default"]["a"][0].requires_grad
    if kind == "pt":  # Modules ask it which version of them was saved.
        assert found["net"]._metadata == net.state_dict()._metadata
    assert type(mappings["default"]) is defaultdict
    assert mappings["default"]["a"][0] is tagged


def test_a_sparse_tensor_is_refused_where_the_format_has_none(tmp_path):
    path = tmp_path / "x.safetensors"
    gx.save_checkpoint({"old": 1}, path)
    with pytest.raises(TypeError, match=r"checkpoint\['a/b'\] is sparse, which safetensors files"):
        gx.save_checkpoint({"a": {"b": torch.eye(2).to_sparse()}}, path)
    assert gx.load_checkpoint(path) == {"old": 1}


def test_a_file_system_that_cannot_flush_folders_is_written_to(tmp_path, monkeypatch):
    sync = os.fsync

    def only_files(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    gx.save_checkpoint({"x": 1}, tmp_path / "x.pt")
    assert gx.load_checkpoint(tmp_path / "x.pt") == {"x": 1}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    ("thing", "text"),
    [
        ({"lr": {"x": [np.float64(1)]}}, r"checkpoint\['lr/x/0'\] is a numpy\.float64: expected"),
        ({"when": time.gmtime()}, r"checkpoint\['when'\] is a time\.struct_time"),
        ({(1, 2): 3}, r"checkpoint\[''\] has a key \(1, 2\): expected a str or number"),
        ({1: torch.ones(1), "1": torch.ones(1)}, "two tensors have the key '1'"),
    ],
)
def test_what_could_not_be_read_again_is_refused_before_it_is_written(kind, thing, text, tmp_path):
    path = tmp_path / f"x.{kind}"
    gx.save_checkpoint({"old": 1}, path)
    with pytest.raises(TypeError, match=text):
        gx.save_checkpoint(thing, path)
    assert gx.load_checkpoint(path) == {"old": 1}


def test_an_ordered_dict_is_read_by_both(tmp_path):
    for kind in FILES:
        gx.save_checkpoint(OrderedDict(a=1), tmp_path / f"x.{kind}")
        assert gx.load_checkpoint(tmp_path / f"x.{kind}") == {"a": 1}


@pytest.mark.parametrize("kind", FILES)
def test_whoever_is_killed_while_writing_leaves_a_whole_checkpoint(kind, tmp_path):
    """At random times: the file is the old one or the new one, and the next one can be written."""
    path, draw, seen = tmp_path / f"x.{kind}", random.Random(0), set()
    for _ in range(6):
        with forked(save_for_ever, str(path)) as writer:
            writer.hear()
            time.sleep(0.03 * draw.random())
            os.kill(writer.process.pid, signal.SIGKILL)
            writer.process.join()
        found = gx.load_checkpoint(path)
        assert bool((found["x"] == found["number"]).all())
        seen.add(found["number"])
    assert len(seen) > 1


@pytest.mark.parametrize("kind", FILES)
def test_a_disk_that_is_full_leaves_the_old_one(kind, tmp_path, monkeypatch):
    path = tmp_path / f"x.{kind}"
    gx.save_checkpoint({"x": torch.ones(3)}, path)

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        gx.save_checkpoint({"x": torch.zeros(3)}, path)
    assert [path.name for path in tmp_path.iterdir()] == [path.name]
    assert torch.equal(gx.load_checkpoint(path)["x"], torch.ones(3))


def test_a_safetensors_file_of_somebody_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="its metadata has no 'gradtx'"):
        gx.load_checkpoint(tmp_path / "x.safetensors")
    for text in ("[", "3", '{"tensor": "y"}', '{"call": "os.system"}', '{"dict": 3}', "{}"):
        save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors", {"gradtx": text})
        with contextlib.suppress(ValueError):
            assert gx.load_checkpoint(tmp_path / "x.safetensors") == 3
