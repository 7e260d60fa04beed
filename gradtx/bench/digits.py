"""The digits task, of the demo and of ``bench convergence``: its images and its network.

1797 images of 8 x 8 pixels come with scikit-learn; 540 of them are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

BATCH = 64


class Digits(NamedTuple):
    """The data, the same on all ranks.

    Images are float32 ``[n, 1, 8, 8]`` from 0 to 1, labels int64 ``[n]``.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        """Reads the images that come with scikit-learn, always split in the same way."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
        labels = torch.from_numpy(digits.target).long()
        train, test = train_test_split(
            range(len(labels)), test_size=540, stratify=digits.target, random_state=0
        )
        return cls(images[train], labels[train], images[test], labels[test])

    @property
    def batches(self) -> int:
        """How many full batches there are in an epoch."""
        return len(self.train_labels) // BATCH

    def epoch(self, seed: int, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A rank's part of each batch, in an order that all ranks draw alike.

        Args:
            seed: of the order.
            rank: whose part.
            world_size: how many ranks share each batch.
        """
        order = torch.randperm(
            len(self.train_labels), generator=torch.Generator().manual_seed(seed)
        )
        for batch in order.split(BATCH)[: self.batches]:
            mine = batch[rank::world_size]
            yield self.train_images[mine], self.train_labels[mine]


def network() -> nn.Sequential:
    """Three convolutions with BatchNorm and two linear layers: 40,506 parameters."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    head = [nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)]
    halve = nn.MaxPool2d(2)
    return nn.Sequential(*block(1, 16), *block(16, 32), halve, *block(32, 64), halve, *head)
