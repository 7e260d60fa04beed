import functools
import re

import pytest
import torch
import torch.distributed as dist

import gradtx as gx
from gradtx.core.phases import PhaseClock
from gradtx.exchange.group import Group, ProcessGroup, ThreadGroup, default_group, find_group
from gradtx.testing import run_ranks
from ranks import gloo_ranks

SIZES = [1, 2, 3]
KINDS = ["threads", "gloo"]
REDUCED = [torch.float32, torch.float64]
SPREAD = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


def collectives(rank):
    """What every collective gives this rank, and what it says it has sent for each."""
    group, facts, before = find_group(), {}, 0

    def note(name, value):
        nonlocal before
        facts[name] = value
        facts[f"sent {name}"], before = group.sent - before, group.sent

    facts["who"] = (type(group).__name__, group.rank, group.size)
    message = torch.arange(7, dtype=torch.uint8) + 10 * rank
    note("all_gather", [part.tolist() for part in group.all_gather(message)])
    parts = [torch.full((i + 1,), 10 * rank + i, dtype=torch.uint8) for i in range(group.size)]
    note("all_to_all", [part.tolist() for part in group.all_to_all(parts)])
    note("gather", [part.tolist() for part in group.gather(message)])
    # Of every length, none among them, from rank `i` to rank `j`: `i * j`.
    parts = [torch.full((rank * i,), 10 * rank + i, dtype=torch.uint8) for i in range(group.size)]
    lengths = [i * rank for i in range(group.size)]
    note("uneven", [part.tolist() for part in group.all_to_all(parts, lengths)])
    for dtype in REDUCED:
        buffer = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, 8.0], dtype=dtype) * (rank + 1)
        note(f"all_reduce {dtype}", group.all_reduce(buffer).tolist())
    for dtype in SPREAD:
        buffer = (torch.arange(5) + rank).to(dtype)
        note(f"broadcast {dtype}", group.broadcast(buffer).tolist())
    return facts


@functools.cache
def facts_of(kind, size):
    return (gloo_ranks if kind == "gloo" else run_ranks)(size, collectives)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_gather_gives_all_messages_in_rank_order(kind, size):
    expected = [[10 * rank + i for i in range(7)] for rank in range(size)]
    assert [facts["all_gather"] for facts in facts_of(kind, size)] == [expected] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_to_all_gives_what_all_have_for_a_rank(kind, size):
    """Of another length for each rank."""
    expected = [[[10 * other + rank] * (rank + 1) for other in range(size)] for rank in range(size)]
    assert [facts["all_to_all"] for facts in facts_of(kind, size)] == expected


def large(rank):
    """What every rank has of messages that are sent in pieces, in few numbers."""
    group = find_group()
    message = (torch.arange(2_500_001) % 251).to(torch.uint8) + rank
    gathered = group.all_gather(message)
    assert all(torch.equal(part, message - rank + i) for i, part in enumerate(gathered))
    lengths = [1_200_000 * (i + 1) + i for i in range(group.size)]
    parts = [torch.full((n,), 10 * rank + i, dtype=torch.uint8) for i, n in enumerate(lengths)]
    return [(part.numel(), *part.unique().tolist()) for part in group.all_to_all(parts)]


