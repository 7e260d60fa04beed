"""`bench soak`: what it does, and that it finds what is broken."""

import json
import os
import sys

import pytest
import torch

import gradtx as gx
from gradtx.__main__ import main
from gradtx.bench import faults, soak, soaking
from gradtx.bench.faults import SHAPES, Episode, lives_of
from gradtx.bench.ledger import Ledger, accounts_for_all, zeros
from gradtx.bench.soak import Flat
from gradtx.bench.soaking import Broken, Counts, Ended, Task, soaked
from gradtx.resharding import keyed
from gradtx.testing import run_ranks

COMMAND = ["bench", "soak"]
TOPK = "gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), gx.allreduce())"
WINDOWS = "gx.chain(gx.accumulate(2), gx.topk(0.1), gx.ef(), gx.allreduce())"


def on_threads(folder, code=TOPK, steps=30, seed=0, size=2, flush=True):
    """What the ranks tell of one episode."""
    task = Task((code,), seed, folder)
    return run_ranks(size, lambda rank: list(soaked(task, Episode(0, steps, False, flush))))


class TestCommand:
    def test_a_short_run_over_processes_keeps_all_laws(self, tmp_path, capsys):
        """Two lives, on three ranks and, resharded, on two."""
        out = tmp_path / "soak.json"
        codes = [TOPK, WINDOWS, soak.CHAINS[4]]
        options = [word for code in codes for word in ("--chain", code)]
        assert main([*COMMAND, "--steps", "120", *options, "--json", str(out)]) == 0
        found = json.loads(out.read_text())
        assert [life["ranks"] for life in found["lives"]] == [3, 2]
        assert sum(row["steps"] for row in found["chains"]) == 120
        assert found["restarts"] >= 3
        assert found["broken"] is found["complaint"] is None
        assert sum(row["bad"] for row in found["chains"]) > 0
        for row in found["chains"]:
            assert row["absent"] > 0
            assert row["checks"] > 0
            assert 0 < row["error"] < 1
        shown = capsys.readouterr()
        assert shown.out.splitlines()[-1].startswith("seed 0; 2 sets of processes, of 3, 2 ranks; ")
        assert "100 %: " in shown.err

    def test_what_is_broken_is_told_with_how_to_repeat_it(self, monkeypatch, tmp_path, capsys):
        def told_by(place, work, task, number, life):
            yield "under way"
            yield Broken(TOPK, 17, 2, "L2: results + mean residual are off")

        monkeypatch.setattr(soak, "told_by", told_by)
        out = tmp_path / "soak.json"
        options = ["--chain", TOPK, "--seed", "5", "--steps", "90", "--json", str(out)]
        assert main([*COMMAND, *options]) == 1
        assert capsys.readouterr().err.splitlines()[-2:] == [
            f"gradtx bench soak: step 17 of {TOPK}, rank 2: L2: results + mean residual are off",
            f'again: python -m gradtx bench soak --seed 5 --steps 90 --ranks 3 --chain "{TOPK}"',
        ]
        assert json.loads(out.read_text())["broken"]["step"] == 17

    def test_what_is_not_flat_is_told(self, monkeypatch, capsys):
        def told_by(place, work, task, number, life):
            for i in range(4):
                yield Ended(0, Counts(steps=1), 100 * 2**20, 7 + i)

        monkeypatch.setattr(soak, "told_by", told_by)
        assert main([*COMMAND, "--chain", TOPK, "--steps", "90"]) == 1
        assert "a process has 2 files more at its end than after its second turn" in (
            capsys.readouterr().err
        )

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            (["--chain", "chain(topk(0.1), ef())"], "exchanges nothing"),
            (["--chain", "chain(allreduce())"], "lets what is not finite through: put unscale()"),
            (
                ["--chain", "chain(accumulate(2, on_bad='leave_out'), sign(), ef(), allreduce())"],
                "expected accumulate(on_bad='drop')",
            ),
            (["--chain", "chain(topk(0.1), allreduce())"], "GX302"),
        ],
    )
    def test_chains_that_it_cannot_judge_are_refused(self, options, text, capsys):
        assert main([*COMMAND, *options]) == 2
        assert text in capsys.readouterr().err

    def test_a_launcher_is_refused(self, monkeypatch, capsys):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert main(COMMAND) == 2
        assert "run it without a launcher" in capsys.readouterr().err


