"""Array operations for JAX arrays, the counterpart of `torch_ops`; importing it imports jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gradtx.backends import registry, rows
from gradtx.backends.digits import quotient_of

registry.register_with_jax(jax)

Array = jax.Array
T = TypeVar("T")

TRACES = True
"""Values may be traced, and are never read but through `concrete`."""


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


def contiguous(x: Array) -> Array:
    """`x`: strides are the compiler's."""
    return x


def reshape(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` in another shape of the same size, in C order."""
    return jnp.reshape(x, shape)


def concat(arrays: Sequence[Array]) -> Array:
    """The flat `arrays`, one after the other."""
    return jnp.concatenate(list(arrays))


def joined(leaves: Sequence[Array]) -> Array:
    """The values of leaves of any shape, flat, one after the other."""
    return jnp.concatenate([jnp.ravel(x) for x in leaves])


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


def flags(values: Sequence[bool]) -> Array:
    """A bool a value."""
    return jnp.asarray(list(values), jnp.bool_)


def as_flag(value: bool | Array) -> Array:
    """A 0-d bool of what may be a Python bool."""
    return jnp.asarray(value, jnp.bool_)


def all_finite(leaves: Sequence[Array]) -> Array:
    """A 0-d bool: no leaf has an infinity or a NaN."""
    flags = [jnp.isfinite(x).all() for x in leaves]
    return jnp.stack(flags).all() if flags else flag(True)


def known(condition: Array) -> bool | None:
    """None: a JAX value may be traced, and so is never branched on."""
    del condition
    return None


def where(condition: Array, a: Array, b: Array) -> Array:
    """`a` where the condition holds, else `b`, element by element; no host sync."""
    return jnp.where(condition, a, b)


def take(x: Array, indices: Array) -> Array:
    """The entries of `x` at `indices`, along the last axis."""
    return jnp.take_along_axis(x, indices, -1, mode="promise_in_bounds")


def positions(starts: Sequence[int], length: int, like: Array) -> Array:
    """int32 ``[len(starts), length]``: whole numbers that rise by one from each start."""
    return jnp.asarray(starts, jnp.int32)[:, None] + jnp.arange(length, dtype=jnp.int32)


def ascending(x: Array) -> Array:
    """`x`, sorted."""
    return jnp.sort(x)


def split(x: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The flat `x` in arrays of some shapes, one after the other."""
    ends = list(accumulate(math.prod(shape) for shape in shapes))
    parts = jnp.split(x, ends[:-1])
    return [jnp.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def divided(leaves: Sequence[Array], divisor: float) -> list[Array]:
    """``x / divisor`` for each."""
    return [x / divisor for x in leaves]


def scatter(values: Array, indices: Array, size: int) -> Array:
    """A last axis of `size` zeros with `values` written at `indices`."""
    out = jnp.zeros((*values.shape[:-1], size), values.dtype)
    return jnp.put_along_axis(out, indices, values, -1, inplace=False)


def scatter_add(total: Array, values: Array, indices: Array) -> Array:
    """`total` with `values` added at `indices` of the last axis, which are distinct."""
    return scatter(values, indices, total.shape[-1]) + total


def signed(bits: Array, n: int, scale: Array) -> Array:
    """``[n]``: `scale`, ``[1]``, where a packed bit is set, and its negative elsewhere."""
    return jnp.where(unpack_bits(bits, n), scale, -scale)


def unshared(arrays: Sequence[Array], others: Sequence[Array]) -> list[Array]:
    """The arrays: nothing is written to them."""
    return list(arrays)


def add_in_place(total: Array, x: Array) -> Array:
    """``total + x``."""
    return total + x


def multiply_in_place(x: Array, factors: Array) -> Array:
    """``x * factors``."""
    return x * factors


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


def finite_part(x: Array) -> Array:
    """`x`, with zeros for infinities and NaNs."""
    return jnp.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def max_magnitude(x: Array) -> Array:
    """The largest ``|x|`` of the last axis; zero for an empty one, NaN if there is one."""
    return jnp.abs(x).max(-1, initial=0.0)


def euclidean_norm(x: Array) -> Array:
    """The square root of the sum of squares over the last axis; no square of FP32 overflows."""
    power = jnp.clip(exponent(max_magnitude(x)), -125, 125)[..., None]
    dtype = dtype_name(x)
    norm = jnp.sqrt(jnp.square(x * power_of_two(-power, dtype)).sum(-1))
    return norm * power_of_two(power, dtype)[..., 0]


def blocks(x: Array, size: int) -> Array:
    """The flat `x` in rows of `size`, the last one filled with zeros."""
    return jnp.reshape(jnp.pad(x, (0, -x.shape[0] % size)), (-1, size))


def table(x: Array, count: int, length: int) -> Array:
    """The flat `x` in so many rows of a length, filled up with zeros."""
    return jnp.reshape(jnp.pad(x, (0, count * length - x.shape[0])), (count, length))


def repeat(x: Array, count: int) -> Array:
    """`x` so many times, along a new first axis."""
    return jnp.broadcast_to(x, (count, *x.shape))


def limit(x: Array, bound: float) -> Array:
    """`x` limited to ``-bound`` to `bound`; NaN gives zero."""
    return jnp.nan_to_num(jnp.clip(x, -bound, bound), nan=0.0)


def round_by(x: Array, noise: Array | float) -> Array:
    """`x` in whole numbers: up where its fraction is larger than the noise, else down."""
    lower = jnp.floor(x)
    return lower + (x - lower > noise)


def bitcast(x: Array, dtype: str) -> Array:
    """The bits of `x` as another dtype of the same size."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))


def signbit(x: Array) -> Array:
    """Bools: the sign bit is set."""
    return jnp.signbit(x)


def exponent(x: Array) -> Array:
    """``floor(log2(abs(x)))`` as int32, exactly, for normal FP32 and FP64 numbers.

    Zero and denormal numbers give one less than the smallest, infinity and NaN one more than the
    largest: what `power_of_two` turns into zero and infinity.
    """
    bits, mantissa, bias = _float_bits(x)
    return ((bits >> mantissa) & (2 * bias + 1)).astype(jnp.int32) - bias


def power_of_two(exponent: Array, dtype: str) -> Array:
    """``2**exponent`` in FP32 or FP64, exactly; see the function `exponent` for its range."""
    kind, mantissa, bias = _FLOATS[dtype]
    return bitcast((exponent.astype(kind) + bias) << mantissa, dtype)


def random_exponent(x: Array, key: Array) -> Array:
    """The exponent of one of the powers of two around ``abs(x)``, drawn so that its mean is that.

    As by `exponent`, but a denormal number goes to zero or to the smallest normal one, and what is
    above the largest power of two goes down to it.
    """
    bits, mantissa, bias = _float_bits(x)
    bits = bits & (((2 * bias + 2) << mantissa) - 1)
    noise = random_bits(key, x.shape[-1], x)
    if mantissa > 32:
        noise = noise.astype(bits.dtype) << (mantissa - 32)
    else:
        noise = (noise >> (32 - mantissa)).astype(bits.dtype)
    # The mantissa is the probability of the larger one: adding noise to it carries as often.
    noise = noise * (bits < (2 * bias) << mantissa)
    return ((bits + noise) >> mantissa).astype(jnp.int32) - bias


def top_k(x: Array, k: int) -> Array:
    """Indices (int32, ascending) of the `k` largest magnitudes of the last axis.

    Exact; ties go to the lowest index (as XLA's TopK does).
    """
    if k == 0:
        return jnp.zeros((*x.shape[:-1], 0), jnp.int32)
    return jnp.sort(jax.lax.top_k(jnp.abs(x), k)[1], -1)


def digits(data: Array, base: int, count: int) -> Array:
    """The `count` lowest digits of bytes in a base, uint8 ``[count, n]``, the lowest first.

    The base is 2 to 256.
    """
    rows, rest = [], data.astype("int32")
    for _ in range(count):
        quotient = quotient_of(rest, base)
        rows.append((rest - quotient * base).astype("uint8"))
        rest = quotient
    return jnp.stack(rows)


def pack_bits(bits: Array) -> Array:
    """Eight bools of the last axis to a byte, lowest bit first."""
    return jnp.packbits(bits, axis=-1, bitorder="little")


def unpack_bits(data: Array, n: int) -> Array:
    """The inverse of `pack_bits`: the first `n` bools."""
    return jnp.unpackbits(data, axis=-1, count=n, bitorder="little").astype(jnp.bool_)


def random_subset(key: Array, n: int, k: int, like: Array) -> Array:
    """Indices (int32, ascending) of `k` of `n` places, every choice as likely: no place twice.

    The choice is a function of the key alone, the same as on the torch side.
    """
    if k in (0, n):
        return jnp.arange(k, dtype=jnp.int32)
    keys = (random_bits(key, n, like) & jnp.uint32(0x7FFFFFFF)).astype(jnp.int32)
    return jnp.sort(jax.lax.top_k(keys, k)[1])


def stack(arrays: Sequence[Array]) -> Array:
    """Arrays of one shape, along a new first axis."""
    return jnp.stack(list(arrays))


def orthonormal(x: Array) -> Array:
    """For each matrix ``[..., n, r]``, n >= r: orthonormal columns whose span holds its own."""
    # Scaled by a power of two: its squares would overflow, or vanish.
    power = jnp.clip(exponent(jnp.abs(x).max((-2, -1), keepdims=True, initial=0.0)), -125, 125)
    return jnp.linalg.qr(x * power_of_two(-power, dtype_name(x)))[0]


def total_norm(leaves: Sequence[Array]) -> Array:
    """0-d FP32 or FP64: the Euclidean norm of all leaves together; no square overflows."""
    norm, scale = _scaled_norm(leaves, [()] * len(leaves))
    return norm / scale


def _scaled_norm(leaves: Sequence[Array], axes: Sequence[tuple[str, ...]]) -> tuple[Array, Array]:
    """The norm of all leaves together times a power of two that brings it near 1, and that power.

    A leaf has its other parts on the devices along its axes.
    """
    if not leaves:
        return jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32)
    dtype = dtype_name(jnp.concatenate([jnp.zeros(0, x.dtype) for x in leaves]))
    own = [jnp.abs(x).max(initial=0.0).astype(dtype) for x in leaves]
    largest = jnp.stack([x.max() for x in _over_axes(jax.lax.pmax, own, axes)]).max()
    scale = power_of_two(-jnp.clip(exponent(largest), -125, 125), dtype)
    squares = [jnp.square(x.astype(dtype) * scale).sum() for x in leaves]
    parts = [x.sum() for x in _over_axes(jax.lax.psum, squares, axes)]
    return jnp.sqrt(jnp.stack(parts).sum()), scale


def _over_axes(
    reduce: Any, numbers: Sequence[Array], axes: Sequence[tuple[str, ...]]
) -> Iterator[Array]:
    """The numbers of leaves with the same axes, ``[n]``, reduced along those."""
    for own in sorted(set(axes)):
        found = jnp.stack([x for x, others in zip(numbers, axes, strict=True) if others == own])
        yield reduce(found, own) if own else found


def clip_by_norm(
    leaves: Sequence[Array], limit: float, axes: Sequence[tuple[str, ...]]
) -> list[Array]:
    """The leaves times ``limit / max(norm, limit)``, with the norm of all of them together.

    Neither a square nor the norm overflows, and leaves of zeros stay so. If a value is not finite,
    all are NaN.

    Args:
        leaves: FP32 or FP64.
        limit: over 0.
        axes: for each leaf, the axes of the mesh along which other devices hold other parts of it.
    """
    norm, scale = _scaled_norm(leaves, axes)
    norm = norm + (norm - norm)  # NaN for infinity.
    within = norm <= limit * scale
    scale, factor = jnp.where(within, 1.0, scale), jnp.where(within, 1.0, limit / norm)
    return [x * scale.astype(x.dtype) * factor.astype(x.dtype) for x in leaves]


def mesh_axes() -> dict[str, bool]:
    """The axes of the mesh inside `jax.shard_map`, and whether JAX tells what varies over them."""
    names = jax.sharding.get_abstract_mesh().manual_axes
    return {name: name in varying_axes(jax.lax.axis_index(name)) for name in names}


def varying_axes(x: Any) -> tuple[str, ...]:
    """The axes that JAX knows an array to vary over; it does only under ``check_vma``."""
    if not isinstance(x, jax.Array):
        return ()
    kind: Any = jax.typeof(x)
    tracked: Any = getattr(kind, "mat", None)
    return tuple(sorted(kind.vma if tracked is None else tracked.varying))


def has_axis(name: str) -> bool:
    """Whether there is an axis of that name, of a mesh or of `jax.vmap`."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def ratio(x: Array, y: Array) -> Array:
    """``x / y``. XLA multiplies by ``1 / y``, which underflows for the largest `y`: not here."""
    dtype = dtype_name(y)
    scale = power_of_two(-jnp.clip(exponent(y), -125, 125), dtype)
    return (x * scale) / (y * scale)


def concrete(count: Array) -> int | None:
    """The value of a 0-d whole number; None if it is not known yet, as under `jax.jit`."""
    return None if isinstance(count, jax.core.Tracer) else int(count)


def each(fn: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """``fn`` of each row of some columns, whose entries are arrays or payloads.

    Rows of the same small shapes go through one computation.
    """
    given = list(zip(*columns, strict=True))
    out: list[Any] = [None] * len(given)
    for places in rows.groups(given):
        if len(places) == 1:
            out[places[0]] = fn(*given[places[0]])
            continue
        found = jax.vmap(fn)(*rows.stacked([given[i] for i in places]))
        for number, i in enumerate(places):
            out[i] = rows.row(found, number)
    return out


def switch(index: Array, branches: Sequence[Callable[[], T]]) -> T:
    """What the branch at a 0-d `index` gives; all of them give arrays of the same shapes."""
    found: T = jax.lax.switch(index, branches)
    return found


def blank(fn: Callable[[], Any]) -> Any:
    """Zeros of the structure, shapes and dtypes that `fn` gives, varying over the same axes."""
    varying: list[tuple[str, ...]] = []

    def traced() -> Any:
        found = fn()
        varying.extend(map(varying_axes, jax.tree.leaves(found)))
        return found

    shapes, treedef = jax.tree.flatten(jax.eval_shape(traced))
    zeros = (jnp.zeros(x.shape, x.dtype) for x in shapes)
    found = [
        jax.lax.pcast(x, axes, to="varying") if axes else x
        for x, axes in zip(zeros, varying, strict=True)
    ]
    return jax.tree.unflatten(treedef, found)


def nearest(value: Array, values: Sequence[float]) -> Array:
    """The position of a 0-d value among `values`, of the nearest one if need be; 0-d int32."""
    return jnp.argmin(jnp.abs(jnp.asarray(values) - value)).astype(jnp.int32)


def random_key(*words: int | Array) -> Array:
    """A uint32 mixed from whole numbers (0-d, or as many as a word has), as on the torch side."""
    key = jnp.zeros((), jnp.uint32)
    for word in words:
        bits = jnp.uint32(word % 2**32) if isinstance(word, int) else word.astype(jnp.uint32)
        key = _mix(_mix(key ^ bits) + jnp.uint32(_GOLDEN))
    return key


def random_keys(
    seed: int, words: Sequence[int], rank: int | Array, count: Array
) -> Sequence[Array]:
    """For each word, ``random_key(seed, word, rank, count)``."""
    column = jnp.asarray([word % 2**32 for word in words], jnp.uint32)
    return list(random_key(seed, column, rank, count))


def random_bits(key: Array, n: int, like: Array, start: int | Array = 0) -> Array:
    """`n` uint32 numbers, uniform over all bit patterns, a function of the key alone.

    `start` numbers of the key come before them.
    """
    del like
    counter = jnp.arange(n, dtype=jnp.uint32) + jnp.asarray(start).astype(jnp.uint32)
    return _mix(_mix(counter ^ key) + _mix(key + jnp.uint32(_GOLDEN)))


def uniform(key: Array, n: int, like: Array, start: int | Array = 0) -> Array:
    """`n` FP32 numbers, multiples of 2**-24 in ``[0, 1)``; see `random_bits`."""
    return (random_bits(key, n, like, start) >> 8).astype(jnp.float32) * 2.0**-24


# The whole number of the same size, the bits of the mantissa, and the bias of the exponent.
_FLOATS = {"float32": ("int32", 23, 127), "float64": ("int64", 52, 1023)}


def _float_bits(x: Array) -> tuple[Array, int, int]:
    kind, mantissa, bias = _FLOATS[dtype_name(x)]
    return bitcast(x, kind), mantissa, bias


_GOLDEN = 0x9E3779B9


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
