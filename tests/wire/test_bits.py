import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtx.wire import pack_bits, pack_uints, unpack_bits, unpack_uints

booleans = st.lists(st.booleans(), max_size=70)


@st.composite
def uints(draw):
    width = draw(st.integers(0, 63))
    values = draw(st.lists(st.integers(0, 2**width - 1), max_size=40))
    return torch.tensor(values, dtype=torch.int64), width


def seeded():
    return torch.Generator().manual_seed(0)


def as_integer(data):
    return int.from_bytes(bytes(data.tolist()), "little")


@given(booleans)
def test_packed_bits_are_one_little_endian_number(bits):
    packed = pack_bits(torch.tensor(bits, dtype=torch.bool))
    assert as_integer(packed) == sum(1 << i for i, bit in enumerate(bits) if bit)


@given(booleans)
def test_packed_bits_fill_whole_bytes(bits):
    packed = pack_bits(torch.tensor(bits, dtype=torch.bool))
    assert packed.shape == ((len(bits) + 7) // 8,)
    assert packed.dtype == torch.uint8


@given(booleans)
def test_bits_come_back(bits):
    bits = torch.tensor(bits, dtype=torch.bool)
    assert torch.equal(unpack_bits(pack_bits(bits), len(bits)), bits)


@pytest.mark.parametrize("shape", [(3, 11), (2, 3, 16), (1, 8), (4, 0), (0, 5), (5, 1)])
def test_bits_come_back_along_the_last_dimension(shape):
    bits = torch.rand(shape, generator=seeded()) < 0.5
    packed = pack_bits(bits)
    assert packed.shape == (*shape[:-1], (shape[-1] + 7) // 8)
    assert torch.equal(unpack_bits(packed, shape[-1]), bits)


@pytest.mark.parametrize(
    "select",
    [
        pytest.param(lambda table: table[:, 0], id="a column"),
        pytest.param(lambda table: table[:0, 0], id="an empty column"),
        pytest.param(lambda table: table.t(), id="a transpose"),
        pytest.param(lambda table: table[:, :8], id="a narrowed row"),
        pytest.param(lambda table: table[:1, :8], id="one narrowed row"),
        pytest.param(lambda table: table.view(-1)[3:11], id="an odd offset"),
        pytest.param(lambda table: table[:1, :8].expand(4, 8), id="an expanded row"),
    ],
)
def test_strided_bits_pack_like_their_copy(select):
    bits = select(torch.rand(16, 24, generator=seeded()) < 0.5)
    assert torch.equal(pack_bits(bits), pack_bits(bits.clone().contiguous()))


def test_strided_bytes_unpack_like_their_copy():
    data = torch.randint(256, (6, 5), dtype=torch.uint8, generator=seeded()).t()
    assert torch.equal(unpack_bits(data, 45), unpack_bits(data.contiguous(), 45))


@given(st.binary(max_size=40), st.integers(0, 7))
def test_any_bytes_unpack_to_their_bits(data, missing):
    n = max(8 * len(data) - missing, 0)
    bits = unpack_bits(torch.tensor(list(data), dtype=torch.uint8), n)
    number = int.from_bytes(data, "little")
    assert bits.tolist() == [bool(number >> i & 1) for i in range(n)]


@given(st.integers(0, 63), st.integers(0, 40), st.data())
def test_any_bytes_unpack_to_uints_of_their_width(width, count, data):
    nbytes = (count * width + 7) // 8
    drawn = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    values = unpack_uints(torch.tensor(list(drawn), dtype=torch.uint8), count, width)
    number = int.from_bytes(drawn, "little")
    assert values.tolist() == [number >> i * width & (1 << width) - 1 for i in range(count)]


def test_unpacking_ignores_padding_bits():
    assert unpack_bits(torch.tensor([0b11111010], dtype=torch.uint8), 3).tolist() == [
        False,
        True,
        False,
    ]


def test_packing_leaves_its_input_alone():
    bits = torch.tensor([True, False] * 8)
    pack_bits(bits)
    assert bits.tolist() == [True, False] * 8


def test_unpacking_leaves_its_input_alone():
    data = torch.tensor([1, 2, 3], dtype=torch.uint8)
    unpack_bits(data, 24)
    assert data.tolist() == [1, 2, 3]


def test_pack_bits_refuses_other_dtypes():
    with pytest.raises(TypeError, match=r"bits must be torch\.bool, not torch\.uint8"):
        pack_bits(torch.zeros(8, dtype=torch.uint8))


def test_pack_bits_refuses_a_scalar():
    with pytest.raises(ValueError, match="bits must have at least one dimension"):
        pack_bits(torch.tensor(True))


def test_unpack_bits_refuses_other_dtypes():
    with pytest.raises(TypeError, match=r"data must be torch\.uint8, not torch\.int64"):
        unpack_bits(torch.zeros(1, dtype=torch.int64), 8)


@pytest.mark.parametrize("n", [-1, 8, 17])
def test_unpack_bits_refuses_the_wrong_length(n):
    with pytest.raises(ValueError, match=f"{n} bits take . bytes, but data has 2"):
        unpack_bits(torch.zeros(2, dtype=torch.uint8), n)


@given(uints())
def test_packed_uints_are_one_little_endian_number(case):
    values, width = case
    expected = sum(value << (i * width) for i, value in enumerate(values.tolist()))
    assert as_integer(pack_uints(values, width)) == expected


@given(uints())
def test_packed_uints_fill_whole_bytes(case):
    values, width = case
    packed = pack_uints(values, width)
    assert packed.shape == ((len(values) * width + 7) // 8,)
    assert packed.dtype == torch.uint8


@given(uints())
def test_uints_come_back(case):
    values, width = case
    assert torch.equal(unpack_uints(pack_uints(values, width), len(values), width), values)


@pytest.mark.parametrize("width", [0, 1, 3, 6, 31, 63])
@pytest.mark.parametrize("count", [32_767, 32_768, 70_001])
def test_many_uints_pack_like_their_bits(count, width):
    values = torch.randint(2**62, (count,), generator=seeded()) & (1 << width) - 1
    bits = values.numpy()[:, None] >> np.arange(width) & 1
    packed = pack_uints(values, width)
    np.testing.assert_array_equal(
        packed, np.packbits(bits.astype(bool).reshape(-1), bitorder="little")
    )
    assert torch.equal(unpack_uints(packed, count, width), values)


@pytest.mark.parametrize("count", [0, 1, 8, 13, 70_001])
def test_uints_on_a_device_have_the_same_shapes(count):
    values = torch.zeros(count, dtype=torch.int64, device="meta")
    packed = pack_uints(values, 5)
    assert packed.shape == ((5 * count + 7) // 8,)
    assert unpack_uints(packed, count, 5).shape == (count,)


def test_strided_uints_pack_like_their_copy():
    values = torch.arange(32).view(16, 2)[:, 1]
    assert torch.equal(pack_uints(values, 5), pack_uints(values.contiguous(), 5))


def test_pack_uints_drops_the_bits_above_the_width():
    values = torch.tensor([0b10101, -1])
    assert torch.equal(pack_uints(values, 3), pack_uints(torch.tensor([0b101, 0b111]), 3))


@pytest.mark.parametrize("width", [-1, 64])
def test_uints_refuse_an_impossible_width(width):
    with pytest.raises(ValueError, match=rf"width must be in 0\.\.63, not {width}"):
        pack_uints(torch.zeros(1, dtype=torch.int64), width)
    with pytest.raises(ValueError, match=rf"width must be in 0\.\.63, not {width}"):
        unpack_uints(torch.zeros(8, dtype=torch.uint8), 1, width)


def test_pack_uints_refuses_other_dtypes():
    with pytest.raises(TypeError, match=r"values must be torch\.int64, not torch\.int32"):
        pack_uints(torch.zeros(1, dtype=torch.int32), 3)


def test_pack_uints_refuses_a_matrix():
    with pytest.raises(ValueError, match=r"values must have one dimension, not shape \(2, 2\)"):
        pack_uints(torch.zeros(2, 2, dtype=torch.int64), 3)


@pytest.mark.parametrize("width", [0, 3])
def test_unpack_uints_refuses_a_negative_count(width):
    with pytest.raises(ValueError, match="count must not be negative, but it is -1"):
        unpack_uints(torch.zeros(0, dtype=torch.uint8), -1, width)


@pytest.mark.parametrize("count", [2, 6])
def test_unpack_uints_refuses_the_wrong_length(count):
    with pytest.raises(ValueError, match=f"{count} values of 3 bits take . bytes, but data has 2"):
        unpack_uints(torch.zeros(2, dtype=torch.uint8), count, 3)
