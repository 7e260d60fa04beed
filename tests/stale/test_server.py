"""Server and workers as threads of one process, over a store in memory."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import gradtx as gx
from gradtx.stale.frames import Frame, Kind
from gradtx.stale.mailbox import BELL, JOINED, Mailbox
from gradtx.wire import WireFormatError

SGD = partial(torch.optim.SGD, lr=1.0)
TOPK = gx.chain(gx.topk(0.25), gx.ef())
TIMEOUT = 20.0


def zeros(*shape):
    return {"w": torch.zeros(shape)}


def store():
    return torch.distributed.HashStore()


def serve(where, params, tx=None, optimizer=SGD, **options):
    options = {"timeout": TIMEOUT, **options}
    return gx.ParameterServer(where, params, gx.chain() if tx is None else tx, optimizer, **options)


def join(where, params, tx=None, **options):
    options = {"timeout": TIMEOUT, **options}
    return gx.Worker(where, params, gx.chain() if tx is None else tx, **options)


def test_what_is_applied_and_the_residuals_are_all_gradients():
    where = store()
    generator = torch.Generator().manual_seed(0)
    with serve(where, zeros(8), TOPK) as server:
        workers = [join(where, zeros(8), TOPK) for _ in range(2)]
        total = torch.zeros(8)
        for step in range(9):
            gradient = torch.randn(8, generator=generator)
            workers[step % 2].push({"w": gradient})
            total += gradient
        residual = sum(worker.state.residual["w"] for worker in workers)
        for worker in workers:
            worker.close()
        server.join(workers=2)
    assert residual.abs().max() > 0
    torch.testing.assert_close(residual - server.parameters()["w"], total)


def test_a_fragment_with_feedback_takes_fewer_bytes():
    where = store()
    tx = gx.chain(gx.topk(0.01), gx.ef())
    with serve(where, zeros(10000), tx), join(where, zeros(10000), tx) as worker:
        report = worker.push({"w": torch.randn(10000)})
    assert report.dense_bytes == 40000
    assert report.wire_bytes < 700


def test_three_workers_solve_a_convex_problem():
    """Least squares with one solution: each worker has a third of the rows."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(60, 6, generator=generator)
    solution = torch.randn(6, generator=generator)
    where = store()

    def work(i):
        mine, w = rows[i::3], {"w": torch.zeros(6)}
        with join(where, w, TOPK) as worker:
            for _ in range(150):
                worker.push({"w": mine.T @ (mine @ (w["w"] - solution)) / len(mine)})
                worker.pull()

    optimizer = partial(torch.optim.SGD, lr=0.05)
    with serve(where, zeros(6), TOPK, optimizer) as server, ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
        server.join(workers=3)
    assert server.updates == 450
    torch.testing.assert_close(server.parameters()["w"], solution, atol=1e-3, rtol=0)


@pytest.mark.parametrize("tx", [gx.chain(), gx.chain(gx.unscale()), TOPK], ids=repr)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_is_not_pushed_and_leaves_no_trace(tx, bad):
    where = store()
    extra = {"loss_scale": 2.0} if "unscale" in repr(tx) else {}
    good = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with serve(where, zeros(4), tx) as server, join(where, zeros(4), tx) as worker:
        worker.push({"w": good}, **extra)
        before = server.parameters()["w"], worker.state.residual
        report = worker.push({"w": torch.tensor([1.0, bad, 3.0, 4.0])}, **extra)
        assert not report.pushed
        assert report.clock == worker.clock == server.updates == server.clocks[0] == 1
        assert torch.equal(server.parameters()["w"], before[0])
        if before[1] is not None:
            assert torch.equal(worker.state.residual["w"], before[1]["w"])
        assert worker.push({"w": good}, **extra).clock == 2


