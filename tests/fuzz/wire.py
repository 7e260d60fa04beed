"""What is on the wire: messages, indices, bits, and handshakes."""

import json
import struct

import torch

import gradtx as gx
from gradtx.core.errors import RankMismatchError
from gradtx.core.payload import Member, Payload, with_dense_values
from gradtx.core.transformation import Context
from gradtx.core.tree import layout_of
from gradtx.exchange.handshake import Hello, agree, confirm
from gradtx.exchange.message import Packing
from gradtx.wire import (
    Header,
    WireFormatError,
    decode_indices,
    decode_message,
    encode_indices,
    encode_message,
    indices_nbytes,
)
from gradtx.wire.bits import pack_bits, pack_uints, unpack_bits, unpack_uints

from .replay import Replay, SilentError
from .target import Target, target

FINGERPRINT = 0x0123456789ABCDEF


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0).byte()


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def header_of(leaves: int, **fields) -> Header:
    absent = tuple(i % 3 == 1 for i in range(leaves))
    return Header(FINGERPRINT, 3, **{"finite": True, "error": False, "absent": absent} | fields)


LAYOUTS = [(0, []), (3, [4, 8]), (9, [1, 7, 16]), (70, [0, 5])]


@target
def message() -> Target:
    """One message of several layouts; what is taken is what would be written."""

    def run(data: bytes) -> None:
        leaves, sizes = LAYOUTS[data[0] % len(LAYOUTS)]
        given = as_tensor(data[1:])
        try:
            header, segments = decode_message(given, leaves, sizes, FINGERPRINT)
        except WireFormatError:
            return
        assert torch.equal(encode_message(header, segments, "cpu"), given)

    seeds = [
        bytes([i]) + as_bytes(encode_message(header, [torch.ones(n).byte() for n in sizes], "cpu"))
        for i, (leaves, sizes) in enumerate(LAYOUTS)
        for header in (header_of(leaves), header_of(leaves, finite=False, error=True, weight=0.5))
    ]
    return Target(seeds, run, known=70)


STAGES = {
    "topk": (gx.topk(0.2, feedback=False),),
    "topk global": (gx.topk(0.2, scope="global", feedback=False),),
    "topk float16": (gx.topk(0.2, values="float16", feedback=False),),
    "topk sign": (gx.topk(0.2, feedback=False), gx.sign(feedback=False)),
    "topk ternary": (gx.topk(0.2, feedback=False), gx.ternary()),
    "topk quantize": (gx.topk(0.2, feedback=False), gx.quantize(4)),
    "threshold": (gx.threshold(0.5, capacity=0.2, feedback=False),),
    "sign": (gx.sign(feedback=False),),
    "majority vote": (gx.sign(majority_vote=True),),
    "quantize": (gx.quantize(2),),
    "natural": (gx.natural(),),
    "ternary": (gx.ternary(),),
    "cast": (gx.cast("float8_e5m2", feedback=False),),
    "cast float16": (gx.cast("float16", feedback=False),),
}


def packing_of(stages) -> Packing:
    generator = torch.Generator().manual_seed(0)
    updates = {
        "a": torch.randn(300, generator=generator),
        "b": torch.randn(7, 5, generator=generator, dtype=torch.float64),
        "c": torch.zeros(0),
    }
    for stage in stages:
        updates, _ = stage.update(updates, stage.init(updates))
    leaves = [leaf for leaf in updates.values() if isinstance(leaf, Payload)]
    return Packing([leaf for leaf in leaves if not isinstance(leaf, Member)])


