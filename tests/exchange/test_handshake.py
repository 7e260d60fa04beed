import math
import re
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from gradtx.checkpoint import flatten_state
from gradtx.core.transformation import Context
from gradtx.core.tree import layout_of
from gradtx.exchange.group import Group, ProcessGroup, default_group, find_group
from gradtx.exchange.handshake import NBYTES, Hello, agree
from gradtx.testing import run_ranks
from gradtx.wire import WireFormatError
from ranks import Spy, gloo_ranks, spied

W, B = torch.ones(4, 5), torch.ones(4)
MEAN = {"w": W, "b": B}


def outcome(fn, *args, **kwargs):
    """What a call raises, as type and text; or "fine" and what it returns."""
    try:
        return "fine", fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)


def first_update(tx, grads, steps=0):
    """The outcome of a rank's first step with others, after some steps alone."""
    state = tx.init(grads)
    alone = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(group=Group()))
    for _ in range(steps):
        _, state = alone.update(grads, state)
    return outcome(lambda: tx.update(grads, state)[0])


TOPK = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="gather"))
DENSE = gx.chain(gx.allreduce())


def keeping(path):
    """A chain whose filter keeps one leaf; which one is not in its code."""
    return gx.chain(
        gx.filter_params(lambda p, leaf, info: p == path),
        gx.topk(0.5),
        gx.ef(),
        gx.allreduce(algorithm="gather"),
    )


# For each case: what most ranks run, what the last rank runs, and what differs.
CASES = {
    "another ratio": (
        (TOPK, MEAN),
        (gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce(algorithm="gather")), MEAN),
        "ranks differ in the chain: "
        "rank 0 runs gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(algorithm='gather')), "
        "rank {last} runs gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce(algorithm='gather'))",
    ),
    "another op": (
        (DENSE, MEAN),
        (gx.chain(gx.allreduce(op="sum")), MEAN),
        "ranks differ in the chain: rank 0 runs gx.chain(gx.allreduce()), "
        "rank {last} runs gx.chain(gx.allreduce(op='sum'))",
    ),
    "another shape": (
        (TOPK, MEAN),
        (TOPK, {"w": W.t().contiguous(), "b": B}),
        "ranks differ in leaf 'w': rank 0 has [4, 5] float32, rank {last} has [5, 4] float32",
    ),
    "another shape, dense": (
        (DENSE, MEAN),
        (DENSE, {"w": W, "b": torch.ones(3)}),
        "ranks differ in leaf 'b': rank 0 has [4] float32, rank {last} has [3] float32",
    ),
    "another dtype": (
        (TOPK, MEAN),
        (TOPK, {"w": W.double(), "b": B}),
        "ranks differ in leaf 'w': rank 0 has [4, 5] float32, rank {last} has [4, 5] float64",
    ),
    "a missing leaf": (
        (TOPK, MEAN),
        (TOPK, {"w": W}),
        "ranks differ in leaf 'b': rank 0 has [4] float32, rank {last} has nothing",
    ),
    "a leaf more": (
        (DENSE, {"w": W}),
        (DENSE, MEAN),
        "ranks differ in leaf 'b': rank 0 has nothing, rank {last} has [4] float32",
    ),
    "two things": (
        (TOPK, MEAN),
        (DENSE, {"w": W}),
        "ranks differ in the chain: "
        "rank 0 runs gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(algorithm='gather')), "
        "rank {last} runs gx.chain(gx.allreduce()); "
        "leaf 'b': rank 0 has [4] float32, rank {last} has nothing",
    ),
}


def _case(rank, size, name):
    most, last, _ = CASES[name]
    return first_update(*(last if rank == size - 1 else most))


def _good_step(rank):
    """Whether the group still works: the outcome of a good step."""
    kind, out = first_update(DENSE, {"w": torch.tensor([1.0 + rank])})
    return kind, out["w"].tolist()


def _all_cases(rank, size):
    return {name: _case(rank, size, name) for name in CASES}, _good_step(rank)


def assert_mismatch(outcomes, text):
    """All ranks say the same, which begins with a text: one difference may bring others."""
    assert {kind for kind, _ in outcomes} == {"RankMismatchError"}
    assert len({said for _, said in outcomes}) == 1
    assert outcomes[0][1].startswith(text)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_differ_all_raise_and_say_in_what(size, name):
    text = CASES[name][2].format(last=size - 1)
    outcomes = run_ranks(size, lambda rank: _case(rank, size, name))
    assert_mismatch(outcomes, text)


