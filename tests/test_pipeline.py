import io
import math
import re

import pytest
import torch
from torch import nn

import gradtx as gx
from gradtx.checkpoint import flatten_state
from gradtx.exchange.group import find_group
from gradtx.testing import run_ranks
from ranks import gloo_ranks, outcome, spied

MISSION = gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.1), gx.ef(), gx.allreduce())
PLAIN = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce())
SCALED = gx.chain(gx.unscale(), gx.allreduce())
DENSE = gx.chain(gx.allreduce())
SIGNS = gx.chain(gx.sign(), gx.ef(), gx.allreduce())
BAD = [math.inf, -math.inf, math.nan]


def a_model(seed=0):
    """A small network with BatchNorm; the seed is its own, since threads share torch's."""
    model = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def a_scaler(**kwargs):
    settings = {"init_scale": 1024.0, "growth_interval": 1000, **kwargs}
    return torch.amp.GradScaler("cpu", **settings)


def true_gradients(model, rank, step=0):
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return {
        path: torch.randn(p.shape, generator=generator).to(p.dtype)
        for path, p in model.named_parameters()
    }


def set_gradients(model, rank, step=0, scale=1.0):
    """Gradients as a backward pass would leave them."""
    for path, grad in true_gradients(model, rank, step).items():
        model.get_parameter(path).grad = grad * scale


def backward(model, scaler, rank, step=0):
    """The same with a scaler, which sees a loss."""
    scaler.scale(torch.zeros(()))
    set_gradients(model, rank, step, scaler.get_scale())


def parameters(model):
    return {path: p.tolist() for path, p in model.named_parameters()}


def gradients(model):
    return {
        path: None if p.grad is None else p.grad.tolist() for path, p in model.named_parameters()
    }


def residuals(pipe):
    return {k: v.tolist() for k, v in flatten_state(pipe.state).items() if "residual" in k}


class Rank:
    """A training loop on one rank, a step at a time."""

    def __init__(self, rank, tx=MISSION, scaled=True, optimizer=torch.optim.SGD, **kwargs):
        self.rank, self.model = rank, a_model(rank)
        self.optimizer = optimizer(self.model.parameters(), lr=0.5, **kwargs)
        self.scaler = a_scaler() if scaled else None
        self.pipe = gx.Pipeline(tx, self.model, scaler=self.scaler)

    def gradients(self, step, bad=None, leaf="0.weight"):
        if self.scaler is None:
            set_gradients(self.model, self.rank, step)
        else:
            backward(self.model, self.scaler, self.rank, step)
        if bad is not None:
            self.model.get_parameter(leaf).grad.view(-1)[0] = bad

    def step(self, step, bad=None, leaf="0.weight"):
        self.gradients(step, bad, leaf)
        report = self.pipe.sync(self.optimizer)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return report

    @property
    def facts(self):
        """All that has to be the same on all ranks."""
        scale = None if self.scaler is None else self.scaler.get_scale()
        return parameters(self.model), gradients(self.model), scale


def same(values):
    first, *others = values
    return all(other == first for other in others)


@pytest.mark.parametrize("tx", [DENSE, SCALED])
def test_a_step_is_one_on_the_mean_gradient(tx):
    def rank(i):
        loop = Rank(i, tx, scaled=tx is SCALED)
        loop.step(0)
        return loop.model

    models = run_ranks(3, rank)
    start = a_model(0)
    grads = [true_gradients(start, i) for i in range(3)]
    for model in models:
        for path, p in start.named_parameters():
            wanted = p - 0.5 * (grads[0][path] + grads[1][path] + grads[2][path]) / 3
            torch.testing.assert_close(model.get_parameter(path), wanted)


@pytest.mark.parametrize("scaled", [True, False])
def test_replicas_stay_equal_over_steps(scaled):
    def rank(i):
        loop = Rank(i, MISSION if scaled else PLAIN, scaled)
        for step in range(4):
            loop.step(step)
        return loop.facts

    assert same(run_ranks(3, rank))


def test_with_a_scaler_the_steps_are_those_without():
    def rank(i, scaled):
        loop = Rank(i, MISSION if scaled else gx.chain(*MISSION.transformations[1:]), scaled)
        for step in range(3):
            loop.step(step)
        return parameters(loop.model)

    assert run_ranks(2, lambda i: rank(i, True)) == run_ranks(2, lambda i: rank(i, False))


def _overflow(rank, bad, leaf, optimizer=torch.optim.SGD, kwargs=None):
    """A good step, one that is bad on rank 1 only, a good one; what can be seen after each."""
    loop = Rank(rank, optimizer=optimizer, **(kwargs or {}))
    loop.step(0)
    before = parameters(loop.model), residuals(loop.pipe)
    report = loop.step(1, bad if rank == 1 else None, leaf)
    kept = (parameters(loop.model), residuals(loop.pipe)) == before
    facts, zeros = loop.facts, all(not p.grad.any() for p in loop.model.parameters())
    last = loop.step(2)
    return {
        "report": (report.ready, report.skipped),
        "kept": kept,
        "zeros": zeros,
        "scale": facts[2],
        "facts": facts,
        "next": (last.ready, last.skipped),
        "moved": parameters(loop.model) != before[0],
        "next facts": loop.facts,
    }


# The second leaf is a BatchNorm's: the filter keeps it from the compressors.
PLACES = [(bad, leaf) for bad in BAD for leaf in ("0.weight", "1.weight")]


@pytest.fixture(scope="module", params=PLACES, ids=str)
def overflow(request):
    return run_ranks(3, lambda rank: _overflow(rank, *request.param))


def test_an_overflow_on_one_rank_is_a_skipped_step_on_all(overflow):
    assert [facts["report"] for facts in overflow] == [(False, True)] * 3


def test_an_overflow_on_one_rank_moves_no_parameter_and_no_residual(overflow):
    assert [facts["kept"] for facts in overflow] == [True] * 3


def test_an_overflow_on_one_rank_lowers_the_scale_on_all(overflow):
    assert [facts["scale"] for facts in overflow] == [512.0] * 3


