"""Server and workers as processes, over a TCPStore; some of them die."""

import os
import signal
import subprocess
import sys

import pytest

import apart
import gradtx as gx
from forked import Forked, forked

BOUND = 3


def test_a_sleeping_worker_holds_the_others_within_the_bound():
    clocks, store = [], apart.host()

    def note(update):
        clocks.append(update.clocks)

    with (
        apart.serve(store, bound=BOUND, on_update=note) as server,
        forked(apart.work, store.port, 12, 0.03) as slow,
        forked(apart.work, store.port, 12, 0.0) as fast,
    ):
        numbers = [slow.hear(), fast.hear()]
        slow.tell("go")
        fast.tell("go")
        assert slow.hear() == fast.hear() == list(range(1, 13))
        server.join(workers=2, timeout=20)
    spread = [max(c.values()) - min(c.values()) for c in clocks]
    assert len(clocks) == 24
    assert sorted(numbers) == [0, 1]
    assert max(spread) == BOUND + 1
    assert server.lost == {}


def test_a_dead_worker_no_longer_holds_the_others():
    store = apart.host()
    with (
        apart.serve(store, bound=BOUND) as server,
        forked(apart.work, store.port, 100, 0.0) as victim,
        forked(apart.work, store.port, 20, 0.0) as other,
    ):
        number = victim.hear()
        other.hear()
        other.tell("go")
        victim.process.kill()
        assert other.hear() == list(range(1, 21))
        server.join(workers=2, timeout=20)
    assert list(server.lost) == [number]
    assert server.lost[number] == f"worker {number} has given no sign of life in 2 s"


def test_a_dead_worker_stops_all_if_so_configured():
    store = apart.host()
    with (
        apart.serve(store, bound=BOUND, on_failure="stop") as server,
        forked(apart.work, store.port, 100, 0.0) as victim,
        forked(apart.work_until_an_error, store.port) as other,
    ):
        number = victim.hear()
        other.hear()
        victim.process.kill()
        reason = f"worker {number} has given no sign of life in 2 s"
        text = f"the parameter server has stopped: {reason}"
        assert [error[:2] for error in other.hear()] == [("RankMismatchError", text)] * 2
        with pytest.raises(gx.RankMismatchError, match=reason):
            server.join(timeout=20)


@pytest.mark.parametrize("end", [lambda s: s.process.kill(), Forked.suspend], ids=["kill", "stop"])
def test_a_dead_server_is_one_clear_error_in_time(end):
    """Stopped, it is like a machine that is gone: its sockets stay open, and nothing comes."""
    with (
        forked(apart.serve_for_ever) as server,
        forked(apart.work_until_an_error, server.hear()) as worker,
    ):
        worker.hear()
        end(server)
        errors = worker.hear()
    kinds, texts, seconds = zip(*errors, strict=True)
    assert set(kinds) == {"ConnectionError"}
    assert len(set(texts)) == 1
    assert "the store of the parameter server is gone" in texts[0] or (
        texts[0] == "no sign of life from the parameter server in 2 s"
    )
    # The time-out, and as much again for a machine that has much to do.
    assert max(seconds) < 2 * apart.TIMEOUT


def test_a_worker_that_was_taken_for_dead_is_told():
    store = apart.host()
    with (
        apart.serve(store) as server,
        forked(apart.work_until_an_error, store.port) as paused,
    ):
        number = paused.hear()
        paused.suspend()
        server.join(timeout=20)
        os.kill(paused.process.pid, signal.SIGCONT)
        (kind, text, _), _ = paused.hear()
    assert kind == "RankMismatchError"
    assert text.startswith("the parameter server no longer counts this worker in")
    assert list(server.lost) == [number]


def test_workers_that_exit_without_closing_are_lost():
    store = apart.host()
    with apart.serve(store) as server, forked(apart.exit_without_closing, store.port) as child:
        numbers = child.hear()
        child.process.join(10)
        assert child.process.exitcode == 0
        server.join(workers=2, timeout=20)
    assert sorted(server.lost) == numbers


def interpreter(code):
    """A Python of its own, which runs its exit handlers; what it prints is read from it."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", f"import apart, gradtx as gx\n{code}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interpreter_that_holds_server_and_worker_exits():
    code = (
        "store = apart.host()\nserver = apart.serve(store).start()\n"
        "worker = gx.Worker(store, apart.start(), apart.TX)\nprint(worker.clock)"
    )
    with interpreter(code) as child:
        out, errors = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "0\n"), errors


def test_an_interpreter_whose_server_is_silent_exits():
    code = (
        "worker = gx.Worker(apart.connect(int(input())), apart.start(), apart.TX, timeout=2.0)\n"
        "print('there', flush=True)\ninput()\n"
        "try:\n    worker.pull()\nexcept ConnectionError as error:\n    print(error)"
    )
    with forked(apart.serve_for_ever) as server, interpreter(code) as child:
        child.stdin.write(f"{server.hear()}\n")
        child.stdin.flush()
        assert child.stdout.readline() == "there\n"
        server.suspend()
        out, errors = child.communicate("go\n", timeout=60)
    expected = "no sign of life from the parameter server in 2 s\n"
    assert (child.returncode, out) == (0, expected), errors
