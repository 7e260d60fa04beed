import dataclasses
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from damage import as_bytes, as_tensor, damaged
from gradtx.wire import (
    Header,
    WireFormatError,
    decode_message,
    encode_message,
    error_message,
    message_nbytes,
)

headers = st.builds(
    Header,
    fingerprint=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    finite=st.booleans(),
    error=st.booleans(),
    absent=st.lists(st.booleans(), max_size=40).map(tuple),
    weight=st.floats(0, allow_infinity=False),
    left_out=st.booleans(),
    flushing=st.booleans(),
)
payloads = st.lists(st.binary(max_size=40), max_size=6)
DTYPES = [torch.bool, torch.uint8, torch.float16, torch.float32, torch.float64, torch.int64]


def as_segments(payload):
    return [torch.tensor(list(part), dtype=torch.uint8) for part in payload]


def as_sizes(payload):
    return [len(part) for part in payload]


def a_header(**changes):
    header = Header(fingerprint=7, step=3, finite=True, error=False, absent=(False, True, False))
    return dataclasses.replace(header, **changes)


def a_message(**changes):
    return encode_message(a_header(**changes), as_segments([b"abc", b"de"]), "cpu")


def decode(data):
    return decode_message(data, leaves=3, sizes=[3, 2], fingerprint=7)


@given(headers, payloads)
def test_the_header_comes_back(header, payload):
    data = encode_message(header, as_segments(payload), "cpu")
    decoded, _ = decode_message(data, len(header.absent), as_sizes(payload), header.fingerprint)
    assert decoded == header


@given(headers, payloads)
def test_the_segments_come_back_in_order(header, payload):
    data = encode_message(header, as_segments(payload), "cpu")
    _, parts = decode_message(data, len(header.absent), as_sizes(payload), header.fingerprint)
    assert [bytes(part.tolist()) for part in parts] == payload


@given(headers, payloads)
def test_the_size_follows_from_the_shapes(header, payload):
    data = encode_message(header, as_segments(payload), "cpu")
    assert data.shape == (message_nbytes(len(header.absent), as_sizes(payload)),)
    assert data.dtype == torch.uint8