class TestPlan:
    def test_all_follows_from_the_seed(self):
        assert lives_of(3, 5000, 3, 4) == lives_of(3, 5000, 3, 4) != lives_of(4, 5000, 3, 4)
        assert faults.moment(3, 0, 7, 1) == faults.moment(3, 0, 7, 1)
        first, second = (faults.gradients(3, 0, 7, 1) for _ in range(2))
        assert all(torch.equal(first[path], second[path]) for path in SHAPES)

    @pytest.mark.parametrize("steps", [1, 13, 300, 10_000])
    def test_steps_are_shared_out_in_whole(self, steps):
        lives = lives_of(0, steps, 3, 7)
        episodes = [episode for life in lives for episode in life.episodes]
        assert sum(episode.steps for episode in episodes) == steps
        assert all(episode.steps >= 0 for episode in episodes)
        assert {life.ranks for life in lives} == {2, 3}

    def test_all_that_may_happen_does(self):
        found = [faults.moment(0, 0, step, rank) for step in range(2000) for rank in range(3)]
        assert {x.bad for x in found} == {None, *SHAPES}
        assert sum(x.late > 0 for x in found) > 10
        assert frozenset.union(*(x.absent for x in found)) == SHAPES.keys() - {faults.ALWAYS}
        assert len({faults.loss_scale(0, 0, step) for step in range(1000)}) > 10


class TestEpisodes:
    @pytest.mark.parametrize("code", [WINDOWS, *soak.CHAINS[-2:]])
    def test_a_chain_goes_on_from_its_checkpoints(self, code, tmp_path):
        first = on_threads(tmp_path, code, 13, flush=False)
        second = on_threads(tmp_path, code, 7)
        for told in (first, second):
            assert isinstance(told[0][-1], Ended)
            assert told[0][-1] == told[1][-1]
        assert second[0][0].endswith("step 14")

    def test_a_state_of_another_rank_is_found(self, tmp_path):
        on_threads(tmp_path, steps=20)
        folder = tmp_path / "chain_0"
        os.replace(folder / "state_1.pt", folder / "state.pt")
        os.link(folder / "state_0.pt", folder / "state_1.pt")
        with pytest.raises(ValueError, match="this state_dict has rank 0: expected 1"):
            on_threads(tmp_path)

    def test_parameters_that_differ_when_loaded_are_found(self, tmp_path):
        on_threads(tmp_path, steps=12)
        path = tmp_path / "chain_0" / "run_1.pt"
        saved = torch.load(path)
        saved["parameters"]["scalar"] += 1
        torch.save(saved, path)
        (broken, *_), _ = on_threads(tmp_path)
        assert broken.text == "L4: its parameters are not those of rank 0 when they are loaded"
        assert (broken.rank, broken.step) == (1, 12)

    def test_an_error_says_where_it_was(self, tmp_path, monkeypatch):
        class Failing(gx.Pipeline):
            def sync(self, *args, **kwargs):
                raise RuntimeError("out of luck")

        monkeypatch.setattr(soaking.gx, "Pipeline", Failing)
        with pytest.raises(RuntimeError, match="out of luck") as caught:
            on_threads(tmp_path)
        assert "in step 1 of gx.chain(" in caught.value.__notes__[0]
        assert "seed=0" in caught.value.__notes__[0]


def residual_of(pipe):
    found = keyed(pipe.state)
    return next(x for key, x in found.items() if key.endswith(".residual.head.weight"))


class Forgetful(gx.Pipeline):
    """Loses a value of the residual, once."""

    steps = 0

    def sync(self, *args, **kwargs):
        report = super().sync(*args, **kwargs)
        self.steps += 1
        if self.steps == 12:
            residual_of(self).view(-1)[residual_of(self).abs().argmax()] = 0
        return report


class Doubling(gx.Pipeline):
    """Hands on a result twice as large, on all ranks."""

    def sync(self, *args, **kwargs):
        report = super().sync(*args, **kwargs)
        if report.ready and self._parameters["wide"].grad is not None:
            self._parameters["wide"].grad *= 2
        return report


class Apart(gx.Pipeline):
    """Hands on another bit on rank 1."""

    def sync(self, *args, **kwargs):
        report = super().sync(*args, **kwargs)
        if self._group.rank == 1 and report.ready:
            gradient = self._parameters["head.weight"].grad
            gradient.view(torch.int32).view(-1)[5] ^= 1 << 22
        return report


