"""``python -m gradtx.bench.record``: makes the gradients in ``gradtx/bench/data``.

They are those of rank 0 in a dense run of the demo (two ranks, 15 epochs, seed 1), its own before
the exchange and without loss scale: what compressors get to see.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import gradtx as gx
from gradtx import demo
from gradtx.bench.digits import Digits
from gradtx.bench.gradients import BUILT_IN, built_in_path
from gradtx.core.tree import PyTree, flatten_with_paths

EPOCHS = 15
SEED = 1


class Recorder:
    """Hands gradients on, and keeps those of some steps.

    Args:
        steps: which, by name, counted from 1.

    Attributes:
        kept: for each name, the leaves by path, FP32.
    """

    def __init__(self, steps: Mapping[str, int]) -> None:
        self._names = {step: name for name, step in steps.items()}
        self._count = 0
        self.kept: dict[str, dict[str, np.ndarray]] = {}

    def init(self, params: PyTree) -> tuple[()]:
        """No state: what is kept is for one run."""
        return ()

    def update(
        self, updates: PyTree, state: tuple[()], params: PyTree = None
    ) -> tuple[PyTree, tuple[()]]:
        """Counts a step."""
        self._count += 1
        if self._count in self._names:
            paths, leaves, _ = flatten_with_paths(updates)
            arrays = {p: x.float().numpy().copy() for p, x in zip(paths, leaves, strict=True)}
            self.kept[self._names[self._count]] = arrays
        return updates, state


def rank_main(rank: int, rendezvous: str, folder: Path) -> None:
    """Trains on one rank; rank 0 writes its files.

    Args:
        rank: 0 or 1.
        rendezvous: the URI of a file, in an empty folder, by which the ranks find each other.
        folder: where to write.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", rendezvous, demo.COLLECTIVE_TIMEOUT, world_size=2, rank=rank)
    recorder = Recorder(BUILT_IN)
    tap = gx.declare(recorder, name="tap", linear=True, stateful=False, needs_reduced=False)
    tx = gx.chain(gx.unscale(), tap, gx.allreduce())
    run = demo.train("dense", tx, Digits.load(), SEED, EPOCHS, lambda: None)
    dist.destroy_process_group()
    if rank == 0:
        print(f"{EPOCHS} epochs, seed {SEED}: {run.accuracy:.2f} % of the held-out images")
        for name, arrays in recorder.kept.items():
            path = folder / built_in_path(name).name
            np.savez_compressed(path, allow_pickle=False, **arrays)
            print(f"step {BUILT_IN[name]}: {path}, {path.stat().st_size:,} bytes")


def main() -> None:
    """Trains, and writes one file a gradient, over those that are there."""
    demo.require_extras()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder, "rendezvous").as_uri()
        spawn(rank_main, (rendezvous, built_in_path("late").parent), nprocs=2)


if __name__ == "__main__":
    main()
