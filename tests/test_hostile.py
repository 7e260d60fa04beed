"""Every decoder of what comes from the network or a file, given bytes that no encoder makes."""

import io
import json
import struct
import zipfile
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from damage import damaged
from fuzz import files, wire
from fuzz.targets import TARGETS
from gradtx.bench import gradients, results
from gradtx.bench.training import Job, Record
from gradtx.exchange.flags import Slots
from gradtx.exchange.handshake import Hello
from gradtx.exchange.uneven import gather
from gradtx.wire import Header, WireFormatError


@cache
def target(name):
    made = TARGETS[name]()
    made.warm()
    return made


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@settings(max_examples=8)
@given(st.data())
def test_any_bytes_are_taken_or_refused(name, data):
    """In little memory, and with the library's own errors."""
    seed = data.draw(st.sampled_from(target(name).seeds))
    target(name).check(seed[:1] + data.draw(damaged(seed[1:])))


def test_a_length_takes_no_memory_before_it_has_come():
    hello = wire.as_bytes(Hello(1, 2, 5).encode())
    target("handshake").check(b"\0" + hello + struct.pack("<Q", 2**28))


def test_descriptions_may_be_longer_than_a_piece():
    hello = wire.as_bytes(Hello(1, 2, 5).encode())
    text = json.dumps(["x" * 200_000, {}]).encode()
    group = wire.Replay(0, 2, hello + struct.pack("<Q", len(text)) + text)
    with pytest.raises(gx.RankMismatchError, match="rank 0 runs chain, rank 1 runs xxx"):
        wire.agree(group, wire.Context(wire.layout_of([torch.zeros(1)]), "chain"), 5)


def test_a_description_may_be_nested_as_deep_as_it_likes():
    hello = wire.as_bytes(Hello(1, 2, 5).encode())
    text = b"[" * 100_000
    group = wire.Replay(0, 2, hello + struct.pack("<Q", len(text)) + text)
    with pytest.raises(WireFormatError, match="malformed description"):
        wire.agree(group, wire.Context(wire.layout_of([torch.zeros(1)]), "chain"), 5)


def test_a_description_may_say_more_of_a_leaf_than_others_do():
    hello = wire.as_bytes(Hello(1, 2, 5).encode())
    text = json.dumps(["chain", {"0": ["[1] float32", "dense", "and more"]}]).encode()
    group = wire.Replay(0, 2, hello + struct.pack("<Q", len(text)) + text)
    with pytest.raises(gx.RankMismatchError, match=r"rank 0 has .*, rank 1 has "):
        wire.agree(group, wire.Context(wire.layout_of([torch.zeros(1)]), "chain"), 5)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 0.5, 1e30])
def test_flags_that_no_ranks_add_up_to_are_refused(place, number):
    slots = Slots(3, 2, "float32", windowed=True)
    header = Header(7, 3, True, False, (False, True, False), weight=0.5)
    said = [2 * slot for slot in slots.encode(header)]
    assert slots.decode(said).absent == (0, 2, 0)
    said[place] = number
    if place == slots.length - 1 and number in (0.5, 1e30):
        assert slots.decode(said).weight == number
        return
    with pytest.raises(WireFormatError, match=r"(flags|weights) add up to"):
        slots.decode(said)


@pytest.mark.parametrize("said", [(2**40, 5), (-8, 0), (8, 6)])
def test_a_rank_that_has_failed_takes_no_size_for_granted(said):
    group = wire.Replay(0, 2, struct.pack("<qq", *said))
    with pytest.raises(WireFormatError, match="rank 1 has"):
        gather(group, torch.zeros(8, dtype=torch.uint8), [0], [5])


def spoilt(state, section, key, value):
    if section is None:
        return {**state, key: value}
    return {**state, section: {**state[section], key: value}}


WEIGHT, COUNT = "states.0.inner_states.0.residual.w", "states.0.total_notfinite"
UNFIT = {
    "sparse": torch.zeros(3, 4).to_sparse(),
    "meta": torch.zeros(3, 4, device="meta"),
    "expanded": torch.zeros(1).expand(3, 4),
    "a list": [torch.zeros(3, 4)],
}


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        *((None, key, torch.zeros(2)) for key in ("format", "chain", "rank", "world_size")),
        (None, "rank", False),
        (None, "chain", [["nested"]]),
        (None, "state", 3),
        ("state", ("w",), torch.zeros(2)),
        *(("state", WEIGHT, value) for value in UNFIT.values()),
        ("state", WEIGHT, torch.zeros(3, 4, dtype=torch.float64)),
        ("state", WEIGHT, None),
    ],
)
def test_a_state_with_anything_in_it_is_refused(section, key, value):
    pipe = files.pipeline(0)
    before = pipe.state_dict()
    with pytest.raises(ValueError, match="state_dict"):
        pipe.load_state_dict(spoilt(before, section, key, value))
    assert files.same(pipe.state_dict(), before)
    with pytest.raises(ValueError, match="this is no state_dict of a Pipeline: it is a list"):
        pipe.load_state_dict([before])


