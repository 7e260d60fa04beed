"""Values as whole levels between minus and plus a norm: what `quantize` and `ternary` send."""

from __future__ import annotations

from typing import Any, ClassVar

from gradtx import backends
from gradtx.core.payload import Payload, register_payload
from gradtx.core.tree import Array

# How many digits of a base fit a byte.
PER_BYTE = {2: 8, 3: 5, 4: 4, 16: 2, 256: 1}


@register_payload
class Levels(Payload):
    """Values as levels, packed, and a norm for each block of values.

    Attributes:
        codes: uint8 ``[ceil(n / PER_BYTE[base])]``: the levels, counted from the lowest, by `pack`.
        norms: ``[ceil(n / block)]``: what the highest level of each block stands for.
        base: how many codes there are; of an even number over 2 the last is not used.
        block: how many values share a norm.
    """

    children: ClassVar[tuple[str, ...]] = ("codes", "norms")
    static = ("base", "block")
    keeps_zeros = True
    codes: Array
    norms: Array
    base: int
    block: int

    @property
    def grain(self) -> int | None:
        """What shares a norm stays together; levels that share a byte lie far apart."""
        return self.block if PER_BYTE[self.base] == 1 else None

    def cut(self, start: int, stop: int) -> Payload:
        """A run of the values."""
        norms = self.norms[start // self.block : -(-stop // self.block)]
        return self._like(self.codes[start:stop], norms, (stop - start,))

    def in_rows(self, count: int, length: int) -> Levels:
        """Runs of values, filled up with zeros."""
        ops, zero = backends.of(self.norms), int(steps_of(self.base))
        # The code of zero is not zero.
        codes = ops.table(self.codes - zero, count, length) + zero
        norms = ops.table(self.norms, count, length // self.block)
        return self._like(codes, norms, (length,))

    def again(self, flat: Array, start: Any) -> Payload:
        """Other values to the nearest level, whatever the norm was: the closest is the largest."""
        return self._encoded(flat, 0.5)

    def _encoded(self, flat: Array, noise: Array | float) -> Levels:
        norms = backends.of(flat).max_magnitude(backends.of(flat).blocks(flat, self.block))
        shape = tuple(flat.shape)
        return encode_levels(flat, norms, noise, base=self.base, block=self.block, shape=shape)

    def _like(self, codes: Array, norms: Array, shape: tuple[int, ...]) -> Levels:
        return type(self)(codes, norms, self.base, self.block, shape, self.dtype)

    def decode(self) -> Array:
        """The levels times the norms."""
        ops = backends.of(self.norms)
        steps = steps_of(self.base)
        codes = ops.cast(unpack(self.codes, self.size, self.base), self.dtype)
        # A product with the norm, for zeros too: if it is not finite, nothing in its block is.
        rows = ops.blocks((codes - steps) * (1 / steps), self.block) * self.norms[:, None]
        return ops.ravel(rows)[: self.size]


@register_payload
class TwoLevels(Levels):
    """`Levels` of base 2, which have none at zero."""

    keeps_zeros = False


@register_payload
class RandomLevels(Levels):
    """`Levels` that were rounded at random, and are where they are rounded again.

    Attributes:
        key: what further random numbers are drawn from: of all ranks', owners take the first.
    """

    children = ("codes", "norms", "key")
    key: Array

    def again(self, flat: Array, start: Any) -> Payload:
        """Other values, right on average."""
        ops = backends.of(flat)
        key = ops.random_key(self.key, _AGAIN)
        noise = ops.uniform(key, flat.shape[0], flat, start)
        return at_random(self._encoded(flat, noise), self.key)

    def in_rows(self, count: int, length: int) -> Levels:
        """Runs of values, filled up with zeros; all have one key."""
        rows = super().in_rows(count, length)
        return at_random(rows, backends.of(self.norms).repeat(self.key, count))

    def _like(self, codes: Array, norms: Array, shape: tuple[int, ...]) -> Levels:
        return at_random(Levels(codes, norms, self.base, self.block, shape, self.dtype), self.key)


# Keeps the second rounding of a step independent of the first.
_AGAIN = 0x41474149


def steps_of(base: int) -> float:
    """How many levels lie above zero: 127 with 256 codes; with 2 there is none at zero."""
    return (base - 1) // 2 or 0.5


def encode_levels(
    flat: Array,
    norms: Array,
    noise: Array | float,
    *,
    base: int,
    block: int,
    shape: tuple[int, ...],
) -> Levels:
    """Rounds values to levels: up, where their fraction is larger than the noise.

    Args:
        flat: ``[n]``; what lies beyond its norm gets the norm's level.
        norms: ``[ceil(n / block)]``.
        noise: one half to round to nearest; uniform over ``[0, 1)``, ``[n]``, to be right on
            average.
        base: how many codes there are.
        block: how many values share a norm.
        shape: of the leaf.
    """
    ops = backends.of(flat)
    steps = steps_of(base)
    safe = ops.where(norms > 0, norms, 1.0)
    share = ops.ravel(ops.ratio(ops.blocks(flat, block), safe[:, None]))[: flat.shape[0]]
    exact = ops.limit(share, 1.0) * steps
    codes = ops.round_by(exact, noise) + steps if base > 2 else ops.round_by(exact + steps, noise)
    packed = pack(ops.cast(codes, "uint8"), base)
    kind = Levels if base > 2 else TwoLevels
    return kind(packed, norms, base, block, shape, ops.dtype_name(flat))


def at_random(levels: Levels, key: Array) -> Levels:
    """Levels that say that they were rounded at random, by the numbers of a key."""
    static = levels.base, levels.block, levels.shape, levels.dtype
    return RandomLevels(levels.codes, levels.norms, key, *static)


def pack(digits: Array, base: int) -> Array:
    """Digits, uint8 ``[n]``, as many to a byte as fit; those of one byte lie far apart."""
    ops, n, per_byte = backends.of(digits), digits.shape[0], PER_BYTE[base]
    if n == 0 or per_byte == 1:
        return digits
    length = -(-n // per_byte)
    planes = ops.reshape(ops.blocks(digits, per_byte * length), (per_byte, length))
    packed = planes[-1]
    for i in reversed(range(per_byte - 1)):
        packed = packed * base + planes[i]
    return packed


def unpack(data: Array, n: int, base: int) -> Array:
    """The inverse of `pack`: the first `n` digits, uint8."""
    ops, per_byte = backends.of(data), PER_BYTE[base]
    if per_byte == 1:
        return data
    return ops.ravel(ops.digits(data, base, per_byte))[:n]
