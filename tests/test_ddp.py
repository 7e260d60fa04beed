import functools
import gc
import io
import math
import warnings
import weakref
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradtx as gx
from gradtx.bench.digits import network
from gradtx.checkpoint import flatten_state
from ranks import gloo_ranks, outcome, spied

MISSION = gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.1), gx.ef(), gx.allreduce())
PLAIN = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce())
SCALED = gx.chain(gx.unscale(), gx.allreduce())
DENSE = gx.chain(gx.allreduce())
SIGNS = gx.chain(gx.sign(), gx.ef(), gx.allreduce())
FIRST = gx.chain(gx.topk(0.25), gx.ef(), gx.allreduce())
DECAYED = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(), gx.add_decayed_weights(0.5))
CHAINS = {"DECAYED": DECAYED, "DENSE": DENSE, "FIRST": FIRST, "PLAIN": PLAIN}
SMALL = 0.002  # MiB a bucket: several for each model here
OPTIONS = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def seeded(make, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def in_ddp(tx, model, scaler=None, **options):
    """The model in DDP with small buckets, and its hook."""
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": SMALL, **options})
    hook = gx.ddp_hook(tx, ddp, scaler=scaler)
    ddp.register_comm_hook(None, hook)
    return ddp, hook


def a_scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def parameters(model):
    return {path: p.detach().clone() for path, p in model.named_parameters()}


def gradients(model):
    return {
        path: None if p.grad is None else p.grad.tolist() for path, p in model.named_parameters()
    }


def residuals(owner):
    return {
        key.rpartition("residual.")[2]: value.clone()
        for key, value in flatten_state(owner.state).items()
        if "residual" in key
    }


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def same_on_all(found):
    return all(same(found[0], other) for other in found[1:])


class Weights(nn.Module):
    """Vectors, of which each forward uses those that it is told to; their gradients are given."""

    def __init__(self, size=4, names="ab", dtype=torch.float32):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=dtype)))

    def forward(self, **given):
        return sum((getattr(self, name) * grad).sum() for name, grad in given.items())


def of(*values):
    return torch.tensor(values)


# The demo's network, beside plain DDP and beside a Pipeline.


def batches(rank, steps):
    generator = torch.Generator().manual_seed(17 + rank)
    for _ in range(steps):
        images = torch.randn(8, 1, 8, 8, generator=generator)
        yield images, torch.randint(10, (8,), generator=generator)