@pytest.fixture(scope="module")
def over_gloo():
    return gloo_ranks(3, _all_cases, 3)


@pytest.mark.parametrize("name", CASES)
def test_over_gloo_ranks_that_differ_all_raise(over_gloo, name):
    text = CASES[name][2].format(last=2)
    assert_mismatch([cases[name] for cases, _ in over_gloo], text)


def test_over_gloo_the_group_works_after_a_mismatch(over_gloo):
    assert [good for _, good in over_gloo] == [("fine", [2.0])] * 3


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_the_handshake_is_sent_when_ranks_differ(name):
    def rank(i):
        def run(spy):
            _case(i, 3, name)
            return spy.calls

        return spied(run)

    for calls in run_ranks(3, rank):
        assert [call[:2] for call in calls] == [("all_gather", "uint8")] * 3
        # The fixed message; then, since they differ, the lengths of the descriptions, and these.
        assert [call[2] for call in calls[:2]] == [NBYTES, 8]


def test_many_differences_are_cut():
    def rank(i):
        return first_update(DENSE, {f"{k:02}": torch.ones(1 + i) for k in range(25)})

    for kind, text in run_ranks(2, rank):
        assert kind == "RankMismatchError"
        assert text.count("leaf '") == 20
        assert text.endswith("; and 5 more")


def test_each_rank_that_differs_from_rank_0_is_named():
    def rank(i):
        return first_update(DENSE, {"w": torch.ones(1 if i == 0 else 2)})

    text = (
        "ranks differ in leaf 'w': rank 0 has [1] float32, rank 1 has [2] float32; "
        "leaf 'w': rank 0 has [1] float32, rank 2 has [2] float32"
    )
    assert run_ranks(3, rank) == [("RankMismatchError", text)] * 3


def _none_elsewhere(rank):
    grads = [{"a": None, "w": W}, {"c": None, "w": W}][rank]
    return first_update(DENSE, grads)


def test_leaves_that_are_none_at_other_paths_are_a_difference():
    text = (
        "ranks differ in leaf 'a': rank 0 has None, rank 1 has nothing; "
        "leaf 'c': rank 0 has nothing, rank 1 has None"
    )
    assert run_ranks(2, _none_elsewhere) == [("RankMismatchError", text)] * 2


def _other_leaves_kept(rank):
    """Filters of one code, one of which closes over another path."""
    return first_update(keeping("wb"[rank]), {"w": W, "b": B})


def test_filters_that_keep_other_leaves_are_a_difference():
    outcomes = run_ranks(2, _other_leaves_kept)
    assert [kind for kind, _ in outcomes] == ["RankMismatchError"] * 2


