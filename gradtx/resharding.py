"""`reshard`: the states of all ranks for another number of ranks.

What is the same on all ranks is the same on the new ones. What differs between ranks adds to the
result by a rule that a saved state says for each such value, under ``"per_rank"``, so that no chain
is needed to reshard it. With :math:`N` ranks before and :math:`M` after, every new rank gets

=============  =================================================================================
rule           what
=============  =================================================================================
``mean``       the mean over the old ranks: it adds to a mean over ranks
``node mean``  the same: the ranks of a node have the same, and stand for it together
``sum``        the sum over the old ranks, divided by :math:`M`: it adds to a sum over ranks
``any``        whether it is true on any old rank
``window``     zeros: a window that cannot be shared out is refused unless it is empty
``node sum``   zeros: refused unless it is zero everywhere, as nodes are not known
=============  =================================================================================

That all new ranks get the same has reasons. Of all ways to share out what is to be conserved it has
the smallest mean square, which is what bounds the error of error feedback; the ranks of a node,
which have to have the same, do; and it is made with one leaf of one rank at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import optree
import torch

from gradtx.backends.registry import NAMESPACE
from gradtx.core.arguments import check_whole
from gradtx.core.chain import Chain, ChainState
from gradtx.core.per_rank import per_rank_fields
from gradtx.core.stage import Kind
from gradtx.core.transformation import flat
from gradtx.core.tree import path_of
from gradtx.transforms.accumulate import AccumulateState
from gradtx.untrusted import check_tensor, is_same, shown

_SHARED = ("mean", "node mean", "sum")
_REFUSED = {
    "window": (
        "a window of accumulate() is under way, and what its part of the sum over ranks is depends "
        "on how many there are: call Pipeline.flush before the states are saved"
    ),
    "node sum": (
        "it adds to a sum over nodes, and how many nodes there are is not known from a state: "
        "write op='mean' between nodes"
    ),
}
_RULES = (*_SHARED, "any", *_REFUSED)
_IDENTITY = ("format", "chain", "rank", "world_size", "state")


def rules_of(tx: Chain, state: ChainState) -> dict[str, str]:
    """How what differs between ranks is carried over to another number of them.

    Args:
        tx: the chain.
        state: its state.

    Returns:
        A rule for each value that differs between ranks, by the key it is saved under.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(op="sum"))
        >>> rules_of(tx, tx.init({"w": torch.zeros(2)}))
        {'states.0.inner_states.0.residual.w': 'sum'}
    """
    rules = _Rules(tx)
    return {key: rule for key, rule in keyed(rules.marked(state)).items() if rule}


class _Rules:
    """The rules of a chain, by what holds the value."""

    def __init__(self, tx: Chain) -> None:
        exchanges = [stage for stage in tx.stages if stage.kind is Kind.EXCHANGE]
        ops = [stage.hyperparameters.get("op", "mean") for stage in exchanges] or ["mean"]
        nodes = "node " if tx.inners else ""
        self._fed_back = nodes + ops[-1]
        windows = (stage for stage in tx.stages if stage.kind is Kind.ACCUMULATE)
        mean = next((stage.hyperparameters["mean"] for stage in windows), True)
        one_op = ops[0] if len(set(ops)) == 1 else "window"
        # The weights of all ranks are added up, and what they weigh with them.
        by_weight = "sum" if one_op == "mean" else "window"
        self._window = {
            "total": by_weight if mean else one_op,
            "weight": by_weight if mean else "sum",
            "bad": "any",
            "seen": "any",
        }

    def _rule(self, state: Any, field: str) -> str:
        if isinstance(state, AccumulateState):
            return self._window[field]
        return self._fed_back if field in ("residual", "velocity") else ""

    def marked(self, state: Any) -> Any:
        """A tree like the state, of rules; empty for what is the same on all ranks."""
        if not isinstance(state, tuple):
            return _filled(state, "")
        names = getattr(state, "_fields", None)
        if names is None:
            return tuple(map(self.marked, state))
        own = per_rank_fields(state)
        parts = zip(names, state, strict=True)
        return type(state)(
            *(
                _filled(part, self._rule(state, name)) if name in own else self.marked(part)
                for name, part in parts
            )
        )


def _filled(tree: Any, rule: str) -> Any:
    return optree.tree_map(lambda _: rule, tree, namespace=NAMESPACE)


def keyed(state: Any) -> dict[str, Any]:
    """The leaves of a state, as they are, by the keys that they are saved under."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state, namespace=NAMESPACE)
    return {path_of(accessor): leaf for accessor, leaf in zip(accessors, leaves, strict=True)}