def train(rank, model, scaler, sync=lambda optimizer: None, steps=4):
    """Trains the network as the demo does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches(rank, steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        sync(optimizer)
        scaler.step(optimizer)
        scaler.update()


def _dense_beside_ddp(rank, options):
    scaler = a_scaler()
    plain = DistributedDataParallel(seeded(network), bucket_cap_mb=SMALL, **options)
    train(rank, plain, a_scaler())
    model, hook = in_ddp(SCALED, seeded(network), scaler, **options)
    train(rank, model, scaler)
    return parameters(plain.module), parameters(model.module), hook.report


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_dense_chain_trains_as_plain_ddp_does(options):
    found = gloo_ranks(2, _dense_beside_ddp, options)
    for plain, hooked, report in found:
        assert report.ready
        assert not report.skipped
        for path in plain:
            torch.testing.assert_close(hooked[path], plain[path], rtol=1e-5, atol=1e-6)
    assert same_on_all([hooked for _, hooked, _ in found])


def _beside_a_pipeline(rank, options):
    """The same training with a hook and with a Pipeline; what each comes to."""
    alike, scaler = seeded(network), a_scaler()
    pipe = gx.Pipeline(MISSION, alike, scaler=scaler)
    train(rank, alike, scaler, pipe.sync)
    model, scaler = seeded(network), a_scaler()
    ddp, hook = in_ddp(MISSION, model, scaler, **options)
    train(rank, ddp, scaler)
    return parameters(alike), residuals(pipe), parameters(model), residuals(hook), hook.report


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_trains_as_a_pipeline_does_bit_for_bit(options):
    found = gloo_ranks(2, _beside_a_pipeline, options)
    for wanted, wanted_residuals, got, got_residuals, report in found:
        assert same(got, wanted)
        assert same(got_residuals, wanted_residuals)
        assert len(got_residuals) == 7
        assert 0 < report.wire_bytes < report.dense_bytes == 40506 * 4
    assert same_on_all([got for _, _, got, _, _ in found])


VARIED = [
    gx.chain(gx.topk(0.1, scope="global"), gx.ef(), gx.allreduce(algorithm="sharded")),
    gx.chain(gx.skip_bn(), gx.sign(), gx.ef(), gx.allreduce(), gx.clip_by_global_norm(1.0)),
    gx.chain(gx.powersgd(2), gx.ef(), gx.allreduce()),
    gx.chain(gx.random_k(0.1, feedback=False), gx.allreduce()),
    gx.chain(gx.quantize(8), gx.ef(), gx.allreduce()),
    gx.chain(gx.cast("bfloat16"), gx.ef(), gx.allreduce(op="sum")),
    gx.chain(gx.topk(0.1), gx.momentum_correction(0.9), gx.allreduce()),
]


def _varied(rank):
    found = []
    for tx in VARIED:
        alike, model = seeded(network), seeded(network)
        pipe = gx.Pipeline(tx, alike)
        ddp, hook = in_ddp(tx, model)
        for images, labels in batches(rank, 3):
            for each, sync in ((alike, pipe.sync), (ddp, lambda: None)):
                nn.functional.cross_entropy(each(images), labels).backward()
                sync()
                with torch.no_grad():
                    for p in each.parameters():
                        p -= 0.1 * p.grad
                each.zero_grad()
        states = flatten_state(pipe.state), flatten_state(hook.state)
        found.append((same(parameters(alike), parameters(model)), same(*states)))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_chains_of_all_kinds_do_what_they_do_in_a_pipeline(size):
    """Several rounds, two shots, random numbers by rank and leaf, a choice over all leaves."""
    assert gloo_ranks(size, _varied) == [[(True, True)] * len(VARIED)] * size


def _bucketing(rank):
    """Which parameters came in which bucket, in each step."""
    model, hook = in_ddp(PLAIN, seeded(network))
    paths = {id(p): path for path, p in model.module.named_parameters()}
    take, steps = hook._collect, [[]]

    def note(bucket):
        steps[-1].append([paths[id(p)] for p in bucket.parameters()])
        take(bucket)

    hook._collect = note
    for images, _ in batches(rank, 3):
        model(images).sum().backward()
        model.zero_grad()
        steps.append([])
    return steps[:-1]


def test_the_buckets_are_several_and_are_built_anew():
    """Or the tests above would show less than they say."""
    for first, second, third in gloo_ranks(2, _bucketing):
        assert len(second) > 4
        assert first != second == third
        assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second))


def _calls(rank):
    """The collectives of a step with a hook and with a Pipeline."""

    def with_hook(spy):
        model, _ = in_ddp(PLAIN, seeded(network))
        found = []
        for images, _ in batches(rank, 3):
            model(images).sum().backward()
            model.zero_grad()
            found.append(list(spy.calls))
            spy.calls.clear()
        return found[1:]

    def with_pipeline(spy):
        model = seeded(network)
        pipe, found = gx.Pipeline(PLAIN, model), []
        for images, _ in batches(rank, 3):
            model(images).sum().backward()
            pipe.sync()
            model.zero_grad()
            found.append(list(spy.calls))
            spy.calls.clear()
        return found[1:]

    return spied(with_hook), spied(with_pipeline)


def test_there_is_one_exchange_a_step_whatever_the_buckets():
    for hooked, piped in gloo_ranks(2, _calls):
        assert hooked == piped
        assert [len(calls) for calls in hooked] == [1, 1]


def _channels_last(rank, name):
    def make():
        return seeded(network).to(memory_format=torch.channels_last)

    model, alike = make(), make()
    ddp, hook = in_ddp(CHAINS[name], model)
    pipe = gx.Pipeline(CHAINS[name], alike)
    for images, _ in batches(rank, 3):
        for each, sync in ((ddp, lambda: None), (alike, pipe.sync)):
            each(images).square().sum().backward()
            sync()
            with torch.no_grad():
                for p in each.parameters():
                    p -= 0.01 * p.grad
            each.zero_grad()
    return parameters(model), parameters(alike), residuals(hook), residuals(pipe)


@pytest.mark.parametrize("name", ["DECAYED", "DENSE", "PLAIN"])
def test_a_channels_last_gradient_is_not_taken_for_a_row_major_one(name):
    """Weights are added to it; the views of DDP's own bucket are in another order than these."""
    for got, wanted, got_residuals, wanted_residuals in gloo_ranks(2, _channels_last, name):
        assert same(got, wanted)
        assert same(got_residuals, wanted_residuals)


# What DDP accepts for a hook.


