"""Hypothesis strategies: chains, parameters, gradients of several ranks, loss scales, bad steps.

Example:
    >>> from hypothesis import given, settings
    >>> from gradtx.testing import check_laws, strategies
    >>> @settings(max_examples=1, deadline=None)
    ... @given(strategies.chains(valid=True, exchange=True))
    ... def accepted_chains_keep_the_laws(tx):
    ...     check_laws(tx, ranks=(2,))
    >>> accepted_chains_keep_the_laws()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "gradtx.testing.strategies needs hypothesis: pip install hypothesis"
    ) from error

from gradtx.compressors.sign import sign
from gradtx.compressors.topk import topk
from gradtx.core.chain import Chain, chain
from gradtx.core.combinators import ef
from gradtx.core.predicates import is_matrix, path_glob
from gradtx.core.rules import check
from gradtx.core.transformation import Transformation
from gradtx.core.tree import PyTree, flatten, unflatten
from gradtx.exchange.allreduce import allreduce
from gradtx.testing.trace import Step
from gradtx.transforms.clip import clip_by_global_norm, clip_by_local_norm
from gradtx.transforms.scale import scale, scale_by_schedule
from gradtx.transforms.select import filter_params, skip_bn
from gradtx.transforms.unscale import unscale
from gradtx.transforms.weight_decay import add_decayed_weights

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = ((), (0,), (1,), (3,), (8,), (2, 3), (5, 1, 2), (0, 4))
NAMES = ("weight", "bias", "bn1", "fc", "head", "BatchNorm_0")

List = list[Transformation]


class Layer(NamedTuple):
    """A NamedTuple, for trees that have one."""

    weight: Any
    bias: Any


def ratios() -> st.SearchStrategy[float]:
    """Shares for `topk`: all, too; and so few that one value, the least that is sent, is more."""
    return st.sampled_from((1e-6, 0.01, 0.1, 0.25, 0.5, 0.75, 1.0))


def filters() -> st.SearchStrategy[Transformation]:
    """`skip_bn` and `filter_params`."""
    tests = (is_matrix, ~is_matrix, ~path_glob("*weight"), path_glob("*"), ~path_glob("*"))
    return st.one_of(st.builds(skip_bn), st.sampled_from(tests).map(filter_params))


def topks(*, feedback: bool = True) -> st.SearchStrategy[Transformation]:
    """`topk`, of all scopes."""
    scopes = st.sampled_from(("leaf", "global"))
    return st.builds(topk, ratios(), scope=scopes, feedback=st.just(feedback))


def exchanges() -> st.SearchStrategy[Transformation]:
    """`allreduce`, of all ops; on leaves as small as these only ``"gather"`` sends payloads."""
    algorithms = st.sampled_from(("auto", "gather"))
    return st.builds(allreduce, op=st.sampled_from(("mean", "sum")), algorithm=algorithms)


def _waning(step: Any) -> Any:
    return 1.0 / (1.0 + step)


def transforms() -> st.SearchStrategy[Transformation]:
    """Clips, scales and weight decay: from dense gradients to dense gradients."""
    norms = st.sampled_from((1e-3, 0.5, 1.0, 100.0))
    masks = st.sampled_from((None, is_matrix, ~path_glob("*bias")))
    return st.one_of(
        st.builds(clip_by_global_norm, norms),
        st.builds(clip_by_local_norm, norms),
        st.builds(scale, st.sampled_from((-1.0, -0.1, 0.5, 3))),
        st.just(scale_by_schedule(_waning)),
        st.builds(add_decayed_weights, st.sampled_from((0.0, 0.01, 0.5)), masks),
    )


def stages() -> st.SearchStrategy[Transformation]:
    """Any one transformation of the vocabulary, but for `transforms`."""
    return st.one_of(
        st.builds(unscale),
        filters(),
        st.booleans().flatmap(lambda feedback: topks(feedback=feedback)),
        st.builds(sign, feedback=st.booleans()),
        st.builds(ef),
        exchanges(),
    )


def transformations(
    valid: bool | None = None,
    *,
    exchange: bool | None = None,
    max_stages: int = 5,
    dense: bool = False,
) -> st.SearchStrategy[List]:
    """Lists of transformations, as `chain` takes them.

    Args:
        valid: whether `chain` accepts them; None for both.
        exchange: whether there is an `allreduce` among them; None for both.
        max_stages: how many there are at most.
        dense: whether `transforms` are among them too.

    Returns:
        The strategy. Where `valid` is True, one error feedback is over all compressors, or all of
        them say ``feedback=False``.
    """
    accepted = _accepted(exchange, max_stages, dense)
    refused = _refused(exchange, max_stages, dense)
    if valid is None:
        return st.one_of(accepted, refused)
    return accepted if valid else refused


def chains(
    valid: bool | None = None,
    *,
    exchange: bool | None = None,
    max_stages: int = 5,
    dense: bool = False,
) -> st.SearchStrategy[Chain]:
    """As `transformations`, but built: with ``check=False`` unless `valid` is True."""
    lists = transformations(valid, exchange=exchange, max_stages=max_stages, dense=dense)
    return lists.map(lambda parts: chain(*parts, check=valid is True))


@st.composite
def _accepted(draw: st.DrawFn, exchange: bool | None, max_stages: int, dense: bool) -> List:
    if not dense:
        return draw(_plain(exchange, max_stages))
    room = draw(st.integers(0, max(0, max_stages - (exchange is True))))
    parts = draw(_plain(exchange, max_stages - room))
    for _ in range(room):
        # Each at a place that the rules allow; none is put in where there is no such place.
        part, places = draw(transforms()), range(len(parts) + 1)
        tried = [[*parts[:i], part, *parts[i:]] for i in places]
        allowed = [longer for longer in tried if _in_order(longer)]
        parts = draw(st.sampled_from(allowed)) if allowed else parts
    return parts


def _in_order(parts: List) -> bool:
    return not check([stage for part in parts for stage in part.stages])


@st.composite
def _plain(draw: st.DrawFn, exchange: bool | None, max_stages: int) -> List:
    exchanging = (draw(st.booleans()) if exchange is None else exchange) and max_stages > 0
    end: List = [draw(exchanges())] if exchanging else []
    room = max_stages - len(end)
    run = draw(_runs(room)) if room > 0 and draw(st.integers(0, 4)) else []
    front: List = []
    if run:
        front = draw(st.lists(filters(), max_size=min(3, room - len(run))))
    if room - len(run) - len(front) > 0 and draw(st.booleans()):
        if not run and draw(st.booleans()):
            return [*end, unscale()]
        front.insert(draw(st.integers(0, len(front))), unscale())
    return [*front, *run, *end]


@st.composite
def _runs(draw: st.DrawFn, room: int) -> List:
    """Compressors, the last of which may be `sign`, and their feedback, if there is room for it."""
    feedback = room > 1 and draw(st.integers(0, 3)) > 0
    room -= feedback
    signs = draw(st.booleans())
    choosing = draw(st.lists(topks(feedback=feedback), min_size=not signs, max_size=room - signs))
    last: List = [sign(feedback=feedback)] if signs else []
    return [*choosing, *last, *([ef()] if feedback else [])]


def _refused(exchange: bool | None, max_stages: int, dense: bool) -> st.SearchStrategy[List]:
    def wanted(parts: List) -> bool:
        has = any(part.name == "allreduce" for part in parts)
        return not _in_order(parts) and exchange in (None, has)

    any_stage = st.one_of(stages(), transforms()) if dense else stages()
    return st.lists(any_stage, min_size=1, max_size=max_stages).filter(wanted)


@st.composite
def leaves(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES, *, absent: bool = True
) -> torch.Tensor | None:
    """A parameter of zeros: 0-d, empty, with one value or more, contiguous or not; or None."""
    if absent and not draw(st.integers(0, 9)):
        return None
    shape = draw(st.sampled_from(SHAPES))
    leaf = torch.zeros(shape, dtype=draw(st.sampled_from(dtypes)))
    return _strided(leaf) if draw(st.booleans()) else leaf


@st.composite
def params(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES, *, max_leaves: int = 6
) -> PyTree:
    """A parameter tree: dicts, nested ones, lists, tuples, NamedTuples; at least one array in it.

    Args:
        draw: given by Hypothesis.
        dtypes: of the leaves.
        max_leaves: how many leaves there are at most, Nones among them.
    """
    names = st.sampled_from(NAMES)

    def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(names, children, min_size=1, max_size=3),
            st.lists(children, min_size=1, max_size=3),
            st.tuples(children, children),
            st.builds(Layer, children, children),
        )

    nested = st.recursive(leaves(dtypes), containers, max_leaves=max_leaves)
    tree = draw(st.dictionaries(names, nested, min_size=1, max_size=3))
    if all(leaf is None for leaf in flatten(tree)[0]):
        tree = {**tree, "last": draw(leaves(dtypes, absent=False))}
    return tree


def loss_scales() -> st.SearchStrategy[float]:
    """Loss scales: powers of two, which change no bit of a gradient in range, and others."""
    return st.sampled_from((1.0, 2.0, 8.0, 256.0, 1024.0, 0.5, 3.0, 10.0, 1000.0))


def world_sizes(max_size: int = 4, *, min_size: int = 1) -> st.SearchStrategy[int]:
    """Numbers of ranks."""
    return st.integers(min_size, max_size)


def values(kind: str, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A flat gradient of one of the kinds in `KINDS`, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    uniform = 2 * torch.rand(n, generator=generator, dtype=torch.float64) - 1
    return KINDS[kind](uniform, torch.finfo(dtype)).to(dtype)


KINDS: dict[str, Callable[[torch.Tensor, torch.finfo], torch.Tensor]] = {
    "random": lambda uniform, info: uniform,
    "zeros": lambda uniform, info: 0 * uniform,
    "ties": lambda uniform, info: torch.where(uniform < 0, -0.5, 0.5),
    "positive": lambda uniform, info: uniform.abs(),
    "negative": lambda uniform, info: -uniform.abs(),
    "few": lambda uniform, info: torch.where(uniform.abs() < 0.8, 0.0, uniform),
    "spread": lambda uniform, info: uniform * 2.0 ** (14 * uniform.flip(0)),
    "huge": lambda uniform, info: uniform * info.max * 2.0**-6,
    "tiny": lambda uniform, info: uniform * info.smallest_normal * 4,
}
"""What a gradient may look like: from uniform values in [-1, 1] and the limits of its dtype."""


@st.composite
def gradients(
    draw: st.DrawFn,
    like: PyTree,
    size: int,
    *,
    loss_scale: float = 1.0,
    kinds: tuple[str, ...] = tuple(KINDS),
    absent: bool = True,
) -> Step:
    """The gradients of all ranks in one step, and the loss scale that they are multiplied by.

    Args:
        draw: given by Hypothesis.
        like: the parameters.
        size: how many ranks.
        loss_scale: what the gradients are multiplied by, in their own dtype; where that overflows,
            the step is a bad one.
        kinds: of gradients, of `KINDS`.
        absent: whether leaves may be None, on some ranks or on all.
    """
    given, treespec = flatten(like)
    ranks: list[list[Any]] = [[] for _ in range(size)]
    lacks = st.sets(st.integers(0, size - 1), min_size=1)
    for leaf in given:
        kind, seed = draw(st.sampled_from(kinds)), draw(st.integers(0, 2**16))
        lacking = draw(lacks) if absent and _rarely(draw) else ()
        strided = draw(st.booleans())
        for rank, row in enumerate(ranks):
            if leaf is None or rank in lacking:
                row.append(None)
                continue
            flat = values(kind, leaf.numel(), leaf.dtype, size * seed + rank)
            grad = flat.reshape(leaf.shape) * loss_scale
            row.append(_strided(grad) if strided else grad)
    return Step(tuple(unflatten(treespec, row) for row in ranks), loss_scale)


@st.composite
def bad_steps(draw: st.DrawFn, like: PyTree, size: int, *, loss_scale: float = 1.0) -> Step:
    """As `gradients`, but with one infinity or NaN, on one rank, if a leaf has a value at all."""
    kinds = tuple(kind for kind in KINDS if kind != "huge")
    step = draw(gradients(like, size, loss_scale=loss_scale, kinds=kinds, absent=False))
    rank = draw(st.integers(0, size - 1))
    given, treespec = flatten(step.gradients[rank])
    places = [i for i, leaf in enumerate(given) if leaf is not None and leaf.numel()]
    if not places:
        return step
    place = draw(st.sampled_from(places))
    spoilt = given[place].clone().contiguous()
    where = draw(st.integers(0, spoilt.numel() - 1))
    spoilt.view(-1)[where] = draw(st.sampled_from((torch.inf, -torch.inf, torch.nan)))
    row = [spoilt if i == place else leaf for i, leaf in enumerate(given)]
    trees = [unflatten(treespec, row) if i == rank else t for i, t in enumerate(step.gradients)]
    return Step(tuple(trees), loss_scale)


@st.composite
def sequences(
    draw: st.DrawFn,
    like: PyTree,
    size: int,
    *,
    min_steps: int = 1,
    max_steps: int = 5,
    scales: st.SearchStrategy[float] | None = None,
) -> list[Step]:
    """Steps one after the other, with changing loss scales and, now and then, a bad one.

    Args:
        draw: given by Hypothesis.
        like: the parameters.
        size: how many ranks.
        min_steps: how many steps at least.
        max_steps: how many steps at most.
        scales: the loss scales; by default `loss_scales`. Without an `unscale` in the chain give
            ``st.just(1.0)``.
    """
    out = []
    for _ in range(draw(st.integers(min_steps, max_steps))):
        scale = draw(loss_scales() if scales is None else scales)
        make = bad_steps if _rarely(draw) else gradients
        out.append(draw(make(like, size, loss_scale=scale)))
    return out


def _rarely(draw: st.DrawFn) -> bool:
    return draw(st.integers(0, 4)) == 4


def _strided(leaf: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous in memory where the shape allows it."""
    if not leaf.ndim:
        return leaf
    wide = leaf.new_zeros((*leaf.shape[:-1], 2 * leaf.shape[-1]))
    wide[..., ::2] = leaf
    return wide[..., ::2]


__all__ = [
    "DTYPES",
    "KINDS",
    "NAMES",
    "SHAPES",
    "Layer",
    "bad_steps",
    "chains",
    "exchanges",
    "filters",
    "gradients",
    "leaves",
    "loss_scales",
    "params",
    "ratios",
    "sequences",
    "stages",
    "topks",
    "transformations",
    "transforms",
    "values",
    "world_sizes",
]