def test_an_overflow_in_the_payload_is_not_pushed_and_leaves_no_trace():
    """Residual and gradient are finite, and their sum is not."""
    where, huge = store(), torch.full((4,), 3e38)
    with serve(where, zeros(4), TOPK) as server, join(where, zeros(4), TOPK) as worker:
        assert worker.push({"w": huge}).pushed
        before = server.parameters()["w"], worker.state.residual["w"]
        assert not worker.push({"w": huge}).pushed
        assert server.clocks == {0: 1}
        assert torch.equal(server.parameters()["w"], before[0])
        assert torch.equal(worker.state.residual["w"], before[1])


def test_the_loss_scale_is_divided_out():
    tx = gx.chain(gx.unscale())
    where = store()
    with serve(where, zeros(2), tx) as server, join(where, zeros(2), tx) as worker:
        worker.push({"w": torch.tensor([8.0, 4.0])}, loss_scale=4.0)
    assert server.parameters()["w"].tolist() == [-2.0, -1.0]


def test_a_loss_scale_without_unscale_is_refused():
    where = store()
    refused = pytest.raises(ValueError, match=r"the chain has no unscale\(\)")
    with serve(where, zeros(2)), join(where, zeros(2)) as worker, refused:
        worker.push({"w": torch.ones(2)}, loss_scale=4.0)


def test_a_leaf_without_gradient_is_not_stepped_and_keeps_its_residual():
    params = {"a": torch.ones(4), "b": torch.ones(4)}
    where = store()
    decay = partial(torch.optim.SGD, lr=1.0, weight_decay=0.5)
    gradient = torch.tensor([4.0, 1.0, 1.0, 1.0])
    with serve(where, params, TOPK, decay) as server, join(where, params, TOPK) as worker:
        worker.push({"a": gradient, "b": gradient})
        before, residual = server.parameters(), worker.state.residual
        worker.push({"a": None, "b": gradient})
        assert torch.equal(server.parameters()["a"], before["a"])
        assert not torch.equal(server.parameters()["b"], before["b"])
        assert torch.equal(worker.state.residual["a"], residual["a"])
        assert not worker.push({"a": None, "b": None}).pushed


def test_a_module_is_read_and_written():
    torch.manual_seed(0)
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    second.weight.requires_grad_(False)
    first.weight.requires_grad_(False)
    where = store()
    frozen = second.weight.clone()
    with serve(where, first) as server, join(where, second) as worker:
        assert torch.equal(second.bias, first.bias)
        second(torch.ones(1, 3)).sum().backward()
        worker.push()
        assert worker.pull() == 1
        torch.testing.assert_close(second.bias, first.bias - 1)
        assert list(server.parameters()) == ["bias"]
    assert torch.equal(second.weight, frozen)
    second.load_state_dict(server.parameters(), strict=False)


def test_sixteen_bit_parameters_are_kept_in_32_bits_and_sent_in_16():
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    where = store()
    small = partial(torch.optim.SGD, lr=2.0**-12)
    with serve(where, params, optimizer=small) as server:
        mine = {"w": torch.zeros(4, dtype=torch.bfloat16)}
        with join(where, mine) as worker:
            for _ in range(64):
                worker.push({"w": -torch.ones(4, dtype=torch.bfloat16)})
            worker.pull()
    assert server.parameters()["w"].dtype == torch.bfloat16
    assert mine["w"].tolist() == [1 + 2.0**-6] * 4


def test_payloads_whose_size_varies_are_sent_as_long_as_need_be():
    tx = gx.chain(gx.threshold(1.0, capacity=0.5), gx.ef())
    where = store()
    few, many = torch.zeros(1000), torch.zeros(1000)
    few[:3], many[:300] = 2.0, 2.0
    with serve(where, zeros(1000), tx) as server, join(where, zeros(1000), tx) as worker:
        sizes = [worker.push({"w": gradient}).wire_bytes for gradient in (few, many)]
    assert sizes[0] < 100 < sizes[1]
    assert torch.equal(server.parameters()["w"], -few - many)


