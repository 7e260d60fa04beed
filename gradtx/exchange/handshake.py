"""How ranks come to agree, and how they learn that one of them has failed.

Before a chain exchanges anything, the ranks compare what they run in a message of fixed size
(`agree`). From then on every rank knows the sizes of all messages; one that fails before it sends
sets the error flag in a message of the agreed size, and all ranks read the reasons (`share_error`).
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from gradtx.core.errors import RankLostError, RankMismatchError
from gradtx.core.transformation import Context
from gradtx.exchange.group import Group
from gradtx.wire import WireFormatError

NBYTES = 1024
_HEAD = struct.Struct("<4sHHQQQI")
_MAGIC = b"GRTH"
_VERSION = 1
_HEARD = re.compile(r"rank \d+ failed ")
_NOTHING = ["nothing", "nothing"]
# Of a chain and all its leaves, as JSON: that of a million leaves is shorter.
_LONGEST = 2**28
_PIECE = 2**16  # bytes


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself in a handshake.

    Attributes:
        chain: 64 bits of a hash over the chain as code.
        layout: 64 bits of a hash over paths, shapes, dtypes, and how each leaf travels.
        step: how many steps its state has seen.
        error: why it cannot go on; empty if it can.
    """

    chain: int
    layout: int
    step: int
    error: str = ""

    def encode(self) -> torch.Tensor:
        """As uint8 ``[NBYTES]``; a long error is cut."""
        text = self.error.encode(errors="backslashreplace")[: NBYTES - _HEAD.size]
        head = _HEAD.pack(
            _MAGIC, _VERSION, int(bool(self.error)), self.chain, self.layout, self.step, len(text)
        )
        return torch.frombuffer(bytearray((head + text).ljust(NBYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def decode(cls, message: torch.Tensor) -> Hello:
        """The inverse.

        Raises:
            WireFormatError: if the bytes are no handshake of this version.
        """
        data = bytes(message.cpu().numpy())
        if len(data) != NBYTES:
            raise WireFormatError(f"a handshake has {NBYTES} bytes, got {len(data)}")
        magic, version, failed, chain, layout, step, length = _HEAD.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise WireFormatError(
                f"not a handshake of version {_VERSION}: magic {magic!r}, version {version}"
            )
        if failed not in (0, 1) or length > NBYTES - _HEAD.size:
            raise WireFormatError(f"malformed handshake: flag {failed}, text of {length} bytes")
        text = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        return cls(chain, layout, step, text or "unknown error" if failed else "")


def agree(
    group: Group,
    context: Context,
    step: int,
    error: str = "",
    forms: Mapping[str, str] | None = None,
) -> None:
    """Compares chain, parameters and step with the other ranks.

    Args:
        group: the ranks.
        context: of the step: the chain and the layout.
        step: how many steps this rank's state has seen.
        error: why this rank cannot go on, if it cannot.
        forms: how each leaf travels, by path, where that is known.

    Raises:
        RankMismatchError: on every rank, if one has failed, or they differ.
    """
    forms = forms or {}
    leaves = {x.path: [str(x), f"sent {forms.get(x.path)}"] for x in context.layout.leaves}
    code = context.code + group.place
    hello = Hello(_hash(code), _hash(json.dumps(leaves, sort_keys=True)), step, error)
    hellos = [Hello.decode(message) for message in group.plain.all_gather(hello.encode())]
    _raise_errors(group, [other.error for other in hellos], "before the first exchange")
    if len({(other.chain, other.layout) for other in hellos}) > 1:
        raise RankMismatchError(_difference(_descriptions(group, code, leaves)))
    if len({other.step for other in hellos}) > 1:
        raise RankMismatchError(
            "the ranks' states are at different steps: "
            + ", ".join(f"rank {rank} at {other.step}" for rank, other in enumerate(hellos))
            + "; load the checkpoint of one step on all ranks"
        )


def said_of(error: Exception) -> str:
    """An error in words, for other ranks; what this rank has heard of one itself, as it was."""
    text = str(error)
    heard = isinstance(error, RankMismatchError) and _HEARD.match(text)
    return text if heard else f"{type(error).__name__}: {text}"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def share_error(group: Group, error: str) -> None:
    """Tells all ranks why some have failed, once all know that some have.

    Args:
        group: the ranks.
        error: this rank's own; empty if it has none.

    Raises:
        RankMismatchError: always, unless no rank has an error to tell.
    """
    messages = group.plain.all_gather(Hello(0, 0, 0, error).encode())
    _raise_errors(group, [Hello.decode(message).error for message in messages], "in this step")


def _raise_errors(group: Group, errors: Sequence[str], when: str) -> None:
    known = group.members if len(group.members) == len(errors) else range(len(errors))
    named = zip(known, errors, strict=True)
    # What a rank has heard in another group is said as it was said there, once.
    failed = [
        text if _HEARD.match(text) else f"rank {rank} failed {when}: {text}"
        for rank, text in named
        if text
    ]
    if failed:
        lost = any(f"{RankLostError.__name__}: " in text for text in failed)
        kind = RankLostError if lost else RankMismatchError
        raise kind("; ".join(dict.fromkeys(failed)))


def _descriptions(
    group: Group, code: str, leaves: Mapping[str, list[str]]
) -> list[tuple[str, dict[str, list[str]]]]:
    """Every rank's chain and leaves; sent only once it is known that they differ."""
    own = json.dumps([code, leaves]).encode()
    lengths = group.plain.all_gather(_bytes(struct.pack("<Q", len(own))))
    sizes = [struct.unpack("<Q", bytes(length.numpy()))[0] for length in lengths]
    if max(sizes) > _LONGEST:
        raise WireFormatError(f"descriptions of {max(sizes)} bytes: expected at most {_LONGEST}")
    texts = [bytearray() for _ in sizes]
    # In pieces, so that memory is taken for what has come, not for what a rank says is to come.
    for start in range(0, max(sizes), _PIECE):
        piece = own[start : start + _PIECE].ljust(min(_PIECE, max(sizes) - start), b" ")
        for text, part in zip(texts, group.plain.all_gather(_bytes(piece)), strict=True):
            text += part.numpy().tobytes()
    return [_description(bytes(text)) for text in texts]


def _description(text: bytes) -> tuple[str, dict[str, list[str]]]:
    try:
        code, leaves = json.loads(text)
        return str(code), {path: list(map(str, words)) for path, words in leaves.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WireFormatError(f"malformed description {text[:80]!r}") from error


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _difference(ranks: Sequence[tuple[str, dict[str, list[str]]]]) -> str:
    (chain, leaves), lines = ranks[0], []
    for rank, (other_chain, other_leaves) in enumerate(ranks[1:], 1):
        if other_chain != chain:
            lines.append(f"the chain: rank 0 runs {chain}, rank {rank} runs {other_chain}")
        for path in sorted({*leaves, *other_leaves}):
            both = leaves.get(path, _NOTHING), other_leaves.get(path, _NOTHING)
            pairs = zip_longest(*both, fillvalue=_NOTHING[0])
            for here, there in [pair for pair in pairs if pair[0] != pair[1]][:1]:
                lines.append(f"leaf {path!r}: rank 0 has {here}, rank {rank} has {there}")
    shown = lines[:20] + ([f"and {len(lines) - 20} more"] if len(lines) > 20 else [])
    return "ranks differ in " + "; ".join(shown)


def confirm(group: Group, error: Exception | None = None, digest: int = 0) -> None:
    """Says that this rank can go on, or why it cannot, and hears whether all others can.

    Args:
        group: the ranks, which are to do the same from here on.
        error: why this rank cannot.
        digest: 32 bits of a hash over what it is about to send.

    Raises:
        Exception: as `stop`, if some rank cannot go on.
        RankMismatchError: on all of them, if they are about to send different things.
    """
    if group.size == 1:
        return
    told = torch.tensor([error is not None, digest], dtype=torch.int64).view(torch.uint8)
    answers = [answer.clone().view(torch.int64).tolist() for answer in group.all_gather(told)]
    if any(failed for failed, _ in answers):
        stop(group, error)
    if len({found for _, found in answers}) > 1:
        raise RankMismatchError(
            f"the ranks {list(group.members)} of one node have compressed different things: their "
            "states have to be equal; load the checkpoint of each rank on it, of one step"
        )


def stop(group: Group, error: Exception | None) -> None:
    """Ends a step that some rank has failed in, on all of them.

    Args:
        group: the ranks.
        error: this rank's own, if it has one.

    Raises:
        Exception: that error; on the others a `RankMismatchError` with its text.
    """
    try:
        share_error(group, "" if error is None else said_of(error))
    except RankMismatchError:
        if error is not None:
            raise error from None
        raise