def _module_on_one_rank(rank):
    """`skip_bn` knows the layers on rank 0, and on rank 1 only paths that say nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    tx = gx.chain(gx.skip_bn(), gx.topk(0.1), gx.ef(), gx.allreduce())
    params = dict(model.named_parameters())
    state = tx.init(model if rank == 0 else params)
    grads = {path: torch.ones_like(p) for path, p in params.items()}
    return outcome(lambda: tx.update(grads, state))[0]


def test_filters_that_know_the_module_on_one_rank_only_are_a_difference():
    assert run_ranks(2, _module_on_one_rank) == ["RankMismatchError"] * 2


def is_wide(path, leaf, info):
    return leaf.ndim > 1


def _filtered_by_a_function(rank):
    chains = [
        gx.chain(gx.filter_params(is_wide), gx.topk(0.1), gx.ef(), gx.allreduce()),
        gx.chain(gx.masked(gx.error_feedback(gx.topk(0.1)), is_wide), gx.allreduce()),
    ]
    return [first_update(tx, MEAN)[0] for tx in chains]


@pytest.fixture(scope="module")
def filtered_by_a_function():
    return gloo_ranks(2, _filtered_by_a_function)


@pytest.mark.parametrize(("i", "how"), [(0, "filter_params"), (1, "masked")])
def test_one_function_as_a_predicate_is_the_same_in_all_processes(filtered_by_a_function, i, how):
    assert [kinds[i] for kinds in filtered_by_a_function] == ["fine"] * 2


@pytest.mark.parametrize("tx", [TOPK, gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(op="sum"))])
def test_other_step_counts_are_a_difference(tx):
    outcomes = run_ranks(3, lambda rank: first_update(tx, MEAN, steps=[2, 2, 1][rank]))
    text = (
        "the ranks' states are at different steps: rank 0 at 2, rank 1 at 2, rank 2 at 1; "
        "load the checkpoint of one step on all ranks"
    )
    assert outcomes == [("RankMismatchError", text)] * 3


def test_other_step_counts_end_with_the_handshake():
    def rank(i):
        def run(spy):
            first_update(TOPK, MEAN, steps=i)
            return spy.calls

        return spied(run)

    assert run_ranks(2, rank) == [[("all_gather", "uint8", NBYTES)]] * 2


def test_equal_step_counts_go_on():
    outcomes = run_ranks(2, lambda rank: first_update(TOPK, MEAN, steps=3))
    assert [kind for kind, _ in outcomes] == ["fine"] * 2


@pytest.mark.parametrize("algorithm", ["gather", "auto", "sharded"])
def test_a_rank_that_falls_a_step_behind_later_is_noticed(algorithm):
    tx = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(algorithm=algorithm))
    grads = {"w": torch.ones(500)}

    def rank(i):
        state = tx.init(grads)
        _, once = tx.update(grads, state)
        return outcome(tx.update, grads, state if i == 1 else once)

    assert run_ranks(2, rank) == [
        ("RankMismatchError", "this is step 1 on rank 0, but step 0 on rank 1"),
        ("RankMismatchError", "this is step 0 on rank 1, but step 1 on rank 0"),
    ]


def test_ranks_that_agree_do_not_shake_hands_again():
    def rank(i):
        def run(spy):
            state = TOPK.init(MEAN)
            for _ in range(4):
                _, state = TOPK.update(MEAN, state)
            return [numel for _, _, numel in spy.calls].count(NBYTES)

        return spied(run)

    assert run_ranks(2, rank) == [1, 1]


class Fuse:
    """A user's stage, which raises when it is told to."""

    def __init__(self):
        self.blow = ""

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        if self.blow:
            raise OverflowError(self.blow)
        return updates, state


def local(fuse):
    return gx.declare(fuse, name="fuse", stateful=False, needs_reduced=False)


TREE = {"w": torch.ones(40, 30), "b": torch.ones(7), "d": torch.ones(3, dtype=torch.float64)}
KINDS = {
    "dense": lambda fuse: gx.chain(local(fuse), gx.allreduce()),
    "gathered": lambda fuse: gx.chain(
        local(fuse), gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="gather")
    ),
    "two shots": lambda fuse: gx.chain(
        local(fuse), gx.cast("float8_e4m3fn"), gx.ef(), gx.allreduce(algorithm="two_shot")
    ),
    "sharded": lambda fuse: gx.chain(
        local(fuse), gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="sharded")
    ),
    "root": lambda fuse: gx.chain(
        local(fuse), gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="root")
    ),
    "mixed": lambda fuse: gx.chain(
        gx.unscale(),
        local(fuse),
        gx.filter_params(gx.is_matrix),
        gx.topk(0.1),
        gx.ef(),
        gx.allreduce(),
    ),
}