@target
def payloads() -> Target:
    """What a message holds, of every compressor: decoded, and added to a sum."""
    packings = [packing_of(stages) for stages in STAGES.values()]

    def run(data: bytes) -> None:
        packing = packings[data[0] % len(packings)]
        try:
            _, segments = decode_message(as_tensor(data[1:]), 3, packing.sizes, FINGERPRINT)
            found = packing.decode(segments)
        except WireFormatError:
            return
        assert all(map(torch.equal, Packing(found).encode(), segments))
        for payload in with_dense_values(found):
            total = torch.zeros(payload.size, dtype=getattr(torch, payload.dtype))
            assert payload.decode().shape == payload.add_to(total).shape == total.shape

    seeds = [
        bytes([i]) + as_bytes(encode_message(header_of(3), packing.encode(), "cpu"))
        for i, packing in enumerate(packings)
    ]
    return Target(seeds, run, known=8 * 335)


UNIVERSES = [
    (0, 0),
    (0, 9),
    (9, 9),
    (1, 2),
    (3, 100),
    (40, 1000),
    (400, 1000),
    (33, 70_000),
    (7, 2**40),
    (5, 2**62),
    (2, 2**63 - 1),
]


@target
def indices() -> Target:
    """Elias-Fano and bitmaps, of many universes; what is taken is what would be written."""

    def run(data: bytes) -> None:
        count, universe = UNIVERSES[data[0] % len(UNIVERSES)]
        given = as_tensor(data[1:])
        try:
            found = decode_indices(given, count, universe)
        except WireFormatError:
            return
        assert found.numel() == count
        assert torch.equal(encode_indices(found, universe), given)

    seeds = []
    for i, (count, universe) in enumerate(UNIVERSES):
        spread = torch.tensor([j * universe // max(count, 1) for j in range(count)]).long()
        for chosen in (torch.arange(count), spread, universe - 1 - torch.arange(count).flip(0)):
            seeds.append(bytes([i]) + as_bytes(encode_indices(chosen, universe)))
            assert len(seeds[-1]) == 1 + indices_nbytes(count, universe)
    return Target(seeds, run, known=8 * 400)


@target
def bits() -> Target:
    """Booleans and whole numbers of any width."""

    def run(data: bytes) -> None:
        width, count, body = data[0], int.from_bytes(data[1:3], "little"), as_tensor(data[3:])
        for undo, back in (
            (lambda: unpack_bits(body, count), pack_bits),
            (lambda: unpack_uints(body, count, width), lambda x: pack_uints(x, width)),
        ):
            try:
                found = undo()
            except ValueError:
                continue
            assert found.numel() == count
            again = undo()
            assert torch.equal(found, again)
            written = back(found)
            assert written.numel() == body.numel()
            assert torch.equal(written[:-1], body[:-1])

    seeds = [
        bytes([width]) + count.to_bytes(2, "little") + bytes([255]) * ((count * each + 7) // 8)
        for width in (0, 1, 3, 8, 9, 33, 63, 64)
        for count in (0, 1, 9, 300)
        for each in {1, width}
    ]
    return Target(seeds, run, known=8 * 65_536)


@target
def handshake() -> Target:
    """All that ranks say to each other before the first exchange, and when one has failed."""
    own = {"w": torch.zeros(3), "b": torch.zeros(2)}
    context = Context(layout_of(own), "chain")

    def run(data: bytes) -> None:
        group = Replay(0, 2, data[1:])
        try:
            if data[0] % 2:
                confirm(group, digest=7)
            else:
                agree(group, context, 5)
        except (RankMismatchError, WireFormatError, SilentError):
            return

    def hello(**fields) -> bytes:
        return as_bytes(Hello(**{"chain": 1, "layout": 2, "step": 5} | fields).encode())

    def description(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode().ljust(200)

    other = json.dumps(["another", {"w": ["float32[3]", "sent dense"], "c": ["x", "y"]}])
    seeds = [
        b"\0",
        b"\0" + hello(),
        b"\0" + hello(error="ValueError: text"),
        b"\0" + hello() + description(other.ljust(200)),
        b"\0" + hello() + description("[" * 300 + "]" * 300),
        b"\1" + struct.pack("<qq", 0, 7),
        b"\1" + struct.pack("<qq", 0, 8),
        b"\1" + struct.pack("<qq", 1, 7) + hello(error="rank 1 failed: why"),
    ]
    return Target(seeds, run, known=4096)