class Moved(gx.Pipeline):
    """Lets a bad step into the residual."""

    def sync(self, *args, **kwargs):
        report = super().sync(*args, **kwargs)
        if report.skipped:
            residual_of(self)[0, 0] += 1
        return report


class Spoilt(gx.Pipeline):
    """Keeps a NaN."""

    steps = 0

    def sync(self, *args, **kwargs):
        report = super().sync(*args, **kwargs)
        self.steps += 1
        if self.steps % soaking.EVERY == 0 and not report.skipped:
            residual_of(self)[0, 0] = torch.nan
        return report


class Blind(gx.Pipeline):
    """Takes bad steps for good ones."""

    def sync(self, *args, **kwargs):
        report = super().sync(*args, **kwargs)
        return gx.SyncReport(True, False, report.wire_bytes, report.dense_bytes)


class Stingy(gx.Pipeline):
    """Keeps what is to be brought out."""

    def flush(self, *args):
        yield from ()


class TestDetection:
    @pytest.mark.parametrize(
        ("kind", "code", "text"),
        [
            (Forgetful, TOPK, "L2: results + mean residual are off by"),
            (Doubling, TOPK, "L2: results + mean residual are off by"),
            (Apart, TOPK, "L4: its parameters are not those of rank 0"),
            (Moved, TOPK, "L5: a bad step has left a trace in the state, at 'states.1."),
            (Spoilt, TOPK, "L5: the state is not finite at 'states.1.inner_states.0.residual"),
            (Blind, TOPK, "L5: SyncReport(ready=True, skipped=False"),
            (Stingy, soak.CHAINS[4], "L2: flush does not bring out all results"),
        ],
        ids=lambda x: getattr(x, "__name__", ""),
    )
    def test_a_broken_law_is_told_by_all_ranks(self, kind, code, text, tmp_path, monkeypatch):
        monkeypatch.setattr(soaking.gx, "Pipeline", kind)
        told = on_threads(tmp_path, code, 90)
        assert told[0][-1] == told[1][-1]
        assert isinstance(told[0][-1], Broken)
        assert told[0][-1].text.startswith(text)
        assert told[0][-1].rank == int(kind is Apart)

    def test_a_leak_of_a_file_a_turn_is_found(self, tmp_path):
        if sys.platform != "linux":
            pytest.skip("no /proc")
        kept, ended = [], []
        for _ in range(3):
            ended.append(on_threads(tmp_path, steps=1, size=1)[0][-1])
        assert Flat(ended, 1).complaint() == ""
        for _ in range(3):
            kept.append(open(os.devnull))  # noqa: SIM115
            ended.append(on_threads(tmp_path, steps=1, size=1)[0][-1])
        for file in kept:
            file.close()
        assert Flat(ended, 1).growth("files") == 3
        assert "3 files more at its end" in Flat(ended, 1).complaint()

    def test_memory_that_grows_is_found(self):
        ended = [Ended(0, Counts(), (100 + 5 * i) * 2**20, 7) for i in range(4)]
        assert "10,485,760 bytes of memory more" in Flat(ended, 1).complaint()
        assert Flat(ended[:2], 1).growth("resident") is None
        unknown = [Ended(0, Counts(), -1, -1)] * 9
        assert Flat(unknown, 1).complaint() == ""


class TestLedger:
    def test_only_chains_that_bring_out_all_are_held_to_it(self):
        assert all(accounts_for_all(soaking.chain_from(code)) for code in soak.CHAINS)
        for code in (
            "chain(topk(0.1, feedback=False), allreduce())",
            "chain(topk(0.1), momentum_correction(0.9), allreduce())",
            "chain(topk(0.1), ef(), allreduce(), clip_by_global_norm(1.0))",
            "chain(topk(0.1), ef(), allreduce(op='sum'))",
        ):
            assert not accounts_for_all(soaking.chain_from(code))

    def test_what_is_not_a_number_is_an_error(self):
        ledger = Ledger(1, 0)
        held = zeros()
        assert ledger.error(held) == (0.0, "")
        held["wide"][3] = torch.nan
        assert ledger.error(held)[1] == "wide"
        assert not ledger.error(held)[0] <= 1
