"""Shards of `fully_shard` in a Pipeline, on real ranks.

Each set of ranks is started once and runs all of its scenarios, one after the other; a scenario
returns what it has found, and the tests look at that.
"""

import copy
import functools
import io
import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradtx as gx
from gradtx.checkpoint import flatten_state
from gradtx.core.stage import Stage
from gradtx.core.transformation import Transformation
from ranks import gloo_ranks, outcome

torch_fsdp = pytest.importorskip("torch.distributed.fsdp")


class Mesh:
    """Replicas by shards.

    Args:
        name: of its dimensions; no two meshes of one process have the same, since torch remembers
            meshes by that, with process groups that are gone.
        shape: how many replicas, and how many shards.
    """

    def __init__(self, name, *shape):
        names = f"{name}_replicate", f"{name}_shard"
        self.whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.between, self.inside = (self.whole[each] for each in names)


def network(seed=0):
    """With a bias of one value, of which the second of two ranks has none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 1))


def small():
    """Without normalisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 1))


def sharded(mesh, model=None, **options):
    model = network() if model is None else model
    torch_fsdp.fully_shard(model[0], mesh=mesh.inside, **options)
    return torch_fsdp.fully_shard(model, mesh=mesh.inside, **options)


def batch(number, rank):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * number + rank))


def part(x):
    """This rank's part, all of what is not spread."""
    with torch.no_grad():
        return x.detach().to_local() if hasattr(x, "to_local") else x.detach()


def parts(model):
    return {path: part(p).clone() for path, p in model.named_parameters()}


def gradients(model):
    return {path: p.grad for path, p in model.named_parameters()}


def kept(pipe):
    """All of the state but what counts steps or says how the last one went."""
    counters = ("count", "finite", "last_finite", "total_notfinite", "closed", "ready", "clean")
    state = flatten_state(pipe.state)
    return {k: v for k, v in state.items() if k.rpartition(".")[2] not in counters}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


class Loop:
    """A training loop of one rank."""

    def __init__(self, rank, mesh, *stages, scaler=None, model=None, op="mean", **options):
        self.rank, self.mesh, self.scaler = rank, mesh, scaler
        # Replicas start apart, and the Pipeline makes them those of the first.
        replica = mesh.between.get_local_rank()
        self.model = sharded(mesh, network(replica), **options) if model is None else model
        self.tx = gx.chain(*stages, gx.allreduce(mesh.between, op=op))
        self.pipe = gx.Pipeline(self.tx, self.model, scaler=scaler)
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=0.1, momentum=0.9)
        self.reports = []

    def backward(self, number):
        self.optimizer.zero_grad()
        loss = self.model(batch(number, self.rank)).square().mean()
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        elif self.pipe.state.loss_scale is not None:
            loss = loss * self.pipe.state.loss_scale
        loss.backward()

    def step(self, number, poisoned=(), **extra):
        """One step; on some ranks a value of the gradient of the first layer is infinite."""
        self.backward(number)
        if self.rank in poisoned:
            part(self.model[0].weight.grad)[0, 0] = math.inf
        report = self.pipe.sync(self.optimizer, **extra)
        self.reports.append(report)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif report.ready:
            self.optimizer.step()
        return report

    @property
    def found(self):
        return {**parts(self.model), **kept(self.pipe)}


# The stages before the exchange.
CHAINS = {
    "dense": (),
    "topk": (gx.topk(0.3), gx.ef()),
    "topk of all": (gx.topk(0.3, scope="global"), gx.ef()),
    "mission": (gx.unscale(), gx.skip_bn(), gx.topk(0.3), gx.ef()),
    "topk cast": (gx.topk(0.3), gx.cast("float16"), gx.ef()),
    "cast": (gx.cast("bfloat16"), gx.ef()),
    "sign": (gx.sign(), gx.ef()),
    "quantize": (gx.quantize(8), gx.ef()),
    "ternary": (gx.ternary(),),
    "natural": (gx.natural(),),
    "threshold": (gx.threshold(0.01), gx.ef()),
    "random_k": (gx.random_k(0.5), gx.ef()),
    "powersgd": (gx.powersgd(2), gx.ef()),
    "momentum": (gx.topk(0.3), gx.momentum_correction(0.9)),
    "accumulate": (gx.accumulate(2), gx.topk(0.3), gx.ef()),
}


