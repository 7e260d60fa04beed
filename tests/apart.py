"""What the processes of `stale/test_processes.py` do."""

import time
from datetime import timedelta
from functools import partial

import torch

import gradtx as gx

TX = gx.chain(gx.topk(0.25), gx.ef())
TIMEOUT = 2.0


def start():
    return {"w": torch.zeros(64)}


def serve(store, **options):
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return gx.ParameterServer(store, start(), TX, optimizer, timeout=TIMEOUT, **options)


def host():
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect(port):
    return torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20)
    )


def work(line, port, pushes, seconds):
    """Pushes so many times, with a pause before each; says the clocks it has reached."""
    with gx.Worker(connect(port), start(), TX, timeout=TIMEOUT) as worker:
        line.tell(worker.number)
        line.hear()
        clocks = []
        for _ in range(pushes):
            time.sleep(seconds)
            clocks.append(worker.push({"w": torch.randn(64)}).clock)
            worker.pull()
        line.tell(clocks)


def work_until_an_error(line, port):
    """Pushes for ever; says which error has ended it, and the next, and the seconds it waited."""
    worker = gx.Worker(connect(port), start(), TX, timeout=TIMEOUT)
    line.tell(worker.number)
    errors, began = [], time.monotonic()
    while len(errors) < 2:
        try:
            began = time.monotonic()
            worker.push({"w": torch.randn(64)})
        except (ConnectionError, gx.RankMismatchError) as error:
            errors.append((type(error).__name__, str(error), time.monotonic() - began))
    line.tell(errors)


def serve_for_ever(line):
    store = host()
    with serve(store):
        line.tell(store.port)
        line.hear()


def exit_without_closing(line, port):
    """Ends with a worker that waits for another one, and neither closed."""
    store = connect(port)
    line.tell([gx.Worker(store, start(), TX, timeout=TIMEOUT).number for _ in range(2)])