def test_an_overflow_leaves_zero_gradients(overflow):
    assert [facts["zeros"] for facts in overflow] == [True] * 3


def test_the_step_after_an_overflow_is_taken(overflow):
    assert [(facts["next"], facts["moved"]) for facts in overflow] == [((True, False), True)] * 3


def test_replicas_are_equal_after_an_overflow(overflow):
    assert same([facts["facts"] for facts in overflow])
    assert same([facts["next facts"] for facts in overflow])


def test_a_skipped_step_leaves_no_trace_but_the_scale():
    def rank(i, bad):
        loop = Rank(i)
        loop.step(0)
        if bad:
            loop.step(9, math.inf if i == 1 else None)
        loop.step(1)
        return parameters(loop.model), residuals(loop.pipe)

    assert run_ranks(2, lambda i: rank(i, True)) == run_ranks(2, lambda i: rank(i, False))


def test_the_scale_grows_on_all_ranks_alike():
    def rank(i):
        loop = Rank(i)
        loop.scaler.set_growth_interval(2)
        for step in range(4):
            loop.step(step)
        return loop.scaler.get_scale()

    assert run_ranks(2, rank) == [4096.0] * 2


def test_after_a_skip_growth_starts_anew_on_all_ranks():
    def rank(i):
        loop = Rank(i)
        loop.scaler.set_growth_interval(2)
        scales = []
        for step in range(4):
            loop.step(step, math.nan if (i, step) == (0, 1) else None)
            scales.append(loop.scaler.get_scale())
        return scales

    assert run_ranks(2, rank) == [[1024.0, 512.0, 512.0, 1024.0]] * 2


def test_a_gradient_whose_mean_overflows_is_a_skipped_step():
    def rank(i):
        loop = Rank(i, SCALED)
        loop.gradients(0, 3.0e38)
        loop.scaler.update(1.0)
        return loop.pipe.sync(loop.optimizer).skipped

    assert run_ranks(2, rank) == [True, True]


def _over_gloo(rank):
    places = {str(place): _overflow(rank, *place) for place in PLACES[::2]}
    places["fused"] = _overflow(rank, math.inf, "0.weight", torch.optim.Adam, {"fused": True})
    return places


@pytest.fixture(scope="module")
def over_gloo():
    return gloo_ranks(3, _over_gloo)


@pytest.mark.parametrize("place", [*map(str, PLACES[::2]), "fused"])
def test_over_gloo_an_overflow_on_one_rank_is_skipped_by_all(over_gloo, place):
    for rank in over_gloo:
        facts = rank[place]
        assert (facts["report"], facts["kept"], facts["scale"]) == ((False, True), True, 512.0)


@pytest.mark.parametrize("place", [*map(str, PLACES[::2]), "fused"])
def test_over_gloo_replicas_are_equal_after_an_overflow(over_gloo, place):
    assert same([rank[place]["next facts"] for rank in over_gloo])


FUSED = [torch.optim.SGD, torch.optim.Adam]


@pytest.mark.parametrize("optimizer", FUSED)
def test_a_fused_optimizer_takes_the_steps_of_a_plain_one(optimizer):
    def rank(i, fused):
        loop = Rank(i, optimizer=optimizer, fused=fused)
        for step in range(3):
            loop.step(step, math.inf if (i, step) == (1, 1) else None)
        return {path: p.detach() for path, p in loop.model.named_parameters()}

    for fused, plain in zip(
        run_ranks(2, lambda i: rank(i, True)), run_ranks(2, lambda i: rank(i, False)), strict=True
    ):
        torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize("optimizer", FUSED)
def test_a_fused_optimizer_does_not_step_on_an_overflow(optimizer):
    runs = run_ranks(2, lambda i: _overflow(i, math.nan, "3.bias", optimizer, {"fused": True}))
    assert [(run["kept"], run["scale"], run["moved"]) for run in runs] == [(True, 512.0, True)] * 2


