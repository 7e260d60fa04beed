"""Values in 16 or 8 bits, scaled by powers of two: of `cast`, and of 16-bit leaves on their way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.core.payload import Payload, register_payload
from gradtx.core.tree import Array


class Format(NamedTuple):
    """A float format.

    Attributes:
        top: the exponent that the largest magnitude is scaled to.
        block: how many values share a scale; None for the whole leaf.
    """

    top: int
    block: int | None


# E4M3 goes up to 1.75 * 2**8: only below 2**8 is there room for every mantissa. BF16 has the range
# of FP32, so that any exponent does.
FORMATS = {
    "float16": Format(15, None),
    "bfloat16": Format(15, None),
    "float8_e4m3fn": Format(7, 256),
    "float8_e5m2": Format(15, 256),
}
# Both 2**n and 2**-n are normal numbers.
_LIMIT = {"float32": 126, "float64": 1022}


_SMALL = 1 << 16  # values; those of larger leaves are not copied to lie beside each other


@register_payload
class Cast(Payload):
    """Values in fewer bits, scaled by powers of two.

    Attributes:
        codes: ``[n]``: the scaled values, 8-bit ones as uint8.
        exponents: int16, one a leaf, or ``[ceil(n / 256)]``: what to scale back by.
        format: the name of the dtype of the codes.
    """

    children = ("codes", "exponents")
    static = ("format",)
    keeps_zeros = True
    codes: Array
    exponents: Array
    format: str

    def at(self, places: Array) -> Payload | None:
        """Some of the values, if all have one scale."""
        if FORMATS[self.format].block is not None:
            return None
        codes = backends.of(places).take(self.codes, places)
        return type(self)(codes, self.exponents, self.format, tuple(codes.shape), self.dtype)

    def plain(self) -> tuple[Array, Array | None]:
        """FP16 as it is, and all others as bfloat16, which has room for their scale."""
        if self.dtype == "float64":
            return self.decode(), None
        ops = backends.of(self.codes)
        if self.format != "float16":
            return ops.cast(self.decode(), "bfloat16"), None
        return self.codes, self.exponents if self.size else ops.zeros((1,), "int16", self.codes)

    @property
    def grain(self) -> int:
        """What shares a scale stays together, but for that of a whole leaf, which is repeated."""
        return FORMATS[self.format].block or 1

    def cut(self, start: int, stop: int) -> Payload:
        """A run of the values."""
        exponents = self.exponents
        if (block := FORMATS[self.format].block) is not None:
            exponents = exponents[start // block : -(-stop // block)]
        codes = self.codes[start:stop]
        return type(self)(codes, exponents, self.format, (stop - start,), self.dtype)

    def in_rows(self, count: int, length: int) -> Payload:
        """Runs of values, filled up with zeros."""
        ops, block = backends.of(self.codes), FORMATS[self.format].block
        if block is None:
            exponents = ops.repeat(self.exponents, count)
        else:
            exponents = ops.table(self.exponents, count, length // block)
        codes = ops.table(self.codes, count, length)
        return type(self)(codes, exponents, self.format, (length,), self.dtype)

    def again(self, flat: Array, start: Any) -> Payload:
        """Other values in the same format."""
        return encode_cast(flat, tuple(flat.shape), self.format)

    @classmethod
    def decode_all(cls, payloads: Sequence[Any]) -> list[Array]:
        """`decode` of several, small ones of one length and format together."""
        out: list[Any] = [None] * len(payloads)
        for places in _alike([(p.size, p.format, p.dtype) for p in payloads]):
            first = payloads[places[0]]
            if len(places) == 1:
                out[places[0]] = first.decode()
                continue
            ops = backends.of(first.codes)
            rows = ops.cast(ops.stack([payloads[i].codes for i in places]), first.dtype)
            exponents = ops.concat([payloads[i].exponents for i in places])
            rows = rows * ops.power_of_two(exponents, first.dtype)[:, None]
            for row, i in enumerate(places):
                out[i] = rows[row]
        return out

    def subtracted_from(self, flat: Array) -> Array:
        """What is left of the values, written over `flat`, which no code lies in."""
        ops = backends.of(flat)
        return ops.add_in_place(flat, ops.cast(self._scaled_back(-1.0), ops.dtype_name(flat)))

    def decode(self) -> Array:
        """The values, scaled back."""
        return self._scaled_back(1.0)

    def _scaled_back(self, sign: float) -> Array:
        ops = backends.of(self.codes)
        eight_bits = ops.dtype_name(self.codes) == "uint8"
        codes = ops.bitcast(self.codes, self.format) if eight_bits else self.codes
        rows = ops.blocks(ops.cast(codes, self.dtype), FORMATS[self.format].block or self.size or 1)
        scales = sign * ops.power_of_two(self.exponents, self.dtype)
        return ops.ravel(ops.multiply_in_place(rows, scales[:, None]))[: self.size]


@register_payload
class Narrow(Cast):
    """16-bit leaves that nothing has compressed: what is not finite comes through as it is."""

    def again(self, flat: Array, start: Any) -> Payload:
        """Other values in the same format."""
        return encode_narrow(flat, self.format)


def encode_narrow(flat: Array, dtype: str) -> Narrow:
    """FP32 values that were of a 16-bit dtype, in that dtype; those of several leaves, maybe.

    One scale is enough: FP16 values are FP16 values at any scale that the largest fits, and BF16,
    which has the range of FP32, needs none. An infinity or a NaN has no part in it.
    """
    ops = backends.of(flat)
    wide = ops.dtype_name(flat)
    exponents = ops.zeros((1,), "int32", flat)
    if dtype != "bfloat16":
        largest = ops.max_magnitude(ops.finite_part(flat)[None])
        exponents = _exponents(largest, dtype)
    codes = ops.cast(flat * ops.power_of_two(exponents, wide), dtype)
    return Narrow(codes, ops.cast(-exponents, "int16"), dtype, tuple(flat.shape), wide)


def encode_cast(flat: Array, shape: tuple[int, ...], dtype: str) -> Cast:
    """The flat FP32 or FP64 values of a leaf in another dtype, scaled."""
    ops = backends.of(flat)
    block = FORMATS[dtype].block
    rows, exponents = _scaled(ops.blocks(flat, block or max(flat.shape[0], 1)), dtype)
    codes = ops.ravel(rows)[: flat.shape[0]]
    if block is not None:
        codes = ops.bitcast(codes, "uint8")
    return Cast(codes, exponents, dtype, shape, ops.dtype_name(flat))


def encode_casts(
    flats: Sequence[Array], shapes: Sequence[tuple[int, ...]], dtype: str
) -> list[Payload]:
    """`encode_cast` of several leaves, small ones of one length together."""
    out: list[Any] = [None] * len(flats)
    for places in _alike([(flat.shape[0], dtype, flat.dtype) for flat in flats]):
        first = flats[places[0]]
        if len(places) == 1:
            out[places[0]] = encode_cast(first, shapes[places[0]], dtype)
            continue
        ops = backends.of(first)
        rows, exponents = _scaled(ops.stack([flats[i] for i in places]), dtype)
        for row, i in enumerate(places):
            scale = exponents[row : row + 1]
            out[i] = Cast(rows[row], scale, dtype, shapes[i], ops.dtype_name(first))
    return out


def _alike(kinds: Sequence[tuple[int, str, Any]]) -> list[list[int]]:
    """The positions of leaves that may be rows, those of one length, format and dtype together."""
    found: dict[Any, list[int]] = {}
    for i, (length, dtype, _) in enumerate(kinds):
        alone = FORMATS[dtype].block is not None or not 0 < length <= _SMALL
        found.setdefault(i if alone else kinds[i], []).append(i)
    return list(found.values())


def _scaled(rows: Array, dtype: str) -> tuple[Array, Array]:
    """Rows of FP32 or FP64 values in another dtype, each scaled; and what to scale back by."""
    ops = backends.of(rows)
    wide = ops.dtype_name(rows)
    largest = ops.max_magnitude(rows)
    exponents = _exponents(largest, dtype)
    finite = ops.exponent(largest) < _LIMIT[wide] + 2
    # Times zero, infinity and NaN are NaN: the cast, which in some formats saturates, cannot hide
    # them.
    scales = ops.power_of_two(ops.where(finite, exponents, -_LIMIT[wide] - 1), wide)
    return ops.cast(rows * scales[:, None], dtype), ops.cast(-exponents, "int16")


def _exponents(largest: Array, dtype: str) -> Array:
    """What the largest magnitudes are to be scaled by, as exponents of two."""
    ops = backends.of(largest)
    limit = _LIMIT[ops.dtype_name(largest)]
    return ops.limit(FORMATS[dtype].top - _rounded_exponent(largest, dtype), limit)


def _rounded_exponent(x: Array, dtype: str) -> Array:
    """The exponents of magnitudes once rounded: what is encoded anew keeps its scale."""
    ops = backends.of(x)
    wide = ops.dtype_name(x)
    exponents = ops.limit(ops.exponent(x), _LIMIT[wide])
    rounded = ops.cast(x * ops.power_of_two(-exponents, wide), dtype)
    return exponents + ops.exponent(ops.cast(rounded, wide))