@given(st.integers(0, 100), st.lists(st.integers(0, 100)))
def test_a_message_is_the_next_multiple_of_eight(leaves, sizes):
    named = 40 + -(-leaves // 8) + sum(sizes)
    nbytes = message_nbytes(leaves, sizes)
    assert nbytes % 8 == 0
    assert named <= nbytes < named + 8


@given(payloads, st.integers(0, 17), st.sampled_from(DTYPES))
def test_segments_can_be_viewed_as_any_dtype_that_fits(payload, offset, dtype):
    data = encode_message(a_header(), as_segments(payload), "cpu")
    somewhere = torch.cat([data.new_zeros(offset), data])[offset:]
    _, parts = decode_message(somewhere, 3, as_sizes(payload), fingerprint=7)
    for part in parts:
        if part.numel() % dtype.itemsize == 0:
            assert part.view(dtype).view(torch.uint8).tolist() == part.tolist()


def test_segments_are_views_of_gathered_messages():
    gathered = torch.stack([a_message(), a_message()])
    _, [_, part] = decode(gathered[1])
    assert part.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()


def test_a_strided_message_gives_viewable_segments():
    columns = torch.stack([a_message(step=4), a_message()], dim=1)
    header, [first, second] = decode(columns[:, 0])
    assert header.step == 4
    assert bytes(first.tolist()) == b"abc"
    assert second.view(torch.int16).tolist() == [int.from_bytes(b"de", "little")]


def test_the_layout_is_as_documented():
    data = a_message(finite=False)
    fixed = struct.pack("<4sHHQIIQd", b"GRTX", 2, 1, 7, 3, 3, 7, 1.0)
    assert bytes(data.tolist()) == fixed + b"\x02" + b"\0\0" + b"abc" + b"de"


def test_the_step_wraps():
    assert decode(a_message(step=2**32 + 5))[0].step == 5


@given(headers, payloads)
def test_an_error_message_has_the_agreed_size_and_the_flag(header, payload):
    leaves, sizes = len(header.absent), as_sizes(payload)
    data = error_message(header, message_nbytes(leaves, sizes))
    decoded, parts = decode_message(data, leaves, sizes, header.fingerprint)
    assert decoded == dataclasses.replace(header, error=True)
    assert [part.tolist() for part in parts] == [[0] * size for size in sizes]


@pytest.mark.parametrize("nbytes", [0, 40, 52])
def test_an_error_message_of_an_impossible_size_is_refused(nbytes):
    with pytest.raises(ValueError, match=rf"3 leaves .* at least 48, not {nbytes}"):
        error_message(a_header(), nbytes)


@given(headers, payloads, st.data())
def test_random_bytes_are_refused(header, payload, data):
    leaves, sizes = len(header.absent), as_sizes(payload)
    size = message_nbytes(leaves, sizes)
    drawn = data.draw(st.binary(max_size=size + 9).filter(lambda raw: raw[:4] != b"GRTX"))
    with pytest.raises(WireFormatError):
        decode_message(*as_segments([drawn]), leaves, sizes, header.fingerprint)


@given(headers, payloads, st.data())
def test_a_flipped_header_bit_is_refused_or_means_something_else(header, payload, data):
    leaves, sizes = len(header.absent), as_sizes(payload)
    message = encode_message(header, as_segments(payload), "cpu")
    position = data.draw(st.integers(0, message.numel() - sum(sizes) - 1))
    message[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded, parts = decode_message(message, leaves, sizes, header.fingerprint)
    except WireFormatError:
        return
    assert decoded != header
    assert decoded.fingerprint == header.fingerprint
    assert [bytes(part.tolist()) for part in parts] == payload


@given(headers, payloads, st.data())
def test_a_damaged_message_is_refused_or_valid(header, payload, data):
    leaves, sizes = len(header.absent), as_sizes(payload)
    sent = as_bytes(encode_message(header, as_segments(payload), "cpu"))
    message = as_tensor(data.draw(damaged(sent)))
    try:
        decoded, parts = decode_message(message, leaves, sizes, header.fingerprint)
    except WireFormatError:
        return
    assert torch.equal(encode_message(decoded, parts, "cpu"), message)


@pytest.mark.parametrize(("leaves", "sizes"), [(3, [2**62, 2]), (2**32 - 1, [3, 2])])
def test_sizes_that_the_bytes_cannot_back_are_refused(leaves, sizes):
    with pytest.raises(WireFormatError, match="message has 48 bytes, expected"):
        decode_message(a_message(), leaves, sizes, fingerprint=7)


@pytest.mark.parametrize("size", [0, 39, 40, 47, 49, 56])
def test_another_length_is_refused(size):
    data = torch.cat([a_message(), torch.zeros(8, dtype=torch.uint8)])[:size]
    with pytest.raises(WireFormatError, match=f"message has {size} bytes, expected 48"):
        decode(data)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "complaint"),
    [
        (0, "4s", b"HTTP", "magic b'HTTP', expected b'GRTX'"),
        (4, "<H", 1, "version 1, expected 2"),
        (6, "<H", 17, "flags 0x11, expected none but 0xf"),
        (8, "<Q", 2**63, "fingerprint 0x8000000000000000, expected 0x7"),
        (20, "<I", 4, "leaves 4, expected 3"),
        (24, "<Q", 2**63, "length 9223372036854775808, expected 7"),
        (32, "<d", -1.0, "weight -1.0, expected a finite one of at least 0"),
        (32, "<d", float("inf"), "weight inf, expected a finite one"),
        (32, "<d", float("nan"), "weight nan, expected a finite one"),
        (40, "B", 0b1000, "padding that is not zero"),
        (42, "B", 1, "padding that is not zero"),
    ],
)
def test_a_wrong_field_is_refused_by_name(offset, layout, value, complaint):
    data = bytearray(a_message().tolist())
    struct.pack_into(layout, data, offset, value)
    with pytest.raises(WireFormatError, match=complaint):
        decode(torch.tensor(list(data), dtype=torch.uint8))


def test_bytes_of_another_dtype_are_refused():
    with pytest.raises(WireFormatError, match=r"message is torch\.int64 of shape \(48,\)"):
        decode(a_message().long())


def test_a_matrix_of_bytes_is_refused():
    with pytest.raises(WireFormatError, match=r"message is torch\.uint8 of shape \(1, 48\)"):
        decode(a_message()[None])


@pytest.mark.parametrize("fingerprint", [-1, 2**64])
def test_encoding_refuses_an_impossible_fingerprint(fingerprint):
    with pytest.raises(ValueError, match=rf"fingerprint must be in .* not {fingerprint}"):
        a_message(fingerprint=fingerprint)


def test_encoding_refuses_segments_of_other_dtypes():
    with pytest.raises(TypeError, match=r"segment 0 must be torch\.uint8, not torch\.float32"):
        encode_message(a_header(), [torch.zeros(2)], "cpu")


def test_encoding_refuses_segments_of_other_shapes():
    with pytest.raises(ValueError, match=r"segment 0 must have one dimension, not shape \(1, 2\)"):
        encode_message(a_header(), [torch.zeros(1, 2, dtype=torch.uint8)], "cpu")


def test_a_negative_segment_size_is_refused():
    with pytest.raises(ValueError, match=r"must not be negative, but they are \[4, -1\]"):
        message_nbytes(1, [4, -1])


@pytest.mark.parametrize("leaves", [-1, 2**32])
def test_an_impossible_number_of_leaves_is_refused(leaves):
    with pytest.raises(ValueError, match=rf"leaves must be in \[0, 2\*\*32\), not {leaves}"):
        message_nbytes(leaves, [])
