"""What torchrun runs in `test_faults.py`: a loop that goes on from its checkpoints.

torchrun ... restarted.py FOLDER VICTIM COLLECTIVE SHARE SECONDS
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import gradtx as gx
from killing import LAST, Fate, Marks, digest

STEPS = LAST + 3


def newest_of_all(folder, rank):
    """The step of the newest checkpoint that every rank has; none is -1.

    A rank that has heard all it had to may have made one more than the others: two are kept.
    """
    own = {int(path.stem.split("_")[-1]): path for path in folder.glob(f"rank_{rank}_step_*.pt")}
    newest = torch.tensor(max(own, default=-1))
    dist.all_reduce(newest, op=dist.ReduceOp.MIN)
    for step in own:
        if step > newest:
            own[step].unlink()
    return int(newest)


def train(folder, fate=None):
    """Trains to the end, from the newest checkpoint; gives a hash over all that is left."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(60, 60), torch.nn.BatchNorm1d(60), torch.nn.Dropout(0.5),
        torch.nn.Linear(60, 60),
    )  # fmt: skip
    exchange = gx.topk(0.1), gx.momentum_correction(0.9), gx.allreduce()
    pipe = gx.Pipeline(gx.chain(gx.skip_bn(), *exchange), net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    torch.manual_seed(rank)  # Of dropout.
    first = newest_of_all(folder, rank)
    if first >= 0:
        saved = gx.load_checkpoint(folder / f"rank_{rank}_step_{first}.pt")
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        pipe.load_state_dict(saved["pipe"])
        torch.set_rng_state(saved["rng"])
    for step in range(first + 1, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(8, 60, generator=generator)).pow(2).mean().backward()
        if fate is not None:
            fate.begin(step)
        if pipe.sync(optimizer).ready:
            optimizer.step()
        saved = {
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "pipe": pipe.state_dict(),
            "rng": torch.get_rng_state(),
        }
        gx.save_checkpoint(saved, folder / f"rank_{rank}_step_{step}.pt")
        (folder / f"rank_{rank}_step_{step - 2}.pt").unlink(missing_ok=True)
    return digest(saved), first


def main(folder, victim, collective, share, seconds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, again = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    fate = None
    if not again:
        point = float(collective), float(share), float(seconds)
        fate = Fate(Marks(Path(folder, f"marks {rank}")), *point, rank == int(victim))
    found, first = train(Path(folder), fate)
    print(f"rank {rank}: {found} from step {first}, restarted {again}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
