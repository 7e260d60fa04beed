import re

import pytest
import torch
from torch import nn

from gradtx.interop.amp import ScalerAdapter


def a_step(grad=1.0, scale=8.0, growth_interval=1000):
    """A scaler that has scaled a loss, an optimizer, and its one parameter with a gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    scaler.scale(torch.zeros(()))
    weight = nn.Parameter(torch.tensor([5.0, 5.0]))
    weight.grad = torch.tensor([grad * scale, scale])
    return scaler, torch.optim.SGD([weight], lr=1.0), weight


def what_scaler_keeps(scaler, optimizer):
    """What the scaler has noted about an optimizer, in comparable form."""
    state = scaler._per_optimizer_states[id(optimizer)]
    found = {
        str(device): (t.dtype, t.shape, t.item())
        for device, t in state["found_inf_per_device"].items()
    }
    return state["stage"], found


@pytest.mark.parametrize("grad", [1.0, float("inf"), float("nan")])
def test_record_leaves_the_scaler_as_unscale_does(grad):
    scaler, optimizer, _ = a_step(grad)
    scaler.unscale_(optimizer)
    other, its_optimizer, _ = a_step(grad)
    ScalerAdapter(other).record([its_optimizer], skipped=grad != 1.0)
    assert what_scaler_keeps(other, its_optimizer) == what_scaler_keeps(scaler, optimizer)


@pytest.mark.parametrize(("skipped", "value", "scale"), [(True, 5.0, 4.0), (False, 4.0, 8.0)])
def test_step_and_update_go_by_what_is_recorded(skipped, value, scale):
    scaler, optimizer, weight = a_step()
    weight.grad = torch.ones(2)
    ScalerAdapter(scaler).record([optimizer], skipped=skipped)
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.get_scale()) == ([value] * 2, scale)


def test_a_recorded_step_counts_for_the_growth_of_the_scale():
    scaler, optimizer, _ = a_step(growth_interval=1)
    ScalerAdapter(scaler).record([optimizer], skipped=False)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0


def test_the_loss_scale_is_the_scalers():
    scaler, optimizer, weight = a_step()
    assert ScalerAdapter(scaler).loss_scale([optimizer], {"w": weight}) == (8.0, True)


def test_asking_for_the_loss_scale_divides_nothing():
    scaler, optimizer, weight = a_step()
    ScalerAdapter(scaler).loss_scale([optimizer], {"w": weight})
    assert weight.grad.tolist() == [8.0, 8.0]


def test_the_loss_scale_is_one_where_the_user_has_unscaled():
    scaler, optimizer, weight = a_step()
    scaler.unscale_(optimizer)
    assert ScalerAdapter(scaler).loss_scale([optimizer], {"w": weight}) == (1.0, True)


def test_the_loss_scale_is_known_before_anything_was_scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    _, optimizer, weight = a_step()
    assert ScalerAdapter(scaler).loss_scale([optimizer], {"w": weight}) == (32.0, True)


def test_a_scaler_that_has_scaled_nothing_can_be_stepped_and_updated():
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    _, optimizer, weight = a_step()
    ScalerAdapter(scaler).record([optimizer], skipped=True)
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.get_scale()) == ([5.0, 5.0], 16.0)


def test_a_new_iteration_starts_with_update():
    scaler, optimizer, weight = a_step()
    adapter = ScalerAdapter(scaler)
    adapter.record([optimizer], skipped=False)
    scaler.step(optimizer)
    scaler.update()
    assert adapter.loss_scale([optimizer], {"w": weight}) == (8.0, True)


@pytest.mark.parametrize("enabled", [True, False])
def test_enabled_is_what_the_scaler_says(enabled):
    assert ScalerAdapter(torch.amp.GradScaler("cpu", enabled=enabled)).enabled is enabled


def test_an_optimizer_may_not_have_stepped_already():
    scaler, optimizer, weight = a_step()
    scaler.step(optimizer)
    text = (
        "pipe.sync(optimizer) comes before scaler.step(optimizer); here the optimizer has stepped"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}"):
        ScalerAdapter(scaler).loss_scale([optimizer], {"w": weight})


def test_a_parameter_without_a_gradient_needs_no_optimizer():
    scaler, optimizer, weight = a_step()
    parameters = {"w": weight, "v": nn.Parameter(torch.zeros(1))}
    assert ScalerAdapter(scaler).loss_scale([optimizer], parameters) == (8.0, True)


def test_a_second_sync_before_update_is_refused():
    scaler, optimizer, weight = a_step()
    adapter = ScalerAdapter(scaler)
    adapter.record([optimizer], skipped=False)
    with pytest.raises(RuntimeError, match="the gradients are reduced already"):
        adapter.loss_scale([optimizer], {"w": weight})
    scaler.step(optimizer)
    scaler.update()
    assert adapter.loss_scale([optimizer], {"w": weight}) == (8.0, True)
