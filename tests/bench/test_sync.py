import json
import subprocess
import sys

import pytest
import torch.distributed as dist

import gradtx as gx
from gradtx.__main__ import main
from gradtx.bench import link, overhead, ranks, rounds, sync
from gradtx.bench.overlap import MOST, Hidden
from gradtx.bench.peers import PEERS
from gradtx.bench.ranks import Place
from gradtx.bench.rounds import KINDS, Measured, Plan, Results, Round
from gradtx.bench.sync import CHAINS, summarise
from ranks import gloo_ranks

COMMAND = ["bench", "sync"]
LOOPBACK = [*COMMAND, "--link", "loopback"]
TOPK = "chain(topk(0.1), ef(), allreduce())"


@pytest.fixture(scope="module")
def means() -> None:
    try:
        with link.hosts(2) as hosts:
            hosts.shape(1e6)
    except link.LinkError as error:
        pytest.skip(str(error))


def measured(name, *seconds, sent=1000, counted=None, feedback=False, peak=None, code=None):
    """Rounds that nobody has run; half of each is spent in a hook."""
    rounds = [
        Round(x, sent, counted, {**dict.fromkeys(KINDS, 0.0), "hook": x / 2}) for x in seconds
    ]
    return Measured(name, code, feedback, rounds, peak)


@pytest.fixture
def asked(monkeypatch):
    """Runs nothing: the plans that were asked for, and results for each."""
    plans = []

    def told_by(place, work, plan):
        plans.append(plan)
        yield "under way"
        found = [measured("FP32 all-reduce", 0.2, 0.1, 0.3, peak=0)]
        found += [measured("signs", 0.1, 0.2, 0.05, feedback=True, counted=1020, code=TOPK)]
        yield Results(found, {"bf16": "no such sum"}, 1e9, None)

    monkeypatch.setattr(ranks, "told_by", told_by)
    monkeypatch.setattr(sync, "find_place", lambda args: Place(2, 8e6))
    return plans


