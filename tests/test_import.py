"""What ``import gradtx`` brings in, and what it gives."""

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gradtx as gx

ROOT = Path(gx.__file__).parents[1]
OPTIONAL = ["jax", "optax", "matplotlib", "sklearn", "rich", "hypothesis"]


def run_python(code, *options):
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def brought_in():
    """The modules that gradtx imports on top of torch, warnings being errors."""
    return set(
        run_python(
            "import sys, warnings, torch\n"
            "before = set(sys.modules)\n"
            "warnings.simplefilter('error')\n"
            "import gradtx\n"
            "print(*sorted(set(sys.modules) - before))"
        ).split()
    )


def test_import_brings_in_the_package(brought_in):
    assert {"gradtx", "gradtx.core.chain"} <= brought_in


@pytest.mark.parametrize("name", OPTIONAL)
def test_import_leaves_optional_packages_alone(brought_in, name):
    assert not {module for module in brought_in if module.split(".")[0] == name}


def test_import_leaves_the_jax_backend_alone(brought_in):
    assert "gradtx.backends.jax_ops" not in brought_in


def test_optional_packages_stay_out_while_a_chain_runs():
    code = (
        "import sys, torch, gradtx as gx\n"
        "tx = gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.5), gx.ef(), gx.allreduce())\n"
        "state = tx.init({'w': torch.zeros(4)})\n"
        "tx.update({'w': torch.ones(4)}, state, loss_scale=2.0)\n"
        f"print(*[name for name in {OPTIONAL} if name in sys.modules])"
    )
    assert run_python(code).split() == []


@pytest.mark.parametrize("name", gx.__all__)
def test_public_name_has_a_docstring(name):
    assert inspect.getdoc(getattr(gx, name))


def test_public_names_are_sorted_and_unique():
    assert gx.__all__ == sorted(set(gx.__all__))


def test_public_names_of_the_contract_are_there():
    contract = {
        *("unscale", "filter_params", "skip_bn", "topk_sparsify", "topk", "sign_quantize", "sign"),
        *("error_feedback", "ef", "allreduce", "chain", "explain", "declare", "ChainOrderError"),
        *("RankMismatchError", "Pipeline", "SyncReport", "masked", "apply_if_finite", "is_matrix"),
    }
    assert contract <= set(gx.__all__)


@pytest.mark.parametrize(
    ("short", "long"),
    [("topk", "topk_sparsify"), ("sign", "sign_quantize"), ("ef", "error_feedback")],
)
def test_short_name_is_the_long_one(short, long):
    assert getattr(gx, short) is getattr(gx, long)


def test_everything_public_in_the_module_is_in_all():
    public = {
        name
        for name, value in vars(gx).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(gx.__all__)


def test_version_is_read_from_the_package_by_the_build():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in pyproject["project"]
    assert pyproject["project"]["dynamic"] == ["version"]
    assert pyproject["tool"]["hatch"]["version"]["path"] == "gradtx/__init__.py"


def test_version_is_written_in_one_file():
    holders = [
        path.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("gradtx/**/*.py"), ROOT / "pyproject.toml"]
        if f'"{gx.__version__}"' in path.read_text()
    ]
    assert holders == ["gradtx/__init__.py"]


def test_package_is_typed():
    assert (ROOT / "gradtx" / "py.typed").is_file()