@pytest.mark.parametrize("size", [2, 3])
def test_large_messages_arrive_whole(size):
    expected = [
        [(1_200_000 * (rank + 1) + rank, 10 * other + rank) for other in range(size)]
        for rank in range(size)
    ]
    assert gloo_ranks(size, large) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_gather_gives_rank_0_all_messages(kind, size):
    expected = [[10 * rank + i for i in range(7)] for rank in range(size)]
    assert [facts["gather"] for facts in facts_of(kind, size)] == [expected, *[[]] * (size - 1)]
    assert [facts["sent gather"] for facts in facts_of(kind, size)] == [0, *[7] * (size - 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_to_all_takes_other_lengths_from_each_rank(kind, size):
    expected = [[[10 * i + rank] * (i * rank) for i in range(size)] for rank in range(size)]
    assert [facts["uneven"] for facts in facts_of(kind, size)] == expected
    sent = [facts["sent uneven"] for facts in facts_of(kind, size)]
    assert sent == [sum(rank * i for i in range(size) if i != rank) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_to_all_counts_what_goes_to_others(kind, size):
    whole = size * (size + 1) // 2
    sent = [facts["sent all_to_all"] for facts in facts_of(kind, size)]
    assert sent == [whole - (rank + 1) for rank in range(size)]


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_reduce_gives_the_sum(kind, size, dtype):
    times = size * (size + 1) / 2
    expected = [x * times for x in (1.0, -2.0, 0.5, 3.0, 0.0, 8.0)]
    assert [f[f"all_reduce {dtype}"] for f in facts_of(kind, size)] == [expected] * size


@pytest.mark.parametrize("dtype", SPREAD)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_gives_the_buffer_of_rank_0(kind, size, dtype):
    expected = torch.arange(5).to(dtype).tolist()
    assert [f[f"broadcast {dtype}"] for f in facts_of(kind, size)] == [expected] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_gather_counts_a_copy_for_each_other_rank(kind, size):
    assert {f["sent all_gather"] for f in facts_of(kind, size)} == {7 * (size - 1)}


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_reduce_counts_what_a_ring_sends(kind, size, dtype):
    expected = 2 * (size - 1) * 6 * dtype.itemsize // size
    assert {f[f"sent all_reduce {dtype}"] for f in facts_of(kind, size)} == {expected}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_counts_what_rank_0_sends(kind, size):
    sent = [f["sent broadcast torch.int64"] for f in facts_of(kind, size)]
    assert sent == [40, 0][:size] if size > 1 else sent == [0]


@pytest.mark.parametrize("size", SIZES)
def test_the_kinds_send_alike(size):
    def sent(kind):
        return [{k: v for k, v in f.items() if "sent" in k} for f in facts_of(kind, size)]

    assert sent("threads") == sent("gloo")


@pytest.mark.parametrize(("kind", "name"), [("threads", "ThreadGroup"), ("gloo", "ProcessGroup")])
def test_ranks_are_numbered_from_0(kind, name):
    assert [f["who"] for f in facts_of(kind, 3)] == [(name, rank, 3) for rank in range(3)]


def test_one_rank_in_run_ranks_is_alone():
    assert facts_of("threads", 1)[0]["who"] == ("Group", 0, 1)


def test_without_a_group_a_rank_is_alone():
    assert (find_group().rank, find_group().size) == (0, 1)


def test_alone_the_collectives_give_what_they_get():
    group, buffer = Group(), torch.tensor([1.0, 2.0])
    message = torch.tensor([3], dtype=torch.uint8)
    assert group.all_gather(message)[0].tolist() == [3]
    assert group.all_to_all([message])[0].tolist() == [3]
    assert group.all_reduce(buffer).tolist() == group.broadcast(buffer).tolist() == [1.0, 2.0]


def test_in_run_ranks_the_threads_group_is_the_default():
    groups = run_ranks(2, lambda rank: find_group())
    assert [type(group) for group in groups] == [ThreadGroup] * 2


def test_after_run_ranks_a_rank_is_alone_again():
    run_ranks(2, lambda rank: find_group())
    assert find_group().size == 1


def test_default_group_holds_for_its_block():
    inner = Group()
    with default_group(inner):
        assert find_group() is inner
    assert find_group() is not inner


def test_a_group_stands_for_itself():
    group = Group()
    assert find_group(group) is group


def _defaults(rank):
    before = find_group()
    threads = run_ranks(2, lambda i: find_group().size)
    world = find_group(dist.group.WORLD)
    return type(before).__name__, threads, world is before, type(world) is ProcessGroup


def test_the_default_process_group_is_the_default_outside_run_ranks():
    assert gloo_ranks(3, _defaults) == [("ProcessGroup", [2, 2], True, True)] * 3


def _sub_group(rank):
    sub = dist.new_group([1, 2])
    try:
        tx = gx.allreduce(group=sub)
    except ValueError as error:
        return str(error)
    grads = {"w": torch.tensor([1.0, 2.0]) * 2**rank}
    out, _ = tx.update(grads, tx.init(grads))
    root = find_group(sub).broadcast(torch.tensor([rank])).tolist()
    return tx.group.rank, tx.group.size, out["w"].tolist(), root, "group" in repr(tx)


@pytest.fixture(scope="module")
def sub_group():
    return gloo_ranks(3, _sub_group)


def test_a_process_group_of_some_ranks_has_its_own_ranks(sub_group):
    assert [facts[:2] for facts in sub_group[1:]] == [(0, 2), (1, 2)]


def test_a_process_group_of_some_ranks_averages_over_them(sub_group):
    assert [facts[2] for facts in sub_group[1:]] == [[3.0, 6.0]] * 2


def test_a_process_group_of_some_ranks_broadcasts_from_its_own_rank_0(sub_group):
    assert [facts[3] for facts in sub_group[1:]] == [[1], [1]]


def test_a_rank_outside_the_process_group_is_refused(sub_group):
    assert sub_group[0] == "this rank is not a member of the process group given to allreduce"


def test_the_group_is_not_part_of_what_ranks_compare():
    tx = gx.chain(gx.allreduce(group=Group()))
    assert tx.code(local=False) == gx.chain(gx.allreduce()).code(local=False)


@pytest.mark.parametrize("group", [3, "gloo", [0, 1]])
def test_what_is_no_group_is_refused_where_it_is_written(group):
    text = (
        "expected a torch.distributed process group, a DeviceMesh of one dimension or None, "
        f"got {group!r}"
    )
    with pytest.raises(TypeError, match=re.escape(text)):
        gx.allreduce(group=group)


@pytest.fixture
def init(tmp_path):
    """A function that makes a default process group of one rank, anew at each call."""

    def again(name):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/{name}", rank=0, world_size=1
        )

    yield again
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def beside_a_receive(rank):
    """A large gather while a user waits for a tensor of its own."""
    group, mine = find_group(), torch.zeros(4)
    pending = dist.irecv(mine, src=1 - rank)
    received = group.all_gather(torch.full((3 << 20,), rank, dtype=torch.uint8))
    dist.send(torch.full((4,), 7.0 + rank), dst=1 - rank)
    pending.wait()
    return [int(part.float().mean()) for part in received], mine.tolist()


def test_pieces_are_not_taken_for_what_a_user_sends():
    assert gloo_ranks(2, beside_a_receive) == [([0, 1], [8.0] * 4), ([0, 1], [7.0] * 4)]


def test_all_collectives_count_as_transport():
    def rank(i):
        group, message = find_group(), torch.zeros(2, dtype=torch.uint8)
        found = []
        for collective in (group.all_gather, group.gather, group.all_reduce, group.broadcast):
            with PhaseClock().running() as clock:
                collective(message)
            found.append(set(clock.seconds))
        with PhaseClock().running() as clock:
            group.all_to_all([message] * 2)
        return [*found, set(clock.seconds)]

    assert run_ranks(2, rank) == [[{"transport"}] * 5] * 2


def test_a_new_default_process_group_is_a_new_group(init):
    init("first")
    first = find_group()
    init("second")
    assert find_group() is not first


def test_after_the_process_group_a_rank_is_alone_again(init):
    init("first")
    find_group()
    dist.destroy_process_group()
    assert type(find_group()) is Group


def test_a_process_group_is_one_group_for_its_lifetime(init):
    init("first")
    find_group().agreements["chain"] = "sizes"
    assert find_group().agreements == {"chain": "sizes"}


def test_threads_refuse_what_real_ranks_would_garble():
    def rank(i):
        find_group().all_reduce(torch.zeros(2 + i))

    text = "ranks sent tensors of different sizes: [torch.Size([2]), torch.Size([3])]"
    with pytest.raises(ValueError, match=re.escape(text)):
        run_ranks(2, rank)


def test_threads_do_not_share_memory():
    def rank(i):
        mine = torch.ones(2)
        got = find_group().all_reduce(mine)
        parts = find_group().all_gather(torch.zeros(2, dtype=torch.uint8))
        got.fill_(-1)
        parts[0].fill_(9)
        find_group().all_reduce(torch.zeros(1))
        return mine.tolist(), got.tolist(), parts[1].tolist()

    assert run_ranks(2, rank) == [([1.0, 1.0], [-1.0, -1.0], [0, 0])] * 2


def test_a_thread_that_raises_ends_the_wait_of_the_others():
    def rank(i):
        if i == 1:
            raise KeyError("mine")
        find_group().all_reduce(torch.zeros(1))

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, rank)


def test_a_thread_that_does_not_come_is_a_time_out():
    def rank(i):
        if i == 0:
            find_group().all_reduce(torch.zeros(1))

    with pytest.raises(TimeoutError, match="rank 0 waited for a rank that did not come"):
        run_ranks(2, rank, timeout=0.05)


def test_processes_of_a_launcher_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="2 processes were started"):
        find_group()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_group().size == 1
