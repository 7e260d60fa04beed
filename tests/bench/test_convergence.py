import importlib.util
import json
import math
import sys
from dataclasses import replace

import pytest
import torch

import gradtx as gx
from gradtx.__main__ import main
from gradtx.bench import convergence, results
from gradtx.bench.arguments import chain_from
from gradtx.bench.summary import Difference, Summary, summarise
from gradtx.bench.tasks import SEQUENCES, TASKS, evaluate, loss_of
from gradtx.bench.text import CONTEXT, HELD_OUT, Corpus, windows
from gradtx.bench.training import WARM_UP, Job, Record, rate_factor, train

DENSE = "gx.chain(gx.allreduce())"
SIGNS = "gx.chain(gx.sign(), gx.ef(), gx.allreduce())"
COMMAND = ["bench", "convergence"]


def record(chain=DENSE, seed=0, losses=(2.0, 1.0), accuracy=90.0, sent=1000, **given):
    """A run of two steps that nobody has run."""
    job = Job(given.pop("task", "text"), chain, seed, 2, 2)
    return replace(
        Record(
            job,
            version=gx.__version__,
            learning_rate=0.2,
            train_loss=list(losses),
            loss=list(losses),
            accuracy=[50.0, accuracy],
            wire_bytes=[sent, 2 * sent],
            dense_bytes=8000,
            applied=2,
            skipped=0,
            seconds=3.0,
        ),
        **given,
    )


@pytest.fixture
def runs(monkeypatch):
    """Runs nothing: what would have been run, and a record for each."""
    asked = []

    def messages_of(function, arguments, count):
        asked.extend(arguments[0])
        for job in arguments[0]:
            yield "under way"
            yield replace(record(), job=job)

    monkeypatch.setattr(convergence, "messages_of", messages_of)
    return asked