def reshard(states: Sequence[Any], new_size: int, *, tx: Any = None) -> list[Any]:
    r"""States for another number of ranks, so that nothing is lost: law L2 holds across the change.

    A residual :math:`e_r` of rank :math:`r` of :math:`N` adds :math:`e_r / N` to a mean over ranks.
    So each of :math:`M` new ranks gets the mean over the old ones, :math:`\frac{1}{N} \sum_r e_r`;
    for ``allreduce(op="sum")`` it gets :math:`\frac{1}{M} \sum_r e_r`. So do velocities of
    `momentum_correction`. In a window of `accumulate` that is under way, sums and weights are
    conserved. What is the same on all ranks stays: counters, loss scales, low-rank factors, results
    that `delayed` has queued, master weights, the state of an optimizer.

    Of a sharded model the ranks here are replicas: the states of one shard are made for another
    number of these, shard by shard, and the number of shards stays.

    Sums are made in FP64. With as many ranks as before, each has what it had (but for an exchange
    in two stages, where nodes may have changed).

    Args:
        states: of all ranks, in any order: what `Pipeline.state_dict` gave (mappings that load
            their values when asked will do: one is held at a time). Or, with `tx`, the states of a
            chain itself, in the order of ranks.
        new_size: the number of ranks to come, at least 1.
        tx: the chain, for states that are not a Pipeline's.

    Returns:
        A state for each new rank, in their order. They share tensors with each other and with
        `states`.

    Raises:
        TypeError: if `new_size` is no int; if `states` are of another type, or of JAX arrays.
        ValueError: if ranks are missing or there twice, or differ in their chain, their parameters
            or the steps they have made; if something differs between ranks of which nothing is
            known, such as what an optax transformation before the exchange keeps (named); if a
            window is under way that cannot be shared out.

    Example:
        >>> import torch, gradtx as gx
        >>> from gradtx.testing import run_ranks
        >>> tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
        >>> def rank(i):
        ...     grads = {"w": torch.tensor([3.0, 1.0 + i])}
        ...     return tx.update(grads, tx.init(grads))[1]
        >>> states = run_ranks(2, rank)
        >>> [state.residual["w"] for state in states]
        [tensor([0., 1.]), tensor([0., 2.])]
        >>> [state.residual["w"] for state in gx.reshard(states, 3, tx=tx)]
        [tensor([0.0000, 1.5000]), tensor([0.0000, 1.5000]), tensor([0.0000, 1.5000])]
    """
    check_whole("reshard(new_size", new_size, 1)
    states = list(states)
    if tx is not None or any(isinstance(state, ChainState) for state in states):
        return _of_chains(tx, states, new_size)
    return Resharded(states, new_size).all()


def _of_chains(tx: Any, states: list[Any], new_size: int) -> list[Any]:
    if tx is None:
        raise TypeError("reshard(states, new_size): states of a chain need it: reshard(..., tx=tx)")
    chain = tx if isinstance(tx, Chain) else Chain(flat((tx,)))
    if chain.exchange is not None and chain.exchange.one_program:
        raise TypeError(
            f"reshard(tx={chain.code()}): its state is one for all devices of a mesh, of JAX "
            "arrays; expected states of torch tensors, one of each rank"
        )
    for number, state in enumerate(states):
        if not isinstance(state, ChainState) or len(state.states) != len(chain.core):
            raise TypeError(
                f"states[{number}] is no state of {chain.code()}: with tx= give what its init or "
                "update gave, for each rank"
            )
    specs = [optree.tree_structure(state, namespace=NAMESPACE) for state in states]
    for number, spec in enumerate(specs):
        if spec != specs[0]:
            raise ValueError(f"states[{number}] is of other parameters than states[0]")
    saved = [
        {
            "format": 1,
            "chain": chain.shared_code,
            "rank": rank,
            "world_size": len(states),
            "per_rank": rules_of(chain, state),
            "state": keyed(state),
        }
        for rank, state in enumerate(states)
    ]
    anew = reshard(saved, new_size)
    return [optree.tree_unflatten(specs[0], list(state["state"].values())) for state in anew]


