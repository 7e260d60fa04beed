"""Ranks that die, stop or fail, and what the others are left with."""

import contextlib
import functools
import os
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path

from forked import forked
from killing import CHAINS, LAST, STEPS, Marks, ranks_of, train

LIMIT = 30.0  # seconds: the time-out of groups
POINTS = int(os.environ.get("GRADTX_KILL_POINTS", "20"))


def run(name, victim=None, late=None, fate=(None, 0.0, 0.0)):
    """What the ranks that are left have to tell; and where the victim was.

    Each tells of the weights before and after each step, the error that has ended it, and what was
    not as it ought to be after that.
    """
    size, told = ranks_of(name), []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store, marks = Path(folder, "store"), [Path(folder, f"marks {i}") for i in range(size)]
        ranks = []
        for i in range(size):
            own = (marks[i], *fate, i == victim) if i in (victim, late) else None
            ranks.append(stack.enter_context(forked(train, i, name, str(store), LIMIT, own)))
        for i, rank in enumerate(ranks):
            if i != victim:
                told.append(rank.hear(2 * LIMIT))
        if victim is None:
            return told, None
        ranks[victim].process.join(LIMIT)
        assert ranks[victim].process.exitcode == -signal.SIGKILL
        return told, Marks(marks[victim]).all()


@functools.cache
def undisturbed(name):
    """The weights before and after each step, the same on all ranks."""
    told, _ = run(name)
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
        told, mark = run(name, victim, late, fate)
        inside = mark["entered"] > mark["left"]
        where[
            "inside a collective" if inside else "between two" if mark["syncing"] else "else"
        ] += 1
        for weights, text, faults in told:
            assert not faults, drawn
            assert "does not answer" in text, drawn
            assert LAST < len(weights) <= len(undisturbed(name)), drawn
            assert weights == undisturbed(name)[: len(weights)], drawn
        # Whoever has heard all that it had to has taken the step.
        steps = [len(weights) for weights, _, _ in told]
        assert max(steps) - min(steps) <= (2 if name == "window" else 1), drawn
    print(dict(where))
    assert where["inside a collective"] > POINTS / 3, where
