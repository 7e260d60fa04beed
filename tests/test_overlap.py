"""A `Pipeline` with ``overlap=True``: gradients go out while the backward pass goes on."""

import gc
import math
import time
import weakref

import pytest
import torch

import gradtx as gx
from gradtx import grouped
from gradtx.core.stage import Stage
from gradtx.grouped import Trial, partition, reason_against
from ranks import gloo_ranks

CHAINS = {
    "dense": [gx.allreduce()],
    "dense, scaled": [gx.allreduce(), gx.scale(0.5)],
    "dense, clip behind": [gx.allreduce(), gx.clip_by_global_norm(0.1)],
    "topk": [gx.skip_bn(), gx.topk(0.1), gx.ef(), gx.allreduce()],
    "random": [gx.random_k(0.2), gx.ef(), gx.allreduce()],
    "cast": [gx.cast("float16"), gx.ef(), gx.allreduce()],
    "powersgd": [gx.powersgd(1), gx.ef(), gx.allreduce()],
    "momentum": [gx.topk(0.1), gx.momentum_correction(0.9), gx.allreduce()],
    "clip behind": [gx.topk(0.1), gx.ef(), gx.allreduce(), gx.clip_by_global_norm(0.1)],
    "sharded": [gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="sharded")],
    "schedule": [gx.topk(gx.warmup_density([0.5, 0.1], 2)), gx.ef(), gx.allreduce()],
    "accumulate": [gx.accumulate(2), gx.topk(0.1), gx.ef(), gx.allreduce()],
    "accumulate, scaled": [gx.accumulate(3), gx.topk(0.1), gx.ef(), gx.allreduce(), gx.scale(2.0)],
}

UNGATED = ("dense", "dense, scaled")  # What is stateless and linear hands on what is not finite.