def beside_local_parts(rank, mesh):
    """Whether a Pipeline on plain tensors, this rank's parts, gives the same bits."""
    found = {}
    for name, stages in CHAINS.items():
        loop = Loop(rank, mesh, *stages, scaler=a_scaler() if name == "mission" else None)
        _, info = gx.core.tree.parameters_of(loop.model)
        plain = {path: nn.Parameter(x) for path, x in parts(loop.model).items()}
        state = loop.tx.init(plain, info)
        equal = []
        for number in range(3):
            loop.backward(number)
            extra = {} if loop.scaler is None else {"loss_scale": loop.scaler.get_scale()}
            grads = {path: part(g).clone() for path, g in gradients(loop.model).items()}
            report = loop.pipe.sync(loop.optimizer)
            updates, state = loop.tx.update(grads, state, plain, **extra)
            if report.ready:
                given = {path: part(g) for path, g in gradients(loop.model).items()}
                equal.append(same(given, updates))
                loop.optimizer.step()
                for path, x in parts(loop.model).items():
                    plain[path].data.copy_(x)
            if loop.scaler is not None:
                loop.scaler.update()
        found[name] = equal, loop.found
    return found


def beside_whole_model(rank, mesh):
    """How far parameters are from those of plain training over the replicas, with no shards."""
    found = {}
    for name in ("dense", "cast"):
        loop, whole = Loop(rank, mesh, *CHAINS[name]), network()
        pipe = gx.Pipeline(loop.tx, whole)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
        for number in range(4):
            loop.step(number)
            optimizer.zero_grad()
            whole(batch(number, rank)).square().mean().backward()
            for p in whole.parameters():
                dist.all_reduce(p.grad, group=mesh.inside.get_group())
                p.grad /= mesh.inside.size()
            pipe.sync(optimizer)
            optimizer.step()
        pairs = zip(loop.model.parameters(), whole.parameters(), strict=True)
        gaps = [(p.full_tensor() - q).detach().abs().max() for p, q in pairs]
        found[name] = float(max(gaps))
    return found


def a_scaler(init_scale=256.0):
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)


def trained(rank, mesh, numbers, poisoned, *stages, scaler=None, op="mean"):
    loop = Loop(rank, mesh, *stages, scaler=scaler, op=op)
    for number in numbers:
        loop.step(number, poisoned if number < 0 else ())
    return loop


def bad_steps(rank, mesh):
    """A bad step on the last rank, in one shard, and the same without that step."""
    last = (dist.get_world_size() - 1,)
    window = gx.accumulate(2)
    cases = {
        "topk": (CHAINS["topk"], [0, -1, 1], [0, 1]),
        "sign": (CHAINS["sign"], [0, -1, 1], [0, 1]),
        "window": ((window, *CHAINS["topk"]), [0, 1, -1, 2, 3, 4], [0, 1, 3, 4]),
        "own scale": ((gx.dynamic_loss_scale(64.0), *CHAINS["topk"]), [0, -1, 1], [0, 1]),
    }
    found = {}
    for name, (stages, with_bad, without) in cases.items():
        loop = trained(rank, mesh, with_bad, last, *stages)
        other = trained(rank, mesh, without, (), *stages)
        scale = loop.pipe.state.loss_scale
        one, two = (
            {k: v for k, v in x.found.items() if "loss_scale" not in k and "good_steps" not in k}
            for x in (loop, other)
        )
        skipped = [report.skipped for report in loop.reports]
        found[name] = same(one, two), skipped, None if scale is None else float(scale)
    scaler = a_scaler()
    loop = trained(rank, mesh, [0, -1, 1], last, *CHAINS["mission"], scaler=scaler)
    other = trained(rank, mesh, [0, 1], (), *CHAINS["mission"], scaler=a_scaler())
    skipped = [report.skipped for report in loop.reports]
    found["scaler"] = same(loop.found, other.found), skipped, scaler.get_scale()
    return found