def user_unscaled(rank, bad=None, change=lambda model: None):
    """A step on which the user calls `unscale_`, changes the gradients, and then syncs."""
    loop = Rank(rank, SCALED)
    loop.gradients(0, bad)
    loop.scaler.unscale_(loop.optimizer)
    change(loop.model)
    report = loop.pipe.sync(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    return loop, report


def test_gradients_that_the_user_has_unscaled_are_not_divided_again():
    def rank(i):
        plain = Rank(i, SCALED)
        plain.step(0)
        return user_unscaled(i)[0].facts == plain.facts

    assert run_ranks(2, rank) == [True, True]


@pytest.mark.parametrize("bad", BAD)
def test_an_overflow_that_the_user_has_unscaled_is_skipped_by_all(bad):
    def rank(i):
        loop, report = user_unscaled(i, bad if i == 1 else None)
        return (
            report.skipped,
            loop.scaler.get_scale(),
            parameters(loop.model) == parameters(a_model(0)),
        )

    assert run_ranks(2, rank) == [(True, 512.0, True)] * 2


def test_an_overflow_that_the_user_has_clipped_away_is_still_skipped_by_all():
    def clip(model):
        nn.utils.clip_grad_value_(model.parameters(), 1.0)

    def rank(i):
        loop, report = user_unscaled(i, math.inf if i == 1 else None, clip)
        return report.skipped, loop.scaler.get_scale()

    # As without a pipeline: `unscale_` has seen the infinity, and scaler.step skips.
    assert run_ranks(2, rank) == [(True, 512.0)] * 2


class Two:
    """A loop with two optimizers over disjoint parameters."""

    def __init__(self, rank):
        self.rank, self.model, self.scaler = rank, a_model(rank), a_scaler()
        layers = [self.model[:2].parameters(), self.model[3].parameters()]
        self.optimizers = [torch.optim.SGD(list(p), lr=0.5) for p in layers]
        self.pipe = gx.Pipeline(MISSION, self.model, scaler=self.scaler)

    def step(self, step, bad=None, unscaled=()):
        backward(self.model, self.scaler, self.rank, step)
        if bad is not None:
            self.model[3].bias.grad[0] = bad
        for i in unscaled:
            self.scaler.unscale_(self.optimizers[i])
        report = self.pipe.sync(*self.optimizers)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return report


def one_for_all(rank):
    loop = Rank(rank)
    loop.step(0)
    loop.step(1)
    return parameters(loop.model), residuals(loop.pipe)


@pytest.mark.parametrize("unscaled", [(), (0,), (1,), (0, 1)], ids=str)
def test_two_optimizers_take_the_steps_of_one(unscaled):
    def rank(i):
        loop = Two(i)
        loop.step(0, unscaled=unscaled)
        loop.step(1, unscaled=unscaled)
        return parameters(loop.model), residuals(loop.pipe)

    assert run_ranks(2, rank) == run_ranks(2, one_for_all)


@pytest.mark.parametrize("unscaled", [(), (0,), (1,), (0, 1)], ids=str)
def test_an_overflow_in_one_optimizers_part_skips_both_and_lowers_the_scale_once(unscaled):
    def rank(i):
        loop = Two(i)
        loop.step(0)
        before = parameters(loop.model)
        report = loop.step(1, math.inf if i == 0 else None, unscaled)
        return report.skipped, parameters(loop.model) == before, loop.scaler.get_scale()

    assert run_ranks(2, rank) == [(True, True, 512.0)] * 2


OWNERS = (
    "no optimizer given to sync owns '3.bias', '3.weight': give all optimizers in one call, "
    "sync(optimizer_a, optimizer_b)"
)


def test_an_optimizer_that_is_missing_in_sync_is_refused_on_all_ranks():
    def rank(i):
        loop = Two(i)
        backward(loop.model, loop.scaler, i)
        return outcome(loop.pipe.sync, loop.optimizers[0])

    assert run_ranks(2, rank) == [("ValueError", OWNERS)] * 2


def test_an_optimizer_that_is_missing_on_one_rank_is_told_to_the_others():
    def rank(i):
        loop = Two(i)
        backward(loop.model, loop.scaler, i)
        return outcome(loop.pipe.sync, *loop.optimizers[: 2 - i])

    text = f"rank 1 failed before the first exchange: ValueError: {OWNERS}"
    assert run_ranks(2, rank) == [("RankMismatchError", text), ("ValueError", OWNERS)]


def test_after_a_refused_sync_the_right_one_works():
    def rank(i):
        loop = Two(i)
        backward(loop.model, loop.scaler, i)
        outcome(loop.pipe.sync, *loop.optimizers[: 2 - i])
        loop.step(0)
        loop.step(1)
        return parameters(loop.model), residuals(loop.pipe)

    assert run_ranks(2, rank) == run_ranks(2, one_for_all)


def test_an_optimizer_with_foreign_parameters_is_refused():
    loop = Rank(0)
    foreign = nn.Parameter(torch.zeros(2, 5))
    foreign.grad = torch.ones(2, 5)
    loop.optimizer.add_param_group({"params": [foreign]})
    loop.gradients(0)
    text = (
        "an optimizer owns 1 parameters with gradients that are not in the pipeline (the first has "
        "shape (2, 5)): they would be stepped on with the loss scale still in them; build the "
        "Pipeline over them too"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        loop.pipe.sync(loop.optimizer)


def test_an_optimizer_with_foreign_parameters_without_gradients_is_fine():
    loop = Rank(0)
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 5))]})
    assert loop.step(0).ready


def test_sync_with_a_scaler_wants_the_optimizers():
    loop = Rank(0)
    loop.gradients(0)
    text = "with a GradScaler, name the optimizers: pipe.sync(optimizer), "
    with pytest.raises(ValueError, match=re.escape(text)):
        loop.pipe.sync()