Room: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Value(NamedTuple):
    """One value of a state, anew.

    Attributes:
        section: what it stands under, such as ``"state"``.
        key: its key there.
        values: for each new rank.
    """

    section: str
    key: str
    values: list[Any]


class Resharded:
    """The states of all ranks for another number of ranks, one value after the other.

    Args:
        states: what `Pipeline.state_dict` gave on each rank, in any order.
        new_size: the number of ranks to come.
        names: what to call the states in errors; by default their positions.
        room: makes a tensor to be filled, like the one given; by default one in memory.

    Attributes:
        rules: by key of the section ``"state"``, how what differs between ranks is carried over.

    Raises:
        TypeError: if a state is no mapping.
        ValueError: if they are not those of all ranks of one job.
    """

    def __init__(
        self,
        states: Sequence[Any],
        new_size: int,
        *,
        names: Sequence[str] | None = None,
        room: Room | None = None,
    ) -> None:
        given = [f"states[{i}]" for i in range(len(states))] if names is None else list(names)
        order = _rank_order(states, given)
        self._states = [states[i] for i in order]
        self._names = [given[i] for i in order]
        self._old, self._new = len(states), new_size
        self._room, self._sums = room or _like, _Sums()
        first = self._states[0]
        self.rules: Mapping[str, str] = first["per_rank"]
        self._sections = [
            name for name in first if isinstance(first[name], Mapping) and name != "per_rank"
        ]
        self._check()

    def all(self) -> list[dict[str, Any]]:
        """The new states, in the order of ranks."""
        # What all ranks have in common does for any nodes.
        plain = {name: value for name, value in self._states[0].items() if name != "nodes"}
        out = [
            {
                **plain,
                "rank": rank,
                "world_size": self._new,
                **{section: {} for section in self._sections},
            }
            for rank in range(self._new)
        ]
        for section, key, values in self:
            for state, value in zip(out, values, strict=True):
                state[section][key] = value
        return out

    def __iter__(self) -> Iterator[Value]:
        """The values, in the order that they are saved in.

        Raises:
            ValueError: naming one that cannot be carried over.
        """
        for section in self._sections:
            for key in self._states[0][section]:
                rule = self.rules.get(key, "") if section == "state" else ""
                yield Value(section, key, self._anew(section, key, rule))

    def _anew(self, section: str, key: str, rule: str) -> list[Any]:
        def value(rank: int) -> Any:
            return self._value(section, key, rank)

        if not rule:
            return [self._same(section, key, value)] * self._new
        if self._old == self._new and not rule.startswith("node"):
            return [value(rank) for rank in range(self._old)]
        all_ranks = self._tensors(key, value)
        if rule in _SHARED:
            divisor = self._new if rule == "sum" else self._old
            return [self._sums.of(key, all_ranks, divisor, self._room)] * self._new
        if rule == "any":
            return [_any(all_ranks)] * self._new
        for rank, x in enumerate(all_ranks):
            if bool(x.any()):
                raise ValueError(f"state {key!r} of rank {rank} is not zero: {_REFUSED[rule]}")
        return [torch.zeros_like(value(0))] * self._new

    def _value(self, section: str, key: str, rank: int) -> Any:
        """A value of a rank: of a state a dense tensor, or a number; of what else was saved any.

        Raises:
            ValueError: if it is anything else.
        """
        value = self._states[rank][section][key]
        if section != "state" and not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (bool, int, float, str)):
            return value
        return check_tensor(f"{section} {key!r} of rank {rank}", value)

    def _same(self, section: str, key: str, value: Callable[[int], Any]) -> Any:
        first = value(0)
        for rank in range(1, self._old):
            other = value(rank)
            try:
                if _equal(first, other):
                    continue
            except RecursionError:
                raise ValueError(f"{section} {key!r} is nested too deep") from None
            both = f"{self._names[0]} and {self._names[rank]}"
            if (counter := self._counter_apart(rank)) is not None:
                at = [shown(self._states[r]["state"][counter]) for r in (0, rank)]
                raise ValueError(
                    f"{both} are not of one step: state {counter!r} is {at[0]} on rank 0 and "
                    f"{at[1]} on rank {rank}"
                )
            raise ValueError(
                f"{section} {key!r} is not the same in {both}, and nothing is known of how to "
                "share it out: a transformation that is not gradtx's own keeps it before the "
                f"exchange of {self._states[0]['chain']}, or the states are not of one step"
            )
        return first

    def _counter_apart(self, rank: int) -> str | None:
        """The first counter that is another one on a rank than on rank 0."""
        for key in self._states[0]["state"]:
            value, other = (self._value("state", key, r) for r in (0, rank))
            whole = not isinstance(value, (float, torch.Tensor)) or (
                isinstance(value, torch.Tensor) and not value.ndim and not value.is_floating_point()
            )
            if whole and key not in self.rules and not _equal(value, other):
                return str(key)
        return None

    def _tensors(self, key: str, value: Callable[[int], Any]) -> Iterator[torch.Tensor]:
        """The tensors of all ranks, one after the other, all of one shape and dtype."""
        like: Any = None
        for rank in range(self._old):
            x = value(rank)
            if not isinstance(x, torch.Tensor):
                raise ValueError(f"state {key!r} is a {type(x).__name__}: expected a tensor")
            shape, dtype = like = (x.shape, x.dtype) if like is None else like
            if x.shape != shape or x.dtype != dtype:
                raise ValueError(
                    f"state {key!r} of rank {rank} has shape {tuple(x.shape)} and dtype {x.dtype}, "
                    f"that of rank 0 {tuple(shape)} and {dtype}: the states are of other parameters"
                )
            yield x.detach()

    def _check(self) -> None:
        """What all ranks have in common, but for the values."""
        first = self._states[0]
        plain = [name for name in first if name not in (*self._sections, "rank", "per_rank")]
        names = {key for key in first["state"] if isinstance(key, str)}
        unknown = sorted(map(str, self.rules.keys() - names))
        if unknown:
            raise ValueError(f"{self._names[0]} has rules for what is not there: {unknown[:5]}")
        for key, rule in self.rules.items():
            if not isinstance(rule, str) or rule not in _RULES:
                allowed = ", ".join(map(repr, _RULES))
                raise ValueError(
                    f"state {key!r} has the rule {shown(rule)}: expected one of {allowed}"
                )
        for name, state in zip(self._names, self._states, strict=True):
            if state.keys() != first.keys():
                differ = sorted(map(str, state.keys() ^ first.keys()))
                raise ValueError(f"{name} and {self._names[0]} do not both have {differ}")
            for entry in plain:
                if not is_same(state[entry], first[entry]):
                    raise ValueError(
                        f"{name} has {entry} {shown(state[entry])}: expected "
                        f"{shown(first[entry])}, as {self._names[0]} has"
                    )
            for section in (*self._sections, "per_rank"):
                _check_keys(name, section, state[section], first[section])
            for key, rule in self.rules.items():
                if not is_same(state["per_rank"][key], rule):
                    raise ValueError(
                        f"{name} has the rule {shown(state['per_rank'][key])} for state {key!r}: "
                        f"expected {shown(rule)}, as {self._names[0]} has"
                    )


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_PIECE = 2**18  # values; of what is added to FP64, torch makes copies in FP64