def test_random_compressors_draw_differently_on_each_worker():
    tx = gx.chain(gx.ternary(seed=0, feedback=False))
    where = store()
    gradient = torch.rand(64, generator=torch.Generator().manual_seed(0))
    seen = []
    with serve(where, zeros(64), tx) as server:
        for _ in range(2):
            before = server.parameters()["w"]
            with join(where, zeros(64), tx) as worker:
                worker.push({"w": gradient})
            seen.append(server.parameters()["w"] - before)
    assert not torch.equal(*seen)


def pushes_of_known_staleness(where, options):
    """Two workers read; the first pushes twice, then the second once, with staleness 2."""
    start = {"w": torch.tensor([1.0, -2.0])}
    gradients = [torch.tensor(g) for g in ([0.5, 1.0], [-1.0, 0.25], [2.0, -3.0])]
    with (
        serve(where, start, **options) as server,
        join(where, zeros(2)) as fast,
        join(where, zeros(2)) as slow,
    ):
        fast.push({"w": gradients[0]})
        fast.pull()
        fast.push({"w": gradients[1]})
        before = server.parameters()["w"]
        assert slow.push({"w": gradients[2]}).staleness == 2
    return start["w"], before, server.parameters()["w"], gradients[2]


def test_delay_compensation_is_the_formula():
    options = {"delay_compensation": 0.5, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    read, before, after, g = pushes_of_known_staleness(store(), options)
    compensated = g + 0.5 * g * g * (before - read)
    torch.testing.assert_close(after, before - 0.1 * compensated)
    assert not torch.allclose(after, before - 0.1 * g)


def test_delay_compensation_of_a_fresh_gradient_changes_nothing():
    where = store()
    options = {"delay_compensation": 0.5}
    with serve(where, zeros(2), **options) as server, join(where, zeros(2)) as worker:
        worker.push({"w": torch.tensor([3.0, -1.0])})
    assert server.parameters()["w"].tolist() == [-3.0, 1.0]


def test_staleness_scaling_is_the_formula():
    _, before, after, g = pushes_of_known_staleness(store(), {"staleness_scaling": True})
    torch.testing.assert_close(after, before - g / 2)


def test_staleness_scaling_scales_the_step_of_any_optimizer():
    """Adam's step does not depend on the scale of the gradient."""
    adam = {"optimizer": partial(torch.optim.Adam, lr=0.1)}
    _, before, after, _ = pushes_of_known_staleness(store(), adam)
    _, _, scaled, _ = pushes_of_known_staleness(store(), {**adam, "staleness_scaling": True})
    torch.testing.assert_close(scaled - before, (after - before) / 2)


def test_the_server_reports_each_update():
    updates = []
    pushes_of_known_staleness(store(), {"on_update": updates.append})
    assert updates == [
        gx.ServerUpdate(1, 0, 0, {0: 1, 1: 0}),
        gx.ServerUpdate(2, 0, 0, {0: 2, 1: 0}),
        gx.ServerUpdate(3, 1, 2, {0: 2, 1: 1}),
    ]


@pytest.mark.parametrize("bound", [0, 2])
def test_a_worker_too_far_ahead_waits_for_the_slowest(bound):
    where = store()
    with (
        serve(where, zeros(1), bound=bound) as server,
        ThreadPoolExecutor(1) as pool,
        join(where, zeros(1)) as fast,
        join(where, zeros(1)) as slow,
    ):
        for _ in range(bound + 1):
            fast.push({"w": torch.ones(1)})
        waiting = pool.submit(fast.pull)
        # Others are answered, who have asked later.
        for _ in range(20):
            slow.pull()
        assert not waiting.done()
        assert server.clocks == {0: bound + 1, 1: 0}
        slow.push({"w": torch.ones(1)})
        assert waiting.result(TIMEOUT) == bound + 2


def test_a_worker_that_leaves_is_not_waited_for():
    where = store()
    with serve(where, zeros(1), bound=0) as server, ThreadPoolExecutor(1) as pool:
        with join(where, zeros(1)) as fast:
            slow = join(where, zeros(1))
            fast.push({"w": torch.ones(1)})
            waiting = pool.submit(fast.push, {"w": torch.ones(1)})
            slow.close()
            assert waiting.result(TIMEOUT).clock == 2
        server.join(workers=2, timeout=TIMEOUT)
    assert server.lost == {}


def test_a_worker_ahead_may_leave():
    where = store()
    with serve(where, zeros(1), bound=0) as server:
        fast, slow = join(where, zeros(1)), join(where, zeros(1))
        fast.push({"w": torch.ones(1)})
        fast.close()
        slow.close()
        server.join(workers=2, timeout=TIMEOUT)


def test_a_late_joiner_gets_the_current_parameters_and_the_slowest_clock():
    where = store()
    with (
        serve(where, zeros(2)) as server,
        join(where, zeros(2)) as first,
        join(where, zeros(2)) as second,
    ):
        for worker in (first, first, second, first):
            worker.push({"w": torch.tensor([1.0, 2.0])})
        mine = {"w": torch.full((2,), 9.0)}
        with join(where, mine) as late:
            assert late.number == 2
            assert mine["w"].tolist() == [-4.0, -8.0]
            assert late.clock == 1
            assert late.push({"w": torch.ones(2)}).staleness == 0
            assert server.clocks == {0: 3, 1: 1, 2: 2}


@pytest.mark.parametrize(
    ("params", "tx", "difference"),
    [
        (zeros(3), TOPK, r"leaf 'w': the server has \[4\] float32, the worker \[3\] float32"),
        ({"w": torch.zeros(4).double()}, TOPK, r"the worker \[4\] float64"),
        ({**zeros(4), "b": torch.ones(1)}, TOPK, r"leaf 'b': the server has nothing, the worker"),
        (zeros(4), gx.chain(gx.topk(0.5), gx.ef()), r"the chain: the server runs gx.chain\(gx.t"),
    ],
)
def test_a_worker_that_differs_is_refused_by_name(params, tx, difference):
    where = store()
    with serve(where, zeros(4), TOPK, on_failure="stop") as server:
        with pytest.raises(gx.RankMismatchError, match=difference):
            join(where, params, tx)
        with join(where, zeros(4), TOPK) as worker:
            assert worker.push({"w": torch.ones(4)}).pushed
        server.join()


def test_other_containers_with_the_same_paths_are_no_difference():
    where = store()
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    mine = [{"bias": torch.zeros(1), "weight": torch.zeros(1, 2)}]
    with serve(where, model, TOPK), join(where, mine, TOPK) as worker:
        assert torch.equal(mine[0]["weight"], model[0].weight)
        gradients = [{"bias": torch.zeros(1), "weight": torch.tensor([[1.0, 0.0]])}]
        worker.push(gradients)
        worker.pull()
    torch.testing.assert_close(mine[0]["weight"], model[0].weight - torch.tensor([[1.0, 0.0]]))


def push_for_ever(worker):
    while True:
        worker.push({"w": torch.ones(1)})


def garbage(where, request):
    """Joins as a worker would, and posts bytes of its own in the place of a push."""
    mailbox = Mailbox(where, lambda: None)
    number = mailbox.store.add(JOINED, 1) - 1
    mailbox.post(f"request/{number}/1", request)
    mailbox.store.add(BELL, 1)
    return number


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"no frame at all",
        Frame(Kind.JOIN).encode(),
        Frame(Kind.PUSH).encode(),
        Frame(Kind.TAKEN).encode(),
    ],
)
def test_a_worker_that_sends_garbage_is_dropped_and_the_others_go_on(request_bytes):
    where = store()
    with serve(where, zeros(1)) as server, join(where, zeros(1)) as worker:
        number = garbage(where, request_bytes)
        while number not in server.lost:
            worker.push({"w": torch.ones(1)})
        assert "has sent damaged bytes" in server.lost[number]
        assert worker.push({"w": torch.ones(1)}).pushed