def overflow_of_a_sum(rank, mesh):
    """Every gradient is finite, and their sum over the replicas is not, in one shard."""
    loop = Loop(rank, mesh, *CHAINS["topk"], op="sum")
    loop.backward(0)
    if mesh.inside.get_local_rank() == 1:
        part(loop.model[0].weight.grad)[0, 0] = 3e38
    before = loop.found
    report = loop.pipe.sync(loop.optimizer)
    zeros = all(not bool(part(p.grad).any()) for p in loop.model.parameters())
    return report.skipped, same(before, loop.found), zeros


def left_out_micro_steps(rank, mesh):
    """A micro-step that is bad for one shard of a replica is left out of all of them."""
    stages = gx.unscale(), gx.accumulate(2, on_bad="leave_out"), *CHAINS["topk"]
    found = []
    for poisoned in ((3,), (2, 3)):
        scaler = a_scaler()
        loop = trained(rank, mesh, [0, 1, -1, 2], poisoned, *stages, scaler=scaler)
        found.append((loop.found, scaler.get_scale(), [r.ready for r in loop.reports]))
    return same(found[0][0], found[1][0]), [rest for _, *rest in found]


class Faulty(Transformation):
    """Fails if it is told to."""

    def __init__(self):
        self.fails = False
        super().__init__(Stage("faulty", linear=True), None, self._update)

    def _update(self, updates, state, params=None, **extra):
        if self.fails:
            raise OSError("no more of it")
        return updates, state


def errors(rank, mesh):
    """What all ranks hear if one fails, and whether they can go on as if nothing had happened."""
    faulty, found = Faulty(), {}
    loop = Loop(rank, mesh, faulty, *CHAINS["topk"])
    other = Loop(rank, mesh, Faulty(), *CHAINS["topk"])
    loop.step(0)
    before = loop.found
    faulty.fails = rank == 3
    found["in a stage"] = outcome(loop.step, 7)
    faulty.fails = False
    found["in sync"] = outcome(loop.step, 7, **({"loss_scale": 2.0} if rank == 3 else {}))
    found["nothing has moved"] = same(before, loop.found)
    loop.step(1)
    for number in (0, 1):
        other.step(number)
    found["goes on"] = same(loop.found, other.found)

    window = Loop(rank, mesh, gx.accumulate(2), *CHAINS["topk"])
    found["weights"] = outcome(window.step, 0, weight=1.0 + rank % 2)
    weights = 1.0 + (rank > 1), 3.0, 1.0
    found["ready"] = [window.step(i, weight=weight).ready for i, weight in enumerate(weights)]
    found["ready"] += [report.ready for report in window.pipe.flush(window.optimizer)]
    found["scales"] = outcome(
        Loop, rank, mesh, *CHAINS["mission"], scaler=a_scaler(256.0 * (1 + (rank == 3)))
    )
    model = sharded(mesh)
    found["construction"] = outcome(gx.Pipeline, loop.tx, model, max_skips=int(rank != 3))
    return found


def checkpoints(rank, mesh):
    """Whether a loop that is saved and loaded goes on as one that was not."""
    loop = Loop(rank, mesh, *CHAINS["topk"])
    for number in (0, 1):
        loop.step(number)
    saved = io.BytesIO()
    torch.save(loop.pipe.state_dict(), saved)
    values = {path: x.clone() for path, x in loop.model.state_dict().items()}
    momenta = copy.deepcopy(loop.optimizer.state_dict())
    for number in (2, 3):
        loop.step(number)
    again = Loop(rank, mesh, *CHAINS["topk"])
    again.model.load_state_dict(values)
    again.optimizer.load_state_dict(momenta)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    again.pipe.load_state_dict(state)
    for number in (2, 3):
        again.step(number)
    of_other = {**state, "shard": 1 - state["shard"]}
    return same(loop.found, again.found), outcome(again.pipe.load_state_dict, of_other), state