def test_a_state_is_taken_without_its_history():
    pipe = files.pipeline(0)
    given = spoilt(pipe.state_dict(), "state", WEIGHT, torch.ones(4, 3).requires_grad_().mT)
    pipe.load_state_dict(given)
    taken = pipe.state.states[0].inner_states[0].residual["w"]
    assert not taken.requires_grad
    assert taken.is_contiguous()
    assert bool((taken == 1).all())


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (None, "format", torch.zeros(2)),
        (None, "world_size", 2**40),
        (None, "rank", True),
        ("per_rank", WEIGHT, torch.zeros(2)),
        *(("state", WEIGHT, value) for value in UNFIT.values()),
        ("state", WEIGHT, torch.zeros(1).expand(2**40)),
    ],
)
def test_states_to_reshard_may_hold_anything(section, key, value):
    state = files.pipeline(0).state_dict()
    ranks = [{**state, "rank": rank, "world_size": 2} for rank in range(2)]
    for changed in (
        [ranks[0], spoilt(ranks[1], section, key, value)],
        [spoilt(ranks[1], section, key, value)],
    ):
        with pytest.raises(ValueError, match=r"states\[|state '|rank"):
            gx.reshard(changed, 3)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"latency": 1' + "0" * 400 + ', "bandwidth": 1}'])
def test_a_measured_link_may_be_anything(text, tmp_path):
    (tmp_path / "link.json").write_text(text)
    with pytest.raises(ValueError, match=r"link\.json is no measured link"):
        gx.Link.load(tmp_path / "link.json")


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        *(
            json.dumps(
                Record(
                    Job("text", "chain()", 0, 1, 2),
                    "0",
                    0.1,
                    [1.0],
                    [1.0],
                    [1.0],
                    [1],
                    1,
                    1,
                    0,
                    1.0,
                ).to_json()
                | {field: value}
            )
            for field, value in (("loss", 3), ("loss", ["x"]), ("steps", "many"), ("seed", True))
        ),
    ],
)
def test_a_run_may_be_anything(line, tmp_path):
    (tmp_path / "runs.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 1: not a run"):
        results.read(tmp_path / "runs.jsonl")


def array_bytes(shape, values=6):
    header = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(4 * values)


def archive_bytes(content):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.npy", content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("long.npy", array_bytes((2**36,))),
        ("long.npz", archive_bytes(array_bytes((2**36,)))),
        ("text.npy", array_bytes((2, 3)).replace(b"(2, 3)", b"(2, 3\0")),
        ("text.npz", archive_bytes(b"no array")),
        ("cut.npz", archive_bytes(array_bytes((2, 3))).replace(b"PK\1\2", b"PK\1\3")),
    ],
)
def test_a_file_of_gradients_may_be_anything(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: not read as"):
        gradients.load(str(tmp_path / name))


@pytest.mark.parametrize("kind", [0, 1])
def test_the_header_of_an_array_takes_no_memory_that_is_not_there(kind):
    array = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**29) + b"{'descr': '<f4'"
    target("gradient_files").check(bytes([kind]) + (archive_bytes(array) if kind else array))


def test_arrays_of_all_shapes_are_read(tmp_path):
    for number, array in enumerate((np.float32(3), np.ones((0, 3), np.float32), np.ones((2, 3)).T)):
        np.savez(tmp_path / "a.npz", a=array, b=np.ones(2))
        found = gradients.load(str(tmp_path / "a.npz"))
        assert found["a"].tolist() == array.tolist(), number


def test_values_that_are_only_marked_as_negated_are_compared():
    """Ranks have to agree on the count, whose tensor may be any view."""
    state = gx.Pipeline(gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()), [torch.ones(4)])
    states = [{**state.state_dict(), "rank": rank, "world_size": 2} for rank in range(2)]
    marked = torch._neg_view(torch.ones(3))
    assert marked.is_neg()
    [key] = [key for key in states[0]["state"] if key.endswith("1.count")]
    for own in states:
        own["state"] = {**own["state"], key: marked}
    assert torch.equal(gx.reshard(states, 1)[0]["state"][key], marked)
