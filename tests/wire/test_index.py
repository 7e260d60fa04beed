import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from damage import as_bytes, as_tensor, damaged
from gradtx.wire import WireFormatError, decode_indices, encode_indices, indices_nbytes

universes = st.one_of(st.integers(1, 300), st.integers(1, 2**63 - 1))


@st.composite
def selections(draw):
    universe = draw(universes)
    chosen = draw(st.sets(st.integers(0, universe - 1), max_size=min(universe, 80)))
    return torch.tensor(sorted(chosen), dtype=torch.int64), universe


@st.composite
def hostile_bytes(draw):
    universe = draw(universes)
    count = draw(st.integers(0, min(universe, 40)))
    nbytes = indices_nbytes(count, universe)
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    return torch.tensor(list(data), dtype=torch.uint8), count, universe


def spread(count, universe):
    return torch.arange(count) * (universe // count)


def entropy_bits(count, universe):
    choices = math.lgamma(universe + 1) - math.lgamma(count + 1)
    return (choices - math.lgamma(universe - count + 1)) / math.log(2)


def assert_refused_or_valid(data, count, universe):
    """Decode what may be anything: every selection has one encoding, and the rest is refused."""
    try:
        indices = decode_indices(data, count, universe)
    except WireFormatError:
        return
    assert len(indices) == count
    assert all(0 <= index < universe for index in indices.tolist())
    assert bool((indices[1:] > indices[:-1]).all())
    assert torch.equal(encode_indices(indices, universe), data)


@given(selections())
def test_indices_come_back(case):
    indices, universe = case
    decoded = decode_indices(encode_indices(indices, universe), len(indices), universe)
    assert torch.equal(decoded, indices)


@given(selections())
def test_the_size_follows_from_count_and_universe(case):
    indices, universe = case
    data = encode_indices(indices, universe)
    assert data.shape == (indices_nbytes(len(indices), universe),)
    assert data.dtype == torch.uint8


@pytest.mark.parametrize("count", [1, 20, 50, 63, 64, 65, 128, 200, 255])
def test_indices_come_back_at_every_density(count):
    indices = (
        torch.randperm(256, generator=torch.Generator().manual_seed(count))[:count].sort().values
    )
    assert torch.equal(decode_indices(encode_indices(indices, 256), count, 256), indices)


@pytest.mark.parametrize("universe", [0, 1, 1000])
@pytest.mark.parametrize("all_or_none", [0, 1])
def test_nothing_to_tell_takes_no_bytes(universe, all_or_none):
    indices = torch.arange(universe * all_or_none)
    data = encode_indices(indices, universe)
    assert data.numel() == 0
    assert torch.equal(decode_indices(data, len(indices), universe), indices)


def test_no_bit_is_spent_on_what_no_index_can_be():
    # Three low bits each, and eight ones among the 16 bits that say how often the rest rises to 8.
    assert indices_nbytes(8, 72) == 3 + 2


@pytest.mark.parametrize("density", [0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05])
def test_the_size_is_within_a_tenth_of_the_entropy(density):
    universe = 25_000_000
    count = round(density * universe)
    bits = 8 * indices_nbytes(count, universe)
    entropy = entropy_bits(count, universe)
    assert entropy <= bits <= 1.1 * entropy


@given(universes, st.data())
def test_offsets_within_blocks_are_never_smaller(universe, data):
    count = data.draw(st.integers(0, universe))
    assert indices_nbytes(count, universe) <= 2 * count + 4 * -(-universe // 65_536)


@given(universes, st.data())
def test_a_bitmap_is_never_smaller(universe, data):
    count = data.draw(st.integers(0, universe))
    assert indices_nbytes(count, universe) <= -(-universe // 8)


def test_a_universe_beyond_memory_is_no_obstacle():
    universe = 2**40
    indices = spread(1000, universe) + torch.arange(1000)
    data = encode_indices(indices, universe)
    assert data.numel() < 4200
    assert torch.equal(decode_indices(data, 1000, universe), indices)


def test_the_last_index_of_the_largest_universe_comes_back():
    universe = 2**63 - 1
    indices = torch.tensor([0, universe - 1])
    assert torch.equal(decode_indices(encode_indices(indices, universe), 2, universe), indices)


def test_encoding_leaves_its_input_alone():
    indices = torch.tensor([3, 70, 71])
    encode_indices(indices, 100)
    assert indices.tolist() == [3, 70, 71]


@given(hostile_bytes())
def test_random_bytes_are_refused_or_valid(case):
    assert_refused_or_valid(*case)


@given(selections(), st.data())
def test_a_flipped_bit_is_refused_or_valid(case, data):
    indices, universe = case
    encoded = encode_indices(indices, universe)
    if encoded.numel():
        encoded[data.draw(st.integers(0, encoded.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert_refused_or_valid(encoded, len(indices), universe)


@given(selections(), st.data())
def test_damaged_indices_are_refused_or_valid(case, data):
    indices, universe = case
    encoded = as_bytes(encode_indices(indices, universe))
    assert_refused_or_valid(as_tensor(data.draw(damaged(encoded))), len(indices), universe)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that is made, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.is_tensor(out):
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("byte", [0, 85, 255])
@pytest.mark.parametrize(("count", "universe"), [(1000, 2**62), (1000, 4000), (3, 80_000)])
def test_memory_follows_from_the_bytes_whatever_they_are(byte, count, universe):
    data = torch.full((indices_nbytes(count, universe),), byte, dtype=torch.uint8)
    with Largest() as largest, pytest.raises(WireFormatError):
        decode_indices(data, count, universe)
    assert 0 < largest.nbytes <= 8 * (data.numel() + count)


def test_a_count_that_the_bytes_cannot_back_is_refused():
    with pytest.raises(WireFormatError, match="encoded indices have 3 bytes, expected"):
        decode_indices(torch.zeros(3, dtype=torch.uint8), 2**50, 2**62)


@given(selections(), st.integers(-100, 100).filter(bool))
def test_another_length_is_refused(case, change):
    indices, universe = case
    encoded = encode_indices(indices, universe)
    size = max(encoded.numel() + change, 0)
    resized = torch.cat([encoded, encoded.new_zeros(100)])[:size]
    if size != encoded.numel():
        with pytest.raises(WireFormatError, match=f"have {size} bytes, expected {len(encoded)}"):
            decode_indices(resized, len(indices), universe)


@pytest.mark.parametrize(("count", "universe"), [(3, 100), (50, 100)])
def test_a_wrong_number_of_ones_is_refused(count, universe):
    data = torch.zeros(indices_nbytes(count, universe), dtype=torch.uint8)
    with pytest.raises(WireFormatError, match=f"bitmap has 0 ones, expected {count}"):
        decode_indices(data, count, universe)


def test_indices_that_do_not_increase_are_refused():
    data = encode_indices(torch.tensor([3, 70, 71]), 100)
    # The low five bits of the second and third index, six and seven, become seven and seven.
    data[1] |= 0b00100000
    with pytest.raises(WireFormatError, match="1 of them are not above the one before"):
        decode_indices(data, 3, 100)


def test_an_index_out_of_range_is_refused():
    data = encode_indices(torch.tensor([3, 70, 99]), 100)
    # The low five bits of the last index, three, become four.
    data[2] += 0b00000100
    with pytest.raises(WireFormatError, match="the last is 100"):
        decode_indices(data, 3, 100)


@pytest.mark.parametrize(
    ("position", "what"), [(0, "index bitmap"), (2, "low bits of the indices")]
)
def test_padding_that_is_not_zero_is_refused(position, what):
    data = encode_indices(torch.tensor([3, 70, 71]), 100)
    data[position] |= 0b10000000
    with pytest.raises(WireFormatError, match=f"padding after the {what} is not zero"):
        decode_indices(data, 3, 100)


def test_bytes_of_another_dtype_are_refused():
    with pytest.raises(WireFormatError, match=r"are torch\.int64 of shape \(3,\), expected"):
        decode_indices(torch.zeros(3, dtype=torch.int64), 3, 100)


def test_a_matrix_of_bytes_is_refused():
    with pytest.raises(WireFormatError, match=r"are torch\.uint8 of shape \(1, 3\), expected"):
        decode_indices(torch.zeros(1, 3, dtype=torch.uint8), 3, 100)


@pytest.mark.parametrize(
    ("indices", "fault"),
    [
        ([3, 3], "1 of them are not above the one before"),
        ([9, 5, 4], "2 of them are not above the one before"),
        ([-1, 4], "the first is -1"),
        ([4, 10], "the last is 10"),
    ],
)
def test_encoding_refuses_what_would_not_come_back(indices, fault):
    with pytest.raises(ValueError, match=rf"strictly increasing in \[0, 10\), but {fault}"):
        encode_indices(torch.tensor(indices), 10)


def test_encoding_refuses_other_dtypes():
    with pytest.raises(TypeError, match=r"indices must be torch\.int64, not torch\.int32"):
        encode_indices(torch.zeros(1, dtype=torch.int32), 10)


def test_encoding_refuses_a_matrix():
    with pytest.raises(ValueError, match=r"indices must have one dimension, not shape \(1, 1\)"):
        encode_indices(torch.zeros(1, 1, dtype=torch.int64), 10)


@pytest.mark.parametrize("count", [-1, 11])
def test_an_impossible_count_is_refused(count):
    with pytest.raises(ValueError, match=rf"count must be in \[0, 10\], .* not {count}"):
        indices_nbytes(count, 10)


@pytest.mark.parametrize("universe", [-1, 2**63])
def test_an_impossible_universe_is_refused(universe):
    with pytest.raises(ValueError, match=rf"universe must be in \[0, 2\*\*63\), not {universe}"):
        indices_nbytes(0, universe)