def gradients(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {k: torch.randn(v.shape, generator=generator).to(v.dtype) for k, v in TREE.items()}


def numbers(tree):
    return {key: value.tolist() for key, value in flatten_state(tree).items()}


def failing_run(rank, kind, how, at, failing=(1,)):
    """Steps 0, 1 and 2; at one of them some ranks fail, and then repeat the step in good order.

    Returns the outcome of the failing step, whether the state is as before it, and the results.
    """
    fuse = Fuse()
    tx = KINDS[kind](fuse)
    state, results = tx.init(TREE), []
    failed, kept = None, None
    for step in range(3):
        grads = gradients(rank, step)
        if step == at:
            before, wrong = numbers(state), dict(grads)
            if rank in failing and how == "structure":
                del wrong["b"]
            elif rank in failing and how == "stage":
                fuse.blow = "the fuse has blown"
            failed = outcome(tx.update, wrong, state, loss_scale=1.0)
            fuse.blow, kept = "", numbers(state) == before
        out, state = tx.update(grads, state, loss_scale=1.0)
        results.append({k: v.tolist() for k, v in out.items()})
    return failed, kept, results


ERRORS = {
    "structure": (
        "ValueError",
        "the gradients have another structure than the parameters given to init: missing 'b' "
        "(a leaf without a gradient is None, its key stays)",
    ),
    "stage": ("OverflowError", "the fuse has blown"),
}
WHEN = {0: "before the first exchange", 1: "in this step"}
FAILURES = [(kind, how, at) for kind in KINDS for how in ERRORS for at in WHEN]


def expected_failure(how, at, size, failing=(1,)):
    error = ERRORS[how]
    text = "; ".join(f"rank {r} failed {WHEN[at]}: {error[0]}: {error[1]}" for r in failing)
    return [error if r in failing else ("RankMismatchError", text) for r in range(size)]


@pytest.mark.parametrize(("kind", "how", "at"), FAILURES)
def test_a_rank_that_fails_raises_its_own_error_and_the_others_quote_it(kind, how, at):
    runs = run_ranks(3, lambda rank: failing_run(rank, kind, how, at))
    assert [failed for failed, _, _ in runs] == expected_failure(how, at, 3)


@pytest.mark.parametrize(("kind", "how", "at"), FAILURES)
def test_after_a_failure_the_next_step_works_with_the_old_state(kind, how, at):
    runs = run_ranks(3, lambda rank: failing_run(rank, kind, how, at))
    good = run_ranks(3, lambda rank: failing_run(rank, kind, how, None))
    assert [(kept, results) for _, kept, results in runs] == [(True, r) for _, _, r in good]


def _anew(fn, *args):
    """With a group on which nothing has been agreed yet."""
    with default_group(ProcessGroup()):
        return fn(*args)


def _failures_over_gloo(rank):
    failures = {case: _anew(failing_run, rank, *case) for case in FAILURES}
    return failures, {kind: _anew(failing_run, rank, kind, None, None)[2] for kind in KINDS}


@pytest.fixture(scope="module")
def failures_over_gloo():
    return gloo_ranks(3, _failures_over_gloo)


@pytest.mark.parametrize("case", FAILURES, ids=str)
def test_over_gloo_a_rank_that_fails_raises_its_own_error(failures_over_gloo, case):
    outcomes = [failures[case][0] for failures, _ in failures_over_gloo]
    assert outcomes == expected_failure(case[1], case[2], 3)


@pytest.mark.parametrize("case", FAILURES, ids=str)
def test_over_gloo_the_next_step_works_with_the_old_state(failures_over_gloo, case):
    for failures, good in failures_over_gloo:
        assert failures[case][1:] == (True, good[case[0]])


@pytest.mark.parametrize("at", WHEN)
@pytest.mark.parametrize("kind", KINDS)
def test_several_ranks_that_fail_are_all_named(kind, at):
    runs = run_ranks(4, lambda rank: failing_run(rank, kind, "stage", at, failing=(1, 3)))
    assert [failed for failed, _, _ in runs] == expected_failure("stage", at, 4, failing=(1, 3))


@pytest.mark.parametrize("at", WHEN)
@pytest.mark.parametrize("kind", KINDS)
def test_if_all_ranks_fail_each_raises_its_own_error(kind, at):
    runs = run_ranks(2, lambda rank: failing_run(rank, kind, "stage", at, failing=(0, 1)))
    assert [failed for failed, _, _ in runs] == [ERRORS["stage"]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_alone_is_just_raised(kind):
    [(failed, kept, _)] = run_ranks(1, lambda rank: failing_run(rank, kind, "stage", 1, (0,)))
    assert (failed, kept) == (ERRORS["stage"], True)


def test_a_failure_in_a_bad_step_of_another_rank_is_told():
    fuse = [Fuse(), Fuse()]

    def rank(i):
        tx = KINDS["gathered"](fuse[i])
        _, state = tx.update(gradients(i, 0), tx.init(TREE))
        fuse[i].blow = "the fuse has blown" * i
        bad = {**gradients(i, 1), "b": torch.full((7,), math.inf)}
        return outcome(tx.update, bad, state)

    assert run_ranks(2, rank) == expected_failure("stage", 1, 2)


def test_a_failure_in_the_last_stage_is_noticed_at_the_next_step():
    def rank(i):
        fuse = Fuse()
        tx = gx.chain(
            gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="gather"), gx.declare(fuse, name="fuse")
        )
        _, state = tx.update(TREE, tx.init(TREE))
        fuse.blow = "the fuse has blown" * i
        kind, value = outcome(tx.update, TREE, state)
        fuse.blow = ""
        return kind, outcome(tx.update, TREE, value[1] if kind == "fine" else state)

    assert run_ranks(2, rank) == [
        ("fine", ("RankMismatchError", "this is step 2 on rank 0, but step 1 on rank 1")),
        (
            "OverflowError",
            ("RankMismatchError", "this is step 1 on rank 1, but step 2 on rank 0"),
        ),
    ]


def test_a_wrong_loss_scale_on_one_rank_is_told():
    def rank(i):
        tx = gx.chain(gx.unscale(), gx.allreduce())
        return outcome(tx.update, MEAN, tx.init(MEAN), loss_scale=-1.0 if i == 0 else 1.0)

    own = "loss_scale is -1.0: expected a positive, finite number"
    assert run_ranks(2, rank) == [
        ("ValueError", own),
        ("RankMismatchError", f"rank 0 failed before the first exchange: ValueError: {own}"),
    ]


@pytest.mark.parametrize("wrong", [W.to_sparse(), W.int(), "w", W.double(), torch.ones(3)])
@pytest.mark.parametrize("at", WHEN)
def test_a_leaf_that_is_refused_on_one_rank_is_told(at, wrong):
    def rank(i):
        state = DENSE.init(MEAN)
        for _ in range(at):
            _, state = DENSE.update(MEAN, state)
        return outcome(DENSE.update, {**MEAN, "w": wrong if i == 1 else W}, state)

    first, (kind, text) = run_ranks(2, rank)
    assert kind in ("TypeError", "ValueError")
    assert first == ("RankMismatchError", f"rank 1 failed {WHEN[at]}: {kind}: {text}")


@pytest.mark.parametrize("text", ["x" * 3000, "Größe ∞ " * 300])
def test_a_long_error_is_cut(text):
    def rank(i):
        fuse = Fuse()
        tx = KINDS["dense"](fuse)
        fuse.blow = text if i else ""
        return outcome(tx.update, TREE, tx.init(TREE))[1]

    told = run_ranks(2, rank)[0]
    start = "rank 1 failed before the first exchange: OverflowError: "
    assert told.startswith(start + text[:100])
    assert len(told.encode()) <= NBYTES + len(start) + 3


hellos = st.builds(
    Hello,
    chain=st.integers(0, 2**64 - 1),
    layout=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1),
    error=st.text(max_size=200),
)