def test_a_damaged_reply_is_a_wire_format_error():
    where = store()
    with serve(where, zeros(1), bound=0), join(where, zeros(1)) as fast, join(where, zeros(1)):
        fast.push({"w": torch.ones(1)})
        Mailbox(where, lambda: None).post(f"reply/{fast.number}/3", b"garbage")
        for _ in range(2):
            with pytest.raises(WireFormatError, match="a frame has at least 40 bytes, got 7"):
                fast.pull()


def test_an_error_in_a_workers_block_is_a_failure_that_stops_all():
    where = store()
    with serve(where, zeros(1), on_failure="stop") as server:
        other = join(where, zeros(1))
        with pytest.raises(KeyError), join(where, zeros(1)):
            raise KeyError("images")
        with pytest.raises(gx.RankMismatchError, match="worker 1 has failed: KeyError: 'images'"):
            push_for_ever(other)
        with pytest.raises(gx.RankMismatchError, match="has stopped: worker 1 has failed"):
            other.pull()
        with pytest.raises(gx.RankMismatchError, match=r"^worker 1 has failed"):
            server.join()


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit("disk full")])
def test_an_error_in_the_server_reaches_all_workers(error):
    def fail(update):
        raise error

    where = store()
    with serve(where, zeros(1), on_update=fail) as server:
        worker = join(where, zeros(1))
        with pytest.raises(gx.RankMismatchError, match=r"has stopped: \w+: disk full"):
            push_for_ever(worker)
        with pytest.raises(type(error), match="disk full"):
            server.join(timeout=TIMEOUT)


