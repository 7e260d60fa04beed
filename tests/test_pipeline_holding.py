"""A `Pipeline` with windows, delayed results, master weights, and steps that are never good."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch

import gradtx as gx
from gradtx.exchange.group import find_group
from gradtx.testing import run_ranks

INF = float("inf")


def model_of(dtype=torch.float32):
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.to(dtype)


def batches(rank, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(count):
        x = torch.randn(8, 6, generator=generator)
        yield x.to(dtype), x.sum(1, keepdim=True).to(dtype)


def chain_of(*, accumulate=1, steps=None, behind=()):
    window = [gx.accumulate(accumulate)] if accumulate > 1 else []
    delay = [] if steps is None else [gx.delayed(steps=steps)]
    exchange = gx.allreduce(algorithm="gather")
    return gx.chain(*window, gx.topk(0.2), gx.ef(), *delay, exchange, *behind)


def train(rank, tx, count, *, clear=True, scaler=None, **options):
    """Trains, and gives the parameters, the reports, and the pipeline."""
    model = model_of()
    pipe = gx.Pipeline(tx, model, scaler=scaler, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = []
    for x, y in batches(rank, count):
        if clear:
            optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        reports.append(pipe.sync(optimizer))
        if reports[-1].ready:
            optimizer.step()
            optimizer.zero_grad()
    for report in pipe.flush(optimizer):
        reports.append(report)
        if report.ready:
            optimizer.step()
            optimizer.zero_grad()
    pipe.close()
    return [p.detach().clone() for p in model.parameters()], reports, pipe


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("clear", [True, False])
def test_a_window_counts_each_micro_step_once_whoever_clears_the_gradients(clear):
    tx = chain_of(accumulate=3)

    def functional(rank):
        model = model_of()
        params = dict(model.named_parameters())
        state = tx.init(model)
        found = []
        for number, (x, y) in enumerate(batches(rank, 10)):
            grads = torch.autograd.grad(
                torch.nn.functional.mse_loss(model(x), y), list(params.values())
            )
            updates, state = tx.update(dict(zip(params, grads, strict=True)), state)
            if number == 9:
                updates, state = tx.flush(state)
            if state.ready:
                found.append(number)
                with torch.no_grad():
                    for path, parameter in params.items():
                        parameter.add_(updates[path], alpha=-0.05)
        return [p.detach().clone() for p in params.values()], found

    for (got, reports, _), (expected, when) in zip(
        run_ranks(2, lambda i: train(i, tx, 10, clear=clear)), run_ranks(2, functional), strict=True
    ):
        assert same(got, expected)
        assert when == [2, 5, 8, 9]
        assert [r.ready for r in reports] == [False, False, True] * 3 + [False, True]
        assert [r.wire_bytes > 0 for r in reports] == [r.ready for r in reports]
        assert [r.dense_bytes > 0 for r in reports] == [r.ready for r in reports]


def test_weights_reach_the_window():
    def rank(i):
        p = torch.nn.Parameter(torch.zeros(1))
        pipe = gx.Pipeline(gx.chain(gx.accumulate(2), gx.allreduce()), [p])
        for value, weight in (((1.0, 30), (4.0, 10)), ((2.0, 5), (8.0, 15)))[i]:
            p.grad = torch.full((1,), value)
            report = pipe.sync(weight=weight)
        assert report.ready
        return p.grad.item()

    expected = (30 + 40 + 10 + 120) / 60
    assert run_ranks(2, rank) == [pytest.approx(expected)] * 2


def test_a_weight_without_a_window_is_refused():
    p = torch.nn.Parameter(torch.zeros(1))
    pipe = gx.Pipeline(gx.chain(gx.allreduce()), [p])
    with pytest.raises(ValueError, match=r"no accumulate\(\)"):
        pipe.sync(weight=2.0)


def test_ranks_that_flush_keep_in_turn_with_one_whose_windows_weigh_nothing():
    tx = gx.chain(gx.accumulate(1), gx.delayed(steps=2), gx.allreduce())

    def rank(i):
        p = torch.nn.Parameter(torch.zeros(1))
        pipe = gx.Pipeline(tx, [p])
        out = []
        for step in range(1 + 4 * i):
            p.grad = torch.full((1,), float(step + 1))
            report = pipe.sync(weight=0.0 if step in (2, 3) else 1.0)
            out += [p.grad.item()] if report.ready else []
        for report in pipe.flush():
            out += [p.grad.item()] if report.ready else []
        pipe.close()
        return out

    assert run_ranks(2, rank, timeout=10.0) == [[1.0, 2.0, 5.0]] * 2


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_late_results_are_those_of_the_functional_form(steps, accumulate):
    tx = chain_of(accumulate=accumulate, steps=steps, behind=(gx.clip_by_global_norm(0.5),))

    def functional(rank):
        model = model_of()
        params = dict(model.named_parameters())
        state = tx.init(model)

        def apply(updates):
            with torch.no_grad():
                for path, parameter in params.items():
                    parameter.add_(updates[path], alpha=-0.05)

        for x, y in batches(rank, 11):
            grads = torch.autograd.grad(
                torch.nn.functional.mse_loss(model(x), y), list(params.values())
            )
            updates, state = tx.update(dict(zip(params, grads, strict=True)), state)
            if state.ready:
                apply(updates)
        while True:
            updates, state = tx.flush(state)
            if state.ready:
                apply(updates)
            if not state.pending:
                break
        return [p.detach().clone() for p in params.values()]

    found = run_ranks(2, lambda i: train(i, tx, 11))
    for (got, reports, _), expected in zip(found, run_ranks(2, functional), strict=True):
        assert same(got, expected)
        assert sum(r.ready for r in reports) == -(-11 // accumulate)
    assert same(found[0][0], found[1][0])


def test_without_delay_it_is_the_synchronous_pipeline_bit_for_bit():
    plain, late = (run_ranks(2, lambda i, s=s: train(i, chain_of(steps=s), 6)) for s in (None, 0))
    assert same(plain[0][0], late[0][0])


def test_a_fast_rank_is_no_more_steps_ahead_than_allowed():
    steps, counts, lock, ahead = 2, [0, 0], threading.Lock(), []

    def rank(i):
        p = torch.nn.Parameter(torch.zeros(4))
        pipe = gx.Pipeline(gx.chain(gx.delayed(steps=steps), gx.allreduce()), [p])
        for _ in range(12):
            if i == 1:
                time.sleep(0.03)
            p.grad = torch.ones(4)
            pipe.sync()
            with lock:
                counts[i] += 1
                ahead.append(counts[0] - counts[1])
        list(pipe.flush())
        pipe.close()

    run_ranks(2, rank)
    # One more, between the return of one rank from a step and that of the other.
    assert steps <= max(ahead) <= steps + 1


def test_the_loop_goes_on_while_the_exchange_is_under_way():
    entered = threading.Event()

    def rank(i):
        p = torch.nn.Parameter(torch.zeros(4))
        pipe = gx.Pipeline(gx.chain(gx.delayed(steps=1), gx.allreduce()), [p])
        if i == 1:
            assert entered.wait(20)
        p.grad = torch.ones(4)
        # Rank 0 comes back although rank 1 has not begun.
        assert not pipe.sync().ready
        entered.set()
        assert [r.ready for r in pipe.flush()] == [True]
        pipe.close()
        return p.grad.tolist()

    assert run_ranks(2, rank) == [[1.0] * 4] * 2


def test_a_late_bad_step_is_dropped_in_its_turn():
    def rank(i):
        p = torch.nn.Parameter(torch.zeros(2))
        tx = gx.chain(gx.topk(0.5), gx.ef(), gx.delayed(steps=1), gx.allreduce(algorithm="gather"))
        pipe, found = gx.Pipeline(tx, [p]), []
        for step in range(4):
            p.grad = torch.tensor([INF if (i, step) == (1, 1) else 4.0, 1.0])
            report = pipe.sync()
            found.append((report.ready, report.skipped))
        residual = pipe.state.residual[0].tolist()
        found += [(r.ready, r.skipped) for r in pipe.flush()]
        pipe.close()
        return found, residual

    for found, residual in run_ranks(2, rank):
        assert found == [(False, False), (True, False), (False, True), (True, False), (True, False)]
        # Three steps were taken: in each the larger value was sent.
        assert residual == [0.0, 3.0]


def test_state_dict_has_the_queue_and_training_goes_on_from_it():
    tx = chain_of(accumulate=2, steps=2)

    def rank(i):
        whole = train(i, tx, 13)[0]
        model = model_of()
        data = list(batches(i, 13))

        def run(pipe, part):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for x, y in part:
                torch.nn.functional.mse_loss(model(x), y).backward()
                if pipe.sync(optimizer).ready:
                    optimizer.step()
                optimizer.zero_grad()
            return optimizer

        first = gx.Pipeline(tx, model)
        run(first, data[:7])
        saved = first.state_dict()
        first.close()
        second = gx.Pipeline(tx, model)
        second.load_state_dict(saved)
        optimizer = run(second, data[7:])
        for report in second.flush():
            if report.ready:
                optimizer.step()
        second.close()
        return whole, [p.detach().clone() for p in model.parameters()]

    for whole, parts in run_ranks(2, rank):
        assert same(whole, parts)


@pytest.mark.parametrize(
    ("parts", "scaler", "text"),
    [
        ([gx.unscale()], True, "a GradScaler is given and results are delayed by 1 steps"),
        ([gx.dynamic_loss_scale()], False, "the chain has gx.dynamic_loss_scale()"),
    ],
)
def test_a_loss_scale_that_adjusts_itself_cannot_wait(parts, scaler, text):
    tx = gx.chain(*parts, gx.delayed(steps=1), gx.allreduce())
    scaler = torch.amp.GradScaler("cpu") if scaler else None
    with pytest.raises(ValueError, match="delayed by 1 steps") as caught:
        gx.Pipeline(tx, model_of(), scaler=scaler)
    assert text in str(caught.value)


def test_an_error_in_the_background_comes_at_the_next_step():
    def rank(i):
        p = torch.nn.Parameter(torch.zeros(2))
        pipe = gx.Pipeline(gx.chain(gx.delayed(steps=1), gx.allreduce()), [p])
        pipe._engine._own._hub._timeout = 4.0
        p.grad = torch.ones(2)
        pipe.sync()
        assert pipe.state.last_finite  # Its exchange has been made.
        if i == 1:
            return None
        p.grad = torch.ones(2)
        pipe.sync()
        with pytest.raises(TimeoutError, match="did not come"):
            list(pipe.flush())
        pipe.close()
        return "told"

    assert run_ranks(2, rank) == ["told", None]


def test_a_pipeline_whose_exchange_failed_can_be_collected():
    class Failing:
        def init(self, params):
            return ()

        def update(self, updates, state, params=None):
            raise ValueError("out of order")

    p = torch.nn.Parameter(torch.zeros(1))
    failing = gx.declare(Failing(), name="failing", needs_reduced=False)
    pipe = gx.Pipeline(gx.chain(failing, gx.delayed(steps=1), gx.allreduce()), [p])
    p.grad = torch.ones(1)
    pipe.sync()
    with pytest.raises(ValueError, match="out of order"):
        pipe.state_dict()
    found = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert found() is None


def test_a_closed_pipeline_says_so():
    p = torch.nn.Parameter(torch.zeros(2))
    pipe = gx.Pipeline(gx.chain(gx.delayed(steps=1), gx.allreduce()), [p])
    pipe.close()
    pipe.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipe.sync()


SCRIPT = """
import sys, torch, torch.distributed as dist, gradtx as gx, gradtx.grouped
rank, port, rounds, together = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
)
p = torch.nn.Parameter(torch.zeros(1000))
pipe = gx.Pipeline(gx.chain(gx.topk(0.1), gx.ef(), gx.delayed(steps=2), gx.allreduce()), [p])
gx.grouped._LEAST = 1000
layers = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(3)]
overlapped = gx.Pipeline(gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce()), layers, overlap=True)
for i in range(rounds):
    p.grad = torch.ones(1000)
    pipe.sync()
    if i < together:
        sum(layer.sum() for layer in layers).backward()
    if i < together - 1:
        overlapped.sync()
