"""Array operations for torch tensors. The last axis is the one that is compressed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import optree
import torch

from gradtx.backends.digits import quotient_of, write_digits
from gradtx.backends.registry import NAMESPACE
from gradtx.backends.selection import largest_magnitudes
from gradtx.wire.bits import pack_bits as pack_bits
from gradtx.wire.bits import unpack_bits as unpack_bits

T = TypeVar("T")

_SMALL = 4096  # values; a call costs more than what it does to them

TRACES = False
"""Values are there to be read."""

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
        *("uint8", "int16", "int32", "bool"),
    )
}


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(x: torch.Tensor) -> str:
    """The dtype's name without its module, such as ``"float32"``."""
    return _NAMES.get(x.dtype) or str(x.dtype).removeprefix("torch.")


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """`x` in `dtype`; `x` itself if it has that dtype already."""
    kind = _DTYPES[dtype]
    return x if x.dtype == kind else x.to(kind)


def detach(x: torch.Tensor) -> torch.Tensor:
    """`x` without its autograd history."""
    return x.detach() if x.requires_grad else x


def ravel(x: torch.Tensor) -> torch.Tensor:
    """`x` as one contiguous axis, in C order."""
    return x if x.dim() == 1 and x.is_contiguous() else x.reshape(-1)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x` in C order; `x` itself if it is so already."""
    return x.contiguous()


def reshape(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`x` in another shape of the same size, in C order."""
    return x.reshape(shape)


def digits(data: torch.Tensor, base: int, count: int) -> torch.Tensor:
    """The `count` lowest digits of bytes in a base, uint8 ``[count, n]``, the lowest first.

    The base is 2 to 256.
    """
    rows = data.new_empty(count, data.shape[0])
    if base & (base - 1) == 0:
        width = base.bit_length() - 1
        for i, row in enumerate(rows):
            torch.bitwise_right_shift(data, i * width, out=row).bitwise_and_(base - 1)
        return rows
    if data.device.type == "cpu":
        write_digits(data.numpy(), base, rows.numpy())
        return rows
    rest = data.to(torch.int32)
    for row in rows:
        quotient = quotient_of(rest, base)  # Several times faster than `rest // base`.
        row.copy_(rest - quotient * base)
        rest = quotient
    return rows