def test_a_server_may_be_closed_by_on_update():
    where, started = store(), []

    def enough(update):
        if update.updates == 3:
            started[0].close()

    with serve(where, zeros(1), on_update=enough) as server:
        started.append(server)
        with pytest.raises(gx.RankMismatchError, match="the parameter server was closed"):
            push_for_ever(join(where, zeros(1)))
        server.join(timeout=TIMEOUT)
    assert server.updates == 3


def test_a_server_that_closes_tells_its_workers():
    where = store()
    with serve(where, zeros(1)):
        worker = join(where, zeros(1))
    with pytest.raises(gx.RankMismatchError, match="the parameter server was closed"):
        worker.push({"w": torch.ones(1)})


def test_without_a_server_a_worker_gives_up():
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=r"no sign of life from the parameter server in 0\.5"):
        join(store(), zeros(1), timeout=0.5)
    assert time.monotonic() - start < 5


def test_a_closed_worker_refuses_to_work():
    where = store()
    with serve(where, zeros(1)):
        worker = join(where, zeros(1))
        worker.close()
        worker.close()
        with pytest.raises(ConnectionError, match="the worker is closed"):
            worker.pull()


def test_a_store_serves_one_server():
    where = store()
    with serve(where, zeros(1)):
        pass
    with pytest.raises(ValueError, match="this store has had a parameter server before"):
        serve(where, zeros(1)).start()
    apart = [torch.distributed.PrefixStore(name, where) for name in "ab"]
    with serve(apart[0], zeros(1)) as first, serve(apart[1], zeros(1)) as second:
        with join(apart[1], zeros(1)) as worker:
            worker.push({"w": torch.ones(1)})
        assert (first.updates, second.updates) == (0, 1)


def test_a_chain_may_keep_its_own_loss_scale():
    tx = gx.chain(gx.dynamic_loss_scale(8.0), gx.topk(1.0), gx.ef())
    where = store()
    with serve(where, zeros(1), tx) as server, join(where, zeros(1), tx) as worker:
        assert worker.push({"w": torch.tensor([8.0])}).pushed
        assert server.parameters()["w"].item() == -1.0
        assert not worker.push({"w": torch.tensor([float("inf")])}).pushed
        assert worker.state.loss_scale < 8.0
        with pytest.raises(ValueError, match=r"multiply the loss by worker\.state\.loss_scale"):
            worker.push({"w": torch.ones(1)}, loss_scale=8.0)