print("end of the script", flush=True)
"""


def free_port():
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


@pytest.mark.parametrize("rounds", [(3, 3), (3, 2)])
def test_the_interpreter_exits_with_exchanges_under_way(rounds, tmp_path):
    """Of two pipelines, one before its `sync`; also when the other rank has gone without them."""
    script, port, together = tmp_path / "script.py", free_port(), str(min(rounds))
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), port, str(rounds[rank]), together],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            out, err = process.communicate(timeout=120)
            assert "end of the script" in out, err
    finally:
        for process in started:
            process.kill()
            process.communicate()


class TestMasterWeights:
    def test_small_steps_add_up_and_reach_the_model(self):
        def rank(i):
            p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            wide = torch.nn.Parameter(torch.ones(2))
            pipe = gx.Pipeline(
                gx.chain(gx.allreduce(), gx.master_weights()), {"p": p, "wide": wide}
            )
            copies = pipe.parameters()
            assert copies[0].dtype == torch.float32
            assert copies[1] is wide
            optimizer = torch.optim.SGD(copies, lr=1.0)
            for _ in range(512):
                p.grad = torch.full((3,), 2.0**-11, dtype=torch.bfloat16)
                wide.grad = torch.ones(2)
                pipe.sync(optimizer)
                assert p.grad is None
                optimizer.step()
                optimizer.zero_grad()
            return p.tolist(), wide.tolist()

        assert run_ranks(2, rank) == [([0.75] * 3, [-511.0] * 2)] * 2

    def test_the_mean_is_not_rounded_before_the_step(self):
        """Two ranks whose mean needs more bits than 16."""

        def rank(i):
            p = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
            tx = gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce(algorithm="gather"))
            pipe = gx.Pipeline(gx.chain(*tx.transformations, gx.master_weights()), [p])
            optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
            p.grad = torch.tensor([(1.0, 2.0**-9)[i]], dtype=torch.bfloat16)
            pipe.sync(optimizer)
            return pipe.parameters()[0].grad.item()

        assert run_ranks(2, rank) == [(1.0 + 2.0**-9) / 2] * 2

    def test_they_are_in_the_checkpoint(self):
        def made():
            model = model_of(torch.bfloat16)
            pipe = gx.Pipeline(gx.chain(gx.allreduce(), gx.master_weights()), model)
            return model, pipe, torch.optim.SGD(pipe.parameters(), lr=1e-4)

        model, pipe, optimizer = made()
        for x, y in batches(0, 5, torch.bfloat16):
            torch.nn.functional.mse_loss(model(x), y).backward()
            pipe.sync(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        saved = pipe.state_dict()
        other, again, _ = made()
        again.load_state_dict(saved)
        assert same(pipe.parameters(), again.parameters())
        assert same(list(model.parameters()), list(other.parameters()))
        wrong = {**saved, "masters": {"0.weight": saved["masters"]["0.weight"]}}
        with pytest.raises(ValueError, match="master weights"):
            again.load_state_dict(wrong)

    def test_an_optimizer_over_the_model_is_refused(self):
        model = model_of(torch.bfloat16)
        pipe = gx.Pipeline(gx.chain(gx.allreduce(), gx.master_weights()), model)
        with pytest.raises(ValueError, match=r"'0\.weight' of the model: give it pipe\.parameters"):
            pipe.sync(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="name the optimizers"):
            pipe.sync()

    def test_with_a_scaler_and_windows(self):
        def rank(i):
            model = model_of(torch.float16)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            tx = gx.chain(gx.unscale(), gx.accumulate(2), gx.allreduce(), gx.master_weights())
            pipe = gx.Pipeline(tx, model, scaler=scaler)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
            before = [p.clone() for p in model.parameters()]
            for x, y in batches(i, 4, torch.float16):
                scaler.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
                if pipe.sync(optimizer).ready:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            assert not same(before, list(model.parameters()))
            return [p.detach().clone() for p in model.parameters()]

        first, second = run_ranks(2, rank)
        assert same(first, second)


class TestScaler:
    def test_windows_and_epochs_never_unscale_twice(self):
        def rank(i):
            model = model_of()
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
            tx = gx.chain(gx.unscale(), gx.accumulate(3), gx.topk(0.5), gx.ef(), gx.allreduce())
            pipe = gx.Pipeline(tx, model, scaler=scaler)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

            def step(report):
                if report.ready or report.skipped:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()

            for epoch in range(2):
                for x, y in batches(i + 2 * epoch, 7 - i):
                    scaler.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
                    step(pipe.sync(optimizer))
                for report in pipe.flush(optimizer):
                    step(report)
            return [p.detach().clone() for p in model.parameters()], scaler.get_scale()

        (first, scale), (second, other) = run_ranks(2, rank)
        assert same(first, second)
        # Three windows an epoch.
        assert scale == other == 1024.0

    def test_a_left_out_micro_step_lowers_the_scale_on_all_ranks(self):
        def rank(i):
            p = torch.nn.Parameter(torch.zeros(2))
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            tx = gx.chain(gx.unscale(), gx.accumulate(2, on_bad="leave_out"), gx.allreduce())
            pipe = gx.Pipeline(tx, [p], scaler=scaler)
            optimizer = torch.optim.SGD([p], lr=1.0)
            for step in range(2):
                scaler.scale((p * (INF if i == step == 1 else 3.0)).sum()).backward()
                report = pipe.sync(optimizer)
            assert report.ready
            scaler.step(optimizer)
            scaler.update()
            return p.tolist(), scaler.get_scale()

        assert run_ranks(2, rank) == [([-3.0, -3.0], 32.0)] * 2

    def test_the_scale_does_not_fall_below_one(self):
        p = torch.nn.Parameter(torch.zeros(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        pipe = gx.Pipeline(gx.chain(gx.unscale(), gx.allreduce()), [p], scaler=scaler)
        optimizer = torch.optim.SGD([p], lr=1.0)
        for _ in range(20):
            p.grad = torch.full((2,), INF)
            scaler.scale(torch.zeros(()))
            assert pipe.sync(optimizer).skipped
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1.0


def test_what_is_never_finite_is_named_on_all_ranks():
    def rank(i):
        params = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b", "c")}
        pipe = gx.Pipeline(gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()), params, max_skips=4)
        for step in range(5):
            for name, p in params.items():
                p.grad = torch.ones(2)
                if i == 1 and (name == "b" or (name == "c" and step == 2)):
                    p.grad[0] = INF
            if step < 4:
                assert pipe.sync().skipped
        with pytest.raises(gx.NeverFiniteError) as caught:
            pipe.sync()
        return str(caught.value)

    first, second = run_ranks(2, rank)
    assert "5 steps in a row" in first
    assert "none on this rank" in first
    assert "'b'." in second
    assert "'c'" not in second


def test_what_is_bad_once_in_each_window_is_named():
    params = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("a", "b")}
    pipe = gx.Pipeline(gx.chain(gx.accumulate(2), gx.allreduce()), params, max_skips=2)

    def window():
        for b in (1.0, INF):
            params["a"].grad, params["b"].grad = torch.ones(1), torch.full((1,), b)
            report = pipe.sync()
        return report

    assert window().skipped
    assert window().skipped
    with pytest.raises(gx.NeverFiniteError, match=r"none of them: 'b'\."):
        window()


def test_a_flush_needs_the_optimizers_that_a_scaler_needs():
    p = torch.nn.Parameter(torch.zeros(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipe = gx.Pipeline(gx.chain(gx.unscale(), gx.accumulate(2), gx.allreduce()), [p], scaler=scaler)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    pipe.sync(optimizer)
    with pytest.raises(ValueError, match="name the optimizers"):
        list(pipe.flush())
    for report in pipe.flush(optimizer):
        assert report.ready
        scaler.step(optimizer)
    assert p.item() == -1.0


def test_steps_on_what_is_flushed_after_a_restart_reach_the_model():
    tx = gx.chain(gx.accumulate(2), gx.allreduce(), gx.master_weights())
    saved = None
    for _ in range(2):
        p = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        pipe = gx.Pipeline(tx, [p])
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        if saved is None:
            p.grad = torch.ones(1, dtype=torch.bfloat16)
            pipe.sync(optimizer)
            saved = pipe.state_dict()
    pipe.load_state_dict(saved)
    with pytest.raises(ValueError, match="name the optimizers"):
        list(pipe.flush())
    for _ in pipe.flush(optimizer):
        optimizer.step()
    assert p.item() == 0.5


def test_each_micro_step_may_be_unscaled_and_clipped_by_the_user():
    p = torch.nn.Parameter(torch.zeros(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipe = gx.Pipeline(gx.chain(gx.unscale(), gx.accumulate(2), gx.allreduce()), [p], scaler=scaler)
    optimizer = torch.optim.SGD([p], lr=1.0)
    for unscaled in (True, False, True, True):
        scaler.scale(3.0 * p.sum()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_([p], 1.0)
        if pipe.sync(optimizer).ready:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert p.item() == -(1.0 + 3.0) / 2 - 1.0


def test_a_good_step_begins_the_count_anew():
    p = torch.nn.Parameter(torch.zeros(2))
    pipe = gx.Pipeline(gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()), [p], max_skips=2)
    for value in (INF, INF, 1.0, INF, INF):
        p.grad = torch.full((2,), value)
        pipe.sync()


def test_the_group_of_a_delayed_exchange_is_its_own():
    def rank(i):
        p = torch.nn.Parameter(torch.zeros(4))
        pipe = gx.Pipeline(gx.chain(gx.delayed(steps=1), gx.allreduce()), [p])
        p.grad = torch.ones(4)
        pipe.sync()
        # Meanwhile the ranks talk over the first one.
        total = find_group().all_reduce(torch.full((1,), float(i)))
        assert [r.ready for r in pipe.flush()] == [True]
        pipe.close()
        return total.item()

    assert run_ranks(2, rank) == [1.0, 1.0]


def test_a_wrong_weight_is_refused_where_it_is_given():
    p = torch.nn.Parameter(torch.zeros(1))
    pipe = gx.Pipeline(gx.chain(gx.accumulate(2), gx.delayed(steps=1), gx.allreduce()), [p])
    p.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"weight is -1\.0"):
        pipe.sync(weight=-1.0)
    pipe.close()
