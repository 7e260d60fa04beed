import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from damage import as_bytes, as_tensor, damaged
from gradtx.stale.frames import Description, Frame, Kind
from gradtx.stale.mailbox import Mailbox, Silence
from gradtx.stale.parameters import ParameterCodec
from gradtx.stale.push import PushCodec
from gradtx.wire import WireFormatError

PARAMS = {"b": torch.zeros(3, dtype=torch.bfloat16), "w": torch.zeros(4, 25)}
FRAGMENTS = [
    gx.chain(),
    gx.chain(gx.topk(0.1), gx.ef()),
    gx.chain(gx.sign(), gx.ef()),
    gx.chain(gx.threshold(0.5, capacity=0.2), gx.ef()),
]


def gradients(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(p.shape, generator=generator).to(p.dtype) for k, p in PARAMS.items()}


def pushed(tx, clock=0):
    codec = PushCodec(tx, PARAMS, None)
    outgoing, state = codec.update(gradients(), codec.init(PARAMS), PARAMS)
    return codec, codec.encode(outgoing, clock), state


FRAME = Frame(Kind.PUSH, 3, 7, 2, as_tensor(b"body")).encode()


@given(data=damaged(FRAME))
def test_a_frame_is_read_or_refused(data):
    try:
        frame = Frame.decode(data)
    except WireFormatError:
        assert data != FRAME
    else:
        assert frame.encode() == data


DESCRIPTION = Description("gx.chain()", {"w": ["[2] float32", "sent dense"]})


@given(data=damaged(as_bytes(DESCRIPTION.encode())))
def test_a_description_is_read_or_refused(data):
    try:
        found = Description.decode(Frame(Kind.JOIN, body=as_tensor(data)))
    except WireFormatError:
        return
    assert all(isinstance(word, str) for words in found.leaves.values() for word in words)


PUSHES = [pushed(tx) for tx in FRAGMENTS]


@given(st.data())
def test_a_push_is_read_or_refused(data):
    codec, body, _ = data.draw(st.sampled_from(PUSHES))
    sent = as_bytes(body)
    found = data.draw(damaged(sent))
    try:
        leaves = codec.decode(as_tensor(found), 0)
    except WireFormatError:
        assert found != sent
    else:
        for leaf, parameter in zip(leaves, PARAMS.values(), strict=True):
            assert leaf is None or (leaf.shape, leaf.dtype) == (parameter.shape, torch.float32)


@given(st.data())
def test_parameters_are_read_or_refused(data):
    codec = ParameterCodec(PUSHES[0][0].layout, 7)
    values = list(gradients().values())
    sent = as_bytes(codec.encode(values, 5))
    found = data.draw(damaged(sent))
    try:
        leaves = codec.decode(as_tensor(found), 5)
    except WireFormatError:
        assert found != sent
    else:
        assert [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in values]


@pytest.mark.parametrize("tx", FRAGMENTS, ids=repr)
def test_what_is_pushed_and_the_residual_are_the_gradient(tx):
    codec, body, state = pushed(tx)
    for path, leaf, expected in zip(
        PARAMS, codec.decode(body, 0), gradients().values(), strict=True
    ):
        kept = 0 if state.residual is None else state.residual[path]
        torch.testing.assert_close(leaf + kept, expected.float())


@pytest.mark.parametrize("tx", FRAGMENTS, ids=repr)
def test_a_push_is_no_larger_than_the_server_lets_in(tx):
    codec, body, _ = pushed(tx)
    assert body.numel() <= codec.most_nbytes


def test_a_push_for_another_chain_is_refused():
    (first, _, _), (_, other, _) = PUSHES[:2]
    with pytest.raises(WireFormatError):
        first.decode(other, 0)


def test_a_push_of_another_clock_is_refused():
    codec, body, _ = PUSHES[1]
    with pytest.raises(WireFormatError, match="push 1 has a header that no worker sends"):
        codec.decode(body, 1)


def test_a_push_that_is_not_finite_is_refused():
    codec = PushCodec(gx.chain(), PARAMS, None)
    outgoing, _ = codec.update(gradients(), codec.init(PARAMS), PARAMS)
    outgoing.parts[0].fill_(float("nan"))
    with pytest.raises(WireFormatError, match="push 0 has values that are not finite"):
        codec.decode(codec.encode(outgoing, 0), 0)


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_a_letter_of_any_size_arrives_once(size):
    ticks = []
    mailbox = Mailbox(torch.distributed.HashStore(), lambda: ticks.append(1))
    data = torch.arange(size, dtype=torch.uint8).numpy().tobytes()
    assert mailbox.take("a", size) is None
    mailbox.post("a", data)
    assert mailbox.take("a", size) == data
    assert mailbox.take("a", size) is None
    assert mailbox.store.num_keys() == 0
    assert len(ticks) == 2 * -(-size // (1 << 22))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("a", b"", "a letter begins with"),
        ("a", b"GRTX" + bytes(8), "a letter begins with"),
        ("a", b"GRTB\xff" + bytes(7), "a letter has 255 bytes, expected at most 10"),
        ("a", b"GRTB\x05" + bytes(7), "a letter has 4 bytes, expected 5"),
        ("a/0", None, "a letter lacks its piece 'a/0'"),
    ],
)
def test_a_damaged_letter_is_refused(key, value, reason):
    mailbox = Mailbox(torch.distributed.HashStore(), lambda: None)
    mailbox.post("a", b"1234")
    if value is None:
        mailbox.store.delete_key(key)
    else:
        mailbox.store.set(key, value)
    with pytest.raises(WireFormatError, match=reason):
        mailbox.take("a", 10)


def test_silence_counts_only_as_far_as_one_was_awake(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    silence = Silence(10.0)
    now[0] = 3600.0
    assert not silence.is_death()
    for _ in range(6):
        now[0] += 1.0
        assert not silence.is_death()
    now[0] += 1.0
    assert silence.is_death()
    silence.end()
    assert not silence.is_death()
