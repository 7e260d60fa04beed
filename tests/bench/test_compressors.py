import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import gradtx as gx
from compressing import payload_nbytes
from gradtx.__main__ import main
from gradtx.bench import compressors
from gradtx.bench.compressors import Wire, compare, family_of, measure, methods
from gradtx.bench.gradients import load

# Bits a value by definition; headers and small leaves add a little.
BITS = {
    "topk(0.01)": 0.01 * (32 + 8.56),
    "topk(0.01, values='float16')": 0.01 * 24.56,
    "random_k(0.01)": 0.01 * 32,
    "sign()": 1.0,
    "ternary()": 1.6,
    "quantize(4)": 4 + 32 / 256,
    "cast('float8_e4m3fn')": 8 + 16 / 256,
    "cast('float16')": 16.0,
    "natural()": 9.0,
}
OVERHEAD = 0.03


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(compressors, "MOST_RUNS", 1)


@pytest.fixture(scope="module")
def late_rows():
    gradient = load("late")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressors, "MOST_RUNS", 1)
        return {name: measure(s, gradient) for name, s in methods(gradient).items()}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.npz"
    generator = np.random.default_rng(0)
    leaves = {"w": generator.normal(size=(20, 30)), "b": generator.normal(size=(3,))}
    np.savez(path, empty=np.zeros((0, 2)), scalar=np.float32(1.0), **leaves)
    return str(path)


def test_every_compressor_is_in_the_table():
    named = {stage.name for stages in methods(load("late")).values() for stage in stages}
    modules = {
        getattr(gx, name).__module__.rpartition(".")[2]
        for name in gx.__all__
        if getattr(getattr(gx, name), "__module__", "").startswith("gradtx.compressors.")
    }
    assert named == modules - {"compressor", "levels", "schedule"}


@pytest.mark.parametrize("name", BITS)
def test_bits_are_those_of_the_definition_and_little_more(late_rows, name):
    assert BITS[name] <= late_rows[name].bits < BITS[name] + OVERHEAD


def test_ratio_is_against_fp32(late_rows):
    assert {round(row.ratio * row.bits, 6) for row in late_rows.values()} == {32.0}


@pytest.mark.parametrize("rank", [1, 4])
def test_powersgd_costs_two_narrow_matrices_where_they_pay(late_rows, rank):
    values = 0
    for leaf in load("late").values():
        n, m = leaf.shape[0], leaf[0].numel()
        pays = leaf.dim() > 1 and rank * (n + m) < n * m
        values += rank * (n + m) if pays else n * m
    overhead = late_rows[f"powersgd({rank})"].bits - 32 * values / 40_506
    assert 0 <= overhead < OVERHEAD


def test_errors_keep_their_bounds(late_rows):
    larger_than_the_gradient = {name for name, row in late_rows.items() if row.error >= 1}
    assert larger_than_the_gradient == {"ternary()", "quantize(2)"}  # neither is a contraction
    assert late_rows["natural()"].error < 8**-0.5
    assert late_rows["cast('float16')"].error < 2**-11
    assert late_rows["cast('float8_e4m3fn')"].error < 2**-4
    assert late_rows["powersgd(4)"].error < late_rows["powersgd(1)"].error


@pytest.mark.parametrize("name", ["topk(0.001)", "topk(0.01)", "random_k(0.01)", "powersgd(1)"])
def test_error_and_cosine_of_a_projection_are_the_legs_of_a_right_triangle(late_rows, name):
    row = late_rows[name]
    assert row.error**2 + row.cosine**2 == pytest.approx(1, abs=1e-5)


def test_what_is_measured_is_the_message():
    gradient = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    tx = gx.sign()
    wire = Wire((tx,), gradient)
    sent = wire.encode()
    payload = tx.update(gradient, tx.init(gradient))[0]["w"]
    assert payload_nbytes(payload) < sent.nbytes < payload_nbytes(payload) + 64
    sent.leaves[0] = None  # Only the message is left to read.
    assert torch.equal(wire.decode(sent)[0].reshape(-1), payload.decode())


