"""Payloads laid into segments, and what becomes of segments that are not what was sent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from compressing import normal
from damage import as_bytes, as_tensor, damaged
from gradtx.core.payload import Member, Payload
from gradtx.exchange.message import Packing
from gradtx.wire import WireFormatError

STAGES = {
    "topk": (gx.topk(0.2, feedback=False),),
    "topk global": (gx.topk(0.2, scope="global", feedback=False),),
    "topk float16": (gx.topk(0.2, values="float16", feedback=False),),
    "topk sign": (gx.topk(0.2, feedback=False), gx.sign(feedback=False)),
    "topk ternary": (gx.topk(0.2, feedback=False), gx.ternary()),
    "threshold": (gx.threshold(0.5, capacity=0.2, feedback=False),),
    "sign": (gx.sign(feedback=False),),
    "majority vote": (gx.sign(majority_vote=True),),
    "quantize": (gx.quantize(2),),
    "natural": (gx.natural(),),
    "cast": (gx.cast("float8_e5m2", feedback=False),),
}
stages_ = pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)


def packing_of(stages):
    updates = {"a": normal(300), "b": normal(7, 5, dtype=torch.float64), "c": normal(0)}
    for stage in stages:
        updates, _ = stage.update(updates, stage.init(updates))
    leaves = [leaf for leaf in updates.values() if isinstance(leaf, Payload)]
    return Packing([leaf for leaf in leaves if not isinstance(leaf, Member)])


@stages_
def test_payloads_come_back(stages):
    packing = packing_of(stages)
    segments = packing.encode()
    assert [segment.numel() for segment in segments] == packing.sizes
    payloads = packing.decode(segments)
    assert all(map(torch.equal, Packing(payloads).encode(), segments))


@stages_
@given(st.data())
def test_damaged_segments_are_refused_or_valid(stages, data):
    packing = packing_of(stages)
    segments = [as_tensor(data.draw(damaged(as_bytes(part)))) for part in packing.encode()]
    try:
        payloads = packing.decode(segments)
    except WireFormatError:
        return
    assert all(map(torch.equal, Packing(payloads).encode(), segments))
    for payload in payloads:
        assert payload.decode().shape == (payload.size,)


@pytest.mark.parametrize("change", [-8, -1, 1, 8])
def test_segments_of_another_size_are_refused(change):
    packing = packing_of(STAGES["topk"])
    *others, last = packing.encode()
    resized = torch.cat([last, last.new_zeros(8)])[: last.numel() + change]
    with pytest.raises(WireFormatError, match=rf"{resized.numel()}\] bytes, expected .*"):
        packing.decode([*others, resized])


def test_another_number_of_segments_is_refused():
    packing = packing_of(STAGES["topk"])
    segments = packing.encode()
    for wrong in (segments[:-1], [*segments, segments[0]], []):
        with pytest.raises(WireFormatError, match=r"segments have .* bytes, expected"):
            packing.decode(wrong)


def test_an_index_outside_of_its_leaf_is_refused():
    leaves = [gx.topk(0.5, feedback=False).update([x], ())[0][0] for x in (normal(4), normal(4))]
    first, second = leaves
    first.indices, second.indices = torch.tensor([1, 4]), torch.tensor([1, 3])
    segments = Packing(leaves).encode()
    with pytest.raises(WireFormatError, match="indices 1 to 4 lie outside their leaf, 0 to 3"):
        Packing(leaves).decode(segments)
