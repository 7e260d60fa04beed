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
    # Scaled by a power of two, which is exact, so that the sum does not overflow.
    magnitude = jnp.abs(x)
    exponent = jnp.frexp(magnitude.max(-1, keepdims=True))[1]
    mean = _sum(jnp.ldexp(magnitude, -exponent)) / x.shape[-1]
    return jnp.ldexp(mean, exponent[..., 0])


def _sum(x: Array) -> Array:
    """The sum over the last axis, its rounding errors added up and put back at the end."""
    error = jnp.zeros_like(x)
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x, error = (jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 1)]) for a in (x, error))
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        x = a + b
        rest = x - a
        error = error[..., :half] + error[..., half:] + ((a - (x - rest)) + (b - rest))
    return (x + error)[..., 0]


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