@given(hellos)
def test_a_handshake_comes_back(hello):
    assert Hello.decode(hello.encode()) == hello


@given(hellos)
def test_a_handshake_has_a_fixed_size(hello):
    assert hello.encode().shape == (NBYTES,)


HEAD = struct.Struct("<4sHHQQQI")


def forged(magic=b"GRTH", version=1, failed=0, length=0):
    head = HEAD.pack(magic, version, failed, 1, 2, 3, length)
    return torch.frombuffer(bytearray(head.ljust(NBYTES, b"\0")), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (torch.zeros(1023, dtype=torch.uint8), "a handshake has 1024 bytes, got 1023"),
        (torch.zeros(0, dtype=torch.uint8), "a handshake has 1024 bytes, got 0"),
        (
            forged(magic=b"GRTX"),
            "not a handshake of version 1: magic b'GRTX', version 1",
        ),
        (forged(version=2), "not a handshake of version 1: magic b'GRTH', version 2"),
        (forged(failed=2), "malformed handshake: flag 2, text of 0 bytes"),
        (forged(failed=1, length=989), "malformed handshake: flag 1, text of 989 bytes"),
        (
            forged(failed=1, length=2**32 - 1),
            "malformed handshake: flag 1, text of 4294967295 bytes",
        ),
    ],
)
def test_a_malformed_handshake_is_refused(message, text):
    with pytest.raises(WireFormatError, match=f"^{re.escape(text)}$"):
        Hello.decode(message)


@given(st.binary(min_size=HEAD.size - 6, max_size=NBYTES - 6))
def test_no_handshake_makes_the_decoder_fail_otherwise(rest):
    data = bytearray((struct.pack("<4sH", b"GRTH", 1) + rest).ljust(NBYTES, b"\0"))
    try:
        hello = Hello.decode(torch.frombuffer(data, dtype=torch.uint8))
    except WireFormatError:
        return
    assert Hello.decode(hello.encode()) == hello


def test_an_error_without_a_text_is_still_an_error():
    assert Hello.decode(forged(failed=1)).error == "unknown error"


