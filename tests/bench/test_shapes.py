import math

import pytest

from gradtx.bench.shapes import MODELS, described, shapes_of


@pytest.mark.parametrize(
    ("model", "values", "leaves"),
    [
        ("resnet50", 25_557_032, 161),
        ("gpt2", 124_439_808, 148),
        ("leaves", 64_000, 1000),
        ("24x1024x1024", 24 * 2**20, 24),
        ("3x5", 15, 3),
    ],
)
def test_totals(model, values, leaves):
    shapes = shapes_of(model)
    assert sum(map(math.prod, shapes)) == values
    assert len(shapes) == leaves
    assert described(model) == f"{model}: {values:,} values in {leaves:,} leaves"


def test_layers_fit_each_other():
    kernels = [shape for shape in shapes_of("resnet50") if len(shape) == 4]
    assert len(kernels) == 53
    assert (kernels[0], kernels[-1]) == ((64, 3, 7, 7), (2048, 512, 1, 1))
    assert shapes_of("resnet50")[-2:] == [(1000, 2048), (1000,)]
    matrices = [shape for shape in shapes_of("gpt2") if len(shape) == 2]
    assert len(matrices) == 2 + 4 * 12
    assert matrices[0] == (50_257, 768)


@pytest.mark.parametrize("model", ["vgg", "24", "x4", "4x", "2x-3", "1.5x2", "²x2", ""])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match="expected resnet50, gpt2, leaves, or so many leaves"):
        shapes_of(model)


@pytest.mark.parametrize("model", ["0x5", "5x0", "70000x70000"])
def test_no_values_or_too_many_are_refused(model):
    with pytest.raises(ValueError, match=rf"{model}: expected 1 to 2,147,483,648 values, got"):
        shapes_of(model)


def test_names_are_no_shapes():
    assert all(not name[0].isdigit() for name in MODELS)