def absent(rank, mesh):
    """A replica has no gradient for a parameter, and then no replica has."""
    loop = Loop(rank, mesh)
    loop.backward(0)
    weight = loop.model[0].weight
    if rank > 1:
        weight.grad = None
    own = None if weight.grad is None else weight.grad.full_tensor()
    loop.pipe.sync(loop.optimizer)
    shapes = tuple(weight.grad.shape), weight.grad.placements == weight.placements
    mean = weight.grad.full_tensor()
    weight.grad = None
    loop.pipe.sync(loop.optimizer)
    return shapes, own, mean, weight.grad is None


def options(rank, mesh):
    """Options of `fully_shard` and its modules: training comes near to that without them."""
    found = {}
    policy = torch_fsdp.MixedPrecisionPolicy
    for name, given in {
        "none": {},
        "sums in bfloat16": {"mp_policy": policy(reduce_dtype=torch.bfloat16)},
        "sums in float16": {"mp_policy": policy(reduce_dtype=torch.float16)},
        "all in bfloat16": {"mp_policy": policy(param_dtype=torch.bfloat16)},
        "offloaded": {"offload_policy": torch_fsdp.CPUOffloadPolicy(pin_memory=False)},
    }.items():
        model = sharded(mesh, small(), **given)
        loop = Loop(rank, mesh, *CHAINS["cast"], model=model)
        for number in range(3):
            loop.step(number)
        found[name] = [p.full_tensor().detach() for p in model.parameters()]
    # Gradients of two passes, reduced once.
    model = sharded(mesh, small())
    loop = Loop(rank, mesh, model=model)
    grads = {}
    for accumulates in (True, False):
        loop.optimizer.zero_grad()
        for number in (0, 1):
            model.set_requires_gradient_sync(number == 1 or not accumulates)
            model(batch(number, rank)).square().mean().backward()
        loop.pipe.sync(loop.optimizer)
        grads[accumulates] = model[0].weight.grad.full_tensor()
    found["accumulated"] = grads[True], grads[False]
    # A forward pass alone leaves the parameters of the root whole.
    with torch.no_grad():
        model(batch(0, rank))
    loop = Loop(rank, mesh, model=model)
    found["after a forward pass"] = loop.step(0).ready
    return found


def statistics(rank, mesh):
    """Running statistics are those of all ranks, of both shards too."""
    loop = Loop(rank, mesh)
    loop.step(0)
    own = loop.model[1].running_mean.clone()
    loop.pipe.sync_buffers()
    return own, loop.model[1].running_mean


def clipped(rank, mesh):
    """The norm that torch's own clipping finds after the exchange."""
    loop = Loop(rank, mesh)
    loop.backward(0)
    loop.pipe.sync(loop.optimizer)
    whole = torch.cat([p.grad.full_tensor().reshape(-1) for p in loop.model.parameters()])
    norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01).full_tensor()
    return float(whole.norm()), float(norm)