class Net(torch.nn.Module):
    """Six matrices, of which one is used by no rank, one by some ranks, in some steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(20, 20) for _ in range(6))
        self.norm = torch.nn.BatchNorm1d(20)

    def forward(self, x, skips):
        for i, layer in enumerate(self.layers):
            if i not in skips:
                x = torch.tanh(layer(x))
        return self.norm(x)


def train(rank, name, overlap, bad=(), masters=False, **options):
    torch.manual_seed(rank)
    parts = list(CHAINS[name])
    net = Net()
    if masters:
        net.layers.to(torch.bfloat16)
        parts.append(gx.master_weights())
    grouped._LEAST = 1000
    pipe = gx.Pipeline(gx.chain(*parts), net, overlap=overlap, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5)
    losses, reports = [], []

    def step(report):
        reports.append((report.ready, report.skipped))
        if report.ready:
            optimizer.step()
        optimizer.zero_grad()

    for t in range(9):
        skips = {2} | ({4} if (rank + t) % 3 == 0 else set())
        x = torch.randn(8, 20)
        if masters:
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(x, skips).float().pow(2).mean()
        else:
            loss = net(x, skips).pow(2).mean()
        spoilt = [
            net.layers[layer].weight.register_hook(lambda g: g * math.inf)
            for r, step_, layer in bad
            if (r, step_) == (rank, t)
        ]
        loss.backward()
        for hook in spoilt:
            hook.remove()
        losses.append(loss.item())
        step(pipe.sync(optimizer))
        if t == 3:
            middle = pipe.state_dict()["state"]
    for report in pipe.flush(optimizer):
        step(report)
    pipe.sync_buffers()
    saved = pipe.state_dict()
    assert not overlap or pipe.overlap.startswith("on: being tried")
    pipe.load_state_dict(saved)
    again = pipe.state_dict()
    weights = {k: v.clone() for k, v in net.state_dict().items()}
    pipe.close()
    # Of a window that will be dropped, what has been added up so far does not matter.
    saved["middle"] = {k: x for k, x in middle.items() if ".total" not in k}
    return weights, saved, again, reports


def compared(rank, name, bad, masters=False):
    plain, late = (train(rank, name, overlap, bad, masters) for overlap in (False, True))
    return plain, late


def same(one, other, exact):
    assert one.keys() == other.keys()
    for key, x in one.items():
        if isinstance(x, dict):
            same(x, other[key], exact)
        elif not isinstance(x, torch.Tensor):
            assert x == other[key], key
        elif exact:
            assert torch.equal(x, other[key]), key
        else:
            torch.testing.assert_close(x, other[key], msg=key)


@pytest.mark.parametrize("name", CHAINS)
def test_the_result_is_that_without(name):
    """Bit for bit; checkpoints too, and bad steps on some rank in some leaf leave no trace."""
    # In the last group, and the first.
    bad = [] if name in UNGATED else [(1, 3, 0), (0, 6, 5)]
    ranks = gloo_ranks(2, compared, name, bad)
    for (weights, saved, _, reports), (w, s, again, r) in ranks:
        same(weights, w, exact=True)
        same(saved, s, exact=True)
        same({**saved, "middle": {}}, {**again, "middle": {}}, exact=True)
        assert reports == r
        assert sum(skipped for _, skipped in reports) == (2 if bad else 0)
    same(ranks[0][1][0], ranks[1][1][0], exact=False)


def handed_on(rank, name):
    """The gradients of one step that is not finite in one leaf, without and with overlap."""
    out = []
    for overlap in (False, True):
        grouped._LEAST, net = 1000, Net()
        pipe = gx.Pipeline(gx.chain(*CHAINS[name]), net, overlap=overlap)
        net.layers[3].weight.register_hook(lambda g: g * math.inf)
        backward(net, 1.0 + rank)
        report = pipe.sync()
        out.append(({k: p.grad for k, p in net.named_parameters()}, report.ready, report.skipped))
        pipe.close()
    return out


@pytest.mark.parametrize("name", UNGATED)
def test_what_is_not_gated_hands_on_what_is_not_finite(name):
    for (plain, *said), (late, *told) in gloo_ranks(2, handed_on, name):
        assert said == told == [True, False]
        assert not late["layers.3.weight"].isfinite().all()
        for path, x in plain.items():
            torch.testing.assert_close(x, late[path], rtol=0, atol=0, equal_nan=True)


def masters(rank):
    plain, late = (train(rank, "topk", overlap, [], True) for overlap in (False, True))
    return plain, late


def test_with_masters():
    for (weights, saved, _, _), (w, s, _, _) in gloo_ranks(2, masters):
        same(weights, w, exact=True)
        same(saved, s, exact=True)


def three(rank, name):
    return [train(rank, name, overlap)[0] for overlap in (False, True)]


@pytest.mark.parametrize("name", ["dense", "cast"])
def test_sums_of_three_ranks_are_equal_to_rounding(name):
    """What a ring adds, or an owner rounds, is added in another order."""
    for plain, late in gloo_ranks(3, three, name):
        same(plain, late, exact=False)


def scaled(rank):
    """With a GradScaler whose scale falls after a bad step."""
    out = []
    for overlap in (False, True):
        torch.manual_seed(rank)
        grouped._LEAST, net = 1000, Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        tx = gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), gx.allreduce())
        pipe = gx.Pipeline(tx, net, scaler=scaler, overlap=overlap)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for t in range(4):
            loss = net(torch.randn(8, 20), ()).pow(2).mean()
            hook = None
            if (rank, t) == (1, 1):
                hook = net.layers[3].bias.register_hook(lambda g: g * math.nan)
            scaler.scale(loss).backward()
            if hook is not None:
                hook.remove()
            pipe.sync(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        out.append((dict(net.named_parameters()), scaler.get_scale()))
        if overlap:
            scaler.scale(net(torch.randn(8, 20), ()).pow(2).mean()).backward()
            scaler.unscale_(optimizer)
            with pytest.raises(ValueError, match=r"have gone out with .*loss_scale.*: 4.0"):
                pipe.sync(optimizer)
        pipe.close()
    return [({k: v.detach() for k, v in weights.items()}, scale) for weights, scale in out]


def test_with_a_scaler():
    for (plain, scale), (late, other) in gloo_ranks(2, scaled):
        assert scale == other == 4.0
        same(plain, late, exact=True)


def setup(chain="topk", model=None, **options):
    grouped._LEAST, net = 1000, Net() if model is None else model
    return net, gx.Pipeline(gx.chain(*CHAINS[chain]), net, overlap=True, **options)


def backward(net, scale=1.0):
    (net(torch.ones(4, 20) * scale + torch.eye(4, 20), ()).pow(2).mean()).backward()


def goes_out(rank):
    net, pipe = setup()
    engine = pipe._engine
    backward(net)
    early, groups = len(engine._jobs), len(engine._groups)
    report = pipe.sync()
    assert 0 <= report.hidden <= report.seconds
    # A leaf that gets no gradient holds up its group, and those after it, until sync().
    (net.layers[5](torch.ones(4, 20)).pow(2).mean()).backward()
    held = len(engine._jobs)
    pipe.sync()
    return early, held, groups


def test_all_groups_but_the_last_are_on_their_way_when_the_backward_pass_ends():
    for early, held, groups in gloo_ranks(2, goes_out):
        assert early == groups - 1 > 3
        assert held < early


def in_order(rank):
    """Of twelve layers, whose paths are not in the order of their numbers when sorted."""
    grouped._LEAST = 1000
    net = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(12)))
    pipe = gx.Pipeline(gx.chain(gx.allreduce()), net, overlap=True)
    engine, seen = pipe._engine, []
    for number, layer in enumerate(net):
        # This hook runs after that of the engine: it came later.
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, n=number: seen.append((n, len(engine._jobs)))
        )
    net(torch.ones(4, 20)).sum().backward()
    pipe.sync()
    return seen


def test_the_first_groups_go_out_while_the_backward_pass_is_at_its_beginning():
    for seen in gloo_ranks(2, in_order):
        assert [number for number, _ in seen] == list(reversed(range(12)))
        jobs = [count for _, count in seen]
        assert jobs == sorted(jobs)
        assert jobs[3] >= 1
        assert jobs[6] >= 3


def twice(rank):
    net, pipe = setup("dense")
    backward(net)
    with pytest.raises(RuntimeError, match=r"a second backward pass before sync.*no_sync"):
        backward(net)
    with pytest.raises(RuntimeError, match=r"a backward pass has come since the last sync"):
        pipe.load_state_dict(pipe.state_dict())
    pipe.sync()
    net.zero_grad()

    plain = Net()
    with pipe.no_sync():
        backward(net, 1.0 + rank)
    assert not pipe._engine._jobs
    backward(net, 2.0)
    pipe.sync()
    reference = gx.Pipeline(gx.chain(*CHAINS["dense"]), plain)
    with reference.no_sync():  # Does nothing without overlap.
        backward(plain, 1.0 + rank)
    backward(plain, 2.0)
    reference.sync()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


def test_gradients_of_several_backward_passes():
    gloo_ranks(2, twice)


def failing(rank):
    """A stage raises on rank 1, in the second step, in a group in the middle."""
    calls = []

    def update(updates, state, params=None, **extra):
        if updates["layers.3.weight"] is not None:
            calls.append(1)
            if rank == 1 and len(calls) == 2:
                raise ArithmeticError("on purpose")
        return updates, state

    fails = gx.Transformation(Stage("fails", linear=True), None, update)
    grouped._LEAST, net = 1000, Net()
    pipe = gx.Pipeline(gx.chain(fails, *CHAINS["topk"]), net, overlap=True)
    backward(net)
    pipe.sync()
    before, errors = pipe.state_dict()["state"], []
    for _ in range(2):
        net.zero_grad()
        backward(net)
        try:
            pipe.sync()
        except (ArithmeticError, gx.RankMismatchError) as error:
            errors.append((type(error).__name__, str(error)))
            same(before, pipe.state_dict()["state"], exact=True)
    assert not torch.equal(next(iter(pipe.state.residual.values())), torch.zeros(20))
    return errors


def test_a_rank_that_fails_is_one_error_and_leaves_no_trace():
    (other, text), (own, _) = (errors[0] for errors in gloo_ranks(2, failing))
    assert (other, own) == ("RankMismatchError", "ArithmeticError")
    assert "rank 1 failed in this step: ArithmeticError: on purpose" in text


def refuses(rank):
    """What sync() refuses is told to the other ranks, which wait for the groups still to come."""
    net, pipe = setup()
    texts = []
    (net.layers[5](torch.ones(4, 20)).pow(2).mean()).backward()
    try:
        pipe.sync(loss_scale=2.0 if rank == 0 else None)
    except (ValueError, gx.RankMismatchError) as error:
        texts.append(str(error))
    net.zero_grad()
    backward(net)
    assert pipe.sync().ready
    # The same once all that goes out in the backward pass has gone out.
    before = pipe.state_dict()["state"]
    for fails in (lambda: pipe.sync(loss_scale=2.0), lambda: pipe.fail(OSError("no data"))):
        backward(net)
        try:
            (fails if rank == 0 else pipe.sync)()
        except (ValueError, gx.RankMismatchError) as error:
            texts.append(str(error))
        same(before, pipe.state_dict()["state"], exact=True)
    backward(net)
    assert pipe.sync().ready
    return texts


def test_what_sync_refuses_the_others_hear():
    own, other = gloo_ranks(2, refuses)
    text = "loss_scale is given and the chain has no unscale(): put it first"
    assert own == [text] * 2
    assert other == [
        f"rank 0 failed before the first exchange: ValueError: {text}",
        f"rank 0 failed in this step: ValueError: {text}",
        "rank 0 failed in this step: OSError: no data",
    ]


def left(rank):
    """Nothing holds a Pipeline that is dropped, and its hooks are gone."""
    net, pipe = setup()
    backward(net)
    pipe.sync()
    there = weakref.ref(pipe._engine)
    del pipe
    deadline = time.monotonic() + 10
    while there() is not None and time.monotonic() < deadline:
        gc.collect()  # The thread lets go of its last job in its own time.
    assert there() is None
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    tree = [torch.ones(600, requires_grad=True), {"b": torch.ones(500, requires_grad=True)}]
    pipe = gx.Pipeline(gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce()), tree, overlap=True)
    (tree[0].sum() + tree[1]["b"].sum() * (1 + rank)).backward()
    assert len(pipe._engine._jobs) == 1
    pipe.sync()
    pipe.close()
    assert not tree[0]._post_accumulate_grad_hooks
    return tree[1]["b"].grad.unique().tolist(), pipe.state.residual[0].shape


def test_a_pipeline_that_is_dropped_or_closed():
    for values, shape in gloo_ranks(2, left):
        assert values == [0.0, 1.5]
        assert shape == (600,)


def off(rank):
    small = gx.Pipeline(gx.chain(gx.allreduce()), torch.nn.Linear(2, 2), overlap=True)
    asked = gx.Pipeline(gx.chain(gx.allreduce()), torch.nn.Linear(2, 2))
    return small.overlap, asked.overlap


def test_where_it_is_off_it_says_why():
    for small, asked in gloo_ranks(2, off):
        assert small == "off: there is too little to send for more than one group"
        assert asked == "off: not asked for"
    alone = gx.Pipeline(gx.chain(gx.allreduce()), torch.nn.Linear(2, 2), overlap=True)
    assert alone.overlap == "off: there is one rank"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([gx.topk(0.1, scope="global"), gx.ef(), gx.allreduce()], "looks at all leaves"),
        ([gx.clip_by_local_norm(1.0), gx.topk(0.1), gx.ef(), gx.allreduce()], "looks at all"),
        ([gx.topk(0.1), gx.momentum_correction(0.9, clip=1.0), gx.allreduce()], "looks at all"),
        ([gx.dynamic_loss_scale(), gx.topk(0.1), gx.ef(), gx.allreduce()], "looks at all leaves"),
        ([gx.accumulate(2, on_bad="leave_out"), gx.allreduce()], "leaves a micro-step out"),
        ([gx.topk(0.1), gx.ef(), gx.delayed(steps=1), gx.allreduce()], "delayed, and hidden"),
        (
            [gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="sharded", density=0.1)],
            "chooses among the sums",
        ),
        ([gx.apply_if_finite(gx.error_feedback(gx.topk(0.1)), gx.allreduce())], "combinators"),
    ],
)
def test_what_needs_all_leaves_together_is_refused(parts, reason):
    tx = gx.chain(*parts)
    with pytest.raises(ValueError, match=rf"Pipeline\(overlap=True\): .*{reason}"):
        gx.Pipeline(tx, Net(), overlap=True)
    assert reason in reason_against(tx)


def test_the_loss_scale_has_to_be_known_before():
    tx = gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), gx.allreduce())
    with pytest.raises(ValueError, match="give the GradScaler"):
        gx.Pipeline(tx, Net(), overlap=True)
    for wrong in (1, "never", None):
        with pytest.raises(ValueError, match=r"overlap=.*expected True, False or 'always'"):
            gx.Pipeline(tx, Net(), overlap=wrong)


def test_groups_are_of_like_size_the_last_leaves_first():
    leaves = [torch.empty(n) for n in (10, 400_000, 300_000, 20)]
    assert partition([*leaves, None], range(5)) == [[3, 2], [1], [0]]
    assert partition(leaves, [1, 3, 0, 2]) == [[2], [0, 3, 1]]
    assert partition(leaves[:1], [0]) == [[0]]
    many = [torch.empty(1 << 20) for _ in range(48)]
    groups = partition(many, range(48))
    assert [len(group) for group in groups] == [2] * 24
    assert [i for group in groups for i in group] == list(reversed(range(48)))


class TestTrial:
    def run(self, with_, without):
        trial, now = Trial(), 0.0
        trial.note(now)
        while not trial.verdict:
            now += with_ if trial.on else without
            trial.note(now)
        return trial

    def test_what_is_faster_stays(self):
        assert self.run(0.010, 0.020).on
        late = self.run(0.020, 0.010)
        assert not late.on
        assert late.verdict == "a step took 20 ms with it and 10 ms without"

    def test_it_ends(self):
        trial = self.run(0.010, 0.020)
        before = trial.verdict
        trial.note(100.0)
        assert (trial.on, trial.verdict) == (True, before)


def in_two_stages(rank):
    out = []
    for overlap in (False, True):
        torch.manual_seed(rank)
        grouped._LEAST, net = 1000, Net()
        inner, outer = gx.node_groups(2)
        parts = gx.topk(0.1), gx.ef(), gx.allreduce(outer), gx.clip_by_global_norm(0.5)
        pipe = gx.Pipeline(gx.chain(gx.allreduce(inner), *parts), net, overlap=overlap)
        for t in range(3):
            net.zero_grad()
            backward(net, rank + t)
            pipe.sync()
        out.append(({k: p.grad for k, p in net.named_parameters()}, pipe.state_dict()["state"]))
        pipe.close()
    return out


def test_with_an_exchange_inside_nodes():
    for (plain, state), (late, other) in gloo_ranks(4, in_two_stages):
        same(plain, late, exact=False)
        same(state, other, exact=False)
