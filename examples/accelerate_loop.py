"""A training loop on Hugging Face Accelerate that sends one gradient value in a hundred.

Its data is scikit-learn's digits: pip install 'gradtx[demo]' accelerate

torchrun --nproc-per-node 2 examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py --save checkpoint --epochs 10
torchrun --nproc-per-node 2 examples/accelerate_loop.py --resume checkpoint
"""

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import gradtx as gx


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def loaders() -> tuple[DataLoader, DataLoader]:
    """Accelerate gives each rank a batch of its own: 32 images on each of two ranks."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    digits = TensorDataset(images, torch.from_numpy(labels).long())
    train, test = random_split(digits, [0.7, 0.3], torch.Generator().manual_seed(0))
    return DataLoader(train, 32, shuffle=True, drop_last=True), DataLoader(test, 256)


def compressed(accelerator: Accelerator, model: nn.Module) -> gx.DDPHook:
    """Registers a chain as the hook of a model that ``accelerator.prepare`` has given."""
    tx = gx.chain(gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())
    if accelerator.scaler is not None:  # mixed_precision="fp16", which takes a GPU
        tx = gx.chain(gx.unscale(), tx)
    hook = gx.ddp_hook(tx, model, scaler=accelerator.scaler)
    model.register_comm_hook(None, hook)

    # Each rank has left out something else, and register_for_checkpointing keeps rank 0's only.
    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        gx.save_checkpoint(hook.state_dict(), f"{folder}/gradtx_{accelerator.process_index}.pt")

    def load(models: list[nn.Module], folder: str) -> None:
        path = f"{folder}/gradtx_{accelerator.process_index}.pt"
        hook.load_state_dict(gx.load_checkpoint(path))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return hook


class Progress:
    """How far training has come; the same on all ranks."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def train(options: argparse.Namespace) -> nn.Module:
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=options.accumulate,
        # An epoch's order is a function of the seed and the epoch, so it is the same if resumed.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model, (loader, test_loader) = network(), loaders()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    # Accelerate takes a step of it for each rank.
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    hook = compressed(accelerator, model)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        accelerator.load_state(options.resume)

    sent = dense = 0
    model.train()
    while progress.epoch < options.epochs:
        loader.set_epoch(progress.epoch)
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    sent, dense = sent + hook.report.wire_bytes, dense + hook.report.dense_bytes
                    if accelerator.scaler is None and not hook.report.ready:
                        optimizer.zero_grad()  # a bad step of some rank; with a scaler, it skips
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        progress.epoch += 1
    if options.save:
        accelerator.save_state(options.save)

    model.eval()
    right = []
    for images, labels in test_loader:
        with torch.no_grad():
            found = model(images).argmax(1)
        found, labels = accelerator.gather_for_metrics((found, labels))
        right.append(found == labels)
    accuracy = torch.cat(right).double().mean().item()
    accelerator.print(f"accuracy {accuracy:.2%}, {sent} bytes sent, dense {dense}")
    # DDP goes before the process group that it uses: the other way round it can wait for ever.
    model = accelerator.unwrap_model(model)
    accelerator.free_memory()
    accelerator.end_training()
    return model


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--save", help="a folder for the state after the last epoch")
    parser.add_argument("--resume", help="a folder with a state")
    options = parser.parse_args(arguments)
    return train(options)


if __name__ == "__main__":
    main()
