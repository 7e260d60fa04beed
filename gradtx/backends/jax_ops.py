"""Array operations for JAX arrays, the counterpart of `torch_ops`; importing it imports jax."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradtx.backends import registry

registry.register_with_jax(jax)

Array = jax.Array


def dtype_name(x: Array) -> str:
    """The dtype's name, such as ``"float32"``."""
    return str(x.dtype)


def cast(x: Array, dtype: str) -> Array:
    """`x` in `dtype`."""
    return x.astype(dtype)


def detach(x: Array) -> Array:
    """`x`: JAX arrays carry no history."""
    return x


def ravel(x: Array) -> Array:
    """`x` as one axis, in C order."""
    return jnp.ravel(x)


def reshape(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` in another shape of the same size, in C order."""
    return jnp.reshape(x, shape)


def concat(arrays: Sequence[Array]) -> Array:
    """The flat `arrays`, one after the other."""
    return jnp.concatenate(list(arrays))


def zeros(shape: tuple[int, ...], dtype: str, like: Array | None = None) -> Array:
    """Zeros; `like` is there for the signature of the torch side."""
    del like
    return jnp.zeros(shape, dtype)


def zeros_like(x: Array) -> Array:
    """Zeros of the shape and dtype of `x`."""
    return jnp.zeros_like(x)


def counter(value: int = 0) -> Array:
    """A 0-d int32."""
    return jnp.asarray(value, jnp.int32)


def flag(value: bool) -> Array:
    """A 0-d bool."""
    return jnp.asarray(value, jnp.bool_)


def all_finite(leaves: Sequence[Array]) -> Array:
    """A 0-d bool: no leaf has an infinity or a NaN."""
    flags = [jnp.isfinite(x).all() for x in leaves]
    return jnp.stack(flags).all() if flags else flag(True)


def known(condition: Array) -> bool | None:
    """None: a JAX value may be traced, and so is never branched on."""
    del condition
    return None


def select(condition: Array, new: Array, old: Array) -> Array:
    """`new` where the 0-d bool `condition` holds, else `old`."""
    return jnp.where(condition, new, old)


def where(condition: Array, a: Array, b: Array) -> Array:
    """`a` where the condition holds, else `b`, element by element."""
    return jnp.where(condition, a, b)


def take(x: Array, indices: Array) -> Array:
    """The entries of `x` at `indices`, along the last axis."""
    return jnp.take_along_axis(x, indices, -1)


def scatter(values: Array, indices: Array, size: int) -> Array:
    """A last axis of `size` zeros with `values` written at `indices`."""
    out = jnp.zeros((*values.shape[:-1], size), values.dtype)
    return jnp.put_along_axis(out, indices, values, -1, inplace=False)


def mean_magnitude(x: Array) -> Array:
    """The mean of ``|x|`` over the last axis; zero for an empty one."""
    if x.shape[-1] == 0:
        return jnp.zeros(x.shape[:-1], x.dtype)
    return jnp.abs(x).mean(-1)


def top_k(x: Array, k: int) -> Array:
    """Indices (int32, ascending) of the `k` largest magnitudes of the last axis.

    Exact; ties go to the lowest index (as XLA's TopK does).
    """
    if k == 0:
        return jnp.zeros((*x.shape[:-1], 0), jnp.int32)
    return jnp.sort(jax.lax.top_k(jnp.abs(x), k)[1], -1)


def pack_bits(bits: Array) -> Array:
    """Eight bools of the last axis to a byte, lowest bit first."""
    return jnp.packbits(bits, axis=-1, bitorder="little")


def unpack_bits(data: Array, n: int) -> Array:
    """The inverse of `pack_bits`: the first `n` bools."""
    return jnp.unpackbits(data, axis=-1, count=n, bitorder="little").astype(jnp.bool_)


def random_key(*words: int | Array) -> Array:
    """A 0-d uint32 mixed from whole numbers, the same bits as on the torch side."""
    key = jnp.zeros((), jnp.uint32)
    for word in words:
        bits = jnp.uint32(word % 2**32) if isinstance(word, int) else word.astype(jnp.uint32)
        key = _mix(_mix(key ^ bits) + jnp.uint32(_GOLDEN))
    return key


def random_bits(key: Array, n: int, like: Array) -> Array:
    """`n` uint32 numbers, uniform over all bit patterns, a function of the key alone."""
    del like
    counter = jnp.arange(n, dtype=jnp.uint32)
    return _mix(_mix(counter ^ key) + _mix(key + jnp.uint32(_GOLDEN)))


def uniform(key: Array, n: int, like: Array) -> Array:
    """`n` FP32 numbers, multiples of 2**-24 in ``[0, 1)``."""
    return (random_bits(key, n, like) >> 8).astype(jnp.float32) * 2.0**-24


_GOLDEN = 0x9E3779B9


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