class _Sums:
    """Sums in FP64, in memory that is used again: what is freed in between comes to pieces."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float64)

    def of(self, key: str, all_ranks: Iterator[torch.Tensor], divisor: int, room: Room) -> Any:
        """The sum over ranks, divided.

        Raises:
            ValueError: if they are neither FP32 nor FP64.
        """
        first = next(all_ranks)
        if first.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"state {key!r} has dtype {first.dtype}: expected float32 or float64")
        if self._memory.numel() < first.numel():
            self._memory = torch.empty(first.numel(), dtype=torch.float64)
        out, total = room(first), self._memory[: first.numel()]
        total.copy_(first.reshape(-1))
        del first  # It may be the only one who holds its memory.
        for x in all_ranks:
            pieces = zip(total.split(_PIECE), x.reshape(-1).split(_PIECE), strict=True)
            for into, piece in pieces:
                into += piece.to(into.device)
        return out.copy_(total.div_(divisor).reshape(out.shape))


def _any(all_ranks: Iterator[torch.Tensor]) -> torch.Tensor:
    """Where a value of some rank is true."""
    first = next(all_ranks)
    found = first.bool()
    for x in all_ranks:
        found = found | x.to(found.device).bool()
    return found.to(first.dtype)


def _check_keys(name: str, section: str, found: Any, expected: Mapping[str, Any]) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}[{section!r}] is a {type(found).__name__}: expected a dict")
    missing = [key for key in expected if key not in found]
    unknown = [key for key in found if key not in expected]
    if missing or unknown:
        raise ValueError(
            f"{name} is of other parameters than that of rank 0: in {section!r} missing "
            f"{missing[:5] or 'nothing'}, unknown {unknown[:5] or 'nothing'}"
        )


def _rank_order(states: Sequence[Any], names: Sequence[str]) -> list[int]:
    """The positions of the states, in the order of their ranks.

    Raises:
        TypeError: if one is no mapping.
        ValueError: if they are not those of all ranks, each once.
    """
    if not states:
        raise ValueError("reshard(states=[]): expected the states of all ranks, got none")
    where: dict[Any, int] = {}
    for i, (state, name) in enumerate(zip(states, names, strict=True)):
        _check_identity(state, name)
        if state.get("shard") != states[0].get("shard"):
            raise ValueError(
                f"{name} is of shard {state.get('shard')} and {names[0]} of shard "
                f"{states[0].get('shard')}: give the states of one shard at a time, of all "
                "replicas; the number of shards has to stay as it is"
            )
        size, rank = state["world_size"], state["rank"]
        if size != states[0]["world_size"]:
            raise ValueError(
                f"{name} is of {size} ranks, {names[0]} of {states[0]['world_size']}: expected "
                "those of one job"
            )
        if type(rank) is not int or not 0 <= rank < size:
            raise ValueError(f"{name} is of rank {shown(rank)} of {size}: there is no such rank")
        if rank in where:
            raise ValueError(f"rank {rank} is there twice: {names[where[rank]]} and {name}")
        where[rank] = i
    size = states[0]["world_size"]
    if len(states) < size:
        # Some, as the number of ranks is only what a file says.
        missing = list(islice((rank for rank in range(size) if rank not in where), 9))
        raise ValueError(
            f"the states are those of {len(states)} of {size} ranks: {_ranks(missing)} missing"
        )
    return [where[rank] for rank in range(len(states))]


def _check_identity(state: Any, name: str) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{name} is a {type(state).__name__}: expected what Pipeline.state_dict() gives, or "
            "states of a chain and tx=..."
        )
    missing = sorted(set(_IDENTITY) - state.keys())
    if missing:
        raise ValueError(f"{name} is no state_dict of a Pipeline: it lacks {missing}")
    if not is_same(state["format"], 1):
        raise ValueError(f"{name} has format {shown(state['format'])}: expected 1")
    size = state["world_size"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"{name} has world_size {shown(size)}: expected a whole number of 1 or more"
        )
    if not isinstance(state["state"], Mapping):
        kind = type(state["state"]).__name__
        raise ValueError(f"{name}['state'] is a {kind}: expected a dict")
    if not isinstance(state.get("per_rank"), Mapping):
        raise ValueError(
            f"{name} does not say what differs between ranks, in 'per_rank': it was saved by an "
            "earlier gradtx; load it on as many ranks as it is of, and save it again"
        )


_SHOWN = 8  # ranks


def _ranks(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some} {'are' if len(ranks) > 1 else 'is'}"


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same, bit for bit."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(x, b[key]) for key, x in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype or not a.layout is b.layout is torch.strided:
        return False
    return torch.equal(_bytes(a), _bytes(b.to(a.device)))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    values = x.detach().resolve_conj().resolve_neg()  # What is only marked as such has no bytes.
    return values.reshape(-1).contiguous().view(torch.uint8)
