"""Ranks that die, stop or fail, and what the others are left with."""

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

import gradtx as gx
from forked import forked
from killing import (
    CHAINS,
    LAST,
    STEPS,
    Marks,
    exchange_alone,
    fail_in_the_loss,
    lose_the_second,
    ranks_of,
    train,
)

ROOT = Path(__file__).parents[1]

LIMIT = 30.0  # seconds: the time-out of groups
POINTS = int(os.environ.get("GRADTX_KILL_POINTS", "20"))


@contextlib.contextmanager
def started(name, victim=None, late=None, fate=(None, 0.0, 0.0), how=signal.SIGKILL, limit=LIMIT):
    """Ranks that train, and the marks of the victim.

    Each tells of the weights before and after each step, the error that has ended it, and what was
    not as it ought to be after that.
    """
    size = ranks_of(name)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store, marks = Path(folder, "store"), [Path(folder, f"marks {i}") for i in range(size)]
        ranks = []
        for i in range(size):
            own = (marks[i], *fate, i == victim, how) if i in (victim, late) else None
            ranks.append(stack.enter_context(forked(train, i, name, str(store), limit, own)))
        yield ranks, None if victim is None else marks[victim]


def killed(name, victim, late, fate):
    """What the ranks that are left have to tell; and where the victim was."""
    with started(name, victim, late, fate) as (ranks, marks):
        told = [rank.hear(2 * LIMIT) for i, rank in enumerate(ranks) if i != victim]
        ranks[victim].process.join(LIMIT)
        assert ranks[victim].process.exitcode == -signal.SIGKILL
        return told, Marks(marks).all()


@functools.cache
def undisturbed(name):
    """The weights before and after each step, the same on all ranks."""
    with started(name) as (ranks, _):
        told = [rank.hear(2 * LIMIT) for rank in ranks]
    assert all(answer == (told[0][0], "", []) for answer in told)
    assert len(set(told[0][0])) > STEPS // 2
    return told[0][0]


def point(draw):
    """A chain, who dies, who is late, and when: at any time, or within a collective."""
    name = draw.choice(list(CHAINS))
    victim, late = draw.sample(range(ranks_of(name)), 2)
    within, held = draw.random() < 0.85, draw.random() < 0.8
    collective = draw.random() if within else None
    seconds = draw.uniform(0.02, 0.1) if within and held else 0.0
    return name, victim, late, (collective, draw.random(), seconds)


def test_a_rank_is_killed_at_random_points_of_a_step():
    """20 points; ``GRADTX_KILL_POINTS=200`` makes more of them."""
    draw, where = random.Random(POINTS), Counter()
    for _ in range(POINTS):
        name, victim, late, fate = drawn = point(draw)
        told, mark = killed(name, victim, late, fate)
        inside = mark["entered"] > mark["left"]
        where[
            "inside a collective" if inside else "between two" if mark["syncing"] else "else"
        ] += 1
        for weights, text, faults in told:
            assert not faults, drawn
            assert "no answer from " in text, drawn
            assert LAST < len(weights) <= len(undisturbed(name)), drawn
            assert weights == undisturbed(name)[: len(weights)], drawn
        named = [text.split("no answer from ")[1].split(":")[0] for _, text, _ in told]
        assert any(f"rank {victim}" in who for who in named), (drawn, named)
        # Whoever has heard all that it had to has taken the step.
        steps = [len(weights) for weights, _, _ in told]
        assert max(steps) - min(steps) <= (2 if name == "window" else 1), drawn
    print(dict(where))
    assert where["inside a collective"] > POINTS / 3, where


STOPS = [("gather", (0.9, 0.3, 0.1)), ("sharded", (0.6, 0.5, 0.1)), ("overlap", (0.5, 0.1, 0.1))]


@pytest.mark.parametrize(("name", "fate"), STOPS, ids=[name for name, _ in STOPS])
def test_a_rank_that_stops_for_a_while_is_waited_for(name, fate):
    with started(name, 1, 2, fate, signal.SIGSTOP) as (ranks, _):
        ranks[1].await_stop()
        os.kill(ranks[1].process.pid, signal.SIGCONT)
        for rank in ranks:
            assert rank.hear(2 * LIMIT) == (undisturbed(name), "", [])


