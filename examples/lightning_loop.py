"""Lightning's Trainer on DDP that sends one gradient value in a hundred.

Its data is scikit-learn's digits: pip install 'gradtx[demo]' lightning

python examples/lightning_loop.py
torchrun --nproc-per-node 2 examples/lightning_loop.py
python examples/lightning_loop.py --save last.ckpt --epochs 10
python examples/lightning_loop.py --resume last.ckpt
"""

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import gradtx as gx


class CompressedDDP(DDPStrategy):
    """DDP whose gradients go through a chain.

    A checkpoint is Lightning's file and, beside it, one of each rank with what it has left out so
    far. Lightning's own file has the states of rank 0 only.
    """

    def __init__(self, tx: gx.Chain, **options: Any) -> None:
        super().__init__(**options)
        self.tx = tx
        self.resumed: dict[str, Any] = {}

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.scaler = getattr(self.precision_plugin, "scaler", None)
        # DDPStrategy(ddp_comm_hook=...) wants a hook before there is a model, and leaves it out
        # without a word where the model is on a CPU.
        self.hook = gx.ddp_hook(self.tx, self.model, scaler=self.scaler)
        self.model.register_comm_hook(None, self.hook)
        if self.resumed:
            self.hook.load_state_dict(self.resumed)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        report = self.hook.report if self.model.require_backward_grad_sync else None
        if report is not None and self.scaler is None and not report.ready:
            self.model.zero_grad()  # a bad step of some rank: the optimizer finds no gradients

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        own = {"global_step": checkpoint["global_step"], "gradtx": self.hook.state_dict()}
        self.checkpoint_io.save_checkpoint(own, self._own(filepath), storage_options)
        self.barrier()  # Lightning's file comes last: where it is, all are there
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.lightning_module.trainer.state.fn == "fit":
            path = self._own(checkpoint_path)
            own = self.checkpoint_io.load_checkpoint(path, weights_only=True)
            if own["global_step"] != checkpoint["global_step"]:
                raise ValueError(f"{path} is of another step than {checkpoint_path}")
            self.resumed = own["gradtx"]
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        self.checkpoint_io.remove_checkpoint(self._own(filepath))

    def _own(self, path: Any) -> str:
        return f"{path}.rank{self.global_rank}"


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        self.sent = self.dense = 0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        report = self.trainer.strategy.hook.report
        self.sent, self.dense = self.sent + report.wire_bytes, self.dense + report.dense_bytes

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).double().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [decay]


def loaders() -> tuple[DataLoader, DataLoader]:
    """Lightning gives each rank a part of the data: 32 images a step on each of two ranks."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    digits = TensorDataset(images, torch.from_numpy(labels).long())
    train, test = random_split(digits, [0.7, 0.3], torch.Generator().manual_seed(0))
    return DataLoader(train, 32, shuffle=True, drop_last=True), DataLoader(test, 270)


def main(arguments: list[str] | None = None) -> L.Trainer:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--save", help="a file for the state after the last epoch")
    parser.add_argument("--resume", help="a file with a state")
    options = parser.parse_args(arguments)
    L.seed_everything(0, verbose=False)
    # With precision="16-mixed", which takes a GPU, the chain begins with gx.unscale().
    tx = gx.chain(gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CompressedDDP(tx),
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
    )
    model, (loader, test_loader) = Classifier(), loaders()
    trainer.fit(model, loader, test_loader, ckpt_path=options.resume)
    if options.save:
        trainer.save_checkpoint(options.save)
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics["accuracy"].item()
        print(f"accuracy {accuracy:.2%}, {model.sent} bytes sent, dense {model.dense}")
    return trainer


if __name__ == "__main__":
    main()