class Answers(Group):
    """One of two ranks; the other gives these answers."""

    size = 2

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)

    def _all_gather(self, message):
        data = self.answers.pop(0).ljust(message.numel(), b" ")
        return [message, torch.frombuffer(bytearray(data), dtype=torch.uint8)]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([struct.pack("<Q", 2**62)], f"descriptions of {2**62} bytes: expected at most"),
        ([struct.pack("<Q", 9), b"not JSON"], "malformed description b'not JSON"),
        ([struct.pack("<Q", 9), b"[1, 2]"], "malformed description"),
        ([struct.pack("<Q", 9), b"\xff\xff"], "malformed description"),
        ([struct.pack("<Q", 9), b'["a", {"b": 3}]'], "malformed description"),
    ],
)
def test_a_difference_that_is_malformed_is_refused(answers, text):
    hello = Hello(1, 2, 0).encode().numpy().tobytes()
    with pytest.raises(WireFormatError, match=re.escape(text)):
        agree(Answers(hello, *answers), Context(layout_of([torch.zeros(1)]), "chain"), 0)


class Noise(Spy):
    """A link that changes one byte of what rank 1 gathers, from its second message on."""

    def __init__(self, inner, position):
        super().__init__(inner)
        self.position = position

    def _all_gather(self, message):
        if self.rank == 1 and len(self.calls) > 1:
            message = message.clone()
            message[self.position] ^= 0xFF
        return super()._all_gather(message)


# Magic, version, flags, fingerprint, leaves, length, absent leaves; and the end of the index code,
# before the ten values.
@pytest.mark.parametrize("position", [0, 4, 7, 8, 20, 24, 40, -41])
def test_a_damaged_message_is_refused_by_all_ranks(position):
    tx = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="gather"))
    grads = {"w": torch.arange(100.0)}

    def rank(i):
        with default_group(Noise(find_group(), position)):
            return outcome(tx.update, grads, tx.init(grads))[0]

    assert run_ranks(2, rank) == ["WireFormatError"] * 2


def test_a_damaged_step_is_a_mismatch():
    tx = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="gather"))
    grads = {"w": torch.arange(100.0)}

    def rank(i):
        with default_group(Noise(find_group(), 16)):
            return outcome(tx.update, grads, tx.init(grads))[0]

    assert run_ranks(2, rank)[0] == "RankMismatchError"


def test_agree_is_silent_where_ranks_agree():
    def rank(i):
        agree(find_group(), Context(layout_of(MEAN), "chain"), 5)

    assert run_ranks(3, rank) == [None] * 3


def test_another_mask_under_the_same_chain_and_tree_is_agreed_on_anew():
    tx = gx.chain(gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())
    model = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.BatchNorm1d(60))
    grads = {path: torch.ones_like(p) for path, p in model.named_parameters()}

    def rank(i):
        tx.update(grads, tx.init(dict(grads)))
        state = tx.init(model)
        _, state = tx.update(grads, state)
        with pytest.raises((ValueError, gx.RankMismatchError)) as caught:
            tx.update({"0.weight": torch.ones(1)} if i else grads, state)
        return type(caught.value).__name__

    assert run_ranks(2, rank) == ["RankMismatchError", "ValueError"]


def test_a_state_of_another_chain_on_one_rank_is_told_to_the_others():
    tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce())
    grads = {"w": torch.ones(1000)}

    def rank(i):
        _, state = tx.update(grads, tx.init(grads))
        with pytest.raises((TypeError, gx.RankMismatchError)) as caught:
            tx.update(grads, () if i else state)
        return type(caught.value).__name__

    assert run_ranks(2, rank) == ["RankMismatchError", "TypeError"]


def test_an_error_that_cannot_be_written_as_utf_8_is_told():
    tx = gx.chain(gx.allreduce())
    grads = {"w": torch.ones(3)}

    class Broken:
        def init(self, params):
            return ()

        def update(self, updates, state, params=None):
            raise OSError("cannot read '/tmp/\\udcff'")

    def rank(i):
        parts = [gx.declare(Broken(), name="x", linear=True, needs_reduced=False)] * i
        with pytest.raises((OSError, gx.RankMismatchError)) as caught:
            gx.chain(*parts, tx).update(grads, gx.chain(*parts, tx).init(grads))
        return type(caught.value).__name__

    assert run_ranks(2, rank) == ["RankMismatchError", "OSError"]


def test_dense_steps_that_differ_are_found_on_every_rank():
    tx = gx.chain(gx.allreduce())
    grads = {"w": torch.ones(3)}

    def rank(i):
        states = [tx.init(grads)]
        for _ in range(3):
            states.append(tx.update(grads, states[-1])[1])
        with pytest.raises(gx.RankMismatchError):
            tx.update(grads, states[i])  # 0 + 1 + 2 is 3 times 1

    run_ranks(3, rank)