def concat(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """The flat `arrays`, one after the other."""
    return torch.cat(list(arrays))


def joined(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of leaves of any shape, flat, one after the other."""
    flat = set(map(torch.Tensor.dim, leaves)) == {1}
    return torch.cat(list(leaves) if flat else [ravel(x) for x in leaves])


def zeros(shape: tuple[int, ...], dtype: str, like: torch.Tensor | None = None) -> torch.Tensor:
    """Zeros on the device of `like`."""
    return torch.zeros(shape, dtype=_DTYPES[dtype], device=None if like is None else like.device)


def zeros_like(x: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape, dtype and device of `x`."""
    return torch.zeros_like(x)


def counter(value: int = 0) -> torch.Tensor:
    """A 0-d int32."""
    return torch.tensor(value, dtype=torch.int32)


def flag(value: bool) -> torch.Tensor:
    """A 0-d bool."""
    return torch.tensor(value)


def flags(values: Sequence[bool]) -> torch.Tensor:
    """A bool a value."""
    return torch.tensor(list(values), dtype=torch.bool)


def as_flag(value: bool | torch.Tensor) -> torch.Tensor:
    """A 0-d bool of what may be a Python bool."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def all_finite(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 0-d bool: no leaf has an infinity or a NaN. One reading pass; small leaves are copied."""
    small = [joined([leaves[i] for i in places]) for places in _small(leaves)]
    large = [x for x in leaves if x.numel() > _SMALL]
    extremes = [torch.stack(torch.aminmax(x)) for x in [*small, *large] if x.numel()]
    if not extremes:
        return torch.tensor(True)
    if len({(x.dtype, x.device) for x in extremes}) > 1:
        extremes = [x.to(extremes[0].device, torch.float64) for x in extremes]
    return torch.cat(extremes).isfinite().all()


def known(condition: torch.Tensor) -> bool | None:
    """The value of a 0-d bool if reading it costs nothing, else None."""
    return bool(condition) if condition.device.type == "cpu" else None


def where(
    condition: torch.Tensor, a: torch.Tensor | float, b: torch.Tensor | float
) -> torch.Tensor:
    """`a` where the condition holds, else `b`, element by element; no host sync."""
    a, b = (_beside(x, condition) if isinstance(x, torch.Tensor) else x for x in (a, b))
    return torch.where(condition, a, b)


def take(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The entries of `x` at `indices`, along the last axis."""
    # Of one axis that is three times as fast.
    return x.index_select(0, indices) if x.dim() == 1 else x.gather(-1, indices)


def positions(starts: Sequence[int], length: int, like: torch.Tensor) -> torch.Tensor:
    """int64 ``[len(starts), length]``: whole numbers that rise by one from each start."""
    steps = torch.arange(length, device=like.device)
    return torch.tensor(starts, device=like.device)[:, None] + steps


def ascending(x: torch.Tensor) -> torch.Tensor:
    """`x`, sorted."""
    return x.sort().values


def split(x: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """The flat `x` in arrays of some shapes, one after the other; views of it."""
    parts = x.unsafe_split_with_sizes(list(map(math.prod, shapes)))  # No autograd is needed.
    if set(map(len, shapes)) == {1}:
        return list(parts)
    pairs = zip(parts, shapes, strict=True)
    return [part if len(shape) == 1 else part.view(shape) for part, shape in pairs]


def divided(leaves: Sequence[torch.Tensor], divisor: float) -> list[torch.Tensor]:
    """``x / divisor`` for each; the leaves themselves if that is one."""
    if divisor == 1:
        return list(leaves)
    groups = _small(leaves)
    if groups and len(groups[0]) == len(leaves):
        return split(joined(leaves) / divisor, [x.shape for x in leaves])
    out: list[Any] = [x / divisor if x.numel() > _SMALL else None for x in leaves]
    for places in groups:
        small = [leaves[i] for i in places]
        parts = split(joined(small) / divisor, [x.shape for x in small])
        for i, part in zip(places, parts, strict=True):
            out[i] = part
    return out


def _small(leaves: Sequence[torch.Tensor]) -> list[list[int]]:
    """Where the small ones are: those of one dtype and device together."""
    small = [i for i, x in enumerate(leaves) if x.numel() <= _SMALL]
    if len({x.dtype for x in leaves}) == len({x.device for x in leaves}) == 1:
        return [small] if small else []
    found: dict[Any, list[int]] = {}
    for i in small:
        found.setdefault((leaves[i].dtype, leaves[i].device), []).append(i)
    return list(found.values())


def scatter(values: torch.Tensor, indices: torch.Tensor, size: int) -> torch.Tensor:
    """A last axis of `size` zeros with `values` written at `indices`."""
    out = values.new_zeros((*values.shape[:-1], size))
    return out.scatter_(-1, indices, values)


def scatter_add(total: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`total`, in place, with `values` added at `indices` of the last axis, which are distinct."""
    return total.scatter_add_(-1, indices, values)


def signed(bits: torch.Tensor, n: int, scale: torch.Tensor) -> torch.Tensor:
    """``[n]``: `scale`, ``[1]``, where a packed bit is set, and its negative elsewhere."""
    octets = torch.arange(256, dtype=torch.uint8, device=bits.device)[:, None]
    table = torch.where(unpack_bits(octets, 8), scale, -scale)
    return torch.nn.functional.embedding(bits.to(torch.int32), table).reshape(-1)[:n]


def unshared(arrays: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The arrays, those copied that lie in the memory of one of the others: views may."""
    taken = {other.untyped_storage().data_ptr() for other in others}
    return [x.clone() if x.untyped_storage().data_ptr() in taken else x for x in arrays]


def add_in_place(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``total + x``, written over `total`."""
    return total.add_(x)


def multiply_in_place(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """``x * factors``, written over `x`."""
    return x.mul_(factors)


def mean_magnitude(x: torch.Tensor) -> torch.Tensor:
    """The mean of ``|x|`` over the last axis; zero for an empty one."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    total = x.abs().sum(-1, dtype=torch.float64)  # Three times as fast as the norm.
    mean: torch.Tensor = total / x.shape[-1]
    return mean.to(x.dtype)


def finite_part(x: torch.Tensor) -> torch.Tensor:
    """`x`, with zeros for infinities and NaNs."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def max_magnitude(x: torch.Tensor) -> torch.Tensor:
    """The largest ``|x|`` of the last axis; zero for an empty one, NaN if there is one."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    if x.numel() == x.shape[-1]:  # One row: no magnitudes need be written.
        return torch.stack(torch.aminmax(x)).abs().amax().reshape(x.shape[:-1])
    return x.abs().amax(-1)


def euclidean_norm(x: torch.Tensor) -> torch.Tensor:
    """The square root of the sum of squares over the last axis; no square of FP32 overflows."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, 2, -1, dtype=torch.float64)
    return norm.to(x.dtype)


def blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """The flat `x` in rows of `size`, the last one filled with zeros."""
    missing = -x.shape[0] % size
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).reshape(-1, size)


def table(x: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """The flat `x` in so many rows of a length, filled up with zeros."""
    return torch.nn.functional.pad(x, (0, count * length - x.shape[0])).reshape(count, length)


def repeat(x: torch.Tensor, count: int) -> torch.Tensor:
    """`x` so many times, along a new first axis."""
    return x.expand(count, *x.shape)


def limit(x: torch.Tensor, bound: float) -> torch.Tensor:
    """`x` limited to ``-bound`` to `bound`; NaN gives zero."""
    return x.clamp(-bound, bound).nan_to_num_(0.0)


def round_by(x: torch.Tensor, noise: torch.Tensor | float) -> torch.Tensor:
    """`x` in whole numbers: up where its fraction is larger than the noise, else down."""
    lower = x.floor()
    return lower.add_(torch.gt(x - lower, noise))


def bitcast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The bits of `x` as another dtype of the same size."""
    return x.view(_DTYPES[dtype])


def signbit(x: torch.Tensor) -> torch.Tensor:
    """Bools: the sign bit is set."""
    return torch.signbit(x)


def exponent(x: torch.Tensor) -> torch.Tensor:
    """``floor(log2(abs(x)))`` as int32, exactly, for normal FP32 and FP64 numbers.

    Zero and denormal numbers give one less than the smallest, infinity and NaN one more than the
    largest: what `power_of_two` turns into zero and infinity.
    """
    bits, mantissa, bias = _float_bits(x)
    return ((bits >> mantissa) & (2 * bias + 1)).to(torch.int32) - bias


def power_of_two(exponent: torch.Tensor, dtype: str) -> torch.Tensor:
    """``2**exponent`` in FP32 or FP64, exactly; see the function `exponent` for its range."""
    kind, mantissa, bias = _FLOATS[dtype]
    return ((exponent.to(kind) + bias) << mantissa).view(_DTYPES[dtype])


def random_exponent(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The exponent of one of the powers of two around ``abs(x)``, drawn so that its mean is that.

    As by `exponent`, but a denormal number goes to zero or to the smallest normal one, and what is
    above the largest power of two goes down to it.
    """
    bits, mantissa, bias = _float_bits(x)
    bits = bits & (((2 * bias + 2) << mantissa) - 1)
    noise = random_bits(key, x.shape[-1], x)
    if mantissa > 32:
        noise = (noise.to(bits.dtype) & 0xFFFFFFFF) << (mantissa - 32)
    else:
        noise = (noise >> (32 - mantissa)) & ((1 << mantissa) - 1)
    # The mantissa is the probability of the larger one: adding noise to it carries as often.
    noise *= bits < (2 * bias) << mantissa
    return ((bits + noise) >> mantissa).to(torch.int32) - bias


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (int64, ascending) of the `k` largest magnitudes of the last axis.

    Exact; ties go to the lowest index; NaN counts as larger than everything.
    """
    n = x.shape[-1]
    if k in (0, n):
        return torch.arange(k, device=x.device).expand(*x.shape[:-1], k).contiguous()
    if x.device.type != "cpu" or (x.dim() > 1 and n <= _SMALL):
        if k == 1:
            return x.abs().argmax(-1, keepdim=True)
        order = x.abs().sort(stable=True, dim=-1, descending=True).indices
        return order[..., :k].sort(-1).values
    rows = x.detach().contiguous().reshape(-1, n).numpy()
    chosen = [torch.from_numpy(largest_magnitudes(row, k)) for row in rows]
    return torch.stack(chosen).reshape(*x.shape[:-1], k)


def random_subset(key: torch.Tensor, n: int, k: int, like: torch.Tensor) -> torch.Tensor:
    """Indices (int64, ascending) of `k` of `n` places, every choice as likely: no place twice.

    Args:
        key: from `random_key`; the choice is a function of it alone, the same as on the JAX side.
        n: how many places.
        k: how many of them.
        like: a tensor on the device to use.
    """
    if k in (0, n):
        return torch.arange(k, device=like.device)
    keys = random_bits(key, n, like) & 0x7FFFFFFF
    if like.device.type == "cpu":
        return torch.from_numpy(largest_magnitudes(keys.numpy().view("float32"), k))
    return keys.sort(stable=True, descending=True).indices[:k].sort().values


def stack(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """Arrays of one shape, along a new first axis."""
    return torch.stack(list(arrays))


def orthonormal(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns whose span holds those of `x`, for each matrix ``[..., n, r]``, n >= r.

    By Householder reflections: the columns are orthonormal whatever the rank, for a matrix of zeros
    too, and no square overflows.
    """
    columns: torch.Tensor = torch.linalg.qr(x)[0]
    return columns


def total_norm(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """0-d FP64: the Euclidean norm of all leaves together; no square overflows FP32."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in leaves]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms])
    )
    return total


def clip_by_norm(
    leaves: Sequence[torch.Tensor], limit: float, axes: Sequence[tuple[str, ...]]
) -> list[torch.Tensor]:
    """The leaves times ``limit / max(norm, limit)``, with the norm of all of them together.

    No square of FP32 overflows, and leaves of zeros stay so. If a value is not finite, all are NaN.

    Args:
        leaves: FP32 or FP64.
        limit: over 0.
        axes: there for the signature of the JAX side.
    """
    del axes
    norm = total_norm(leaves)
    norm = norm + (norm - norm)  # NaN for infinity.
    coefficient = (limit / norm).clamp(max=1.0)
    return [x * coefficient.to(x.device, x.dtype) for x in leaves]


def mesh_axes() -> dict[str, bool]:
    """None: torch tensors are on no mesh."""
    return {}


def varying_axes(x: Any) -> tuple[str, ...]:
    """None: torch tensors are on no mesh."""
    del x
    return ()


def has_axis(name: str) -> bool:
    """False: torch tensors are on no mesh."""
    del name
    return False


def ratio(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x / y``."""
    return x / y


def concrete(count: torch.Tensor) -> int | None:
    """The value of a 0-d whole number, waiting for its device; None if it is not known yet."""
    return int(count)


def each(fn: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """``fn`` of each row of some columns, whose entries are arrays or payloads."""
    return [fn(*row) for row in zip(*columns, strict=True)]


def switch(index: torch.Tensor, branches: Sequence[Callable[[], T]]) -> T:
    """What the branch at a 0-d `index` gives."""
    return branches[int(index)]()


def blank(fn: Callable[[], Any]) -> Any:
    """Zeros of the structure, shapes and dtypes that `fn` gives."""
    return optree.tree_map(torch.zeros_like, fn(), namespace=NAMESPACE)


def nearest(value: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """The position of a 0-d value among `values`, of the nearest one if need be; 0-d int32."""
    return (torch.tensor(values) - value).abs().argmin().to(torch.int32)


def random_key(*words: int | torch.Tensor) -> torch.Tensor:
    """An int32 mixed from whole numbers (0-d, or as many as a word has), as on the JAX side.

    Args:
        *words: Python numbers (taken modulo 2**32) or int32 tensors; the key is on the device of
            these, so that none has to be read.
    """
    key = torch.zeros((), dtype=torch.int32)
    for word in words:
        if not isinstance(word, torch.Tensor):
            word = torch.tensor(_signed(word), dtype=torch.int32)
        key = _mix(_mix(_beside(key, word) ^ word) + _signed(_GOLDEN))
    return key


def random_keys(
    seed: int, words: Sequence[int], rank: int, count: torch.Tensor
) -> Sequence[torch.Tensor]:
    """For each word, ``random_key(seed, word, rank, count)``."""
    if count.device.type != "cpu":
        return [random_key(seed, word, rank, count) for word in words]
    column = torch.tensor([_signed(word) for word in words], dtype=torch.int32)
    return random_key(seed, column, rank, count).unbind()


def random_bits(key: torch.Tensor, n: int, like: torch.Tensor, start: int = 0) -> torch.Tensor:
    """`n` int32 numbers, uniform over all bit patterns, a function of the key alone.

    Args:
        key: from `random_key`.
        n: how many, below 2**32.
        like: a tensor on the device to use.
        start: how many numbers of the key come before them.
    """
    key = _beside(key, like).to(like.device)
    counter = torch.arange(start, start + n, device=like.device).to(torch.int32)
    return _mix(_mix(counter.bitwise_xor_(key)).add_(_mix(key + _signed(_GOLDEN))))


def uniform(key: torch.Tensor, n: int, like: torch.Tensor, start: int = 0) -> torch.Tensor:
    """`n` FP32 numbers, multiples of 2**-24 in ``[0, 1)``; see `random_bits`."""
    bits = random_bits(key, n, like, start).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)
    return bits.to(torch.float32).mul_(2.0**-24)


# The whole number of the same size, the bits of the mantissa, and the bias of the exponent.
_FLOATS = {"float32": (torch.int32, 23, 127), "float64": (torch.int64, 52, 1023)}


def _float_bits(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    kind, mantissa, bias = _FLOATS[dtype_name(x)]
    return x.view(kind), mantissa, bias


def _beside(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x`, on the device of `like` if it is a single number on the CPU.

    It gets there as the argument of a kernel: a copy is waited for.
    """
    if x.device == like.device or x.dim() > 0 or x.device.type != "cpu":
        return x
    return torch.full((), x.item(), dtype=x.dtype, device=like.device)


_GOLDEN = 0x9E3779B9


def _signed(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31


def _mix(x: torch.Tensor) -> torch.Tensor:
    # A bijection of 32 bits in which every input bit changes every output bit half of the time
    # (the constants are from C. Wellons, "Prospecting for Hash Functions", 2018). In place: it is
    # allocation that takes the time.
    high = (x >> 16).bitwise_and_(0xFFFF)
    x.bitwise_xor_(high).mul_(0x7FEB352D)
    torch.bitwise_right_shift(x, 15, out=high).bitwise_and_(0x1FFFF)
    x.bitwise_xor_(high).mul_(_signed(0x846CA68B))
    torch.bitwise_right_shift(x, 16, out=high).bitwise_and_(0xFFFF)
    return x.bitwise_xor_(high)