def test_more_than_a_store_takes_at_once_is_carried_in_pieces():
    where = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine, gradient = zeros(3_000_000), torch.arange(3_000_000.0)
    with serve(where, zeros(3_000_000)) as server, join(where, mine) as worker:
        assert worker.push({"w": gradient}).wire_bytes > 12_000_000
        worker.pull()
        assert torch.equal(mine["w"], -gradient)
        assert torch.equal(server.parameters()["w"], -gradient)


def test_nothing_piles_up_in_the_store():
    where = store()
    with serve(where, zeros(4), TOPK), join(where, zeros(4), TOPK) as worker:
        worker.push({"w": torch.ones(4)})
        before = where.num_keys()
        for _ in range(20):
            worker.push({"w": torch.ones(4)})
            worker.pull()
        assert where.num_keys() <= before + 1


def test_threads_end():
    where = store()
    before = threading.active_count()
    with serve(where, zeros(1)), join(where, zeros(1)):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_join_says_what_it_waits_for():
    server = serve(store(), zeros(1))
    with pytest.raises(RuntimeError, match="has not been started"):
        server.join()
    with server, pytest.raises(TimeoutError, match="0 workers have come, of at least 2, and 0 are"):
        server.join(workers=2, timeout=0.05)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"bound": -1}, ValueError, r"bound=-1\): expected a whole number of 0 or more"),
        ({"bound": 1.5}, TypeError, r"bound=1\.5\)"),
        ({"timeout": 0}, ValueError, r"timeout=0\): expected seconds over 0"),
        ({"timeout": "1"}, TypeError, r"timeout='1'\)"),
        ({"on_failure": "retry"}, ValueError, "'retry'.*expected 'continue' or 'stop'"),
        ({"staleness_scaling": 1}, TypeError, r"staleness_scaling=1\): expected True or False"),
        ({"delay_compensation": -0.1}, ValueError, r"delay_compensation=-0\.1\)"),
        ({"delay_compensation": True}, TypeError, r"delay_compensation=True\)"),
        ({"on_update": 3}, TypeError, r"on_update=3\): expected a function"),
        ({"optimizer": 0.1}, TypeError, r"optimizer=0\.1\): expected a function of the param"),
        ({"optimizer": list}, TypeError, "it gives a list, expected a torch optimizer"),
    ],
)
def test_wrong_options_of_the_server_are_refused(options, error, reason):
    with pytest.raises(error, match=reason):
        serve(store(), zeros(1), **options)


def test_an_optimizer_of_other_tensors_is_refused():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="the server has copies of the parameters"):
        serve(store(), model, optimizer=lambda _: SGD(model.parameters()))


@pytest.mark.parametrize(
    ("tx", "reason"),
    [
        (gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()), r"leave gx\.allreduce\(\) out"),
        (gx.chain(gx.random_k(0.5, feedback=False)), "summed by ranks in step"),
        (gx.chain(gx.powersgd(1), gx.ef()), "summed by ranks in step"),
        (gx.chain(gx.accumulate(2), gx.topk(0.5), gx.ef()), r"leave gx\.accumulate\(2\) out"),
        (
            gx.chain(gx.topk(gx.Schedule(lambda step: 0.5, (0.5,), "half")), gx.ef()),
            "write a number for half",
        ),
    ],
)
@pytest.mark.parametrize("side", [serve, join])
def test_a_fragment_that_cannot_be_pushed_is_refused(side, tx, reason):
    with pytest.raises(ValueError, match=reason):
        side(store(), zeros(8, 8), tx)


@pytest.mark.parametrize("side", [serve, join])
def test_what_is_no_store_is_refused(side):
    with pytest.raises(TypeError, match=r"expected a torch\.distributed store"):
        side("tcp://localhost", zeros(1))


def test_jax_parameters_are_refused():
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match=r"parameter 'w' is a .*torch tensors"):
        serve(store(), {"w": jnp.zeros(2)})


def test_a_server_that_was_never_started_is_forgotten():
    there = weakref.ref(serve(store(), zeros(2)))
    gc.collect()
    assert there() is None
