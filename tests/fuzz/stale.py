"""What workers and a parameter server say to each other."""

from collections.abc import Iterator
from functools import partial

import torch

import gradtx as gx
from gradtx.stale.frames import Description, Frame, Kind
from gradtx.stale.mailbox import BELL, JOINED, Mailbox
from gradtx.stale.parameters import ParameterCodec
from gradtx.stale.push import PushCodec
from gradtx.wire import WireFormatError

from .target import Target, target
from .wire import as_bytes, as_tensor

PARAMS = {"b": torch.zeros(3, dtype=torch.bfloat16), "w": torch.zeros(4, 9)}
FRAGMENTS = [
    gx.chain(),
    gx.chain(gx.topk(0.1), gx.ef()),
    gx.chain(gx.topk(0.3, values="float16"), gx.ef()),
    gx.chain(gx.sign(), gx.ef()),
    gx.chain(gx.threshold(0.5, capacity=0.2), gx.ef()),
]
SGD = partial(torch.optim.SGD, lr=0.5)


def pushed(tx: gx.Chain) -> tuple[PushCodec, torch.Tensor]:
    codec = PushCodec(tx, PARAMS, None)
    generator = torch.Generator().manual_seed(0)
    found = {k: torch.randn(p.shape, generator=generator).to(p.dtype) for k, p in PARAMS.items()}
    outgoing, _ = codec.update(found, codec.init(PARAMS), PARAMS)
    assert outgoing is not None
    return codec, codec.encode(outgoing, 0)


@target
def frames() -> Target:
    """Frames, and what a worker reads in the server's."""
    codec, _ = pushed(FRAGMENTS[0])
    parameters = ParameterCodec(codec.layout, 7)
    other = Description("gx.chain()", {"w": ["[2] float32", "sent dense"]})

    def run(data: bytes) -> None:
        try:
            frame = Frame.decode(data)
            assert frame.encode() == data
            if frame.kind is Kind.JOIN:
                codec.description.difference(Description.decode(frame))
            elif frame.kind is Kind.PARAMETERS:
                found = parameters.decode(frame.body, frame.updates)
                given = PARAMS.values()
                assert [(x.shape, x.dtype) for x in found] == [(p.shape, p.dtype) for p in given]
            elif frame.kind is Kind.REFUSED:
                assert isinstance(frame.text, str)
        except WireFormatError:
            return

    made = [
        Frame(Kind.JOIN, body=codec.description.encode()),
        Frame(Kind.JOIN, body=other.encode()),
        Frame(Kind.JOIN, body=as_tensor(b"[" * 2000)),
        Frame(Kind.PARAMETERS, 3, 7, body=parameters.encode(list(PARAMS.values()), 7)),
        Frame(Kind.REFUSED, body=as_tensor("no: \N{SNOWMAN}".encode())),
        Frame(Kind.TAKEN, 3, 7, 2),
    ]
    return Target([frame.encode() for frame in made], run, known=4096)


@target
def pushes() -> Target:
    """What a worker pushes, of several fragments."""
    codecs = [pushed(tx) for tx in FRAGMENTS]

    def run(data: bytes) -> None:
        codec, _ = codecs[data[0] % len(codecs)]
        try:
            found = codec.decode(as_tensor(data[1:]), 0)
        except WireFormatError:
            return
        for leaf, like in zip(found, PARAMS.values(), strict=True):
            assert leaf is None or (leaf.shape == like.shape and bool(leaf.isfinite().all()))

    seeds = [bytes([i]) + as_bytes(body) for i, (_, body) in enumerate(codecs)]
    return Target(seeds, run, known=4096)


def letter(key: int, data: bytes) -> bytes:
    """Something that is put into the store: which key, how long, and what."""
    return bytes([key]) + len(data).to_bytes(2, "little") + data


def letters(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length = int.from_bytes(data[1:3], "little")
        yield data[0], data[3 : 3 + length]
        data = data[3 + length :]


@target
def server() -> Target:
    """A server with a worker that puts what it likes into the store; the next one finds it well."""
    parts = [pushed(tx) for tx in FRAGMENTS]

    def run(data: bytes) -> None:
        tx, (codec, body) = FRAGMENTS[data[0] % len(FRAGMENTS)], parts[data[0] % len(FRAGMENTS)]
        store = torch.distributed.HashStore()
        served = gx.ParameterServer(store, {k: p.clone() for k, p in PARAMS.items()}, tx, SGD)
        served._switchboard.open()
        mailbox = Mailbox(store, lambda: None)

        def look() -> None:
            mailbox.store.add(BELL, 1)
            served._switchboard.collect()
            served._answer_all()

        mailbox.store.add(JOINED, 1)
        asked = 1
        for key, said in letters(data[1:]):
            if key % 4 == 0:
                mailbox.post(f"request/0/{asked}", said)
            else:
                mailbox.store.set(f"request/0/{asked}" + ("", "/0", "/1")[key % 4 - 1], said)
            look()
            caller = served._switchboard.callers.get(0)
            asked = asked if caller is None else caller.requests + 1
        assert served._failure is None
        mailbox.store.add(JOINED, 1)
        asked_now = [Frame(Kind.JOIN, body=codec.description.encode())]
        clock = Frame.decode(told(mailbox, look, 1, asked_now[0])).clock
        # What is pushed says the clock, too.
        if clock == 0:
            reply = Frame.decode(told(mailbox, look, 2, Frame(Kind.PUSH, 0, body=body)))
            assert reply.kind is Kind.TAKEN

    def told(mailbox: Mailbox, look, number: int, frame: Frame) -> bytes:
        mailbox.post(f"request/1/{number}", frame.encode())
        look()
        reply = mailbox.take(f"reply/1/{number}", 1 << 20)
        assert reply is not None
        return reply

    seeds = []
    for i, (codec, body) in enumerate(parts):
        join = Frame(Kind.JOIN, body=codec.description.encode()).encode()
        push = Frame(Kind.PUSH, 0, body=body).encode()
        pull, leave = Frame(Kind.PULL, 1).encode(), Frame(Kind.LEAVE).encode()
        said = [letter(0, frame) for frame in (join, push, pull, leave)]
        seeds.append(bytes([i]) + b"".join(said))
        seeds.append(bytes([i]) + said[0] + said[2] + said[1])
    pieces = letter(2, b"12345") + letter(3, b"678") + letter(1, b"GRTB\x08" + bytes(7))
    seeds.append(b"\0" + pieces + said[0])
    return Target(seeds, run, known=16_384)
