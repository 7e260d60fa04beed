"""``python -m gradtx compressors``: what each compressor makes of a gradient, and what it costs.

Sizes are those of the messages that one rank of two would send, headers and all, and errors those
of what comes out of them again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradtx as gx
from gradtx.bench.gradients import BUILT_IN, Gradient, load
from gradtx.bench.plot import check_plot, draw
from gradtx.bench.tables import print_table
from gradtx.core.payload import decode_leaves
from gradtx.core.transformation import Context, Transformation
from gradtx.core.tree import flatten, layout_of
from gradtx.exchange.outgoing import Outgoing
from gradtx.files import file_to_write
from gradtx.wire import Header, decode_message

RANKS = 2
MOST_RUNS = 21
FEWEST_RUNS = 3
TIME_LIMIT = 2.0  # seconds, after which a measurement has no more than the fewest runs

Stages = tuple[Transformation, ...]


@dataclass(frozen=True)
class Row:
    """What one compressor came to.

    Attributes:
        compressor: as code; several stages joined by a plus.
        bits: sent for each value of the gradient, headers and all.
        ratio: how many times fewer than FP32.
        error: relative: the norm of the difference over that of the gradient.
        cosine: of the angle between the gradient and what becomes of it; 0 if that is zero.
        encode_ms: from the gradient to the message, median.
        decode_ms: from the message back to dense leaves, median.
    """

    compressor: str
    bits: float
    ratio: float
    error: float
    cosine: float
    encode_ms: float
    decode_ms: float


def methods(gradient: Gradient) -> dict[str, Stages]:
    """All compressors at their usual settings, by name.

    The bound of `threshold` is, to two digits, the magnitude that one value in a hundred exceeds.
    """
    tau = largest_percent(gradient)
    chosen: list[Stages] = [
        (gx.topk(0.001),),
        (gx.topk(0.01),),
        (gx.topk(0.01, values="float16"),),
        (gx.topk(0.01), gx.sign()),
        (gx.threshold(tau, capacity=0.02),),
        (gx.random_k(0.01),),
        (gx.sign(),),
        (gx.ternary(),),
        *((gx.quantize(bits),) for bits in (2, 4, 8)),
        *((gx.cast(dtype),) for dtype in ("float8_e5m2", "float8_e4m3fn", "float16", "bfloat16")),
        (gx.natural(),),
        *((gx.powersgd(rank),) for rank in (1, 4)),
    ]
    return {name_of(stages): stages for stages in chosen}


def largest_percent(gradient: Gradient) -> float:
    """The magnitude that one value in a hundred exceeds, to two digits."""
    magnitudes = torch.cat([leaf.reshape(-1) for leaf in gradient.values()]).abs()
    place = max(1, round(0.99 * magnitudes.numel()))
    return float(f"{magnitudes.kthvalue(place).values:.1e}")


def name_of(stages: Stages) -> str:
    """The stages as code."""
    return " + ".join(stage.code().removeprefix("gx.") for stage in stages)


def family_of(stages: Stages) -> str:
    """The names of the stages alone."""
    return "+".join(stage.name for stage in stages)


def select(found: dict[str, Stages], only: Sequence[str]) -> dict[str, Stages]:
    """The methods of some names or families; all of them if none are given.

    Raises:
        ValueError: for a name that there is not.
    """
    families = list(dict.fromkeys(map(family_of, found.values())))
    for name in only:
        if name not in families and name not in found:
            raise ValueError(
                f"--only {name}: expected {', '.join(families)}, or a name as in the table, "
                'such as "topk(0.001)"'
            )
    return {
        name: stages
        for name, stages in found.items()
        if not only or name in only or family_of(stages) in only
    }


class Wire:
    """A gradient on its way through a compressor onto the wire, and back.

    Args:
        stages: the compressor.
        gradient: its leaves by path.
    """

    def __init__(self, stages: Stages, gradient: Gradient) -> None:
        self._stages = stages
        self._gradient = gradient
        self._states = [stage.init(gradient) for stage in stages]
        self._context = Context(layout_of(gradient), name_of(stages), size=RANKS)
        absent = (False,) * len(gradient)
        self._header = Header(fingerprint=0, step=0, finite=True, error=False, absent=absent)

    def encode(self) -> Sent:
        """Compresses, and writes what is sent: each time the first step."""
        updates: Any = self._gradient
        for stage, state in zip(self._stages, self._states, strict=True):
            updates, _ = stage.update(updates, state)
        leaves = flatten(updates)[0]
        outgoing = Outgoing(leaves, self._context, RANKS, "auto")
        message = outgoing.message(self._header)
        return Sent(leaves, outgoing, message, outgoing.buffers(self._header, RANKS))

    def decode(self, sent: Sent) -> list[Tensor]:
        """Reads the message, and makes all leaves dense."""
        leaves = list(sent.leaves)
        if sent.message is not None:
            packing, named = sent.outgoing.packing, sent.outgoing.sizes.leaves
            _, segments = decode_message(sent.message, named, packing.sizes, 0)
            payloads = packing.decode(segments)
            for places, payload in zip(sent.outgoing.places, payloads, strict=True):
                leaves[places[0]] = payload
        return decode_leaves(leaves)


@dataclass(frozen=True)
class Sent:
    """What one rank sends in a step.

    Attributes:
        leaves: as the compressor left them.
        outgoing: how they travel.
        message: what is gathered, uint8; None if nothing is.
        buffers: what is summed.
    """

    leaves: list[Any]
    outgoing: Outgoing
    message: Tensor | None
    buffers: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the message and the buffers: what a rank of two puts on the link."""
        tensors = self.buffers if self.message is None else [self.message, *self.buffers]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(stages: Stages, gradient: Gradient) -> Row:
    """Sends a gradient through a compressor, and compares."""
    wire = Wire(stages, gradient)
    sent = wire.encode()
    error, cosine = compare(wire.decode(sent), flatten(gradient)[0])
    size = sum(leaf.numel() for leaf in gradient.values())
    return Row(
        compressor=name_of(stages),
        bits=8 * sent.nbytes / size,
        ratio=4 * size / sent.nbytes,
        error=error,
        cosine=cosine,
        encode_ms=median_ms(wire.encode),
        decode_ms=median_ms(lambda: wire.decode(sent)),
    )