class TestCommand:
    def test_runs_are_kept_and_not_run_again(self, tmp_path, capsys, monkeypatch):
        out, written = tmp_path / "runs.jsonl", tmp_path / "all.json"
        options = ["--task", "text", "--chain", "chain(topk(0.01), ef(), allreduce())"]
        options += ["--steps", "2", "--seeds", "1", "--out", str(out), "--json", str(written)]
        assert main([*COMMAND, *options]) == 0
        printed = capsys.readouterr().out
        rows, lines = json.loads(written.read_text())["tasks"]["text"], out.read_text().splitlines()
        assert [row["stages"] for row in rows] == ["dense", "topk(0.01), ef()"]
        for row, line, text in zip(rows, lines, printed.splitlines()[1:3], strict=True):
            run = json.loads(line)
            assert row["losses"] == [run["loss"][-1]]
            assert row["wire_bytes"] == run["wire_bytes"][-1] / 2
            assert row["mean_train_loss"] == run["train_loss"]
            assert text.startswith(row["stages"])
            assert f"{run['loss'][-1]:.4f}" in text
        assert rows[0]["wire_bytes"] > 50 * rows[1]["wire_bytes"]

        with out.open("a") as file:
            file.write(lines[0][:100])
        monkeypatch.setattr(convergence, "messages_of", None)
        assert main([*COMMAND, *options]) == 0
        assert capsys.readouterr().out == printed
        assert out.read_text().splitlines() == lines

    def test_only_what_is_missing_is_run(self, runs, tmp_path, capsys):
        out = tmp_path / "runs.jsonl"
        options = ["--task", "text", "--chain", SIGNS, "--steps", "2", "--out", str(out)]
        there = [record(), record(SIGNS, seed=2)]
        there += [record(seed=1, version="0.0.1"), record(seed=2, learning_rate=0.3)]
        for found in there:
            results.append(out, found)
        assert main([*COMMAND, *options]) == 0
        assert [(job.chain, job.seed) for job in runs] == [
            (SIGNS, 0),
            (DENSE, 1),
            (SIGNS, 1),
            (DENSE, 2),
        ]
        assert capsys.readouterr().err.count("\n") == 4
        assert len(results.read(out)) == 8

    @pytest.mark.parametrize("option", [("--steps", "3"), ("--ranks", "3"), ("--rate", "0.5")])
    def test_other_settings_are_other_runs(self, runs, tmp_path, option):
        out = tmp_path / "runs.jsonl"
        results.append(out, record())
        options = ["--task", "text", "--chain", DENSE, "--seeds", "1", "--steps", "2"]
        assert main([*COMMAND, *options, *option, "--out", str(out)]) == 0
        assert len(runs) == 1

    def test_without_options_both_tasks_are_trained_with_all_families(self, runs):
        assert main([*COMMAND, "--seeds", "1"]) == 0
        names = {task: [job.chain for job in runs if job.task == task] for task in TASKS}
        assert {job.steps for job in runs} == {500}
        for task, chains in names.items():
            assert len(set(chains)) == len(chains)
            assert chains[0] == DENSE
            for chain in chains:
                assert chain_from(chain).code() == chain
            assert any("skip_bn" in chain for chain in chains) == (task == "digits")

    def test_terminal_gets_a_bar_from_rich(self, runs, capsys, monkeypatch):
        pytest.importorskip("rich")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        assert main([*COMMAND, "--task", "text", "--chain", DENSE, "--seeds", "1"]) == 0
        assert "━" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ["--chain", "chain(gzip(9), allreduce())"],
                "--chain chain(gzip(9), allreduce()): unknown name 'gzip'",
            ),
            (["--chain", "sign(feedback=False)"], "--chain sign(feedback=False): gx.chain("),
            (["--chain", "chain(topk(2), allreduce())"], "--chain chain(topk(2), allreduce()): "),
            (["--chain", "chain(sign(), allreduce())"], "this chain breaks 1 rule:"),
            (["--chain", "allreduce(axis_name='x')"], "--chain allreduce(axis_name='x'): "),
            (
                ["--chain", "chain(dynamic_loss_scale(), allreduce())"],
                "--chain chain(dynamic_loss_scale(), allreduce()): there is no overflow here",
            ),
            (["--at", "501"], "--at 501: expected one of the steps from 10 to 500"),
            (["--at", "9"], "--at 9: expected one of the steps from 10 to 500"),
            (["--plot", "nowhere/x.png"], "--plot nowhere/x.png: there is no folder nowhere"),
        ],
    )
    def test_unusable_arguments_are_refused_before_anything_is_run(
        self, runs, capsys, options, message
    ):
        assert main([*COMMAND, "--task", "text", *options]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"gradtx bench convergence: {message}")
        assert captured.out == ""
        assert runs == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--task", "cifar"], "argument --task: invalid choice: 'cifar'"),
            (["--steps", "0"], "argument --steps: 0 is not in"),
            (["--ranks", "1"], f"argument --ranks: 1 is not in 2..{SEQUENCES}"),
            (["--rate", "0"], "argument --rate: 0 is not a finite number over 0"),
            (["--target", "nan"], "argument --target: nan is not a finite number over 0"),
            (["--jobs", "x"], "argument --jobs: invalid whole number value: 'x'"),
            (["--out", "nowhere/x"], "argument --out: nowhere/x cannot be written"),
        ],
    )
    def test_options_out_of_bounds_are_refused(self, capsys, options, message):
        with pytest.raises(SystemExit):
            main([*COMMAND, *options])
        assert message in capsys.readouterr().err

    def test_missing_packages_are_named(self, monkeypatch, capsys):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        for options, name, extra in [
            (["--task", "digits"], "scikit-learn", "demo"),
            (["--task", "text", "--plot", "plot.png"], "matplotlib", "plot"),
        ]:
            assert main([*COMMAND, *options]) == 2
            expected = f"{name} not found: pip install 'gradtx[{extra}]'"
            assert capsys.readouterr().err == f"gradtx bench convergence: {expected}\n"

    @pytest.mark.parametrize(("error", "status"), [(TimeoutError, 1), (KeyboardInterrupt, 130)])
    def test_what_was_done_is_kept_when_a_run_fails(
        self, runs, monkeypatch, tmp_path, error, status
    ):
        first_message_of = convergence.messages_of

        def stopped(*arguments):
            messages = first_message_of(*arguments)
            yield from (next(messages), next(messages))
            raise error

        monkeypatch.setattr(convergence, "messages_of", stopped)
        out = tmp_path / "runs.jsonl"
        options = ["--task", "text", "--chain", SIGNS, "--out", str(out)]
        assert main([*COMMAND, *options]) == status
        assert [found.job for found in results.read(out)] == runs[:1]

    def test_plot_is_written(self, runs, tmp_path):
        pytest.importorskip("matplotlib")
        path = tmp_path / "plot.png"
        options = ["--chain", SIGNS, "--steps", "2", "--plot", str(path)]
        assert main([*COMMAND, *options]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")


class TestFile:
    def test_a_run_is_read_as_it_was_written(self, tmp_path):
        path = tmp_path / "runs.jsonl"
        lost = record(SIGNS, losses=(3.0, math.inf), skipped=1)
        for run in (record(), lost):
            results.append(path, run)
        [first, second] = results.read(path)
        assert first == record()
        assert second.loss[0] == 3.0
        assert math.isnan(second.loss[1])
        assert "NaN" not in path.read_text()

    @pytest.mark.parametrize(
        "line", ["notes", "[1]", '{"task": "text"}', json.dumps({**record().to_json(), "x": 1})]
    )
    def test_line_that_is_no_run_is_named(self, tmp_path, line):
        path = tmp_path / "runs.jsonl"
        results.append(path, record())
        with path.open("a") as file:
            file.write(line + "\n")
        with pytest.raises(ValueError, match=r"runs\.jsonl, line 2: not a run"):
            results.read(path)

    @pytest.mark.parametrize("end", ["{", '{"task": "te', json.dumps(record().to_json())])
    def test_line_that_does_not_end_is_taken_away(self, tmp_path, end):
        path = tmp_path / "runs.jsonl"
        results.append(path, record())
        with path.open("a") as file:
            file.write(end)
        assert results.read(path) == [record()]
        results.mend(path)
        results.append(path, record(seed=1))
        assert results.read(path) == [record(), record(seed=1)]

    def test_file_of_another_program_is_left_as_it_is(self, tmp_path, runs, capsys):
        path = tmp_path / "notes.txt"
        path.write_text("to do")
        assert main([*COMMAND, "--task", "text", "--chain", DENSE, "--out", str(path)]) == 1
        assert "notes.txt: ends in what is not a run" in capsys.readouterr().err
        assert path.read_text() == "to do"
        assert runs == []


class TestTraining:
    def test_dense_ranks_train_as_one_does_on_the_whole_batch(self):
        run = train(Job("text", DENSE, seed=3, steps=4, ranks=2))
        task = TASKS["text"]()
        torch.manual_seed(3)
        model, losses = task.network(), []
        batches = task.batches(3, 0, 1)
        for step in range(1, 5):
            loss = loss_of(model, next(batches))
            losses.append(loss.item())
            parameters = list(model.parameters())
            with torch.no_grad():
                for p, gradient in zip(
                    parameters, torch.autograd.grad(loss, parameters), strict=True
                ):
                    p -= step / WARM_UP * task.learning_rate * gradient
        assert run.train_loss == pytest.approx(losses, rel=1e-5)
        assert run.loss[-1] == pytest.approx(evaluate(model, task.held_out)[0], rel=1e-5)
        assert (run.applied, run.skipped) == (4, 0)
        handshake = 1024
        assert run.wire_bytes[-1] == pytest.approx(run.dense_bytes + handshake, rel=1e-3)

    def test_same_job_gives_the_same_run(self):
        job = Job("digits", SIGNS, seed=0, steps=3, ranks=2)
        first, second, other = train(job), train(job), train(replace(job, seed=1))
        assert replace(first, seconds=0) == replace(second, seconds=0)
        assert first.train_loss != other.train_loss

    def test_loss_scale_is_divided_out_again(self):
        job = Job("digits", SIGNS, seed=0, steps=3, ranks=2)
        scaled = train(replace(job, chain=SIGNS.replace("chain(", "chain(gx.unscale(), ")))
        assert scaled.train_loss == train(job).train_loss

    def test_bad_steps_are_not_taken(self):
        run = train(Job("text", SIGNS, seed=0, steps=6, ranks=2, factor=1e30))
        assert run.skipped > 0
        assert run.applied == 6 - run.skipped
        assert math.isnan(run.train_loss[-1])

    @pytest.mark.parametrize("task", TASKS)
    def test_ranks_share_each_batch(self, task):
        if task == "digits":
            pytest.importorskip("sklearn")
        made = TASKS[task]()
        whole, *parts = (
            [next(batches) for _ in range(3)]
            for batches in (made.batches(1, 0, 1), made.batches(1, 0, 2), made.batches(1, 1, 2))
        )
        for (inputs, targets), (first, _), (second, _) in zip(whole, *parts, strict=True):
            assert len(inputs) == len(targets) == len(first) + len(second)
            assert torch.equal(inputs[0::2], first)
            assert torch.equal(inputs[1::2], second)

    @pytest.mark.parametrize(
        ("stages", "factor"),
        [
            ("sign(), ef()", 1),
            ("sign(majority_vote=True)", 0.025),
            ("random_k(0.1, unbiased=True)", 0.25),
            ("random_k(0.1), ef()", 0.25),
            ("topk(0.1), ef()", 1),
            ("topk(0.1), momentum_correction(0.5)", 0.5),
        ],
    )
    def test_rates_are_lower_for_what_is_longer_than_the_gradient(self, stages, factor):
        assert rate_factor(chain_from(f"chain({stages}, allreduce())")) == factor

    def test_runs_are_evaluated_at_their_end(self):
        for steps in (1, 49, 50, 130, 5000):
            points = Job("text", DENSE, 0, steps, 2).points
            assert points[-1] == steps
            assert points == sorted(set(points))
            assert len(points) <= 66


class TestCorpus:
    def test_it_is_the_same_each_time(self):
        first, second = Corpus.load(), Corpus.load()
        assert first.vocabulary == second.vocabulary
        assert torch.equal(first.train, second.train)
        assert torch.equal(first.held_out, second.held_out)
        assert len(first.train) > 400_000
        assert int(first.train.max()) < len(first.vocabulary) <= 100

    def test_each_character_is_either_trained_on_or_held_out(self):
        texts = ["abcdefghij" * 5, "ABCDEFGHIJKLMNOPQRST"]
        corpus = Corpus.of(texts)
        names = [
            "".join(corpus.vocabulary[i] for i in part) for part in (corpus.train, corpus.held_out)
        ]
        ends = [len(text) - len(text) // HELD_OUT for text in texts]
        assert names[0] == "".join(text[:end] for text, end in zip(texts, ends, strict=True))
        assert names[1] == "".join(text[end:] for text, end in zip(texts, ends, strict=True))

    def test_targets_are_the_next_characters(self):
        inputs, targets = windows(torch.arange(200), torch.tensor([0, 200 - CONTEXT - 1]))
        assert torch.equal(targets, inputs + 1)
        assert inputs[:, 0].tolist() == [0, 200 - CONTEXT - 1]
        assert int(targets.max()) == 199

    def test_the_network_sees_no_character_ahead(self):
        model = TASKS["text"]().network()
        characters = torch.zeros(1, CONTEXT, dtype=torch.long)
        changed = characters.clone()
        changed[0, 10:] = 1
        one, other = model(characters), model(changed)
        assert torch.equal(one[:, :10], other[:, :10])
        assert not torch.equal(one[:, 10], other[:, 10])


class TestSummary:
    def rows(self):
        runs = [record(seed=i, losses=(2.0, x)) for i, x in enumerate((1.0, 1.2, 1.4))]
        runs += [
            record(SIGNS, seed=i, losses=(1.0, x), accuracy=80.0 + i, sent=100)
            for i, x in enumerate((1.5, 1.7, 1.9))
        ]
        return summarise(runs, [DENSE, SIGNS])

    def test_numbers_are_those_of_the_runs(self):
        dense, signs = self.rows()
        assert dense.stages == "dense"
        assert signs.losses == [1.5, 1.7, 1.9]
        assert signs.accuracies == [80.0, 81.0, 82.0]
        difference = signs.loss_difference
        assert difference.value == pytest.approx(0.5)
        assert difference.error == pytest.approx(math.sqrt(2 * 0.04 / 3))
        assert signs.accuracy_difference.value == pytest.approx(-9)
        assert signs.accuracy_difference.errors == pytest.approx(-9 / math.sqrt(1 / 3))
        assert (dense.wire_bytes, signs.wire_bytes) == (1000, 100)
        assert signs.ratio == 40
        assert signs.rise == pytest.approx(0.7)
        assert dense.rise == 0

    def test_losses_on_the_way(self):
        dense, signs = self.rows()
        assert signs.losses_at(1) == [1.0, 1.0, 1.0]
        assert signs.losses_at(2) == signs.losses
        assert dense.steps_to(1.2) == [2, 2, None]
        assert signs.steps_to(1.2) == [1, 1, 1]
        with pytest.raises(ValueError, match="before step 1, got 0"):
            dense.losses_at(0)

    def test_table_says_so(self, runs, capsys, monkeypatch):
        monkeypatch.setattr(convergence, "summarise", lambda records, chains: self.rows())
        options = ["--task", "text", "--chain", SIGNS, "--steps", "2", "--at", "1"]
        assert main([*COMMAND, *options, "--target", "1.2", "--target", "1"]) == 0
        _, dense, signs, _ = (
            [cell.strip() for cell in line.split("  ") if cell]
            for line in capsys.readouterr().out.splitlines()
        )
        assert dense[-3:] == ["2.0000 ± 0.0000", "1 of 3 never", "2 of 3 never"]
        assert signs == [
            "sign(), ef()",
            "0.2",
            "1.7000 ± 0.2000",
            "+0.5000 (+3.1 SE)",
            "81.00 ± 1.00 %",
            "-9.00 (-15.6 SE)",
            "100",
            "40.0 ×",
            "0.700",
            "1.0000 ± 0.0000",
            "1 ± 0",
            "1 ± 0",
        ]

    def test_one_run_has_no_standard_error(self):
        one = Difference.of([2.0], [1.5])
        assert one.value == 0.5
        assert math.isnan(one.errors)
        assert convergence.in_errors(one, 2) == "+0.50"
        assert one.to_json() == {"value": 0.5, "standard_error": None, "errors": None}

    def test_equal_runs_have_none_either(self):
        assert math.isnan(Difference.of([2.0, 2.0], [1.0, 1.0]).errors)

    def test_what_has_diverged_is_counted(self):
        lost = [record(SIGNS, seed=i, losses=(3.0, x)) for i, x in enumerate((1.0, math.nan))]
        row = Summary("sign()", lost, [record(), record(seed=1)])
        assert convergence.with_spread(row.losses, 4) == "1 of 2 diverged"
        assert convergence.in_errors(row.loss_difference, 4) == "–"
        assert row.to_json()["mean_loss"] == [3.0, None]
        assert json.dumps(row.to_json(), allow_nan=False)