def test_a_step_before_sync_is_refused():
    loop = Rank(0)
    loop.gradients(0)
    loop.scaler.step(loop.optimizer)
    text = (
        "pipe.sync(optimizer) comes before scaler.step(optimizer); here the optimizer has stepped "
        "since the last scaler.update()"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        loop.pipe.sync(loop.optimizer)


def nothing(rank, lacking, loss, fused=False):
    """A step on which some ranks have no gradient at all."""
    loop = Rank(rank, fused=fused)
    if loss:
        loop.scaler.scale(torch.zeros(()))
    if rank not in lacking:
        loop.gradients(0)
    report = loop.pipe.sync(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    return report, loop


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss", [True, False])
def test_without_any_gradient_nothing_is_ready_and_nothing_moves(loss, fused):
    def rank(i):
        report, loop = nothing(i, (0, 1), loss, fused)
        unmoved = parameters(loop.model) == parameters(a_model(0))
        none = all(p.grad is None for p in loop.model.parameters())
        return report.ready, report.skipped, unmoved, none, loop.scaler.get_scale()

    assert run_ranks(2, rank) == [(False, False, True, True, 1024.0)] * 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss", [True, False])
def test_a_rank_without_any_gradient_takes_the_step_of_the_others(loss, fused):
    def rank(i):
        report, loop = nothing(i, (1,), loss, fused)
        return report.ready, loop.facts

    results = run_ranks(2, rank)
    assert same(results)
    assert results[0][0]


def test_a_rank_without_any_gradient_counts_as_zero():
    def rank(i):
        return nothing(i, (1,), True)[1].model.get_parameter("1.bias").grad.tolist()

    half = true_gradients(a_model(), 0)["1.bias"] / 2
    assert run_ranks(2, rank) == [half.tolist()] * 2


def test_a_step_without_gradients_keeps_the_residual():
    def rank(i):
        loop = Rank(i)
        loop.step(0)
        before = residuals(loop.pipe)
        loop.optimizer.zero_grad()
        report = loop.pipe.sync(loop.optimizer)
        return report.ready, residuals(loop.pipe) == before

    assert run_ranks(2, rank) == [(False, True)] * 2


def test_a_leaf_without_a_gradient_anywhere_stays_none():
    def rank(i):
        loop = Rank(i)
        loop.gradients(0)
        loop.model[3].bias.grad = None
        loop.pipe.sync(loop.optimizer)
        return [path for path, p in loop.model.named_parameters() if p.grad is None]

    assert run_ranks(2, rank) == [["3.bias"]] * 2


@pytest.mark.parametrize("tx", [MISSION, PLAIN])
def test_a_disabled_scaler_is_no_scaler(tx):
    def rank(i):
        model = a_model(i)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        pipe = gx.Pipeline(tx, model, scaler=scaler)
        set_gradients(model, i)
        report = pipe.sync(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return report.ready, parameters(model)

    assert same(run_ranks(2, rank))
    assert run_ranks(2, rank)[0][0]


@pytest.mark.parametrize("scale", [8.0, 8, torch.tensor(8.0)])
def test_without_a_scaler_the_loss_scale_goes_to_sync(scale):
    def rank(i):
        model = a_model(i)
        pipe = gx.Pipeline(SCALED, model)
        set_gradients(model, i, scale=8.0)
        pipe.sync(loss_scale=scale)
        return model.get_parameter("1.bias").grad.tolist()

    grads = [true_gradients(a_model(), i)["1.bias"] for i in range(2)]
    assert run_ranks(2, rank) == [((grads[0] + grads[1]) / 2).tolist()] * 2


@pytest.mark.parametrize("bad", BAD)
def test_without_a_scaler_a_bad_step_is_skipped_by_all(bad):
    def rank(i):
        loop = Rank(i, PLAIN, scaled=False)
        loop.step(0)
        before = parameters(loop.model), residuals(loop.pipe)
        report = loop.step(1, bad if i == 1 else None)
        kept = (parameters(loop.model), residuals(loop.pipe)) == before
        return report.ready, report.skipped, kept

    assert run_ranks(3, rank) == [(False, True, True)] * 3


def test_an_ungated_chain_lets_a_bad_gradient_through_on_all_ranks():
    def rank(i):
        loop = Rank(i, DENSE, scaled=False)
        report = loop.step(0, math.inf if i == 1 else None)
        return report.ready, report.skipped, loop.model[0].weight.grad[0, 0].item()

    assert run_ranks(2, rank) == [(True, False, math.inf)] * 2


def test_a_scaler_for_a_chain_without_unscale_is_refused():
    text = (
        "a GradScaler is given and the chain has no unscale(): the loss scale would stay in the "
        "gradients; write gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), gx.allreduce())"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        gx.Pipeline(PLAIN, a_model(), scaler=a_scaler())


def test_unscale_without_a_loss_scale_is_refused():
    pipe = gx.Pipeline(MISSION, a_model())
    text = (
        "the chain has unscale() and there is no loss scale: write Pipeline(tx, model, "
        "scaler=scaler), or sync(loss_scale=...), or leave unscale() out"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        pipe.sync()


def test_a_loss_scale_for_a_chain_without_unscale_is_refused():
    pipe = gx.Pipeline(PLAIN, a_model())
    text = "loss_scale is given and the chain has no unscale(): put it first"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        pipe.sync(loss_scale=2.0)


def test_a_loss_scale_beside_a_scaler_is_refused():
    loop = Rank(0)
    text = "the loss scale is the scaler's: leave loss_scale out"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        loop.pipe.sync(loop.optimizer, loss_scale=2.0)


@pytest.mark.parametrize("scaler", [1024.0, "cpu", torch.nn.Linear(1, 1)])
def test_what_is_no_scaler_is_refused(scaler):
    text = f"scaler={scaler!r}: expected a torch.amp.GradScaler"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        gx.Pipeline(MISSION, a_model(), scaler=scaler)


def _in_ddp(rank):
    ddp = nn.parallel.DistributedDataParallel(a_model())
    return [outcome(gx.Pipeline, DENSE, model) for model in (ddp, nn.Sequential(ddp))]


def test_a_model_in_ddp_is_refused_on_all_ranks():
    text = (
        "the model is wrapped in DistributedDataParallel, which reduces the gradients itself: they "
        "would be reduced twice. Give the Pipeline a model that was never wrapped; to keep DDP, "
        "run the chain in it: model.register_comm_hook(None, gx.ddp_hook(tx, model))"
    )
    assert gloo_ranks(2, _in_ddp) == [[("ValueError", text)] * 2] * 2


@pytest.mark.parametrize("tx", [gx.topk(0.1, feedback=False), gx.chain(gx.topk(0.1), gx.ef())])
def test_a_payload_at_the_end_is_refused(tx):
    with pytest.raises(gx.ChainOrderError, match="GX404: ") as caught:
        gx.Pipeline(tx, a_model())
    assert [(v.code, v.stages) for v in caught.value.violations] == [("GX404", (0,))]


@pytest.mark.parametrize("tx", [gx.unscale(), gx.chain(gx.unscale()), gx.chain()])
def test_several_ranks_without_an_exchange_are_refused_on_all(tx):
    def rank(i):
        with pytest.raises(gx.ChainOrderError, match="GX405: ") as caught:
            gx.Pipeline(tx, a_model())
        return [v.code for v in caught.value.violations]

    assert run_ranks(2, rank) == [["GX405"]] * 2


def test_one_rank_needs_no_exchange():
    model = a_model()
    pipe = gx.Pipeline(gx.chain(gx.unscale()), model)
    set_gradients(model, 0, scale=4.0)
    pipe.sync(loss_scale=4.0)
    assert gradients(model) == {k: v.tolist() for k, v in true_gradients(model, 0).items()}


def test_a_bare_exchange_is_a_chain():
    def rank(i):
        model = a_model(i)
        set_gradients(model, i)
        gx.Pipeline(gx.allreduce(), model).sync()
        return gradients(model)

    assert same(run_ranks(2, rank))


class Odd(nn.Module):
    """Parameters and buffers of many dtypes and shapes."""

    def __init__(self, rank):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def values(*shape):
            return torch.randn(shape, generator=generator)

        self.wide = nn.Parameter(values(3, 4))
        self.fp16 = nn.Parameter(values(5).half())
        self.bf16 = nn.Parameter(values(7).bfloat16())
        self.fp64 = nn.Parameter(values(2).double())
        self.scalar = nn.Parameter(values())
        self.frozen = nn.Parameter(values(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.strided = nn.Parameter(values(4, 6).t())
        self.register_buffer("mask", values(9) > 0)
        self.register_buffer("count", torch.tensor(10 + rank))
        self.register_buffer("table", torch.arange(5, dtype=torch.int32) + rank)
        self.register_buffer("mean", values(3).half())
        self.register_buffer("hidden", values(2), persistent=False)
        self.register_buffer("nothing", None)


def everything(module):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {k: (str(t.dtype), t.shape, t.tolist()) for k, t in tensors.items()}


def _start(rank):
    model = Odd(rank)
    gx.Pipeline(DENSE, model)
    return everything(model)


@pytest.fixture(scope="module", params=["threads", "gloo"])
def starts(request):
    return gloo_ranks(3, _start) if request.param == "gloo" else run_ranks(3, _start)


@pytest.mark.parametrize("path", everything(Odd(0)))
def test_parameters_and_buffers_start_as_those_of_rank_0(starts, path):
    assert [start[path] for start in starts] == [everything(Odd(0))[path]] * 3


def test_the_start_takes_one_message():
    def rank(i):
        def run(spy):
            gx.Pipeline(DENSE, Odd(i))
            return [name for name, _, _ in spy.calls]

        return spied(run)

    assert run_ranks(2, rank) == [["all_gather", "broadcast"]] * 2


def test_a_parameter_of_one_value_with_an_odd_stride_starts_as_that_of_rank_0():
    def rank(i):
        parameter = nn.Parameter(torch.full((8, 2), float(i))[3:4, :1].t().squeeze(0))
        assert parameter.stride() == (2,)
        gx.Pipeline(PLAIN, {"w": parameter})
        return parameter.item()

    assert run_ranks(2, rank) == [0.0, 0.0]


def test_the_start_keeps_the_tensors():
    def rank(i):
        model = a_model(i)
        before = [id(t) for t in [*model.parameters(), *model.buffers()]]
        gx.Pipeline(DENSE, model)
        return before == [id(t) for t in [*model.parameters(), *model.buffers()]]

    assert run_ranks(2, rank) == [True, True]


def test_a_gradient_of_every_dtype_is_averaged_in_its_own():
    def rank(i):
        model = Odd(0)
        pipe = gx.Pipeline(gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()), model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter) * (1 + i)
        pipe.sync()
        return [(str(p.grad.dtype), p.grad.shape) for p in model.parameters() if p.requires_grad]

    wanted = [(str(p.dtype), p.shape) for p in Odd(0).parameters() if p.requires_grad]
    assert run_ranks(2, rank) == [wanted] * 2


def with_statistics(rank):
    """A model whose ranks have seen other data."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    model.register_buffer("table", torch.arange(4))
    pipe = gx.Pipeline(DENSE, model)
    with torch.no_grad():
        model[0].running_mean.fill_(1.0 + rank)
        model[0].running_var.fill_(4.0 * (1 + rank))
        model[0].num_batches_tracked.fill_(7 + rank)
        model.table.add_(rank)
    pipe.sync_buffers()
    return {path: buffer.tolist() for path, buffer in model.named_buffers()}


WANTED = {
    "0.running_mean": [2.0] * 3,
    "0.running_var": [8.0] * 3,
    "0.num_batches_tracked": 7,
    "table": [0, 1, 2, 3],
}


@pytest.mark.parametrize("run", [run_ranks, gloo_ranks])
def test_sync_buffers_averages_statistics_and_takes_the_rest_from_rank_0(run):
    assert run(3, with_statistics) == [WANTED] * 3


def test_sync_buffers_without_a_module_does_nothing():
    def rank(i):
        pipe = gx.Pipeline(DENSE, {"w": nn.Parameter(torch.ones(2))})
        before = find_group().sent
        pipe.sync_buffers()
        return find_group().sent - before

    assert run_ranks(2, rank) == [0, 0]


def test_sync_buffers_of_one_rank_changes_nothing():
    model = a_model()
    model[1].running_mean.fill_(3.0)
    gx.Pipeline(DENSE, model).sync_buffers()
    assert model[1].running_mean.tolist() == [3.0] * 20


def narrower(rank):
    return nn.Linear(4 - rank, 2)


def with_another_buffer(rank):
    model = nn.Linear(4, 2)
    model.register_buffer("table", torch.zeros(2 + rank))
    return model


def in_another_dtype(rank):
    return nn.Linear(4, 2).to([torch.float32, torch.float64][rank])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            narrower,
            "ranks differ in leaf 'weight': rank 0 has [2, 4] float32, rank 1 has [2, 3] float32",
        ),
        (
            with_another_buffer,
            "ranks differ in leaf 'buffer table': rank 0 has [2] float32, rank 1 has [3] float32",
        ),
        (
            in_another_dtype,
            "ranks differ in leaf 'bias': rank 0 has [2] float32, "
            "rank 1 has [2] float64; leaf 'weight': rank 0 has [2, 4] float32, "
            "rank 1 has [2, 4] float64",
        ),
    ],
)
def test_models_that_differ_are_refused_at_construction(make, text):
    outcomes = run_ranks(2, lambda rank: outcome(gx.Pipeline, DENSE, make(rank)))
    assert outcomes == [("RankMismatchError", text)] * 2


def test_models_that_differ_stay_as_they_are():
    def rank(i):
        model = narrower(i)
        before = parameters(model)
        outcome(gx.Pipeline, DENSE, model)
        return parameters(model) == before

    assert run_ranks(2, rank) == [True, True]


def test_chains_that_differ_are_refused_at_construction():
    def rank(i):
        return outcome(gx.Pipeline, [DENSE, PLAIN][i], a_model())

    text = (
        "ranks differ in the chain: rank 0 runs gx.chain(gx.allreduce()), "
        "rank 1 runs gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce())"
    )
    assert run_ranks(2, rank) == [("RankMismatchError", text)] * 2


def test_parameters_frozen_on_one_rank_only_are_noticed_at_the_first_sync():
    def rank(i):
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(i == 0)
        pipe = gx.Pipeline(DENSE, model)
        model.weight.grad = torch.ones(2, 2)
        return outcome(pipe.sync)

    text = "ranks differ in leaf 'bias': rank 0 has [2] float32, rank 1 has nothing"
    assert run_ranks(2, rank) == [("RankMismatchError", text)] * 2


def _lazy_on_rank_1(rank):
    lazy = nn.Sequential(nn.LazyLinear(2)) if rank == 1 else nn.Sequential(nn.Linear(3, 2))
    first = outcome(gx.Pipeline, DENSE, lazy)
    model = a_model(rank)
    gx.Pipeline(DENSE, model)
    return first, parameters(model)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_rank_that_fails_at_construction_is_told_to_the_others():
    own = "parameter '0.bias' is lazy and has no shape yet: run a forward first"
    text = f"rank 1 failed before the first exchange: ValueError: {own}"
    results = run_ranks(2, _lazy_on_rank_1)
    assert [first for first, _ in results] == [("RankMismatchError", text), ("ValueError", own)]


def test_a_rank_that_fails_at_construction_leaves_the_group_usable():
    results = run_ranks(2, _scaler_missing_on_rank_1)
    assert same([start for _, start in results])


def _scaler_missing_on_rank_1(rank):
    first = outcome(gx.Pipeline, DENSE, a_model(), scaler="none" if rank == 1 else None)
    model = a_model(rank)
    gx.Pipeline(DENSE, model)
    return first, parameters(model)


def test_over_gloo_a_rank_that_fails_at_construction_is_told_to_the_others():
    own = "scaler='none': expected a torch.amp.GradScaler"
    text = f"rank 1 failed before the first exchange: TypeError: {own}"
    results = gloo_ranks(2, _scaler_missing_on_rank_1)
    assert [first for first, _ in results] == [("RankMismatchError", text), ("TypeError", own)]


def test_frozen_parameters_are_left_alone():
    def rank(i):
        model = a_model()
        model[0].requires_grad_(False)
        pipe = gx.Pipeline(DENSE, model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        pipe.sync()
        return [path for path, p in model.named_parameters() if p.grad is None]

    assert run_ranks(2, rank) == [["0.weight", "0.bias"]] * 2


def test_a_parameter_unfrozen_later_is_refused():
    model = a_model()
    model[0].bias.requires_grad_(False)
    pipe = gx.Pipeline(DENSE, model)
    model[0].bias.requires_grad_(True)
    set_gradients(model, 0)
    text = (
        "parameter '0.bias' has a gradient and did not require one when the Pipeline was built: "
        "build a new Pipeline after changing requires_grad"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        pipe.sync()


def test_a_model_without_trainable_parameters_is_never_ready():
    def rank(i):
        model = a_model().requires_grad_(False)
        return gx.Pipeline(DENSE, model).sync().ready

    assert run_ranks(2, rank) == [False, False]


def a_tree(rank):
    def leaf(*shape):
        return nn.Parameter(torch.full(shape, float(rank)))

    return {"layers": [{"w": leaf(30, 4), "b": None}, (leaf(3), leaf())], "head": leaf(2)}


def leaves_of(tree):
    return [tree["layers"][0]["w"], *tree["layers"][1], tree["head"]]


def test_parameters_may_be_a_nested_tree():
    def rank(i):
        tree = a_tree(i)
        pipe = gx.Pipeline(PLAIN, tree)
        for leaf in leaves_of(tree):
            leaf.grad = torch.full_like(leaf, 1.0 + i)
        pipe.sync()
        return [(leaf.sum().item(), leaf.grad.flatten()[0].item()) for leaf in leaves_of(tree)]

    assert run_ranks(2, rank) == [[(0.0, 1.5)] * 4] * 2


def test_a_nested_tree_works_with_a_scaler():
    def rank(i):
        tree, scaler = a_tree(1), a_scaler()
        optimizer = torch.optim.SGD(leaves_of(tree), lr=1.0)
        pipe = gx.Pipeline(SCALED, tree, scaler=scaler)
        loss = scaler.scale(sum(leaf.sum() for leaf in leaves_of(tree)) * (1 + i))
        loss.backward()
        pipe.sync(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return [leaf.flatten()[0].item() for leaf in leaves_of(tree)]

    assert run_ranks(2, rank) == [[-0.5] * 4] * 2


@pytest.mark.parametrize("leaf", [torch.arange(3), "w", 1.0])
def test_a_leaf_that_is_no_float_tensor_is_refused(leaf):
    with pytest.raises(TypeError, match="leaf 'w' "):
        gx.Pipeline(DENSE, {"w": leaf})


@pytest.mark.parametrize("tx", [MISSION, SCALED])
def test_gradients_stay_the_same_tensors(tx):
    def rank(i):
        loop = Rank(i, tx)
        loop.gradients(0)
        before = [id(p.grad) for p in loop.model.parameters()]
        loop.pipe.sync(loop.optimizer)
        return before == [id(p.grad) for p in loop.model.parameters()]

    assert run_ranks(2, rank) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_keep_their_dtype(dtype):
    def rank(i):
        model = a_model(i).to(dtype)
        pipe = gx.Pipeline(MISSION, model)
        set_gradients(model, i, scale=2.0)
        pipe.sync(loss_scale=2.0)
        return {p.grad.dtype for p in model.parameters()}

    assert run_ranks(2, rank) == [{dtype}] * 2


def test_gradients_of_fp16_parameters_may_be_scaled():
    def rank(i):
        model, scaler = a_model(0).half(), a_scaler(init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        pipe = gx.Pipeline(SCALED, model, scaler=scaler)
        backward(model, scaler, i)
        pipe.sync(optimizer)
        scaler.step(optimizer)
        return parameters(model)

    assert same(run_ranks(2, rank))


def saved(pipe):
    file = io.BytesIO()
    torch.save(pipe.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(rank, interrupted):
    """Five steps; where interrupted, with all written down and taken up anew after the third."""
    loop = Rank(rank)
    for step in range(5):
        if interrupted and step == 3:
            state, scale = saved(loop.pipe), loop.scaler.state_dict()
            model = {k: v.clone() for k, v in loop.model.state_dict().items()}
            loop = Rank(rank)
            loop.model.load_state_dict(model)
            loop.scaler.load_state_dict(scale)
            loop.pipe.load_state_dict(state)
        loop.step(step, math.inf if (rank, step) == (1, 2) else None)
    return loop.facts, numbers(loop.pipe)


def numbers(pipe):
    return {key: value.tolist() for key, value in flatten_state(pipe.state).items()}


def _resumed_over_gloo(rank):
    return [resumed(rank, interrupted) for interrupted in (True, False)]


def test_training_continues_from_a_state_dict_bit_for_bit():
    assert run_ranks(3, lambda i: resumed(i, True)) == run_ranks(3, lambda i: resumed(i, False))


def test_over_gloo_training_continues_from_a_state_dict_bit_for_bit():
    assert [a == b for a, b in gloo_ranks(2, _resumed_over_gloo)] == [True, True]


@pytest.mark.parametrize("tx", [MISSION, PLAIN, DENSE, SIGNS])
def test_a_state_dict_comes_back_bit_for_bit(tx):
    def rank(i):
        loop = Rank(i, tx, scaled=tx is MISSION)
        for step in range(2):
            loop.step(step)
        before, state = numbers(loop.pipe), saved(loop.pipe)
        loop.step(2)
        moved = numbers(loop.pipe)
        loop.pipe.load_state_dict(state)
        return numbers(loop.pipe) == before != moved

    assert run_ranks(2, rank) == [True, True]


def test_ranks_have_states_of_their_own():
    def rank(i):
        loop = Rank(i)
        loop.step(0)
        return residuals(loop.pipe)

    first, second = run_ranks(2, rank)
    assert first != second


def test_a_state_dict_is_keyed_by_parameter_path():
    keys = Rank(0).pipe.state_dict()["state"]
    assert [key for key in keys if key.endswith("residual.0.weight")]


def test_a_state_dict_holds_tensors_and_numbers_only():
    state = Rank(0).pipe.state_dict()
    assert {type(value) for value in state.pop("state").values()} == {torch.Tensor}
    assert {type(value) for value in state.pop("per_rank").values()} == {str}
    assert {type(value) for value in state.values()} == {int, str}


def test_a_state_dict_does_not_change_with_the_next_step():
    loop = Rank(0)
    loop.step(0)
    state = loop.pipe.state_dict()["state"]
    before = {key: value.tolist() for key, value in state.items()}
    loop.step(1)
    assert {key: value.tolist() for key, value in state.items()} == before


def test_a_loaded_state_does_not_change_its_state_dict():
    loop = Rank(0)
    loop.step(0)
    state = loop.pipe.state_dict()
    before = {key: value.tolist() for key, value in state["state"].items()}
    loop.pipe.load_state_dict(state)
    loop.step(1)
    assert {key: value.tolist() for key, value in state["state"].items()} == before


def changed(state, /, **changes):
    return {**state, **changes}


def without_a_key(state):
    tensors = dict(list(state["state"].items())[1:])
    return changed(state, state=tensors)


def with_a_key_more(state):
    return changed(state, state={**state["state"], "more": torch.zeros(1)})


def with_another(make):
    def change(state):
        key = next(k for k in state["state"] if k.endswith("residual.0.weight"))
        return changed(state, state={**state["state"], key: make(state["state"][key])})

    return change


REFUSED = [
    (lambda s: changed(s, chain="gx.chain()"), "this state_dict has chain 'gx.chain()': expected"),
    (lambda s: changed(s, rank=1), "this state_dict has rank 1: expected 0"),
    (lambda s: changed(s, world_size=2), "this state_dict has world_size 2: expected 1"),
    (lambda s: changed(s, format=2), "this state_dict has format 2: expected 1"),
    (lambda s: {}, "this is no state_dict of a Pipeline: it lacks ['chain', 'format', "),
    (
        lambda s: {k: v for k, v in s.items() if k != "state"},
        "state",
    ),
    (without_a_key, "this state_dict is of other parameters: missing ["),
    (with_a_key_more, "this state_dict is of other parameters: missing nothing, unknown ['more']"),
    (with_another(lambda t: t[:1]), "has shape (1, 12) and dtype torch.float32: expected (20, 12)"),
    (with_another(lambda t: t.half()), "dtype torch.float16: expected (20, 12) and torch.float32"),
    (with_another(lambda t: t.tolist()), "is a list: expected a tensor"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_a_state_dict_that_does_not_fit_is_refused(change, text):
    pipe = Rank(0).pipe
    with pytest.raises(ValueError, match=re.escape(text)):
        pipe.load_state_dict(change(pipe.state_dict()))


@pytest.mark.parametrize(("change", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_a_refused_state_dict_leaves_the_state_as_it_was(change, text):
    loop = Rank(0)
    other = loop.pipe.state_dict()
    loop.step(0)
    before = numbers(loop.pipe)
    outcome(loop.pipe.load_state_dict, change(other))
    assert numbers(loop.pipe) == before


def test_the_state_of_another_rank_is_refused():
    states = run_ranks(2, lambda i: Rank(i).pipe.state_dict())

    def rank(i):
        return outcome(Rank(i).pipe.load_state_dict, states[1 - i])

    assert run_ranks(2, rank) == [
        ("ValueError", f"this state_dict has rank {1 - i}: expected {i}") for i in range(2)
    ]


def test_states_of_different_steps_are_noticed_at_the_next_sync():
    def rank(i):
        loop = Rank(i, PLAIN, scaled=False)
        state = loop.pipe.state_dict()
        loop.step(0)
        if i == 1:
            loop.pipe.load_state_dict(state)
        loop.gradients(1)
        return outcome(loop.pipe.sync)

    assert [kind for kind, _ in run_ranks(2, rank)] == ["RankMismatchError"] * 2


VALUES = sum(p.numel() for p in a_model().parameters())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_dense_bytes_are_those_of_an_fp32_ring(size):
    def rank(i):
        return Rank(i).step(0).dense_bytes

    assert run_ranks(size, rank) == [2 * (size - 1) * 4 * VALUES // size] * size


def test_dense_bytes_count_trainable_values_in_fp32_whatever_their_dtype():
    def rank(i):
        model = a_model().half()
        model[0].requires_grad_(False)
        return gx.Pipeline(DENSE, model).sync().dense_bytes

    trainable = VALUES - 12 * 20 - 20
    assert run_ranks(2, rank) == [4 * trainable] * 2


@pytest.mark.parametrize("tx", [MISSION, SCALED])
def test_wire_bytes_are_what_the_group_has_sent(tx):
    def rank(i):
        loop = Rank(i, tx)
        before = find_group().sent
        reports = [loop.step(step).wire_bytes for step in range(3)]
        return sum(reports) == find_group().sent - before

    assert run_ranks(2, rank) == [True, True]


def test_wire_bytes_of_the_first_step_count_the_handshake():
    def rank(i):
        loop = Rank(i)
        return loop.step(0).wire_bytes - loop.step(1).wire_bytes

    assert run_ranks(3, rank) == [2 * 1024] * 3


def test_a_skipped_step_has_the_wire_bytes_of_a_good_one():
    def rank(i):
        loop = Rank(i)
        loop.step(0)
        return loop.step(1).wire_bytes - loop.step(2, math.inf).wire_bytes

    assert run_ranks(2, rank) == [0, 0]


def test_alone_nothing_is_on_the_wire():
    report = Rank(0).step(0)
    assert report == gx.SyncReport(ready=True, skipped=False, wire_bytes=0, dense_bytes=0)


def test_a_real_loop_trains_on_all_ranks_alike():
    def rank(i):
        model, scaler = a_model(i), a_scaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        pipe = gx.Pipeline(MISSION, model, scaler=scaler)
        inputs = torch.randn(32, 12, generator=torch.Generator().manual_seed(5))
        targets = inputs[:, :3] * 2
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                predicted = model(inputs[i::2])
            loss = nn.functional.mse_loss(predicted.float(), targets[i::2])
            scaler.scale(loss).backward()
            pipe.sync(optimizer)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        pipe.sync_buffers()
        return losses[-1] < losses[0] / 4, parameters(model), [b.tolist() for b in model.buffers()]

    results = run_ranks(2, rank)
    assert same(results)
    assert results[0][0]


def test_a_failing_rank_in_sync_is_told_to_the_others():
    def rank(i):
        loop = Rank(i)
        loop.step(0)
        loop.gradients(1)
        if i == 1:
            loop.model[0].weight.grad = loop.model[0].weight.grad.to_sparse()
        return outcome(loop.pipe.sync, loop.optimizer)

    first, second = run_ranks(2, rank)
    assert second[0] == "TypeError"
    text = f"rank 1 failed in this step: TypeError: {second[1]}"
    assert first == ("RankMismatchError", text)


def test_a_parameter_that_was_replaced_is_refused():
    model = nn.Linear(2, 1)
    pipe = gx.Pipeline(gx.chain(gx.allreduce()), model)
    model.weight = nn.Parameter(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="parameter 'weight' has been replaced since the Pipeline"):
        pipe.sync()


def test_one_tensor_at_two_paths_is_refused():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="one tensor stands at 'a' and at 'b'"):
        gx.Pipeline(gx.chain(gx.allreduce()), {"a": weight, "b": weight})


def test_the_state_keeps_no_autograd_history():
    class Decay:
        def init(self, params):
            return {"count": 0}

        def update(self, updates, state, params=None):
            out = {path: u + 0.1 * params[path] for path, u in updates.items()}
            return out, {"count": state["count"] + 1}

    weight = nn.Parameter(torch.ones(4))
    decay = gx.declare(Decay(), linear=True, needs_reduced=False)
    pipe = gx.Pipeline(gx.chain(decay, gx.topk(0.25), gx.ef(), gx.allreduce()), {"w": weight})
    weight.grad = torch.ones(4)
    pipe.sync()
    assert not pipe.state.residual["w"].requires_grad
    saved = pipe.state_dict()
    assert 1 in saved["state"].values()
    pipe.load_state_dict(saved)


def test_optimizers_in_a_list_are_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    pipe = gx.Pipeline(
        gx.chain(gx.unscale(), gx.allreduce()), {"w": weight}, scaler=torch.amp.GradScaler("cpu")
    )
    with pytest.raises(TypeError, match="sync takes optimizers one by one"):
        pipe.sync([optimizer])


def test_a_chain_that_cannot_be_built_is_told_to_the_others():
    def rank(i):
        with pytest.raises((TypeError, gx.RankMismatchError)) as caught:
            gx.Pipeline(gx.allreduce if i else gx.chain(gx.allreduce()), nn.Linear(2, 1))
        return type(caught.value).__name__

    assert run_ranks(2, rank) == ["RankMismatchError", "TypeError"]


def test_buffers_that_have_changed_their_size_are_told():
    def rank(i):
        model = nn.Linear(2, 1)
        model.register_buffer("cache", torch.zeros(4))
        pipe = gx.Pipeline(gx.chain(gx.allreduce()), model)
        model.cache = torch.zeros(4 + i)
        with pytest.raises(gx.RankMismatchError, match="leaf 'buffer cache'"):
            pipe.sync_buffers()

    run_ranks(2, rank)


def test_an_exchange_over_a_mesh_is_refused():
    pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"torch tensors: write allreduce\(\)"):
        gx.Pipeline(gx.chain(gx.allreduce(axis_name="data")), torch.nn.Linear(2, 1))
