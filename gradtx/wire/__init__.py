"""Bytes on the network: packed bits, index codes and the message of one rank and step."""

from gradtx.wire.bits import pack_bits, pack_uints, unpack_bits, unpack_uints
from gradtx.wire.errors import WireFormatError
from gradtx.wire.index import decode_indices, encode_indices, indices_nbytes
from gradtx.wire.message import (
    Header,
    decode_message,
    encode_message,
    error_message,
    message_nbytes,
)

__all__ = [
    "Header",
    "WireFormatError",
    "decode_indices",
    "decode_message",
    "encode_indices",
    "encode_message",
    "error_message",
    "indices_nbytes",
    "message_nbytes",
    "pack_bits",
    "pack_uints",
    "unpack_bits",
    "unpack_uints",
]
