"""With tensors on a device, `update` never waits for it.

Meta tensors stand in for those on a GPU: they have no values, so that whatever reads one raises.
Copies from the CPU, which a GPU waits for as well, are found by watching all operations.
"""

import optree
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradtx as gx

ALONE = {
    "quantize 1": (gx.quantize(1),),
    "quantize 2": (gx.quantize(2),),
    "quantize l2": (gx.quantize(4, norm="l2"),),
    "ternary": (gx.ternary(),),
    "ternary clip": (gx.ternary(clip=2.5, feedback=False),),
    "natural": (gx.natural(),),
    "random_k unbiased": (gx.random_k(0.1, unbiased=True),),
    "majority vote": (gx.sign(majority_vote=True),),
    "topk ternary": (gx.topk(0.1, feedback=False), gx.ternary()),
}
FED_BACK = {
    "topk": (gx.topk(0.1),),
    "topk float16": (gx.topk(0.1, values="float16"),),
    "topk global": (gx.topk(0.1, scope="global"),),
    "topk sign": (gx.topk(0.1), gx.sign()),
    "topk quantize": (gx.topk(0.1), gx.quantize(4)),
    "topk cast": (gx.topk(0.1), gx.cast("float8_e4m3fn")),
    "threshold": (gx.threshold(0.5),),
    "random_k": (gx.random_k(0.1),),
    "sign": (gx.sign(),),
    "cast float16": (gx.cast("float16"),),
    "cast bfloat16": (gx.cast("bfloat16"),),
    "cast float8_e4m3fn": (gx.cast("float8_e4m3fn"),),
    "cast float8_e5m2": (gx.cast("float8_e5m2"),),
    "quantize 8": (gx.quantize(8),),
    "quantize to nearest": (gx.quantize(4, stochastic=False),),
    "natural ef": (gx.natural(),),
    "powersgd": (gx.powersgd(2),),
    "powersgd cold": (gx.powersgd(2, warm_start=False),),
}
STAGES = {
    **ALONE,
    **{name: (*stages, gx.ef()) for name, stages in FED_BACK.items()},
    "momentum_correction": (gx.topk(0.1), gx.momentum_correction(0.9)),
    "momentum_correction clip": (gx.topk(0.1), gx.momentum_correction(0.9, clip=1.0)),
    "clip_by_local_norm": (gx.clip_by_local_norm(1.0), gx.topk(0.1), gx.ef()),
    "clip_by_global_norm": (gx.clip_by_global_norm(1.0), gx.natural()),
    "scale": (gx.scale(-0.5), gx.natural()),
    "add_decayed_weights": (gx.add_decayed_weights(0.1, gx.is_matrix), gx.natural()),
}
FRONTS = {"": (), "unscale, skip_bn": (gx.unscale(), gx.skip_bn())}
# They take a single number on the CPU as an argument of their kernel.
TAKE_NUMBERS = {"aten::add", "aten::bitwise_and", "aten::bitwise_xor"}


class Watch(TorchDispatchMode):
    """Keeps the names of operations that read from the device, or bring something to it."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in optree.tree_leaves((args, kwargs, out)) if torch.is_tensor(x)]
        here = [x for x in tensors if x.device.type == "cpu"]
        name = func._schema.name
        # What stays on the CPU, such as mixing the keys of random numbers, waits for nothing.
        if 0 < len(here) < len(tensors):
            if any(x.dim() for x in here):
                self.found.add(f"{name} of a tensor on the CPU")
            if name not in TAKE_NUMBERS:
                self.found.add(f"{name} between devices")
        return out


def gradients(device):
    return {
        "w": torch.ones(16, 40, device=device),
        "conv.weight": torch.ones(300, device=device),
        "bn1.weight": torch.ones(3, device=device),
        "half": torch.ones(7, 5, dtype=torch.bfloat16, device=device),
        "none": torch.ones(0, device=device),
    }


def run(stages, device, before_steps):
    """Three steps on a device, after a call of `before_steps`."""
    tx, grads = gx.chain(*stages), gradients(device)
    loss_scale = torch.ones((), device=device)
    state = tx.init(grads)
    before_steps()
    for _ in range(3):
        _, state = tx.update(grads, state, grads, loss_scale=loss_scale)


@pytest.mark.parametrize("front", FRONTS.values(), ids=FRONTS)
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_no_step_reads_from_the_device_or_copies_to_it(stages, front):
    with Watch() as watch:
        run((*front, *stages), "meta", watch.found.clear)
    assert watch.found == set()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_no_step_waits_for_a_gpu(stages):
    try:
        run(stages, "cuda", lambda: torch.cuda.set_sync_debug_mode("error"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_schedule_on_a_gate_of_the_device_reads_the_step():
    # The step counts good steps alone, and whether one was good only the device knows.
    densities = gx.warmup_density([0.5, 0.1], 1)
    with pytest.raises(RuntimeError, match="item"):
        run((gx.topk(densities), gx.ef()), "meta", lambda: None)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.numpy(force=True),
    ],
)
def test_reading_from_the_device_raises(read):
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.ones(3, device="meta"))


@pytest.mark.parametrize(
    "bring",
    [
        lambda x, n: n.to(x.device),
        lambda x, n: torch.where(x > 0, x, n),
        lambda x, n: torch.ones(3).to(x.device),
        lambda x, n: x.copy_(torch.ones(3)),
    ],
)
def test_bringing_something_to_the_device_is_found(bring):
    with Watch() as watch:
        bring(torch.ones(3, device="meta"), torch.tensor(1.0))
    assert any("between devices" in name for name in watch.found)
