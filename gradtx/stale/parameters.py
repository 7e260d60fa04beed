"""What workers pull: parameters as a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradtx.core.tree import Info, Layout, PyTree, parameters_of
from gradtx.wire import Header, WireFormatError, decode_message, encode_message, message_nbytes


def trained_parameters(params: Any) -> tuple[PyTree, Info | None]:
    """The parameters that are trained, as a tree, and what is known of them, by path."""
    tree, info = parameters_of(params)
    if isinstance(params, torch.nn.Module):
        tree = {path: p for path, p in tree.items() if p.requires_grad}
    return tree, info


class ParameterCodec:
    """Parameters as a message, in their own dtypes.

    Args:
        layout: paths, shapes and dtypes.
        fingerprint: 64 bits that both sides have to agree on.
    """

    def __init__(self, layout: Layout, fingerprint: int) -> None:
        self._layout, self._fingerprint = layout, fingerprint
        by_dtype: dict[str, list[int]] = {}
        for i in layout.by_path:
            if layout.leaves[i].dtype is not None:
                by_dtype.setdefault(str(layout.leaves[i].dtype), []).append(i)
        self._places = dict(sorted(by_dtype.items()))
        self._lengths = {
            dtype: [layout.leaves[i].size for i in places] for dtype, places in by_dtype.items()
        }
        self._sizes = [
            sum(self._lengths[dtype]) * getattr(torch, dtype).itemsize for dtype in self._places
        ]

    @property
    def nbytes(self) -> int:
        """What the message takes, in bytes."""
        return message_nbytes(len(self._layout.leaves), self._sizes)

    def encode(self, values: Sequence[torch.Tensor | None], updates: int) -> torch.Tensor:
        """Values in the order of the layout as uint8 ``[n]``.

        Args:
            values: in any dtype.
            updates: how many updates the server has made.
        """
        header = Header(self._fingerprint, updates, True, False, (False,) * len(values))
        segments = []
        for dtype, places in self._places.items():
            parts = [t.reshape(-1) for i in places if (t := values[i]) is not None]
            segments.append(torch.cat(parts).to(getattr(torch, dtype)).view(torch.uint8))
        return encode_message(header, segments, "cpu")

    def decode(self, body: torch.Tensor, updates: int) -> list[torch.Tensor | None]:
        """The inverse, in the dtypes and shapes of the layout.

        Raises:
            WireFormatError: if the bytes are no parameters of this layout.
        """
        leaves = self._layout.leaves
        header, segments = decode_message(body, len(leaves), self._sizes, self._fingerprint)
        if header.error or not header.finite or any(header.absent):
            raise WireFormatError(f"parameters have a header that no server sends: {header}")
        if header.step != updates % 2**32:
            raise WireFormatError(f"parameters are of update {header.step}, expected {updates}")
        values: list[torch.Tensor | None] = [None] * len(leaves)
        for (dtype, places), segment in zip(self._places.items(), segments, strict=True):
            parts = segment.view(getattr(torch, dtype)).split(self._lengths[dtype])
            for i, part in zip(places, parts, strict=True):
                values[i] = part.reshape(leaves[i].shape or ())
        return values
