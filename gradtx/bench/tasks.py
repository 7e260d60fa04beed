"""The tasks of ``bench convergence``: what is trained, on what, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtx.bench import digits, text

Batch = tuple[Tensor, Tensor]

SEQUENCES = 8  # in a batch, of all ranks together
HELD_OUT_SEQUENCES = 64


@dataclass(frozen=True)
class Task:
    """A network to train by plain SGD, and its data: inputs, and the number of the right class.

    Attributes:
        network: makes one, with weights of torch's global generator.
        batches: ``batches(seed, rank, world_size)`` gives a rank's part of each batch, without end.
        held_out: what to evaluate on.
        learning_rate: for the dense gradient, the same from the warm-up to the end, so that a
            short run is the beginning of a long one.
    """

    network: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Iterator[Batch]]
    held_out: Batch
    learning_rate: float


@cache
def digits_task() -> Task:
    """Images of digits, and a convolutional network with BatchNorm: 40,506 parameters."""
    data = digits.Digits.load()

    def batches(seed: int, rank: int, world_size: int) -> Iterator[Batch]:
        for epoch in count():
            yield from data.epoch(100_000 * seed + epoch, rank, world_size)

    return Task(digits.network, batches, (data.test_images, data.test_labels), 0.2)


@cache
def text_task() -> Task:
    """The characters of real text, and a transformer with LayerNorm: about 115,000 parameters."""
    corpus = text.Corpus.load()

    def network() -> nn.Module:
        return text.Transformer(len(corpus.vocabulary))

    def batches(seed: int, rank: int, world_size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        starts = len(corpus.train) - text.CONTEXT
        while True:
            drawn = torch.randint(starts, (SEQUENCES,), generator=generator)
            yield text.windows(corpus.train, drawn[rank::world_size])

    last = len(corpus.held_out) - text.CONTEXT - 1
    spread = torch.arange(HELD_OUT_SEQUENCES) * last // HELD_OUT_SEQUENCES
    return Task(network, batches, text.windows(corpus.held_out, spread), 0.2)


TASKS: dict[str, Callable[[], Task]] = {"digits": digits_task, "text": text_task}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of a batch, in nats."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Loss in nats, and the share of right answers in percent; the model is left in training."""
    model.eval()
    inputs, targets = batch
    logits = model(inputs).flatten(0, -2)
    model.train()
    right = logits.argmax(-1) == targets.flatten()
    return float(F.cross_entropy(logits, targets.flatten())), 100 * float(right.double().mean())