def test_a_rank_that_stops_for_longer_than_the_time_out_is_lost_and_does_not_step_either():
    name, limit = "gather", 5.0
    with started(name, 1, 2, (0.9, 0.3, 0.1), signal.SIGSTOP, limit) as (ranks, _):
        ranks[1].await_stop()
        told = [ranks[i].hear(2 * LIMIT) for i in (0, 2)]
        os.kill(ranks[1].process.pid, signal.SIGCONT)
        told.append(ranks[1].hear(2 * LIMIT))
    for weights, text, faults in told:
        assert "time-out (5 s), or " in text
        assert not faults
        assert weights == undisturbed(name)[: len(weights)]
        assert len(weights) < len(undisturbed(name))
    assert len({len(weights) for weights, _, _ in told}) == 1


def losing(tells):
    """What three ranks have to tell of an error in the loss of rank 1."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = str(Path(folder, "store"))
        ranks = [stack.enter_context(forked(fail_in_the_loss, i, store, tells)) for i in range(3)]
        if not tells:
            with pytest.raises(AssertionError, match="the loss is below zero"):
                ranks[1].hear()
        return [ranks[i].hear() for i in ((0, 1, 2) if tells else (0, 2))]


def test_a_rank_that_fails_in_its_loss_can_tell_the_others_and_all_go_on():
    heard, weights = zip(*losing(tells=True), strict=True)
    text = "rank 1 failed in this step: ArithmeticError: the loss is below zero"
    assert heard == ([("RankMismatchError", text, True)], [], [("RankMismatchError", text, True)])
    assert len(set(weights)) == 1


def test_a_rank_that_fails_in_its_loss_and_ends_is_lost():
    for heard, _ in losing(tells=False):
        assert [(kind, kept) for kind, _, kept in heard] == [("RankLostError", True)] * 2


def test_a_lost_rank_is_heard_of_at_once_where_the_backend_is_not_named():
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = str(Path(folder, "store"))
        ranks = [stack.enter_context(forked(lose_the_second, i, store)) for i in range(4)]
        for text, seconds, kept in [ranks[i].hear(2 * LIMIT) for i in (0, 2, 3)]:
            assert "no answer from " in text
            assert seconds < LIMIT / 3
            assert kept
        for i in (0, 2, 3):
            ranks[i].tell("end")


# Without the last a restarted worker may read from the agent's store where those before it
# listened, and fails to connect, or waits for ever (pytorch/pytorch#135712).
SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def torchrun(*arguments):
    """What a program prints under torchrun on two ranks, which may be restarted once."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *command, "--max-restarts", "1", *arguments],
        env={**os.environ, "PYTHONPATH": path, **SETTINGS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=240)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out, err


def test_a_run_that_torchrun_restarts_ends_as_if_nothing_had_happened(tmp_path):
    draw = random.Random(1)
    point = [draw.randrange(2), draw.random(), draw.random(), draw.uniform(0.05, 0.1)]
    script = str(ROOT / "tests" / "restarted.py")
    (tmp_path / "killed").mkdir()
    out, err = torchrun(script, str(tmp_path / "killed"), *map(str, point))
    found = re.findall(r"rank (\d): (\w+) from step (\d+), restarted 1", out)
    first = {int(step) for _, _, step in found}
    assert "exitcode: -9" in err
    assert "RankLostError" in err
    (tmp_path / "whole").mkdir()
    with contextlib.ExitStack() as stack:
        arguments = str(tmp_path / "store"), tmp_path / "whole"
        ranks = [stack.enter_context(forked(exchange_alone, i, *arguments)) for i in range(2)]
        whole = [rank.hear(2 * LIMIT) for rank in ranks]
    assert whole[0] != whole[1]  # Residuals, statistics and dropout are of their rank.
    assert sorted((int(i), left) for i, left, _ in found) == list(enumerate(whole))
    assert len(first) == 1
    assert first <= {LAST - 1, LAST, LAST + 1}


class Failing:
    """A transformation of somebody's own, behind the exchange."""

    def init(self, params):
        return None

    def update(self, updates, state, params=None):
        raise ArithmeticError("no step today")


def test_gradients_are_as_they_were_where_a_stage_behind_the_exchange_fails():
    weight = torch.zeros(100, requires_grad=True)
    gradient = torch.arange(100.0)
    weight.grad = gradient.clone()
    own = gx.declare(Failing(), name="failing", linear=True, stateful=False)
    pipe = gx.Pipeline(gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(), own), {"w": weight})
    with pytest.raises(ArithmeticError, match="no step today"):
        pipe.sync()
    assert torch.equal(weight.grad, gradient)
