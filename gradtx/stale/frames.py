"""What worker and server say to each other, as bytes.

A frame is a head of 40 bytes, little-endian, and a body::

    offset  size  what
    0       4     magic, b"GRTS"
    4       2     version, 1
    6       2     kind, see `Kind`
    8       8     clock: how many gradients the worker has pushed
    16      8     updates: how many the server has made
    24      8     staleness: of those, how many between the worker's last read and its push
    32      8     length of the body

The body is a push (`gradtx.stale.push`), the parameters (`gradtx.stale.parameters`), a description
of what a worker runs (JSON), or the text of a refusal. As the head is a multiple of 8 bytes, a
message in a body can be read without a copy.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

import torch

from gradtx.wire import WireFormatError

HEAD_NBYTES = 40
_HEAD = struct.Struct("<4sHHQQQQ")
_MAGIC = b"GRTS"
_VERSION = 1
_NOTHING = ["nothing", "nothing"]


class Kind(IntEnum):
    """What a frame is: the first four are sent by workers, the others by the server."""

    JOIN = 1
    PUSH = 2
    PULL = 3
    LEAVE = 4
    TAKEN = 5
    PARAMETERS = 6
    REFUSED = 7


@dataclass(frozen=True)
class Frame:
    """One request or reply.

    Attributes:
        kind: what it is.
        clock: how many gradients the worker has pushed.
        updates: how many updates the server has made.
        staleness: how many of them between the worker's last read and its push.
        body: uint8 ``[n]``.

    Example:
        >>> frame = Frame.decode(Frame(Kind.TAKEN, clock=3, updates=7, staleness=2).encode())
        >>> frame.kind.name, frame.clock, frame.updates, frame.staleness
        ('TAKEN', 3, 7, 2)
    """

    kind: Kind
    clock: int = 0
    updates: int = 0
    staleness: int = 0
    body: torch.Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.uint8))

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.numpy().tobytes().decode(errors="replace")

    def encode(self) -> bytes:
        """As bytes."""
        numbers = self.clock, self.updates, self.staleness, self.body.numel()
        return _HEAD.pack(_MAGIC, _VERSION, self.kind, *numbers) + self.body.numpy().tobytes()

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """The inverse of `encode`.

        Raises:
            WireFormatError: if the bytes are no frame of this version.
        """
        if len(data) < HEAD_NBYTES:
            raise WireFormatError(f"a frame has at least {HEAD_NBYTES} bytes, got {len(data)}")
        magic, version, kind, clock, updates, staleness, length = _HEAD.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise WireFormatError(
                f"not a frame of version {_VERSION}: magic {magic!r}, version {version}"
            )
        if kind not in list(Kind):
            raise WireFormatError(f"frame has kind {kind}, expected 1 to {max(Kind)}")
        if length != len(data) - HEAD_NBYTES:
            raise WireFormatError(
                f"frame says that {length} bytes follow its head, but {len(data) - HEAD_NBYTES} do"
            )
        return cls(Kind(kind), clock, updates, staleness, as_body(data[HEAD_NBYTES:]))


def as_body(data: bytes) -> torch.Tensor:
    """Bytes as uint8 ``[n]``."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@dataclass(frozen=True)
class Description:
    """What a worker or the server runs: they have to be equal.

    Attributes:
        code: the fragment as code.
        leaves: by path, the shape and dtype of a leaf, and how it travels.
    """

    code: str
    leaves: Mapping[str, list[str]]

    def encode(self) -> torch.Tensor:
        """As JSON in uint8 ``[n]``."""
        return as_body(json.dumps([self.code, dict(self.leaves)]).encode())

    @classmethod
    def decode(cls, frame: Frame) -> Description:
        """The inverse of `encode`, for the frame around it.

        Raises:
            WireFormatError: if the body is no description.
        """
        try:
            code, leaves = json.loads(frame.text)
            words = {str(path): [str(what), str(form)] for path, (what, form) in leaves.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise WireFormatError(f"malformed description {frame.text[:80]!r}") from error
        return cls(str(code), words)

    def difference(self, other: Description) -> str:
        """What differs between the server (this one) and a worker; empty if nothing does."""
        lines = []
        if other.code != self.code:
            lines.append(f"the chain: the server runs {self.code}, the worker {other.code}")
        for path in sorted({*self.leaves, *other.leaves}):
            here, there = self.leaves.get(path, _NOTHING), other.leaves.get(path, _NOTHING)
            for ours, theirs in [p for p in zip(here, there, strict=True) if p[0] != p[1]][:1]:
                lines.append(f"leaf {path!r}: the server has {ours}, the worker {theirs}")
        more = [f"and {len(lines) - 20} more"] if len(lines) > 20 else []
        return "; ".join(lines[:20] + more)
