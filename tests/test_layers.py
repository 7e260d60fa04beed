"""Imports between the packages of gradtx go down only."""

import ast
from pathlib import Path

import pytest

import gradtx as gx

PACKAGE = Path(gx.__file__).parent
# What each package may import, besides itself.
BELOW = {
    "wire": set(),
    "backends": {"wire"},
    "core": {"backends"},
    "compressors": {"core", "backends"},
    "transforms": {"core", "backends"},
    "exchange": {"core", "backends", "wire"},
    "interop": {"core", "backends", "exchange"},
    "stale": {"core", "backends", "wire", "exchange"},
}


def imported(source, module):
    """The modules of gradtx that a source file imports anywhere, by full name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            # A name that is imported may be a module.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "gradtx")


def above(source, layer, module="it"):
    """What a source file imports that its layer does not stand on."""
    allowed = {layer, *BELOW[layer]}
    return [name for name in imported(source, module) if (*name.split("."), "")[1] not in allowed]


@pytest.mark.parametrize(
    "path",
    [path for layer in BELOW for path in sorted((PACKAGE / layer).rglob("*.py"))],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_imports_go_down(path):
    layer = path.relative_to(PACKAGE).parts[0]
    assert above(path.read_text(), layer, path.name) == []


def test_every_package_has_its_place():
    """Those that are not here stand above all."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages - set(BELOW) == {"bench", "plan", "testing"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from gradtx.exchange.group import Group", ["gradtx.exchange.group.Group"]),
        ("def f():\n    import gradtx.interop.amp", ["gradtx.interop.amp"]),
        ("from gradtx import pipeline, backends", ["gradtx.pipeline"]),
        ("import gradtx as gx", ["gradtx"]),
        ("import torch\nfrom gradtx.core.tree import flatten", []),
    ],
)
def test_an_import_that_goes_up_is_found(source, found):
    assert above(source, "core") == found
