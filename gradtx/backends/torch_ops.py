"""Array operations for torch tensors. The last axis is the one that is compressed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradtx.backends.selection import largest_magnitudes
from gradtx.wire.bits import pack_bits as pack_bits
from gradtx.wire.bits import unpack_bits as unpack_bits

_DTYPES = {
    name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int32")
}


def dtype_name(x: torch.Tensor) -> str:
    """The dtype's name without its module, such as ``"float32"``."""
    return str(x.dtype).removeprefix("torch.")


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """`x` in `dtype`; `x` itself if it has that dtype already."""
    return x.to(_DTYPES[dtype])


def detach(x: torch.Tensor) -> torch.Tensor:
    """`x` without its autograd history."""
    return x.detach() if x.requires_grad else x


def ravel(x: torch.Tensor) -> torch.Tensor:
    """`x` as one contiguous axis, in C order."""
    return x.reshape(-1)


def reshape(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`x` in another shape of the same size, in C order."""
    return x.reshape(shape)


def concat(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """The flat `arrays`, one after the other."""
    return torch.cat(list(arrays))


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


def all_finite(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 0-d bool: no leaf has an infinity or a NaN. One reading pass, no temporary."""
    extremes = [torch.stack(torch.aminmax(x)) for x in leaves if x.numel()]
    if not extremes:
        return torch.tensor(True)
    if len({(x.dtype, x.device) for x in extremes}) > 1:
        extremes = [x.to(extremes[0].device, torch.float64) for x in extremes]
    return torch.cat(extremes).isfinite().all()


def known(condition: torch.Tensor) -> bool | None:
    """The value of a 0-d bool if reading it costs nothing, else None."""
    return bool(condition) if condition.device.type == "cpu" else None


def select(condition: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new` where the 0-d bool `condition` holds, else `old`, with no host sync."""
    return torch.where(condition, new, old)


def where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a` where the condition holds, else `b`, element by element."""
    return torch.where(condition, a, b)


def take(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The entries of `x` at `indices`, along the last axis."""
    return x.gather(-1, indices)


def scatter(values: torch.Tensor, indices: torch.Tensor, size: int) -> torch.Tensor:
    """A last axis of `size` zeros with `values` written at `indices`."""
    out = values.new_zeros((*values.shape[:-1], size))
    return out.scatter_(-1, indices, values)


def mean_magnitude(x: torch.Tensor) -> torch.Tensor:
    """The mean of ``|x|`` over the last axis; zero for an empty one."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    total = torch.linalg.vector_norm(x, 1, -1, dtype=torch.float64)
    mean: torch.Tensor = total / x.shape[-1]
    return mean.to(x.dtype)


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (int64, ascending) of the `k` largest magnitudes of the last axis.

    Exact; ties go to the lowest index; NaN counts as larger than everything.
    """
    n = x.shape[-1]
    if k in (0, n):
        return torch.arange(k, device=x.device).expand(*x.shape[:-1], k).contiguous()
    if x.device.type != "cpu":
        order = x.abs().sort(stable=True, dim=-1, descending=True).indices
        return order[..., :k].sort(-1).values
    rows = x.detach().contiguous().reshape(-1, n).numpy()
    chosen = [torch.from_numpy(largest_magnitudes(row, k)) for row in rows]
    return torch.stack(chosen).reshape(*x.shape[:-1], k)


def random_key(*words: int | torch.Tensor) -> torch.Tensor:
    """A 0-d int32 mixed from whole numbers, the same bits as on the JAX side.

    Args:
        *words: Python numbers (taken modulo 2**32) or 0-d int32 tensors.
    """
    key = torch.zeros((), dtype=torch.int32)
    for word in words:
        if not isinstance(word, torch.Tensor):
            word = torch.tensor(_signed(word), dtype=torch.int32)
        key = _mix(_mix(key ^ word.cpu()) + _signed(_GOLDEN))
    return key


def random_bits(key: torch.Tensor, n: int, like: torch.Tensor) -> torch.Tensor:
    """`n` int32 numbers, uniform over all bit patterns, a function of the key alone.

    Args:
        key: from `random_key`.
        n: how many, below 2**32.
        like: a tensor on the device to use.
    """
    key = key.to(like.device)
    counter = torch.arange(n, device=like.device).to(torch.int32)
    return _mix(_mix(counter ^ key) + _mix(key + _signed(_GOLDEN)))


def uniform(key: torch.Tensor, n: int, like: torch.Tensor) -> torch.Tensor:
    """`n` FP32 numbers, multiples of 2**-24 in ``[0, 1)``."""
    return ((random_bits(key, n, like) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


_GOLDEN = 0x9E3779B9


def _signed(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31


def _mix(x: torch.Tensor) -> torch.Tensor:
    # A bijection of 32 bits in which every input bit changes every output bit half of the time
    # (the constants are from C. Wellons, "Prospecting for Hash Functions", 2018).
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)