def a_plain_hook(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class CallableHook:
    def __call__(self, state, bucket):
        return a_plain_hook(state, bucket)


@pytest.mark.parametrize("hook", [functools.partial(a_plain_hook), CallableHook()])
def test_ddp_refuses_partials_and_other_objects(alone, hook):
    ddp = DistributedDataParallel(Weights())
    with pytest.raises(AttributeError, match="__name__"):
        ddp.register_comm_hook(None, hook)


def test_ddp_accepts_the_hook_whose_annotations_it_can_read(alone):
    ddp, hook = in_ddp(FIRST, Weights())
    assert callable(hook)
    ddp(a=of(1.0, 2.0, 3.0, -4.0), b=torch.ones(4)).backward()
    assert ddp.module.a.grad.tolist() == [0.0, 0.0, 0.0, -4.0]


# Bad steps.


def _a_bad_step(rank, bad):
    model, scaler = Weights(), a_scaler()
    ddp, hook = in_ddp(
        gx.chain(gx.unscale(), gx.topk(0.25), gx.ef(), gx.allreduce()), model, scaler
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        value = bad if (step, rank) == (1, 1) else 3.0 + rank
        loss = ddp(a=of(value, 1.0, 2.0, 1.0), b=of(1.0, 5.0, -6.0, 7.0))
        scaler.scale(loss).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        found.append((hook.report, grads, residuals(hook), parameters(model), scaler.get_scale()))
    return found


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_step_of_one_rank_is_skipped_by_the_scalers_of_all(bad):
    found = gloo_ranks(2, _a_bad_step, bad)
    for steps in found:
        assert [report.skipped for report, *_ in steps] == [False, True, False, False]
        assert [report.ready for report, *_ in steps] == [True, False, True, True]
        assert [scale for *_, scale in steps] == [1024.0, 512.0, 512.0, 1024.0]
        before, after = steps[0], steps[1]
        assert all((grad == math.inf).all() for grad in after[1])
        assert same(after[2], before[2])
        assert same(after[3], before[3])
        assert not same(steps[2][3], after[3])
    assert same_on_all([steps[-1][3] for steps in found])


def _a_bad_step_in_no_scaler(rank):
    model = Weights()
    tx = gx.chain(gx.dynamic_loss_scale(8.0), gx.topk(0.25), gx.ef(), gx.allreduce())
    ddp, hook = in_ddp(tx, model)
    found = []
    for step in range(3):
        value = math.inf if (step, rank) == (1, 0) else 4.0
        loss = ddp(a=of(value, 1.0, 1.0, 2.0), b=torch.ones(4))
        (loss * hook.state.loss_scale).backward()
        found.append((hook.report.ready, float(hook.state.loss_scale), model.a.grad.tolist()))
        model.zero_grad()
    return found


def test_without_a_scaler_a_bad_step_gives_zeros():
    assert (
        gloo_ranks(2, _a_bad_step_in_no_scaler)
        == [
            [
                (True, 8.0, [4.0, 0.0, 0.0, 0.0]),
                (False, 4.0, [0.0, 0.0, 0.0, 0.0]),
                (True, 4.0, [4.0, 0.0, 0.0, 0.0]),
            ]
        ]
        * 2
    )


def test_a_scaler_that_is_off_leaves_true_gradients(alone):
    model, scaler = Weights(), torch.amp.GradScaler("cpu", enabled=False)
    ddp, hook = in_ddp(SCALED, model, scaler)
    scaler.scale(ddp(a=torch.ones(4), b=of(1.0, 2.0, 3.0, math.inf))).backward()
    assert hook.report.skipped
    assert model.a.grad.tolist() == [0.0] * 4


def _a_large_value_in_half(rank):
    model = Weights()
    ddp, _ = in_ddp(gx.chain(gx.cast("float16", feedback=False), gx.allreduce()), model)
    ddp(a=of(0.0 if rank else 1e5, 1.0, 1.0, 1.0), b=torch.ones(4)).backward()
    return model.a.grad.tolist()


def test_it_divides_before_it_casts():
    """1e5 is infinite in FP16, and half of it is not."""
    for found in gloo_ranks(2, _a_large_value_in_half):
        assert found[0] == pytest.approx(5e4, rel=1e-3)
        assert found[1:] == pytest.approx([1.0] * 3, rel=1e-2)


def _never_finite(rank):
    model = Weights()
    ddp = DistributedDataParallel(model)
    hook = gx.ddp_hook(FIRST, ddp, max_skips=2)
    ddp.register_comm_hook(None, hook)
    found = []
    for _ in range(3):
        model.zero_grad()
        found.append(outcome(ddp(a=torch.ones(4), b=torch.full((4,), math.nan)).backward))
    return found


def test_too_many_bad_steps_in_a_row_raise_on_all_ranks():
    for first, second, third in gloo_ranks(2, _never_finite):
        assert (first, second) == ("fine", "fine")
        assert third[0] == "NeverFiniteError"
        assert "3 steps in a row were skipped" in third[1]
        assert "in none of them: 'b'." in third[1]


# Accumulation.


def _accumulated(rank, options):
    """Three windows of three micro-steps, behind one step of its own."""
    model, alike = Weights(), Weights()
    ddp, hook = in_ddp(FIRST, model, bucket_cap_mb=1e-5, **options)
    pipe, found, wanted = gx.Pipeline(FIRST, alike), [], []
    for window in range(4):
        grads = [
            {"a": of(9.0, 5.0, 3.0, 1.0) * i + rank, "b": of(1.0, window, i, rank * 7.0)}
            for i in range(3 if window else 1)
        ]
        with ddp.no_sync():
            for grad in grads[:-1]:
                ddp(**grad).backward()
        ddp(**grads[-1]).backward()
        for grad in grads:
            alike(**grad).backward()
        pipe.sync()
        found.append(gradients(model))
        wanted.append(gradients(alike))
        model.zero_grad()
        alike.zero_grad()
    return found, wanted, residuals(hook), residuals(pipe)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_accumulating_in_no_sync_is_one_step_on_the_sum(options):
    for got, wanted, got_residuals, wanted_residuals in gloo_ranks(2, _accumulated, options):
        assert got == wanted
        assert same(got_residuals, wanted_residuals)


def test_the_first_step_of_a_static_graph_in_no_sync_is_refused(alone):
    """DDP fails an assertion of its own there, and cannot go on."""
    model = Weights(names="a")
    ddp, _ = in_ddp(FIRST, model, static_graph=True)
    with (
        ddp.no_sync(),
        pytest.raises(
            RuntimeError, match=r"the first step of DDP.static_graph=True. is inside no_"
        ),
    ):
        ddp(a=torch.ones(4))
    with torch.no_grad(), ddp.no_sync():
        ddp(a=torch.ones(4))
    for grad in (of(4.0, 3.0, 2.0, 1.0), torch.zeros(4)):
        model.zero_grad()
        ddp(a=grad).backward()
    assert gradients(model) == {"a": [0.0, 3.0, 0.0, 0.0]}
    with ddp.no_sync():
        ddp(a=torch.ones(4)).backward()
    assert gradients(model) == {"a": [1.0, 4.0, 1.0, 1.0]}


def _used_in_one_micro_step(rank):
    """``b`` is used only in the first of two micro-steps."""
    model = Weights()
    ddp, hook = in_ddp(FIRST, model, find_unused_parameters=True, bucket_cap_mb=1e-5)
    with ddp.no_sync():
        ddp(a=torch.ones(4), b=of(4.0, 3.0, 2.0, 1.0)).backward()
    ddp(a=torch.ones(4)).backward()
    return gradients(model), residuals(hook)["b"].tolist()


def test_a_parameter_that_any_micro_step_has_used_is_used():
    wanted = {"a": [2.0, 0.0, 0.0, 0.0], "b": [4.0, 0.0, 0.0, 0.0]}
    assert gloo_ranks(2, _used_in_one_micro_step) == [(wanted, [0.0, 3.0, 2.0, 1.0])] * 2


def _not_in_no_sync(rank, name, options):
    """Gradients 1 and 2, then 10 and 20, and no `no_sync`; what the next steps give."""
    model = Weights(size=1, names="a")
    ddp, _ = in_ddp(CHAINS[name], model, **options)
    ddp(a=of(1.0 + rank)).backward()
    first = model.a.grad.tolist()
    again = outcome(ddp(a=of(10.0 + 10 * rank)).backward)
    after = []
    for to_none in (True, False, False, True):
        model.zero_grad(set_to_none=to_none)
        ddp(a=of(10.0 + 10 * rank)).backward()
        after.append(model.a.grad.tolist())
    return first, again, after


@pytest.mark.parametrize("name", ["DENSE", "FIRST"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_accumulating_without_no_sync_is_refused(name, options):
    """The hook would get 11.5 and 21.5, where 11 and 22 are right."""
    for first, again, after in gloo_ranks(2, _not_in_no_sync, name, options):
        assert first == [1.5]
        assert again == (
            "RuntimeError",
            "the gradients of 'a' were added to what the last exchange had left in .grad, which "
            "would be exchanged again: run all backward passes of a step but the last inside "
            "model.no_sync(), and call zero_grad() after the step",
        )
        assert after == [[15.0]] * 4


def _one_rank_accumulates(rank):
    model = Weights(size=1, names="a")
    ddp, _ = in_ddp(DENSE, model)
    ddp(a=of(1.0)).backward()
    if rank:
        model.zero_grad()
    return outcome(ddp(a=of(1.0)).backward)


def test_a_rank_that_does_not_clear_its_gradients_is_told_to_the_others():
    first, second = gloo_ranks(2, _one_rank_accumulates)
    assert first[0] == "RuntimeError"
    assert second == ("RankMismatchError", f"rank 0 failed in this step: {': '.join(first)}")


# Unused parameters.


def _unused(rank, options):
    """Rank 1 does not use ``b`` in the second step, and no rank uses ``c`` in it."""
    model = Weights(names="abc")
    ddp, hook = in_ddp(FIRST, model, bucket_cap_mb=1e-5, **options)
    grad = of(4.0, 3.0, 2.0, 1.0)
    found = []
    for used in ("abc", "a" if rank else "ab", "abc"):
        model.zero_grad()
        ddp(**dict.fromkeys(used, grad)).backward()
        grads = {
            n: None if p.grad is None else p.grad.tolist() for n, p in model.named_parameters()
        }
        found.append((grads, {n: r.tolist() for n, r in residuals(hook).items()}))
    return found


@pytest.mark.parametrize("as_view", [False, True])
def test_the_residual_of_an_unused_parameter_stays_where_its_result_would_be_lost(as_view):
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view}
    for rank, steps in enumerate(gloo_ranks(2, _unused, options)):
        (first, kept), (second, then), (third, last) = steps
        assert first == {path: [4.0, 0.0, 0.0, 0.0] for path in "abc"}
        assert kept == {path: [0.0, 3.0, 2.0, 1.0] for path in "abc"}
        assert second == {
            "a": [0.0, 6.0, 0.0, 0.0],
            "b": [0.0, 3.0, 0.0, 0.0],
            "c": None,
        }
        assert then == {
            "a": [4.0, 0.0, 4.0, 2.0],
            "b": kept["b"] if rank else [4.0, 0.0, 4.0, 2.0],
            "c": kept["c"],
        }
        # What was given and what is left add up to what came in, three times or twice.
        total = [4.0 * 3, 3.0 * 3, 2.0 * 3, 1.0 * 3]
        given = [sum(column) for column in zip(first["a"], second["a"], third["a"], strict=True)]
        assert [g + r for g, r in zip(given, last["a"], strict=True)] == total
        given = [sum(column) for column in zip(first["c"], third["c"], strict=True)]
        assert [g + r for g, r in zip(given, last["c"], strict=True)] == [8.0, 6.0, 4.0, 2.0]


def _unused_in_static_graph(rank):
    model = Weights(names="abc")
    ddp, hook = in_ddp(FIRST, model, bucket_cap_mb=1e-5, static_graph=True)
    found = []
    for _ in range(3):
        model.zero_grad()
        ddp(**dict.fromkeys("a" if rank else "ab", of(4.0, 3.0, 2.0, 1.0))).backward()
        found.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
    return found, {path: r.tolist() for path, r in residuals(hook).items()}


def test_in_a_static_graph_unused_parameters_are_unused_from_the_first_pass_on():
    for rank, (steps, residual) in enumerate(gloo_ranks(2, _unused_in_static_graph)):
        assert [step[1] for step in steps][:2] == [[2.0, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]]
        assert [step[2] for step in steps] == [None] * 3
        assert residual["c"] == [0.0] * 4
        assert (residual["b"] == [0.0] * 4) == bool(rank)


def _unused_from_now_on(rank):
    """A state of a run that used all parameters, in a static graph that does not."""
    model = Weights(names="abc")
    ddp, hook = in_ddp(FIRST, model, static_graph=True)
    state = hook.state_dict()
    for key in state["state"]:
        if "residual" in key:
            state["state"][key] = of(8.0, 7.0, 6.0, 5.0)
    hook.load_state_dict(state)
    for _ in range(2):
        model.zero_grad()
        ddp(**dict.fromkeys("a" if rank else "ab", torch.zeros(4))).backward()
    return {path: r.tolist() for path, r in residuals(hook).items()}


def test_in_a_static_graph_residuals_of_unused_parameters_stay():
    whole, part = [8.0, 7.0, 6.0, 5.0], [0.0, 0.0, 6.0, 5.0]
    assert gloo_ranks(2, _unused_from_now_on) == [
        {"a": part, "b": whole if rank else part, "c": whole} for rank in range(2)
    ]


def _outputs_without_a_loss(rank):
    """``b`` is in the graph of an output that no loss is taken of: DDP sees no gradient of it."""

    class Two(Weights):
        def forward(self, grad):
            return (self.a * grad).sum(), (self.b * grad).sum()

    model = Two()
    ddp, hook = in_ddp(FIRST, model, find_unused_parameters=True)
    grad, found = of(4.0, 3.0, 2.0, 1.0), []
    for both in (True, False):
        model.zero_grad()
        first, second = ddp(grad)
        (first + second if both else first).backward()
        found.append((model.b.grad is None, residuals(hook)["b"].tolist()))
    return found


def test_a_parameter_of_an_output_without_a_loss_is_unused():
    kept = [0.0, 3.0, 2.0, 1.0]
    assert gloo_ranks(2, _outputs_without_a_loss) == [[(False, kept), (True, kept)]] * 2


class Mixed(nn.Module):
    """Two dtypes, hence two buckets in the first pass of a static graph, too."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x):
        return (self.wide * x).sum() + (self.narrow * x.bfloat16()).sum()


def _mixed(rank, options):
    ddp, _ = in_ddp(SIGNS, Mixed(), **options)
    for _ in range(3):
        ddp.zero_grad()
        ddp(of(1.0, -1.0, 1.0, 1.0)).backward()
    return [(p.grad.dtype, p.grad.tolist()) for p in ddp.parameters()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_buckets_of_several_dtypes_are_one_step(options):
    """DDP calls all buckets of a static graph's first pass number 0, and none the last."""
    values = [1.0, -1.0, 1.0, 1.0]
    wanted = [(torch.float64, values), (torch.bfloat16, values)]
    assert gloo_ranks(2, _mixed, options) == [wanted] * 2


# join().


def _uneven(rank, name, options):
    """Rank 1 has two steps more than rank 0."""
    model = seeded(network)
    plain = DistributedDataParallel(seeded(network), bucket_cap_mb=SMALL, **options)
    hooked, hook = in_ddp(CHAINS[name], model, **options)
    for ddp in (plain, hooked):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for images, labels in batches(rank, 2 + 2 * rank):
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(images), labels).backward()
                optimizer.step()
    return parameters(plain.module), parameters(model), int(hook.state.total_notfinite)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_with_join_uneven_inputs_train_as_in_plain_ddp(options):
    found = gloo_ranks(2, _uneven, "DENSE", options)
    for plain, hooked, _ in found:
        for path in plain:
            torch.testing.assert_close(hooked[path], plain[path], rtol=1e-5, atol=1e-6)
    assert same_on_all([hooked for _, hooked, _ in found])


def test_with_join_compressed_gradients_keep_replicas_equal():
    found = gloo_ranks(2, _uneven, "PLAIN", {})
    assert same_on_all([hooked for _, hooked, _ in found])


def _join_by_those_left(rank):
    model = Weights()
    ddp, _ = in_ddp(FIRST, model)

    def steps():
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                ddp(a=torch.ones(4), b=torch.ones(4)).backward()

    return outcome(steps)


def test_a_mean_over_those_left_in_join_is_refused():
    text = (
        "join(divide_by_initial_world_size=False) does not reach a hook, which takes the mean over "
        "all ranks: write join()"
    )
    assert gloo_ranks(2, _join_by_those_left) == [("ValueError", text)] * 2


# Errors in a step.


def last_value_only():
    """A foreign transformation that gives one value for each leaf."""

    class OneValue:
        def init(self, params):
            return ()

        def update(self, updates, state, params=None):
            return {path: grad.sum() for path, grad in updates.items()}, state

    return gx.declare(OneValue(), name="one_value")


def _mis_shaped(rank):
    model = Weights()
    ddp, _ = in_ddp(gx.chain(gx.allreduce(), last_value_only()), model)
    found = outcome(ddp(a=torch.ones(4), b=torch.ones(4)).backward)
    return found, model.a.grad.isnan().all().item()


def test_a_result_of_another_shape_is_refused():
    """DDP would spread one value over the whole parameter."""
    text = "the chain gives 'a' a Tensor of shape (): expected (4,), that of its gradient"
    assert gloo_ranks(2, _mis_shaped) == [(("ValueError", text), True)] * 2


class Failing:
    """A foreign transformation that fails when it is told to."""

    def __init__(self):
        self.fail = False

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        if self.fail:
            raise KeyError("out of order")
        return updates, state


def _fails_once(rank, options):
    model, failing = Weights(), Failing()
    stage = gx.declare(failing, name="failing", needs_reduced=False, stateful=False)
    ddp, hook = in_ddp(
        gx.chain(stage, gx.topk(0.25), gx.ef(), gx.allreduce()),
        model,
        bucket_cap_mb=1e-5,
        **options,
    )
    found = []
    for step in range(5):
        failing.fail = rank == 1 and step in (0, 3)
        model.zero_grad()
        kind = outcome(ddp(a=of(4.0, 3.0, 2.0, 1.0), b=torch.ones(4)).backward)
        found.append((kind, model.a.grad.tolist(), residuals(hook)["a"].tolist()))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_after_an_error_of_one_rank_ddp_goes_on_from_the_state_before(options):
    """A hook that raises within the pass leaves DDP unusable, with an error of its own."""
    found = gloo_ranks(2, _fails_once, options)
    own = ("KeyError", "'out of order'")
    told = ("RankMismatchError", f"rank 1 failed {{}}: {own[0]}: {own[1]}")
    for rank, steps in enumerate(found):
        kinds = [kind for kind, _, _ in steps]
        if rank == 1:
            assert kinds == [own, "fine", "fine", own, "fine"]
        else:
            assert [kind[0] for kind in (kinds[0], kinds[3])] == [told[0]] * 2
            assert kinds[3][1] == told[1].format("in this step")
            assert own[1] in kinds[0][1]
            assert [kinds[1], kinds[2], kinds[4]] == ["fine"] * 3
        assert all(math.isnan(x) for x in steps[0][1] + steps[3][1])
        assert [steps[i][1] for i in (1, 2, 4)] == [
            [4.0, 0.0, 0.0, 0.0],
            [0.0, 6.0, 0.0, 0.0],
            [8.0, 0.0, 0.0, 0.0],
        ]
        assert steps[0][2] == [0.0] * 4
        assert steps[3][2] == steps[2][2]


def test_a_hook_of_another_model_is_refused(alone):
    hook = gx.ddp_hook(DENSE, DistributedDataParallel(Weights()))
    other = DistributedDataParallel(Weights(size=3))
    other.register_comm_hook(None, hook)
    with pytest.raises(
        RuntimeError, match=r"reduces a parameter of shape \[3\] that the hook does"
    ):
        other(a=torch.ones(3), b=torch.ones(3)).backward()


def test_a_memory_format_that_has_changed_is_refused(alone):
    model = nn.Conv2d(2, 3, 3)
    ddp, _ = in_ddp(DENSE, model, bucket_cap_mb=1)
    ddp.to(memory_format=torch.channels_last)
    loss = ddp(torch.ones(1, 2, 4, 4)).sum()
    with (
        pytest.warns(UserWarning, match="Grad strides do not match"),
        pytest.raises(
            RuntimeError, match=r"parameter 'weight' has strides \(18, 1, 6, 2\) and had"
        ),
    ):
        loss.backward()


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the model")


def test_an_error_whose_pass_comes_to_no_end_is_raised_by_the_next_forward(alone):
    """The hook fails on the first of two buckets, and the model before the second."""

    class Stopping(Weights):
        def forward(self, stop=True):
            total = self.a.sum()
            return (Stop.apply(total) if stop else total) + self.b.sum()

    def fail(bucket):
        raise KeyError("in the hook")

    ddp, hook = in_ddp(DENSE, Stopping(), bucket_cap_mb=1e-5)
    ddp(stop=False).backward()
    ddp.zero_grad()
    hook._collect = fail
    with pytest.raises(ArithmeticError, match="in the model"):
        ddp().backward()
    with pytest.raises(KeyError, match="in the hook"):
        ddp()


# States.


def _resumed(rank, folder, interrupted):
    model = seeded(network)
    scaler = a_scaler()
    ddp, hook = in_ddp(MISSION, model, scaler)
    train(rank, ddp, scaler, steps=2)
    if interrupted:
        path = f"{folder}/{rank}.pt"
        torch.save([hook.state_dict(), model.state_dict(), scaler.state_dict()], path)
        state, weights, scale = torch.load(path, weights_only=True)
        model, scaler = seeded(network, seed=1), a_scaler()
        model.load_state_dict(weights)
        scaler.load_state_dict(scale)
        ddp, hook = in_ddp(MISSION, model, scaler)
        hook.load_state_dict(state)
    train(rank, ddp, scaler, steps=3)
    return parameters(model), residuals(hook)


def test_training_goes_on_from_a_saved_state_bit_for_bit(tmp_path):
    """The buckets are those of a first pass again, and then built anew."""
    for rank, (got, whole) in enumerate(
        zip(
            gloo_ranks(2, _resumed, str(tmp_path), True),
            gloo_ranks(2, _resumed, str(tmp_path), False),
            strict=True,
        )
    ):
        assert same(got[0], whole[0]), rank
        assert same(got[1], whole[1]), rank


def _states(rank):
    ddp, hook = in_ddp(FIRST, Weights())
    ddp(a=of(1.0, 2.0, 3.0, 4.0 + rank), b=torch.ones(4)).backward()
    buffer = io.BytesIO()
    torch.save(hook.state_dict(), buffer)
    states = [None, None]
    dist.all_gather_object(states, buffer.getvalue())
    states = [torch.load(io.BytesIO(state), weights_only=True) for state in states]
    before = residuals(hook)
    found = [outcome(hook.load_state_dict, state) for state in states]
    return found, same(residuals(hook), before)


def test_the_state_of_rank_0_is_refused_on_the_others():
    (first, _), (second, kept) = gloo_ranks(2, _states)
    assert first == ["fine", ("ValueError", "this state_dict has rank 1: expected 0")]
    assert second == [("ValueError", "this state_dict has rank 0: expected 1"), "fine"]
    assert kept


def test_a_state_is_that_of_a_pipeline(alone):
    model = Weights()
    pipe = gx.Pipeline(FIRST, model)
    model(a=of(1.0, 2.0, 3.0, 4.0), b=torch.ones(4)).backward()
    pipe.sync()
    _, hook = in_ddp(FIRST, Weights())
    hook.load_state_dict(pipe.state_dict())
    assert residuals(hook)["a"].tolist() == [1.0, 2.0, 3.0, 0.0]
    with pytest.raises(ValueError, match="this is no state_dict of a DDP hook: it lacks"):
        hook.load_state_dict({})


def _keeps_gradients(rank):
    """A foreign stage keeps the gradient itself in its state."""

    class Last:
        def init(self, params):
            return {path: torch.zeros_like(p) for path, p in params.items()}

        def update(self, updates, state, params=None):
            return state, updates

    model = Weights(names="a")
    ddp, _ = in_ddp(gx.chain(gx.allreduce(), gx.declare(Last(), name="last")), model)
    found = []
    for step in range(4):
        model.zero_grad()
        ddp(a=torch.full((4,), float(step + 1))).backward()
        found.append(model.a.grad[0].item())
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_state_may_keep_the_gradients(size):
    assert gloo_ranks(size, _keeps_gradients) == [[0.0, 1.0, 2.0, 3.0]] * size


def test_a_model_that_is_dropped_is_freed(alone):
    ddp, hook = in_ddp(FIRST, Weights())
    ddp(a=torch.ones(4), b=torch.ones(4)).backward()
    model, hooks = weakref.ref(ddp), weakref.ref(hook)
    del ddp, hook
    gc.collect()
    assert model() is None
    assert hooks() is None


# Construction.


def ddp_of(**options):
    return DistributedDataParallel(Weights(), **options)


class Words(nn.Module):
    def __init__(self, layer=nn.Embedding):
        super().__init__()
        self.words = layer(5, 2, sparse=True)

    def forward(self, x):
        return self.words(x)


def frozen_since():
    ddp = ddp_of()
    ddp.module.b.requires_grad_(False)
    return ddp


def with_a_hook():
    ddp = ddp_of()
    ddp.register_comm_hook(None, a_plain_hook)
    return ddp


def delaying():
    model = Weights(names="abc")
    return DistributedDataParallel(
        model, delay_all_reduce_named_params=[("b", model.b)], param_to_hook_all_reduce=model.a
    )


def with_a_python_reducer():
    ddp = ddp_of()
    ddp._use_python_reducer = True  # Asked for in earnest, it changes settings of all compilers.
    return ddp


def stepping_in_backward():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = Weights()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return DistributedDataParallel(model)


SCALER = torch.amp.GradScaler("cpu")
REFUSED = {
    "accumulate": (
        lambda: gx.ddp_hook(gx.chain(gx.accumulate(4), gx.allreduce()), ddp_of()),
        "ValueError",
        "a DDP hook refuses gx.accumulate(4): DDP discards what a hook gives for parameters that "
        "the last micro-step has not used; leave it out, and run all micro-steps but the last "
        "inside model.no_sync()",
    ),
    "delayed": (
        lambda: gx.ddp_hook(gx.chain(gx.delayed(steps=1), gx.allreduce()), ddp_of()),
        "ValueError",
        "a DDP hook refuses gx.delayed(steps=1): DDP waits for results before backward() returns",
    ),
    "master_weights": (
        lambda: gx.ddp_hook(gx.chain(gx.allreduce(), gx.master_weights()), ddp_of()),
        "ValueError",
        "a DDP hook refuses gx.master_weights(): it has no part in the optimizer's step",
    ),
    "a payload at the end": (
        lambda: gx.ddp_hook(gx.topk(0.1, feedback=False), ddp_of()),
        "ChainOrderError",
        "a DDP hook refuses gx.chain(gx.topk(0.1, feedback=False))\nGX404",
    ),
    "a mesh": (
        lambda: gx.ddp_hook(gx.chain(gx.allreduce(axis_name="i")), ddp_of()),
        "TypeError",
        "exchanges JAX arrays over a mesh; DDP has torch tensors: write allreduce()",
    ),
    "no DDP": (
        lambda: gx.ddp_hook(DENSE, Weights()),
        "TypeError",
        "model is a Weights: expected a DistributedDataParallel",
    ),
    "no scaler": (
        lambda: gx.ddp_hook(DENSE, ddp_of(), scaler=1024.0),
        "TypeError",
        "scaler=1024.0: expected a torch.amp.GradScaler",
    ),
    "unscale and no loss scale": (
        lambda: gx.ddp_hook(SCALED, ddp_of()),
        "ValueError",
        "the chain has unscale() and there is no loss scale: write ddp_hook(tx, model, "
        "scaler=scaler), or dynamic_loss_scale() in its place, or leave it out",
    ),
    "a loss scale and no unscale": (
        lambda: gx.ddp_hook(DENSE, ddp_of(), scaler=SCALER),
        "ValueError",
        "a GradScaler is given and the chain has no unscale(): the loss scale would stay in the "
        "gradients; write gx.chain(gx.unscale(), gx.allreduce())",
    ),
    "two loss scales": (
        lambda: gx.ddp_hook(
            gx.chain(gx.dynamic_loss_scale(), gx.allreduce()), ddp_of(), scaler=SCALER
        ),
        "ValueError",
        "two loss scales; leave the scaler out and multiply the loss by hook.state.loss_scale",
    ),
    "max_skips": (
        lambda: gx.ddp_hook(DENSE, ddp_of(), max_skips=0),
        "ValueError",
        "ddp_hook(max_skips=0): expected a whole number of 1 or more",
    ),
    "another hook": (
        lambda: gx.ddp_hook(DENSE, with_a_hook()),
        "ValueError",
        "the model has the hook a_plain_hook already: DDP takes one",
    ),
    "frozen since": (
        lambda: gx.ddp_hook(DENSE, frozen_since()),
        "ValueError",
        "DDP reduces 2 parameters and 1 require a gradient now: change requires_grad before the "
        "model is wrapped in DDP",
    ),
    "buckets left out": (
        lambda: gx.ddp_hook(
            DENSE, ddp_of(find_unused_parameters=True, skip_all_reduce_unused_params=True)
        ),
        "ValueError",
        "the model is in DDP with skip_all_reduce_unused_params: DDP leaves out buckets that a "
        "hook waits for; leave it out",
    ),
    "a Python reducer": (
        lambda: gx.ddp_hook(DENSE, with_a_python_reducer()),
        "ValueError",
        "the model is in DDP with the Python reducer of torch.compile: DDP hands over single",
    ),
    "an optimizer in the backward pass": (
        lambda: gx.ddp_hook(DENSE, stepping_in_backward()),
        "ValueError",
        "an optimizer steps in the backward pass, for which DDP registers a hook of its own",
    ),
    "parameters that DDP reduces itself": (
        lambda: gx.ddp_hook(DENSE, delaying()),
        "ValueError",
        "the model is in DDP with delay_all_reduce_named_params: DDP reduces some parameters "
        "itself",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused(alone, what):
    make, kind, text = REFUSED[what]
    found = outcome(make)
    assert found[0] == kind
    assert text in found[1]


def test_a_sparse_gradient_of_a_layer_that_said_otherwise_is_refused(alone):
    model = Words()
    ddp = DistributedDataParallel(model)
    model.words.sparse = False
    ddp.register_comm_hook(None, gx.ddp_hook(DENSE, ddp))
    model.words.sparse = True
    with pytest.raises(TypeError, match=r"leaf 'words.weight' is sparse"):
        ddp(torch.tensor([1, 2])).sum().backward()
    assert model.words.weight.grad.to_dense()[0].isnan().all()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Weights(names="abc")

    def forward(self, **given):
        return self.inner(**given)


def test_frozen_parameters_and_those_that_ddp_ignores_stay_out(alone):
    model = Nested()
    model.inner.b.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["inner.c"])
    ddp, hook = in_ddp(FIRST, model)
    ddp(**dict.fromkeys("abc", of(4.0, 3.0, 2.0, 1.0))).backward()
    assert gradients(model) == {
        "inner.a": [4.0, 0.0, 0.0, 0.0],
        "inner.b": None,
        "inner.c": [4.0, 3.0, 2.0, 1.0],
    }
    assert residuals(hook).keys() == {"inner.a"}


def test_a_parameter_of_the_root_that_ddp_does_not_ignore_after_all_is_there(alone):
    """DDP looks for ``".b"``."""
    model = Weights()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["b"])
    ddp, _ = in_ddp(FIRST, model)
    ddp(**dict.fromkeys("ab", of(4.0, 3.0, 2.0, 1.0))).backward()
    assert gradients(model) == {path: [4.0, 0.0, 0.0, 0.0] for path in "ab"}


def _made(rank):
    """What the ranks raise when they differ, and when one of them fails."""
    txs = [FIRST, SIGNS]
    differ = outcome(gx.ddp_hook, txs[rank], ddp_of())
    fails = outcome(gx.ddp_hook, FIRST, ddp_of(), max_skips=rank)
    none = outcome(gx.ddp_hook, gx.chain(gx.topk(0.1), gx.ef()), ddp_of())
    return differ, fails, none


def test_ranks_that_differ_or_fail_raise_everywhere_when_it_is_made():
    for rank, (differ, fails, none) in enumerate(gloo_ranks(2, _made)):
        assert differ[0] == "RankMismatchError"
        assert "rank 1 runs gx.chain(gx.sign(), gx.ef(), gx.allreduce()) in DDP over" in differ[1]
        assert fails[0] == ("RankMismatchError" if rank else "ValueError")
        assert "ddp_hook(max_skips=0): expected a whole number" in fails[1]
        assert "GX405" in none[1]


def _over_subgroups(rank):
    own = [dist.new_group([i]) for i in range(2)][rank]
    model = Weights()
    ddp = DistributedDataParallel(model, process_group=own)
    found = outcome(gx.ddp_hook, DENSE, ddp)
    ddp.register_comm_hook(None, gx.ddp_hook(gx.chain(gx.allreduce(group=own)), ddp))
    ddp(a=torch.full((4,), 1.0 + rank), b=torch.ones(4)).backward()
    return found, model.a.grad.tolist()


def _in_two_chains(rank):
    """DDP over ranks 0 and 1, and over 1 and 2; the exchange over 0 and 2."""
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}
    models = {
        pair: DistributedDataParallel(Weights(), process_group=pairs[pair])
        for pair in ((0, 1), (1, 2))
        if rank in pair
    }
    if rank == 1:
        return None
    (model,) = models.values()
    return outcome(gx.ddp_hook, gx.chain(gx.allreduce(group=pairs[0, 2])), model)


def test_as_many_ranks_are_not_the_same_ranks():
    first, _, third = gloo_ranks(3, _in_two_chains)
    assert first == third
    assert first[0] == "RankMismatchError"
    assert "DDP over ranks [0, 1], rank 1 runs gx.chain(gx.allreduce()) in DDP over" in first[1]


def test_the_exchange_is_over_the_ranks_of_ddp():
    for rank, (found, grad) in enumerate(gloo_ranks(2, _over_subgroups)):
        text = (
            f"this is rank {rank} of 2 in the exchange and rank 0 of 1 in DDP: write "
            "allreduce(group=model.process_group)"
        )
        assert found == ("ValueError", text)
        assert grad == [1.0 + rank] * 4