def compare(leaves: Iterable[Tensor], exact: Iterable[Tensor]) -> tuple[float, float]:
    """Relative error and cosine, over all leaves together, in FP64."""
    got, true = (torch.cat([x.reshape(-1).double() for x in side]) for side in (leaves, exact))
    norms = float(true.norm() * got.norm())
    return float((got - true).norm() / true.norm()), float(true @ got) / norms if norms else 0.0


def median_ms(function: Callable[[], object]) -> float:
    """How long a call takes, in milliseconds: the median of several."""
    times: list[float] = []
    deadline = time.perf_counter() + TIME_LIMIT
    while len(times) < MOST_RUNS:
        start = time.perf_counter()
        if start > deadline and len(times) >= FEWEST_RUNS:
            break
        function()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: small leaves are no faster on several, and times vary less."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


HEADINGS = ("compressor", "bits a value", "ratio", "relative error", "cosine", "encode", "decode")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    return (
        row.compressor,
        f"{row.bits:.3f}",
        f"{row.ratio:.1f} ×",
        f"{row.error:.4f}" if row.error >= 0.001 else f"{row.error:.1e}",
        f"{row.cosine:.4f}",
        f"{row.encode_ms:.2f} ms",
        f"{row.decode_ms:.2f} ms",
    )


def describe(source: str, gradient: Gradient) -> str:
    """What the rows are about, in one line."""
    size = sum(leaf.numel() for leaf in gradient.values())
    step = f" (step {BUILT_IN[source]} of the demo, BatchNorm too)" if source in BUILT_IN else ""
    return f"{source}{step}: {size:,} values in {len(gradient)} leaves"


def write_json(path: Path, source: str, gradient: Gradient, rows: Sequence[Row]) -> None:
    """Writes all rows to a file."""
    results = {
        "gradient": source,
        "leaves": len(gradient),
        "values": sum(leaf.numel() for leaf in gradient.values()),
        "version": gx.__version__,
        "compressors": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(results, indent=2) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options.

    Args:
        parser: of the subcommand.
    """
    add = parser.add_argument
    add(
        "--gradient",
        default="late",
        metavar="SOURCE",
        help="early or late, from the demo (late), or a file: .npy, .npz, .pt, .safetensors",
    )
    add("--only", action="append", default=[], metavar="NAME", help='such as topk or "topk(0.01)"')
    add("--json", type=file_to_write, metavar="FILE", help="write all results to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw error against bits, as .png, .svg or .pdf")


def main(args: argparse.Namespace) -> int:
    """Measures and prints.

    Args:
        args: what `add_arguments` declares.

    Returns:
        The exit status: 0; 2 for unusable arguments or missing packages; 130 when interrupted.
    """
    try:
        return report(args)
    except (ImportError, OSError, ValueError) as error:
        print(f"gradtx compressors: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gradtx compressors: interrupted", file=sys.stderr)
        return 130


def report(args: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the files; gives the exit status."""
    if args.plot is not None:
        check_plot(args.plot)
    gradient = load(args.gradient)
    chosen = select(methods(gradient), args.only)
    with one_thread():
        rows = [measure(stages, gradient) for stages in chosen.values()]
    print_table(HEADINGS, [cells(row) for row in rows])
    print(f"{describe(args.gradient, gradient)}; times on one thread")
    if args.json is not None:
        write_json(args.json, args.gradient, gradient, rows)
    if args.plot is not None:
        draw(rows, args.plot, describe(args.gradient, gradient))
    return 0