def test_payload_larger_than_the_leaf_travels_dense():
    gradient = {"w": torch.tensor([1.0])}
    wire = Wire((gx.sign(),), gradient)
    sent = wire.encode()
    assert sent.message is None
    assert torch.equal(wire.decode(sent)[0], gradient["w"])


def test_comparison_is_over_all_leaves():
    exact = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    assert compare([torch.tensor([3.0]), torch.tensor([[0.0]])], exact) == (0.8, 0.6)
    assert compare([torch.zeros(1), torch.zeros(1, 1)], exact) == (1.0, 0.0)


def test_table_and_json_hold_all_rows(tiny, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["compressors", "--gradient", tiny, "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(path.read_text())
    rows = results.pop("compressors")
    assert results == {"gradient": tiny, "leaves": 4, "values": 604, "version": gx.__version__}
    names = [row["compressor"] for row in rows]
    assert names == list(methods(load(tiny)))
    assert [line.split("  ")[0] for line in lines] == [
        "compressor",
        *names,
        f"{tiny}: 604 values in 4 leaves; times on one thread",
    ]
    fields = ["bits", "ratio", "error", "cosine", "encode_ms", "decode_ms"]
    for row in rows:
        assert list(row) == ["compressor", *fields]
        assert all(np.isfinite(row[field]) for field in fields)


@pytest.mark.parametrize("only", [["sign"], ["quantize(4)"], ["topk+sign", "cast"]])
def test_only_some(tiny, capsys, only):
    arguments = [word for name in only for word in ("--only", name)]
    assert main(["compressors", "--gradient", tiny, *arguments]) == 0
    first = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:-1]]
    every = methods(load(tiny))
    assert first == [name for name in every if {name, family_of(every[name])} & set(only)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "gzip"], "--only gzip: expected topk, topk+sign, threshold, "),
        (["--gradient", "grads.csv"], "grads.csv: expected early, late, or a file that ends in "),
        (["--gradient", "nowhere.npy"], "[Errno 2] No such file or directory: 'nowhere.npy'"),
        (["--gradient", "nowhere.pt"], "[Errno 2] No such file or directory: 'nowhere.pt'"),
        (["--plot", "x.bmp"], "x.bmp: expected a file that ends in .png, "),
    ],
)
def test_unusable_arguments_are_refused_in_one_line(capsys, arguments, message):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    assert main(["compressors", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"gradtx compressors: {message}")
    assert captured.err.count("\n") == 1


def test_gradient_that_is_not_finite_is_refused(tmp_path, capsys):
    path = tmp_path / "bad.npy"
    np.save(path, np.array([1.0, np.nan]))
    assert main(["compressors", "--gradient", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"gradtx compressors: {path}: the tensor holds 1 of 2 values not finite as FP32\n"
    )


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_is_written(tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{suffix}"
    assert main(["compressors", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(start)


def test_plot_without_any_error_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "one.npy"
    np.save(path, np.ones(1))
    options = ["--only", "sign", "--plot", str(tmp_path / "plot.png")]
    assert main(["compressors", "--gradient", str(path), *options]) == 0
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_missing_matplotlib_is_named_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["compressors", "--plot", "plot.png"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "gradtx compressors: matplotlib not found: pip install 'gradtx[plot]'\n"


def test_terminal_gets_the_rows_from_rich(tiny, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["compressors", "--gradient", tiny, "--only", "quantize"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("quantize(2)", "quantize(4)", "quantize(8)", "┃"))


def test_number_of_threads_is_put_back(tiny):
    torch.set_num_threads(2)
    try:
        assert main(["compressors", "--gradient", tiny, "--only", "sign"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("arguments", [["explain"], ["compressors", "--only", "sign"]])
def test_optional_packages_stay_out(arguments):
    code = (
        "import sys\n"
        "from gradtx.__main__ import main\n"
        f"main({arguments})\n"
        "print([n for n in ('rich', 'matplotlib', 'sklearn', 'safetensors') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