def in_parallel(mesh):
    """Two layers cut over the ranks of a mesh, and one that each rank has whole."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 1))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    if mesh is not None:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def trained_in_parallel(model, tx, replica, poisoned=False):
    pipe = gx.Pipeline(tx, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reports = []
    for number in range(3):
        optimizer.zero_grad()
        model(batch(number, replica)).square().mean().backward()
        if number == 1 and poisoned:
            part(model[0].weight.grad)[0, 0] = math.inf
        reports.append(pipe.sync(optimizer))
        if reports[-1].ready:
            optimizer.step()
    return [whole(p).detach() for p in model.parameters()], pipe, reports


def tensor_parallel(rank, mesh):
    """Layers in parallel, without FSDP, and the same with all layers whole."""
    from torch.distributed.tensor import Partial

    replica = mesh.between.get_local_rank()
    tx = gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce(mesh.between))
    model = in_parallel(mesh.inside)
    found, pipe, _ = trained_in_parallel(model, tx, replica)
    expected, *_ = trained_in_parallel(in_parallel(None), tx, replica)
    bias = model[2].bias
    bias.grad = bias.from_local(part(bias), bias.device_mesh, [Partial()])
    return found, expected, outcome(pipe.sync)


def both(rank, mesh):
    """Layers in parallel that FSDP has sharded as well, on one replica of 2 x 2 ranks."""
    names = "one", "both", "parallel"
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    between, inside, parallel = (cube[name] for name in names)
    tx = gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce(between))
    found = []
    for poisoned in (False, rank == 2):
        model = torch_fsdp.fully_shard(in_parallel(parallel), mesh=inside)
        values, pipe, reports = trained_in_parallel(model, tx, inside.get_local_rank(), poisoned)
        found.append((values, [r.skipped for r in reports], pipe.state_dict()["shard"]))
    return found


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def refusals(rank, mesh):
    """What is said of what cannot be right; for each, by all ranks."""
    between = gx.allreduce(mesh.between)
    topk = gx.topk(0.3), gx.ef()

    def refused(*stages, model=None, **given):
        model = sharded(mesh) if model is None else model()
        return outcome(gx.Pipeline, gx.chain(*stages), model, **given)

    def hybrid():
        return torch_fsdp.fully_shard(network(), mesh=mesh.whole)

    def over_all():
        return torch_fsdp.fully_shard(network())

    def older():
        return torch_fsdp.FullyShardedDataParallel(network(), device_id=torch.device("cpu"))

    def with_ignored():
        model = network()
        return torch_fsdp.fully_shard(model, mesh=mesh.inside, ignored_params={model[3].bias})

    def over_two_meshes():
        model = network()
        torch_fsdp.fully_shard(model[0], mesh=mesh.between)
        return torch_fsdp.fully_shard(model, mesh=mesh.inside)

    return {
        "hybrid": refused(*topk, between, model=hybrid),
        "over all": refused(*topk, gx.allreduce(), model=over_all),
        "exchange over all": refused(*topk, gx.allreduce()),
        "over the shards": refused(*topk, gx.allreduce(mesh.inside)),
        "FSDP1": refused(*topk, between, model=older),
        "ignored": refused(*topk, between, model=with_ignored),
        "two meshes": refused(*topk, between, model=over_two_meshes),
        "no exchange": refused(gx.scale(2.0)),
        "global clip": refused(*topk, between, gx.clip_by_global_norm(1.5)),
        "local clip": refused(gx.clip_by_local_norm(1.5), *topk, between),
        "clip in momentum": refused(gx.topk(0.3), gx.momentum_correction(0.9, clip=1.0), between),
        "foreign": refused(*topk, between, gx.declare(Foreign(), name="lamb")),
        "delayed": refused(*topk, gx.delayed(steps=1), between),
        "masters": refused(*topk, between, gx.master_weights()),
        "overlap": refused(*topk, between, overlap=True),
        "DDP hook": outcome(gx.ddp_hook, gx.chain(*topk, between), sharded(mesh)),
    }


class Foreign:
    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return updates, state


def in_mesh(rank, scenario):
    return globals()[scenario](rank, Mesh(scenario, 2, 2))


@functools.cache
def found(scenario):
    """What each of 2 x 2 ranks has found; rank 2 i + j has shard j of replica i."""
    return gloo_ranks(4, in_mesh, scenario.__name__, timeout=120.0)


def told(outcomes):
    """What the ranks have raised: how many of each type, and the texts."""
    kinds = [kind for kind, _ in outcomes]
    return {kind: kinds.count(kind) for kind in kinds}, [text for _, text in outcomes]


def test_a_chain_sees_the_parts_of_a_rank_as_it_sees_plain_tensors():
    steps = {name: 1 if name == "accumulate" else 3 for name in CHAINS}
    for rank in found(beside_local_parts):
        assert {name: equal for name, (equal, _) in rank.items()} == {
            name: [True] * n for name, n in steps.items()
        }


def test_replicas_stay_equal_and_shards_differ():
    for name in CHAINS:
        values = [
            {path: x for path, x in rank[name][1].items() if not path.startswith("states")}
            for rank in found(beside_local_parts)
        ]
        assert same(values[0], values[2]), name
        assert same(values[1], values[3]), name
        assert values[0]["0.weight"].shape == (4, 6)
        assert values[1]["0.weight"].shape == (3, 6)
        assert values[1]["3.weight"].shape == (0, 7)


def test_what_acts_on_each_value_trains_as_without_shards():
    for rank in found(beside_whole_model):
        assert rank["dense"] < 1e-6
        assert rank["cast"] < 1e-6


def test_a_bad_step_of_one_shard_leaves_no_trace_on_any_rank():
    one = [False, True, False]
    for rank in found(bad_steps):
        assert rank == {
            "topk": (True, one, None),
            "sign": (True, one, None),
            "window": (True, [False, False, False, True, False, False], None),
            "own scale": (True, one, 32.0),
            "scaler": (True, one, 128.0),
        }


def test_a_sum_that_overflows_in_one_shard_is_a_bad_step_of_all():
    assert found(overflow_of_a_sum) == [(True, True, True)] * 4


def test_a_micro_step_bad_for_one_shard_is_left_out_of_its_replica():
    for same_state, rest in found(left_out_micro_steps):
        assert same_state
        assert rest == [[128.0, [False, True, False, True]]] * 2


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("in a stage", "OSError", "no more of it"),
        ("in sync", "ValueError", "loss_scale is given and the chain has no unscale()"),
        ("construction", "ValueError", "Pipeline(max_skips=0): expected a whole number"),
    ],
)
def test_an_error_of_one_rank_is_raised_by_all(name, kind, text):
    kinds, texts = told([rank[name] for rank in found(errors)])
    assert kinds == {"RankMismatchError": 3, kind: 1}
    assert all(text in one for one in texts)
    assert all(one.startswith("rank 3 failed ") and kind in one for one in texts[:3])


def test_after_an_error_all_go_on_as_if_nothing_had_happened():
    for rank in found(errors):
        assert rank["nothing has moved"]
        assert rank["goes on"]


def test_weights_and_loss_scales_are_the_same_within_a_replica():
    kinds, texts = told([rank["weights"] for rank in found(errors)])
    assert kinds == {"RankMismatchError": 4}
    assert all("weight is [1.0, 2.0] on the ranks of one replica" in one for one in texts)
    kinds, texts = told([rank["scales"] for rank in found(errors)])
    assert kinds == {"RankMismatchError": 4}
    assert all("scaled by 256.0" in one and "scaled by 512.0" in one for one in texts)


def test_windows_end_and_are_flushed_with_weights_of_replicas():
    assert [rank["ready"] for rank in found(errors)] == [[False, True, False, True]] * 4


def test_a_loop_that_is_loaded_goes_on_bit_for_bit():
    for rank, (equal, other, state) in enumerate(found(checkpoints)):
        assert equal
        assert (state["rank"], state["world_size"]) == (rank // 2, 2)
        assert (state["shard"], state["shards"]) == (rank % 2, 2)
        text = f"this state_dict has shard {1 - rank % 2}: expected {rank % 2}"
        assert other == ("ValueError", text)


def test_states_of_one_shard_are_made_for_another_number_of_replicas():
    states = [state for *_, state in found(checkpoints)]
    anew = gx.reshard(states[1::2], 3)
    assert [(x["rank"], x["world_size"], x["shard"], x["shards"]) for x in anew] == [
        (rank, 3, 1, 2) for rank in range(3)
    ]
    key = next(key for key in anew[0]["state"] if key.endswith("residual.0.weight"))
    sums = [sum(x["state"][key] for x in some) / len(some) for some in (states[1::2], anew)]
    torch.testing.assert_close(*sums)
    with pytest.raises(
        ValueError, match=r"states\[1\] is of shard 1 and states\[0\] of shard 0: give"
    ):
        gx.reshard(states, 3)


def test_a_gradient_that_a_replica_lacks_counts_as_zero():
    whole = found(absent)[0][1]
    for rank, (layout, own, mean, gone) in enumerate(found(absent)):
        assert layout == ((7, 6), True)
        assert (own is None) == (rank > 1)
        assert torch.equal(mean, whole / 2)
        assert gone


def test_options_of_fully_shard_change_no_more_than_rounding():
    for rank in found(options):
        plain = rank["none"]
        for name, tolerance in {
            "sums in bfloat16": 0.02,
            "sums in float16": 0.01,
            "all in bfloat16": 0.05,
            "offloaded": 0.0,
        }.items():
            for one, other in zip(plain, rank[name], strict=True):
                torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)
        torch.testing.assert_close(*rank["accumulated"])
        assert rank["after a forward pass"]


def test_running_statistics_are_averaged_over_all_ranks():
    mean = torch.stack([own for own, _ in found(statistics)]).double().mean(0).float()
    for _, averaged in found(statistics):
        torch.testing.assert_close(averaged, mean)


def test_the_norm_that_torch_clips_by_is_that_of_the_whole_gradient():
    for whole_norm, norm in found(clipped):
        assert norm == pytest.approx(whole_norm)
    assert len({norm for _, norm in found(clipped)}) == 1


INSTEAD = (
    "; shard within replicas, and exchange between them: mesh = init_device_mesh({}, (replicas, "
    "shards), mesh_dim_names=('replicate', 'shard')), then fully_shard(model, mesh=mesh['shard']) "
    "and allreduce(mesh['replicate'])"
)
NORM = "would take the norm of this rank's part alone: use"
CLIP = "torch.nn.utils.clip_grad_norm_"
REFUSED = {
    "hybrid": "parameter '0.bias' is replicated on ranks [0, 2] of a mesh, between which its "
    "gradient is reduced already: the exchange would do so again, with nothing left to compress"
    + INSTEAD.format("'cpu'"),
    "over all": "parameter '0.bias' is spread over ranks [0, 1, 2, 3], and the exchange is over "
    "them too: the gradient is reduced already, and each of them has that of another shard"
    + INSTEAD.format("'cpu'"),
    "exchange over all": "parameter '0.bias' is spread over ranks [0, 1], and the exchange is",
    "over the shards": "parameter '0.bias' is spread over ranks [0, 1], and the exchange is over",
    "FSDP1": "the model is wrapped in FullyShardedDataParallel, FSDP1, which lays parameters into "
    "one and reduces their gradients itself: use torch.distributed.fsdp.fully_shard"
    + INSTEAD.format("'cuda'"),
    "ignored": "parameter '3.bias' is not sharded, in a model that fully_shard has sharded: its "
    "gradient is this rank's own, and the ranks of a replica would drift apart; call fully_shard "
    "on the module that has it, without ignored_params",
    "two meshes": "and others are over other ranks: shard all of a model over one mesh",
    "no exchange": "GX405",
    "global clip": f"the model is sharded, and gx.clip_by_global_norm(1.5) {NORM} {CLIP}("
    "model.parameters(), 1.5) after pipe.sync()",
    "local clip": f"the model is sharded, and gx.clip_by_local_norm(1.5) {NORM} {CLIP}("
    "model.parameters(), 1.5 / replicas**0.5) before pipe.sync(), after scaler.unscale_(optimizer)",
    "clip in momentum": f"{NORM} it without clip, and clip with {CLIP} before pipe.sync()",
    "foreign": "lamb() may look at whole leaves, of which this rank has a part: step with a torch "
    "optimizer",
    "delayed": "delayed() exchanges in the background, where shards cannot agree on a step",
    "masters": "parameters in FP32 are master weights: leave master_weights() out and write "
    "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
    "overlap": "overlap=True takes gradients from a background thread, and FSDP reduces them on",
    "DDP hook": "model is sharded by fully_shard, which calls no hook of DDP: use a Pipeline",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_all_ranks(name):
    outcomes = [rank[name] for rank in found(refusals)]
    kind = {"no exchange": "ChainOrderError", "DDP hook": "TypeError"}.get(name, "ValueError")
    assert all(one != "fine" and one[0] == kind for one in outcomes)
    assert REFUSED[name] in outcomes[0][1]


def test_layers_in_parallel_train_as_whole_layers_do():
    for parallel, expected, _ in found(tensor_parallel):
        for one, other in zip(parallel, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_a_gradient_that_is_a_part_of_a_sum_is_refused():
    text = (
        "the gradient of '2.bias' is (Partial(sum),), and the parameter (Replicate(),): write "
        "p.grad = p.grad.redistribute(placements=p.placements) before sync()"
    )
    assert [refused for *_, refused in found(tensor_parallel)] == [("ValueError", text)] * 4


def test_shards_of_layers_in_parallel_step_together():
    expected = found(tensor_parallel)[0][1]
    for rank, (good, bad) in enumerate(found(both)):
        for one, other in zip(good[0], expected, strict=True):
            torch.testing.assert_close(one, other)
        assert [good[1], bad[1]] == [[False, False, False], [False, True, False]]
        assert good[2] == rank


def one_shard(rank):
    """Three replicas of one shard each, beside plain parameters."""
    mesh = Mesh("one_shard", 3, 1)
    found = []
    for model in (sharded(mesh), network()):
        loop = Loop(rank, mesh, *CHAINS["topk"], model=model)
        for number in (0, -1, 1):
            loop.step(number, poisoned=(2,) if number < 0 else ())
        found.append((loop.found, list(loop.pipe.state_dict())))
    return found


def one_replica(rank):
    """One replica of two shards: nothing to exchange, and the shards have to agree all the same."""
    mesh = Mesh("one_replica", 1, 2)
    return bad_steps(rank, mesh), beside_whole_model(rank, mesh)


def lost_behind_the_exchange(rank, folder):
    """Rank 1 is lost when the others of its shard have stepped; rank 0 hears of it, and waits.

    How long the second replica takes to hear of it, and how.
    """
    mesh = Mesh("lost", 2, 2)
    loop = Loop(rank, mesh, *CHAINS["topk"])
    loop.step(0)
    engine, before = loop.pipe._engine, loop.found
    groups = *loop.tx.groups, engine._shards.group
    if rank == 1:

        def end(*args, **kwargs):
            for group in groups:
                group.give_up("this rank is gone")
            raise OSError("gone")

        engine._shards.end = end
    told = outcome(loop.step, 1) if rank < 2 else None
    if rank < 2:
        deadline = time.monotonic() + 15.0
        while len(list(folder.glob("done *"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return told, same(before, loop.found), 0.0
    loop.step(1)
    before, began = loop.found, time.monotonic()
    told = outcome(loop.step, 2)
    seconds = time.monotonic() - began
    (folder / f"done {rank}").touch()
    return told, same(before, loop.found), seconds


def test_a_rank_that_is_lost_behind_the_exchange_is_lost_to_all(tmp_path):
    beside, _, *others = gloo_ranks(4, lost_behind_the_exchange, tmp_path)
    for (kind, _), kept, seconds in (beside, *others):
        assert kind == "RankLostError"
        assert kept
        assert seconds < 10.0


def test_one_shard_is_as_none():
    ranks = gloo_ranks(3, one_shard)
    for (values, keys), (plain, plain_keys) in ranks:
        assert same(values, plain)
        assert keys == plain_keys
    parameters = [
        {path: x for path, x in loop[0].items() if not path.startswith("states")}
        for loop, _ in ranks
    ]
    assert same(parameters[0], parameters[1])
    assert same(parameters[0], parameters[2])


def test_the_shards_of_one_replica_step_together():
    for bad, beside in gloo_ranks(2, one_replica):
        assert all(equal and any(skipped) for equal, skipped, _ in bad.values())
        assert all(gap < 1e-6 for gap in beside.values())
