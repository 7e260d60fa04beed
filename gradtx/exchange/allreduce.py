"""`allreduce`: the stage at which ranks talk."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gradtx import backends
from gradtx.core.arguments import check_ratio
from gradtx.core.combinators import judge
from gradtx.core.payload import Member
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Context, Exchange, Transformation
from gradtx.core.tree import Array, Info, PyTree, arrays_in, flatten, unflatten
from gradtx.exchange.compare import described
from gradtx.exchange.cost import Link
from gradtx.exchange.flags import Flags
from gradtx.exchange.group import Group, find_group
from gradtx.exchange.handshake import agree, said_of, share_error
from gradtx.exchange.incoming import exchange
from gradtx.exchange.inner import Inner, digest_of
from gradtx.exchange.outgoing import Outgoing, Sizes
from gradtx.exchange.plan import (
    ALGORITHMS,
    FOR_TENSORS,
    ON_A_MESH,
    divisor_of,
    further_rounds,
    results_of,
)
from gradtx.exchange.root import Root
from gradtx.exchange.row_sparse import exchanged_rows
from gradtx.exchange.sharded import Sharded
from gradtx.exchange.sparse_sums import SparseSums
from gradtx.exchange.two_shot import TwoShot
from gradtx.exchange.uneven import gather
from gradtx.wire import Header


class AllreduceState(NamedTuple):
    """The state of `allreduce`: counters only.

    Attributes:
        count: 0-d int32: steps so far, bad ones too.
        finite: 0-d bool: on the last step, all ranks' gradients and the result were finite.
    """

    count: Array
    finite: Array


def allreduce(
    group: Any = None,
    *,
    axis_name: str | None = None,
    op: str = "mean",
    algorithm: str = "auto",
    density: float | None = None,
    link: Link | None = None,
) -> Allreduce:
    r"""Exchanges whatever form arrives, and hands on the dense mean over ranks.

    Compressed leaves travel compressed, gathered in one message a rank and step; dense leaves, and
    those whose compressed form would not be smaller on this many ranks, travel through at most one
    all-reduce for each accumulation dtype. All sums are made in FP32 (FP64 for FP64 leaves), those
    of gathered payloads in rank order: all ranks get the same bits.

    What `cast` and ``quantize(8)`` make of dense leaves goes in two shots instead where that is
    less: each rank adds up its share of all leaves and sends the sum on in the same format, which
    takes ``2 (N - 1) / N`` times the payload on any number of ranks. What is left out of a sum is
    added to the residual of the rank that added it up. Leaves of 16 bits that nothing compresses
    travel in 16 bits in the same way, but for sums of `accumulate`, which are of more bits.

    With ``algorithm="sharded"`` values at positions (`topk`, `threshold`) go to the owners of
    these, so spread that no region is one rank's. The owners add them up and send the sums on, at
    their positions or, where that is less, all of them. So a rank sends its own values once and its
    part of the result ``N - 1`` times, in four rounds; the result is that of a gather. It pays
    where ranks choose mostly the same positions, or so many that most are chosen by some rank.
    With a `density` each owner sends on no more than that share of what it owns, the sums of the
    largest magnitude: then a rank sends no more on many ranks than on two. What an owner leaves out
    goes to its own residual, so that nothing is lost, and error feedback has to be there for it.

    Two of them in one chain, over other ranks, are an exchange in two stages: dense inside a node,
    where it costs little, and of what is compressed behind it between nodes, as in
    ``chain(allreduce(inner), topk(0.01), ef(), allreduce(outer))``; see `node_groups`.

    Row-sparse leaves, such as ``Embedding(sparse=True)`` has, are gathered as the rows that each
    rank has, and are row-sparse again.

    The first step begins with a handshake: ranks that run another chain, or have other parameters,
    raise. A leaf that is None counts as zero, and stays None if it is None on all ranks.

    Args:
        group: a `torch.distributed` process group, or a `DeviceMesh` of one dimension. By default
            the default group; this process alone, if none is initialised.
        axis_name: for JAX arrays, the axis of the mesh whose devices exchange; `update` is then
            called inside `jax.shard_map` (or `jax.vmap` with that `axis_name`). JAX arrays without
            it are those of one device alone.
        op: ``"mean"`` or ``"sum"``.
        algorithm: ``"gather"`` sends every payload compressed to all ranks; ``"two_shot"`` those
            that can be cut to owners, and all others to all ranks; ``"auto"`` takes for each
            payload which of these puts fewer bytes on the link, or a dense all-reduce;
            ``"sharded"`` sends values at positions to the owners of these, and all else as
            ``"auto"``; ``"root"`` sends every payload to rank 0, which sends the sums on, and is
            there to be compared. The last two are for torch tensors.
        density: with ``"sharded"``, the share of the sums at positions that owners send on, a float
            over 0 and at most 1: ``max(1, round(density * n / N))`` each, of `n` values on `N`
            ranks. None sends all that are not zero.
        link: what is known of the link between ranks, for ``"auto"``, the same on all of them. Of
            the algorithms, and a dense all-reduce, it then takes that of the least time, by
            `gradtx.exchange.cost`, among those that send no more than the dense one in FP32,
            whatever positions ranks choose. None takes the fewest bytes, as above; both are shown
            by ``explain(tx, params, ranks=8)``.

    Returns:
        The transformation.

    Raises:
        ValueError: for an unknown `op` or `algorithm`; for a `DeviceMesh` of several dimensions; if
            both `group` and `axis_name` are given, or `axis_name` with an algorithm for torch
            tensors; for a `density` that is not over 0 and at most 1, or with another algorithm;
            for a `link` with another algorithm than ``"auto"``, or an axis; in `update`, if there
            is no such axis, or of two exchanges in a chain the groups have several ranks in common.
        TypeError: if `axis_name` is no string, the `density` no float, or the `link` no `Link`; in
            `update`, for torch tensors where an axis is named, or JAX arrays where several torch
            processes are to exchange, or an algorithm is for torch tensors.
        ImportError: if `axis_name` is given and jax is not installed.
        RankMismatchError: in `update`, on every rank, if ranks disagree or one of them has failed.

    Example:
        >>> import torch, gradtx as gx
        >>> from gradtx.testing import run_ranks
        >>> tx = gx.allreduce()
        >>> def rank(i):
        ...     grads = {"w": torch.tensor([1.0 + i])}
        ...     return tx.update(grads, tx.init(grads))[0]["w"]
        >>> run_ranks(2, rank)
        [tensor([1.5000]), tensor([1.5000])]
    """
    if op not in ("mean", "sum"):
        raise ValueError(f"allreduce(op={op!r}): expected 'mean' or 'sum'")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"allreduce(algorithm={algorithm!r}): expected {_expected(ALGORITHMS)}")
    if axis_name is not None:
        _check_axis(axis_name, group)
        if algorithm in FOR_TENSORS:
            raise ValueError(
                f"allreduce(axis_name={axis_name!r}, algorithm={algorithm!r}): for torch tensors "
                f"only; on a mesh write {_expected(ON_A_MESH)}"
            )
    if density is not None:
        _check_density(density, algorithm)
    if group is not None:
        find_group(group)
    if link is not None:
        _check_link(link, algorithm, axis_name)
    return Allreduce(group, axis_name, op, algorithm, density, link)


def _check_link(link: Any, algorithm: str, axis_name: str | None) -> None:
    if not isinstance(link, Link):
        raise TypeError(f"allreduce(link={link!r}): expected a Link, such as Link(50e-6, 125e6)")
    if algorithm != "auto":
        raise ValueError(
            f"allreduce(algorithm={algorithm!r}, link={link!r}): a link is for algorithm='auto', "
            "which chooses by it"
        )
    if axis_name is not None:
        raise ValueError(
            f"allreduce(axis_name={axis_name!r}, link={link!r}): a link is for torch tensors"
        )


def _check_density(density: Any, algorithm: str) -> None:
    check_ratio("allreduce(density", density)
    if algorithm != "sharded":
        raise ValueError(
            f"allreduce(algorithm={algorithm!r}, density={density!r}): it is for owners of "
            "positions; write algorithm='sharded'"
        )


def _expected(names: Sequence[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


def _check_axis(axis_name: Any, group: Any) -> None:
    if not isinstance(axis_name, str):
        raise TypeError(f"allreduce(axis_name={axis_name!r}): expected the name of a mesh axis")
    if group is not None:
        raise ValueError(
            f"allreduce({group!r}, axis_name={axis_name!r}): a group is for torch tensors, an axis "
            "for JAX arrays; give one of them"
        )
    if importlib.util.find_spec("jax") is None:
        raise ImportError(
            f"allreduce(axis_name={axis_name!r}) needs jax, which is not installed: "
            "pip install 'gradtx[jax]'"
        )


class Allreduce(Exchange):
    """The transformation that `allreduce` makes."""

    def __init__(
        self,
        group: Any,
        axis_name: str | None,
        op: str,
        algorithm: str,
        density: float | None = None,
        link: Link | None = None,
    ) -> None:
        stage = Stage(
            "allreduce",
            Kind.EXCHANGE,
            (
                Argument("group", group, None, local=True),
                Argument("axis_name", axis_name, None),
                Argument("op", op, "mean"),
                Argument("algorithm", algorithm, "auto"),
                Argument("density", density, None),
                Argument("link", link, None),
            ),
            linear=True,
            varies=algorithm in FOR_TENSORS or link is not None,
            leaves_out=density is not None,
        )
        super().__init__(stage, _init, self._update)
        self._given, self._op, self._algorithm = group, op, algorithm
        self._density, self._link = density, link
        self.axis_name = axis_name
        self.one_program = axis_name is not None

    @property
    def group(self) -> Group:
        """The ranks it talks to over torch.distributed."""
        return find_group(self._given)

    def over(self, group: Group) -> Allreduce:
        """The same exchange among the same ranks, over another group."""
        given = self._op, self._algorithm, self._density, self._link
        return Allreduce(group, self.axis_name, *given)

    def before_another(self) -> Transformation:
        """What it is where another exchange stands to its right."""
        return Inner(self, ())

    def ranks(self, arrays: Sequence[Array]) -> tuple[Any, int]:
        """This rank's number and how many there are, for the arrays of a step."""
        on_jax = any(not isinstance(x, torch.Tensor) for x in arrays)
        if self.axis_name is not None:
            self._on_jax(arrays)
        elif not (on_jax and self.group.size == 1):
            return self.group.rank, self.group.size
        axis = self._axis()
        return axis.rank, axis.size

    def _axis(self) -> Any:
        from gradtx.exchange.mesh import MeshAxis

        return MeshAxis(self.axis_name)

    def check_local(self, leaves: Mapping[str, Array]) -> None:
        """Refuses gradients that JAX has summed over the axis already, as far as it tells.

        Raises:
            ValueError: naming the paths.
        """
        if self.axis_name is not None:
            self._axis().check(leaves)

    def _on_jax(self, arrays: Sequence[Array]) -> bool:
        """Whether the arrays of a step are JAX's.

        Raises:
            TypeError: if only some are, or they cannot be exchanged.
        """
        torchs = sum(isinstance(x, torch.Tensor) for x in arrays)
        if torchs and torchs != len(arrays):
            raise TypeError(
                f"{self.code()}: {torchs} of {len(arrays)} leaves are torch tensors, the others "
                "JAX arrays"
            )
        if torchs and self.axis_name is not None:
            raise TypeError(
                f"{self.code()} exchanges JAX arrays over a mesh; for torch tensors write "
                "allreduce()"
            )
        if torchs or not arrays:
            return False
        if self._algorithm in FOR_TENSORS or self._link is not None:
            raise TypeError(
                f"{self.code()} exchanges torch tensors between processes, got JAX arrays: write "
                f"algorithm={_expected(ON_A_MESH)}, and no link"
            )
        if self.axis_name is None and self.group.size > 1:
            raise TypeError(
                f"{self.code()} exchanges torch tensors between processes; JAX arrays are "
                "exchanged over a mesh: write allreduce(axis_name=...)"
            )
        return True

    def _update(
        self,
        updates: PyTree,
        state: AllreduceState,
        params: PyTree = None,
        *,
        context: Context,
        finite: Array | None = None,
        **extra: Any,
    ) -> tuple[PyTree, AllreduceState]:
        leaves, treespec = flatten(updates)
        found = arrays_in([leaf for leaf in leaves if not isinstance(leaf, Member)])
        if self._on_jax(found or [state.count]):
            out, good = self._over_mesh(leaves, context, finite)
            return unflatten(treespec, out), AllreduceState(state.count + 1, good)
        group = self.group
        outgoing = self._outgoing(leaves, context, group.size, group.choices)
        header = _header(_key(context), int(state.count), len(leaves))
        header = replace(header, finite=finite is None or bool(finite), absent=outgoing.absent)
        if (share := context.share) is not None:
            left_out = bool(share.left_out)
            header = replace(header, weight=float(share.weight), left_out=left_out)
            header = replace(header, flushing=share.flushing)
        message, buffers = outgoing.message(header), outgoing.buffers(header, group.size)
        shots = TwoShot(group, outgoing, outgoing.shards, header)
        sharded = Sharded(group, outgoing.to_owners, header)

        if meetings := context.progress.meetings:
            digest = digest_of(outgoing.found.values())
            for meeting in reversed(meetings.values()):
                meeting.confirm(digest=digest)
        context.progress.sent = True
        self._agree(group, context, header.step, outgoing)
        sparse = SparseSums(outgoing, context, divisor_of(group.size, self._op))
        parts = group, outgoing, header, message, buffers, shots, sharded, sparse
        totals, flags, add_up = exchange(*parts)
        nowhere = flags.absent_everywhere(group.size)
        context.progress.absent = ()
        if any(nowhere):
            context.progress.absent = tuple(nowhere[i] for i in context.layout.path_ranks)
        summed = further_rounds(group.all_reduce, group.size, outgoing, totals)
        context.progress.settled = outgoing.late(summed)
        finite_everywhere = flags.not_finite == 0
        if share is not None:
            _tell(context, flags, group.size)
            nothing_good = flags.left_out and flags.weight == 0
            finite_everywhere &= share.partial or not nothing_good
        factor = context.progress.factor
        sent_on, returned = shots.send_on(self._op, factor or 1.0) if shots.messages else ({}, {})
        context.progress.finite = finite_everywhere
        if context.progress.rows and finite_everywhere:
            context.progress.rows = exchanged_rows(
                group, context.progress.rows, context.layout, header, self._op, found
            )
        # All have answered to the end: only now is anything written over.
        totals |= add_up()
        results = results_of(outgoing, totals, summed, group.size, self._op, factor)
        results |= sparse.results(factor)
        kept = outgoing.parts_of(sharded.left_out)
        if factor is not None:
            kept = {i: flat * factor for i, flat in kept.items()}
        context.progress.returned = kept | returned
        results |= outgoing.parted(sent_on)
        shaped = outgoing.shaped(leaves, results)
        good = torch.tensor(context.progress.finite)
        if finite is not None and good:
            # Read at once, as the flags were: so the counters stay where they are.
            good = torch.tensor(bool(judge(sparse.judged(shaped), context)))
        return unflatten(treespec, shaped), AllreduceState(state.count + 1, good)

    def _outgoing(
        self, leaves: list[Any], context: Context, size: int, choices: dict[Any, Any] | None = None
    ) -> Outgoing:
        chosen = self._algorithm, choices, self._density, self._link
        return Outgoing(leaves, context, size, *chosen)

    def describe(self, leaves: Sequence[Any], context: Context) -> list[str]:
        """What each algorithm would put on the link of a rank, and which is taken, as lines."""
        arrays = _all(leaves)
        if not arrays:
            return []
        if self.axis_name is not None or not any(isinstance(x, torch.Tensor) for x in arrays):
            return ["  decided when the program is traced: shown for torch tensors only"]
        plan = self._outgoing(list(leaves), context, context.size)
        return described(plan, self._algorithm, self._link)

    def _over_mesh(
        self, leaves: list[Any], context: Context, finite: Array | None
    ) -> tuple[list[Any], Array]:
        """The exchanged leaves, and whether the step is good."""
        from gradtx.exchange import mesh

        axis = self._axis()
        out, settled, returned, good = mesh.exchange(
            axis, leaves, context, op=self._op, algorithm=self._algorithm, finite=finite
        )
        context.progress.settled, context.progress.returned = settled, returned
        # Parameters may be spread over other axes: all their parts step, or none.
        context.progress.finite = good = axis.everywhere(good, leaves)
        if finite is not None:
            good = axis.everywhere(good & judge(out, context), leaves)
        return out, good

    def _agree(self, group: Group, context: Context, step: int, outgoing: Outgoing) -> None:
        key = _key(context)
        if key not in group.agreements or group.agreements[key][0] != outgoing.ways:
            # The first step, or other leaves are compressed (another mask): all ranks come here.
            agree(group, context, step, forms=outgoing.forms)
        group.agreements[key] = (outgoing.ways, outgoing.sizes)

    def fail(
        self,
        state: AllreduceState | None,
        context: Context,
        error: Exception,
        arriving: PyTree | None = None,
    ) -> None:
        """Tells the other ranks that this one has failed; they raise `RankMismatchError`."""
        if self.one_program:
            return  # All devices run one program: it fails for all of them.
        group, text = self.group, type(error).__name__
        if group.size == 1:
            return
        with suppress(Exception):
            text = said_of(error)
        # Whatever goes wrong from here on, the error itself is what the user is to see.
        with suppress(Exception):
            step = 0 if state is None else int(state.count)
            key, sizes = self._agreed(group, context, arriving)
            if sizes is None:
                agree(group, context, step, text)
                return
            header = replace(_header(key, step, sizes.leaves), error=True)
            if sizes.segments is not None:
                nothing = [0] * len(sizes.rooms)
                told = sizes.error_message(header)
                gather(group, told, nothing, sizes.rooms, to_root=sizes.root)
                if sizes.root:
                    Root(group, sizes.leaves, windowed=sizes.windowed).tell([header], [0, 0])
            elif sizes.shards is not None:
                group.all_to_all(sizes.error_parts(header))
            elif sizes.ahead is not None:
                group.all_to_all(sizes.error_ahead(header, group.size))
            else:
                group.all_reduce(sizes.error_buffer(header, group.size))
            share_error(group, text)

    def _agreed(
        self, group: Group, context: Context, arriving: PyTree | None
    ) -> tuple[Key, Sizes | None]:
        """What the others send in this step; None for the sizes if they are in the handshake."""
        key = _key(context)
        if arriving is None:
            # This rank's state is unusable: the last agreement over this chain has to do.
            known = [other for other in group.agreements if other[0] == context.code]
            key = key if key in known or not known else known[-1]
            return key, group.agreements[key][1] if key in known else None
        outgoing = self._outgoing(flatten(arriving)[0], context, group.size)
        agreed = key in group.agreements and group.agreements[key][0] == outgoing.ways
        return key, outgoing.sizes if agreed else None


def _all(leaves: Sequence[Any]) -> list[Any]:
    return arrays_in([x for x in leaves if x is not None])


def _init(params: PyTree, info: Info | None) -> AllreduceState:
    ops = backends.find(flatten(params)[0])
    return AllreduceState(ops.counter(), ops.flag(True))


def _tell(context: Context, flags: Flags, size: int) -> None:
    """Says of the step what the ranks have brought together."""
    told = context.progress
    told.weight = flags.weight
    told.left_out, told.through = flags.left_out > 0, flags.flushing == size
    told.nothing = flags.weight == flags.left_out == flags.not_finite == 0
    if context.weight is None or flags.weight == 0:
        return
    factor = size / flags.weight
    if factor != 1 or context.weight != 1:
        told.factor = factor


Key = tuple[str, int]


def _key(context: Context) -> Key:
    return context.code, context.layout.fingerprint


def _header(key: Key, step: int, leaves: int) -> Header:
    """A header that says only who speaks: chain and tree, and the step."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return Header(int.from_bytes(digest[:8], "little"), step, True, False, (False,) * leaves)
