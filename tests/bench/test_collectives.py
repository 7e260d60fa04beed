import json
import subprocess
import sys

import pytest

from gradtx.__main__ import main
from gradtx.bench import collectives, ranks
from gradtx.bench.collectives import SIZES, Fit, Sample, fit
from gradtx.exchange.group import find_group
from gradtx.testing import run_ranks

COMMAND = ["bench", "link", "--link", "loopback"]


def samples(latency, bandwidth, ranks=4, noise=lambda i: 1.0):
    link, out = Fit(latency, bandwidth, 0.0), []
    for name in ("all_gather", "all_reduce"):
        for nbytes in SIZES:
            sample = Sample(name, nbytes, ranks, 0.0)
            out.append(Sample(name, nbytes, ranks, link.seconds(sample) * noise(len(out))))
    return out


@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(1e-4, 1.25e8), (2e-6, 1e10), (0.05, 1e6), (0.0, 1e9)]
)
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_fit_finds_what_a_link_gives(latency, bandwidth, ranks):
    found = fit(samples(latency, bandwidth, ranks))
    assert found.latency == pytest.approx(latency, rel=1e-6, abs=1e-9)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert found.error < 1e-6


def test_twice_as_long_counts_as_much_as_half_as_long():
    found = fit(samples(1e-4, 1e8, noise=lambda i: (0.5, 2.0)[i % 2]))
    assert found.latency == pytest.approx(1e-4, rel=0.5)
    assert found.bandwidth == pytest.approx(1e8, rel=0.5)
    assert found.error == pytest.approx(0.69, rel=0.1)


def test_what_does_not_show_is_none():
    without = [Sample("all_gather", n, 2, n**1.5) for n in (1000, 10_000, 100_000)]
    assert fit(without).latency == 0.0
    same = [Sample("all_gather", n, 2, 1.0 - n * 1e-9) for n in (1000, 10_000, 100_000)]
    found = fit(same)
    assert found.latency == pytest.approx(1, rel=1e-3)
    assert found.bandwidth > 1e12


@pytest.mark.parametrize(
    ("name", "ranks", "rounds", "sent"),
    [
        ("all_gather", 2, 1, 1200),
        ("all_gather", 4, 3, 3600),
        ("all_reduce", 2, 2, 1200),
        ("all_reduce", 4, 6, 1800),
    ],
)
def test_rounds_and_bytes(name, ranks, rounds, sent):
    sample = Sample(name, 1200, ranks, 1.0)
    assert (sample.rounds, sample.wire_bytes) == (rounds, sent)


def test_a_gather_is_that_of_an_exchange():
    """Over gloo that sends large messages another way than `torch.distributed.all_gather`."""

    def rank(number):
        before = find_group().sent
        collectives.COLLECTIVES["all_gather"](4096)()
        return find_group().sent - before

    assert run_ranks(3, rank) == [2 * 4096] * 3


def test_table_and_file(tmp_path, capsys):
    out = tmp_path / "link.json"
    options = ["--largest", "4096", "--repeats", "2", "--ranks", "3", "--out", str(out)]
    assert main([*COMMAND, *options]) == 0
    found = json.loads(out.read_text())
    assert found["ranks"] == 3
    assert found["latency"] >= 0
    assert found["bandwidth"] > 0
    assert found["rate"] is None
    assert [(x["collective"], x["nbytes"]) for x in found["samples"]] == [
        (name, nbytes) for name in ("all_gather", "all_reduce") for nbytes in (1024, 4096)
    ]
    whole = fit([Sample(**x) for x in found["samples"]])
    assert (whole.latency, whole.bandwidth) == (found["latency"], found["bandwidth"])
    captured = capsys.readouterr()
    table, _, below = captured.out.partition("3 ranks over loopback, fitted:\n")
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        [x["collective"], f"{x['nbytes']:,}"] for x in found["samples"]
    ]
    assert [line.split(":")[0].strip() for line in below.splitlines()] == [
        "together",
        *found["collectives"],
    ]
    assert captured.err.splitlines()[-1].startswith("100 %: all_reduce, 16,777,216 bytes")


def test_a_launcher_may_start_the_ranks(tmp_path):
    out = tmp_path / "link.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["-m", "gradtx", "bench", "link", "--largest", "4096", "--out", str(out)]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks of a launcher, unshaped, fitted:") == 1
    assert json.loads(out.read_text())["ranks"] == 2


def test_messages_that_a_burst_hides_are_left_out(monkeypatch, capsys):
    found = samples(1e-3, 1e6, ranks=2)
    hidden = [
        Sample(x.collective, x.nbytes, 2, 1e-4) if 4096 < x.nbytes < 2**20 else x for x in found
    ]
    monkeypatch.setattr(ranks, "told_by", lambda *given: iter([hidden]))
    place = collectives.Place(2, 8e6)
    monkeypatch.setattr(collectives, "find_place", lambda args: place)
    assert main(COMMAND) == 0
    assert "together: latency 1000 µs a round, bandwidth 8 Mbit/s, off by a factor of 1.00" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link", "warp"], "argument --link: warp: expected loopback, or a rate such as"),
        (["--ranks", "1"], "argument --ranks: 1 is not in 2..64"),
        (["--largest", "100"], "argument --largest: 100 is not in 4096..16777216"),
        (["--out", "nowhere/x"], "argument --out: nowhere/x cannot be written"),
    ],
)
def test_options_out_of_bounds_are_refused(capsys, options, message):
    with pytest.raises(SystemExit):
        main(["bench", "link", *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (TimeoutError("the processes have not ended in 5 s"), 1, "have not ended in 5 s"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_are_one_line(monkeypatch, capsys, error, status, message):
    def told_by(*given):
        yield "under way"
        raise error

    monkeypatch.setattr(ranks, "told_by", told_by)
    assert main(COMMAND) == status
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].endswith(message)
    assert captured.err.splitlines()[-1].startswith("gradtx bench link: ")
    assert captured.out == ""
