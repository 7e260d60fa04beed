"""`add_decayed_weights`: weight decay as a stage."""

import re

import pytest
import torch

import gradtx as gx
from gradtx.testing import check_laws, run_ranks

NAN = float("nan")
PARAMS = {"bias": torch.tensor([2.0, 4.0]), "none": None, "w": torch.tensor([[8.0, -2.0]])}
GRADS = {"bias": torch.tensor([1.0, 1.0]), "none": None, "w": torch.tensor([[1.0, 1.0]])}


def updated(tx, grads, params, **extra):
    return tx.update(grads, tx.init(params), params, **extra)[0]


def test_a_share_of_the_parameters_is_added():
    out = updated(gx.add_decayed_weights(0.5), GRADS, PARAMS)
    assert out["none"] is None
    assert out["bias"].tolist() == [2.0, 3.0]
    assert out["w"].tolist() == [[5.0, 0.0]]


@pytest.mark.parametrize("wrap", [gx.chain, lambda tx: tx])
def test_only_leaves_of_the_mask_decay(wrap):
    asked = []

    def mask(path, leaf, info):
        asked.append((path, tuple(leaf.shape), info))
        return path == "w"

    tx = wrap(gx.add_decayed_weights(0.5, mask=mask))
    state = tx.init(PARAMS)
    for _ in range(2):
        out, state = tx.update(GRADS, state, PARAMS)
        assert torch.equal(out["bias"], GRADS["bias"])
        assert out["w"].tolist() == [[5.0, 0.0]]
    assert asked == [("bias", (2,), None), ("w", (1, 2), None)]


def test_the_mask_knows_the_layers_of_a_module():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    tx = gx.add_decayed_weights(1.0, mask=~gx.is_batch_norm & ~gx.is_bias)
    params = dict(model.named_parameters())
    grads = {path: torch.zeros_like(p) for path, p in params.items()}
    out, _ = tx.update(grads, tx.init(model), params)
    assert [path for path, leaf in out.items() if leaf.any()] == ["0.weight"]


def test_parameters_in_16_bits_are_added_in_fp32():
    params = {"w": torch.full((1,), 1.0, dtype=torch.bfloat16)}
    grads = {"w": torch.full((1,), 2.0**-9, dtype=torch.bfloat16)}
    # In bfloat16 the gradient would be lost beside the parameter.
    tx = gx.chain(gx.add_decayed_weights(1.0), gx.add_decayed_weights(-1.0), gx.allreduce())
    assert torch.equal(updated(tx, grads, params)["w"], grads["w"])


def test_fp64_stays_fp64():
    params = [torch.tensor([2.0**-40], dtype=torch.float64)]
    out = updated(gx.add_decayed_weights(1.0), [torch.ones(1, dtype=torch.float64)], params)
    assert out[0].item() == 1.0 + 2.0**-40


def test_it_is_the_penalty_of_torch_sgd():
    parameter = torch.nn.Parameter(torch.tensor([2.0, -4.0]))
    optimizer = torch.optim.SGD([parameter], lr=0.1, weight_decay=0.25)
    pipe = gx.Pipeline(
        gx.chain(gx.allreduce(), gx.add_decayed_weights(0.25), gx.scale(-0.1)), {"w": parameter}
    )
    before = parameter.detach().clone()
    parameter.grad = torch.ones(2)
    optimizer.step()
    expected = parameter.detach() - before
    with torch.no_grad():
        parameter.copy_(before)
    parameter.grad = torch.ones(2)
    pipe.sync()
    torch.testing.assert_close(parameter.grad, expected)


def test_on_either_side_of_a_dense_exchange_it_is_the_same():
    decay, exchange = gx.add_decayed_weights(0.5), gx.allreduce()

    def rank(i):
        grads = {"w": torch.tensor([1.0 + i, 3.0])}
        params = {"w": torch.tensor([2.0, 4.0])}
        return [
            updated(gx.chain(*parts), grads, params)["w"].tolist()
            for parts in ((decay, exchange), (exchange, decay))
        ]

    assert run_ranks(2, rank) == [[[2.5, 5.0]] * 2] * 2


def test_a_leaf_that_one_rank_lacks_decays_on_all():
    tx = gx.chain(gx.allreduce(), gx.add_decayed_weights(0.5))

    def rank(i):
        grads = {"w": None if i else torch.tensor([4.0])}
        return updated(tx, grads, {"w": torch.tensor([2.0])})["w"].item()

    assert run_ranks(2, rank) == [3.0, 3.0]


def test_a_bad_step_does_not_decay():
    tx = gx.chain(gx.unscale(), gx.allreduce(), gx.add_decayed_weights(0.5))
    grads = {"w": torch.tensor([NAN])}
    out = updated(tx, grads, {"w": torch.tensor([2.0])}, loss_scale=1.0)
    assert out["w"].item() == 0.0


def test_inputs_are_not_written_into():
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    updated(gx.add_decayed_weights(0.5), grads, params)
    assert params["w"].tolist() == grads["w"].tolist() == [1.0, 1.0]


def test_laws():
    params = {"bias": torch.linspace(-1, 1, 3), "w": torch.linspace(-2, 1, 12).reshape(3, 4)}
    decay = gx.add_decayed_weights(0.25, mask=~gx.is_bias)
    for parts in (
        (gx.unscale(), gx.allreduce(), decay),
        (gx.unscale(), decay, gx.topk(0.3), gx.ef(), gx.allreduce()),
    ):
        check_laws(gx.chain(*parts), ranks=(1, 2), steps=2, params=params)


def test_before_unscale_it_is_refused():
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(gx.add_decayed_weights(0.5), gx.unscale(), gx.allreduce())
    [violation] = caught.value.violations
    assert violation.code == "GX102"
    assert violation.fix == "put unscale() before add_decayed_weights(0.5)"


def test_behind_a_compressor_it_is_refused():
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(gx.topk(0.1), gx.ef(), gx.add_decayed_weights(0.5), gx.allreduce())
    assert [violation.code for violation in caught.value.violations] == ["GX401"]


def test_it_needs_the_parameters():
    text = "add_decayed_weights() needs the parameters: tx.update(grads, state, params)"
    for tx in (gx.add_decayed_weights(0.5), gx.add_decayed_weights(0.5, mask=gx.is_bias)):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            tx.update(GRADS, tx.init(PARAMS))


def test_it_prints_as_the_call_that_makes_it():
    tx = gx.add_decayed_weights(0.5, ~gx.is_bias)
    assert repr(tx) == "gx.add_decayed_weights(0.5, mask=~gx.is_bias)"
    assert repr(gx.add_decayed_weights(1)) == "gx.add_decayed_weights(1)"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((NAN,), ValueError, "add_decayed_weights(weight_decay=nan): expected a finite number"),
        (("1",), TypeError, "add_decayed_weights(weight_decay='1'): expected a number"),
        (
            (0.1, "bias"),
            TypeError,
            "a predicate is a function (path, leaf, info) -> bool, got 'bias'",
        ),
    ],
)
def test_wrong_argument_is_refused(arguments, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        gx.add_decayed_weights(*arguments)