class TestCommand:
    def test_all_methods_are_measured_over_loopback(self, tmp_path, capsys):
        out = tmp_path / "sync.json"
        options = ["--model", "3x40x50", "--rounds", "2", "--json", str(out)]
        assert main([*LOOPBACK, *options]) == 0
        found = json.loads(out.read_text())
        assert found["version"] == gx.__version__
        assert found["left_out"] == {}
        assert found["memory_bandwidth"] > 1e8
        assert found["link"]["bandwidth"] > 1e5
        rows = found["methods"]
        assert [row["code"] for row in rows[: len(PEERS)]] == [None] * len(PEERS)
        assert len(rows) == len(PEERS) + len(CHAINS)
        values = 3 * 40 * 50
        assert rows[0]["wire_bytes"] == 4 * values
        assert rows[1]["wire_bytes"] == rows[2]["wire_bytes"] == 2 * values
        for row in rows:
            assert row["seconds"] > 0
            assert len(row["rounds"]) == 2
            assert row["counted_bytes"] is None
            assert sum(row["phases"].values()) in row["rounds"]
            assert row["distance"] == pytest.approx(row["seconds"] / row["floor"])
            assert (row["peak_bytes"] is None) == (sys.platform != "linux")
        for row in rows[len(PEERS) :]:
            assert row["phases"]["hook"] == 0
            assert all(row["phases"][phase] > 0 for phase in ("feedback", "select", "transport"))
        lines = capsys.readouterr().out.splitlines()
        names = [row["name"] for row in rows]
        assert [line.split("  ")[0] for line in lines] == [
            *("method", *names, "", "phases", *names),
            lines[-1],
        ]
        assert lines[-1].startswith("3x40x50: 6,000 values in 3 leaves; 2 ranks over loopback; ")

    @pytest.mark.usefixtures("means")
    def test_interfaces_count_what_the_methods_say(self, tmp_path):
        out = tmp_path / "sync.json"
        options = ["--model", "8x512x512", "--rounds", "1", "--link", "2gbit", "--json", str(out)]
        options += ["--chain", "chain(cast('float16'), ef(), allreduce())", "--chain", TOPK]
        assert main([*COMMAND, *options, "--peer", "fp16", "--peer", "topk"]) == 0
        rows = json.loads(out.read_text())["methods"]
        assert len(rows) == 5
        large = [row for row in rows if row["wire_bytes"] > 1e6]
        assert len(large) == 3
        for row in rows:
            assert row["counted_bytes"] > row["wire_bytes"]
        for row in large:
            assert row["counted_bytes"] < 1.03 * row["wire_bytes"], row["name"]

    def test_without_options_all_of_the_usual_is_measured(self, asked):
        assert main(COMMAND) == 0
        [plan] = asked
        assert plan.model == "24x1024x1024"
        assert plan.peers == tuple(PEERS)
        assert len(plan.chains) == len(CHAINS)
        assert (plan.rounds, plan.interface, plan.probe) == (5, "eth0", False)
        assert plan.steps == 11 * (2 + 1 + 5)

    def test_chains_and_peers_can_be_chosen(self, asked):
        options = ["--chain", TOPK, "--chain", f"gx.{TOPK}", "--peer", "topk", "--peer", "none"]
        assert main([*COMMAND, *options]) == 0
        assert asked[0].chains == ("gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce())",)
        assert asked[0].peers == ("allreduce", "topk")

    def test_table(self, asked, capsys):
        assert main([*COMMAND, "--model", "1x1000"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [x.strip() for x in lines[1].split("  ") if x] == [
            *("FP32 all-reduce", "200.0 ms", "1.00 ×", "1,000", "–", "–"),
            *("1.0 ms", "198.41 ×", "0 MiB"),
        ]
        assert [x.strip() for x in lines[2].split("  ") if x] == [
            *("signs", "100.0 ms", "2.00 ×", "1,000", "1,020", "+2.0 %"),
            *("1.0 ms", "98.43 ×", "–"),
        ]
        assert [x.strip() for x in lines[6].split("  ") if x] == [
            *("signs", "–", "–", "–", "–", "–", "–", "50.0 ms", "50.0 ms"),
        ]
        assert lines[-1] == "bf16 cannot be run here: no such sum"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--model", "vgg"], "vgg: expected resnet50, gpt2, leaves, or so many leaves"),
            (["--chain", "chain(gzip(9), allreduce())"], "--chain chain(gzip(9), allreduce()): "),
            (["--chain", "chain(sign(), ef())"], "--chain chain(sign(), ef()): "),
            (["--chain", "chain(sign(), allreduce())"], "this chain breaks 1 rule:"),
            (["--chain", "allreduce(axis_name='x')"], "--chain allreduce(axis_name='x'): "),
            (["--chain", "chain(accumulate(2), allreduce())"], "--chain chain(accumulate(2), "),
            (["--chain", "delayed(allreduce(), steps=1)"], "--chain delayed("),
            (
                ["--chain", "chain(allreduce(), master_weights())"],
                "--chain chain(allreduce(), master_weights()): ",
            ),
            (["--plot", "x.bmp"], "x.bmp: expected a file that ends in"),
        ],
    )
    def test_unusable_arguments_are_refused_before_anything_is_run(
        self, asked, capsys, options, message
    ):
        assert main([*COMMAND, *options]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"gradtx bench sync: {message}")
        assert captured.out == ""
        assert asked == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--peer", "horovod"], "argument --peer: invalid choice: 'horovod'"),
            (["--rounds", "0"], "argument --rounds: 0 is not in 1..10000"),
            (["--json", "nowhere/x"], "argument --json: nowhere/x cannot be written"),
        ],
    )
    def test_options_out_of_bounds_are_refused(self, capsys, options, message):
        with pytest.raises(SystemExit):
            main([*COMMAND, *options])
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("error", "status"), [(TimeoutError("late"), 1), (KeyboardInterrupt(), 130)]
    )
    def test_failures_are_told(self, asked, monkeypatch, capsys, error, status):
        def told_by(*given):
            yield "under way"
            raise error

        monkeypatch.setattr(ranks, "told_by", told_by)
        assert main(COMMAND) == status
        assert capsys.readouterr().err.splitlines()[-1] in (
            "gradtx bench sync: late",
            "gradtx bench sync: interrupted",
        )

    @pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
    def test_plot_is_written(self, asked, tmp_path, suffix, start):
        pytest.importorskip("matplotlib")
        path = tmp_path / f"plot.{suffix}"
        assert main([*COMMAND, "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(start)

    def test_help_says_what_is_timed(self, capsys):
        with pytest.raises(SystemExit):
            main([*COMMAND, "--help"])
        out = capsys.readouterr().out
        assert "from the gradients in\n`.grad` to their means" in out
        assert all(word in out for word in ("floor", "1 MB, then 25 MB", *PEERS))


class Unable:
    """A peer that this torch cannot run."""

    name, feedback = "unable", False

    def __init__(self, gradients):
        pass

    def sync(self):
        raise RuntimeError("no such sum\nat some line")


def names_measured(rank, peers):
    rounds.PEERS["unable"] = Unable
    plan = Plan("2x10x10", (f"gx.{TOPK}",), peers, 3, None, probe=True)
    *texts, results = rounds.measure(plan)
    assert len(texts) == 2 * (2 + 1 + 3)
    assert results.link.bandwidth > 0
    assert dist.get_world_size() == 2
    return [(x.name, len(x.rounds)) for x in results.measured], results.left_out


class TestRounds:
    def test_a_peer_that_cannot_be_run_is_left_out(self):
        for names, left_out in gloo_ranks(2, names_measured, ("allreduce", "unable")):
            assert names == [("FP32 all-reduce", 3), ("topk(0.1), ef()", 3)]
            assert left_out == {"unable": "no such sum"}

    def test_what_all_are_compared_with_has_to_run(self):
        with pytest.raises(AssertionError, match="no such sum"):
            gloo_ranks(2, names_measured, ("unable", "allreduce"))


class TestSummary:
    def rows(self):
        found = [
            measured("dense", 1.0, 4.0, 2.0, sent=3000),
            measured("other", 0.5, 4.0, 0.5, sent=100, feedback=True),
        ]
        return summarise(Results(found, {}, 1e6, None), values=1000, link=1e3)

    def test_ratios_are_those_of_each_round(self):
        dense, other = self.rows()
        assert (dense.seconds, other.seconds) == (2.0, 0.5)
        assert (dense.ratio, other.ratio) == (1.0, 2.0)

    def test_floor_is_memory_and_link(self):
        dense, other = self.rows()
        assert dense.floor == pytest.approx(2 * 4000 / 1e6 + 3000 / 1e3)
        assert other.floor == pytest.approx(4 * 4000 / 1e6 + 100 / 1e3)
        assert other.distance == pytest.approx(0.5 / other.floor)

    def test_phases_are_those_of_the_middle_round(self):
        dense, _ = self.rows()
        assert dense.phases["hook"] == dense.phases["rest"] == 1.0
        assert sum(dense.phases.values()) == 2.0

    def test_of_an_even_number_of_rounds_the_shorter_is_in_the_middle(self):
        [row] = summarise(Results([measured("x", 1.0, 3.0)], {}, 1e9, None), 1, 1e9)
        assert row.seconds == 2.0
        assert sum(row.phases.values()) == 1.0


class TestOverhead:
    def test_both_chains_are_measured(self, tmp_path, capsys, monkeypatch):
        pytest.importorskip("torchopt")
        out = tmp_path / "overhead.json"
        assert main([*COMMAND, "--overhead", "--rounds", "2", "--json", str(out)]) == 0
        found = json.loads(out.read_text())
        assert [len(seconds) for seconds in found["seconds"]] == [2, 2]
        assert found["ratio"] > 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[0] for line in lines[1:3]] == found["names"]
        assert found["names"][0] == overhead.CHAIN
        assert lines[3].startswith("leaves: 64,000 values in 1,000 leaves, one rank; the first")

    def test_missing_torchopt_is_named(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "torchopt", None)
        assert main([*COMMAND, "--overhead"]) == 2
        assert capsys.readouterr().err == (
            "gradtx bench sync: bench sync --overhead needs torchopt, which is not installed: "
            "pip install 'gradtx[bench]'\n"
        )

    def test_torchopt_stays_out_else(self):
        code = (
            "import sys\nfrom gradtx.__main__ import main\nmain(['explain'])\n"
            "print([n for n in ('torchopt', 'rich', 'matplotlib', 'jax') if n in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]"


class TestOverlap:
    def test_a_backward_pass_and_an_exchange(self, tmp_path, capsys):
        out = tmp_path / "overlap.json"
        options = ["--model", "4x600x600", "--link", "loopback", "--chain", "allreduce()"]
        asked_for = ["--overlap", "--rounds", "2", *options, "--json", str(out)]
        assert main([*COMMAND, *asked_for]) == 0
        [chain] = json.loads(out.read_text())["chains"]
        assert [len(chain[kind]) for kind in ("backward", "plain", "overlapped")] == [2, 2, 2]
        assert chain["share"] <= 1
        assert 1 <= chain["batch"] <= MOST
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split()[0] == "chain"
        assert lines[1].split()[0] == "dense"
        assert lines[2].startswith("4x600x600: 1,440,000 values in 4 leaves; 2 ranks over loopback")

    def test_what_is_hidden(self):
        hidden = Hidden("x", "allreduce()", 8, [1.0, 1.0, 1.0], [2.0, 3.0, 1.0], [1.2, 1.5, 1.0])
        assert hidden.exchange == 1.0
        assert hidden.share == pytest.approx(0.75)

    @pytest.mark.parametrize("model", ["resnet50", "2x3x4", "leaves"])
    def test_models_that_are_no_layers(self, model, capsys):
        assert main([*COMMAND, "--overlap", "--model", model]) == 2
        assert "with --overlap expected square matrices" in capsys.readouterr().err
