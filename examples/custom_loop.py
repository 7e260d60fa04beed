"""A training loop of your own with gradtx, on one process or on several.

Its data is scikit-learn's digits: pip install 'gradtx[demo]'.

python examples/custom_loop.py
torchrun --nproc-per-node 2 examples/custom_loop.py
torchrun --nproc-per-node 2 examples/custom_loop.py --functional
"""

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

import gradtx as gx
from gradtx.exchange.group import find_group

BATCH, HELD_OUT, RATE, MOMENTUM, LOSS_SCALE = 64, 540, 0.1, 0.5, 1024.0
CHAIN = gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())


def network() -> nn.Sequential:
    torch.manual_seed(0)  # every rank starts from the same weights
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    return images[order], torch.from_numpy(labels).long()[order]


def batches(epochs: int) -> Iterator[tuple[float, Tensor, Tensor]]:
    """The learning rate, which falls to zero, and this rank's part of each batch."""
    images, labels = (part[HELD_OUT:] for part in digits())
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shuffle = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=shuffle)
        for start in range(0, len(order) - BATCH + 1, BATCH):
            mine = order[start : start + BATCH][rank::size]
            rate = RATE * (1 - (epoch + start / len(order)) / epochs)
            yield rate, images[mine], labels[mine]


def train(epochs: int) -> tuple[nn.Module, float]:
    """With modules: the optimizer and the scaler are PyTorch's own."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    scaler = torch.amp.GradScaler("cpu")
    pipe = gx.Pipeline(CHAIN, model, scaler=scaler)
    sent = []
    for rate, images, labels in batches(epochs):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        sent.append(pipe.sync(optimizer).wire_bytes)
        scaler.step(optimizer)
        scaler.update()
    pipe.sync_buffers()
    return model, statistics.fmean(sent)


def train_functional(epochs: int) -> tuple[nn.Module, float]:
    """With `torch.func`: parameters, buffers and all state are values."""
    model = network()
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    momentum = {name: torch.zeros_like(p) for name, p in params.items()}
    state = CHAIN.init(model)

    def scaled_loss(params: Any, buffers: Any, images: Tensor, labels: Tensor) -> Any:
        buffers = {name: b.clone() for name, b in buffers.items()}  # BatchNorm writes into them
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = functional_call(model, (params, buffers), (images,))
            return LOSS_SCALE * F.cross_entropy(logits, labels), buffers

    steps = 0
    for rate, images, labels in batches(epochs):
        grads, buffers = grad(scaled_loss, has_aux=True)(params, buffers, images, labels)
        updates, state = CHAIN.update(grads, state, loss_scale=LOSS_SCALE)
        steps += 1
        if not state.last_finite:
            continue  # on all ranks alike: momentum must not step on a bad step's zeros
        momentum = {name: MOMENTUM * m + updates[name] for name, m in momentum.items()}
        params = {name: p - rate * momentum[name] for name, p in params.items()}
    sent = find_group().sent / steps
    running = {name: b for name, b in buffers.items() if b.is_floating_point()}
    mean = gx.chain(gx.allreduce())
    means, _ = mean.update(running, mean.init(running))
    model.load_state_dict({**params, **buffers, **means})
    return model, sent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--functional", action="store_true")
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    model, sent = (train_functional if options.functional else train)(options.epochs)
    images, labels = (part[:HELD_OUT] for part in digits())
    accuracy = (model.eval()(images).argmax(1) == labels).double().mean().item()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"accuracy {accuracy:.2%}, {sent:.0f} bytes a step")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
