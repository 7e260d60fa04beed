"""The text task of ``bench convergence``: real text, and a small transformer over its characters.

The text is the source of some modules of Python's standard library, so it is there wherever this
runs, and another one in each release of Python.
"""

from __future__ import annotations

import string
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT = 64
MODULES = (
    "argparse",
    "calendar",
    "configparser",
    "difflib",
    "doctest",
    "heapq",
    "inspect",
    "mailbox",
    "optparse",
    "pickle",
    "random",
    "shutil",
    "statistics",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "typing",
)
MOST_CHARACTERS = 40_000  # of each module
HELD_OUT = 10  # one character in so many


class Corpus(NamedTuple):
    """Characters as numbers, the same on all ranks.

    Attributes:
        vocabulary: the printable characters that occur, sorted; a number is a place in it.
        train: int64 ``[n]``, of each module all but the end.
        held_out: int64 ``[m]``, the ends.
    """

    vocabulary: str
    train: Tensor
    held_out: Tensor

    @classmethod
    def load(cls) -> Corpus:
        """Reads the source of the standard library.

        Raises:
            FileNotFoundError: if it is not installed as source.
        """
        folder = Path(sysconfig.get_paths()["stdlib"])
        return cls.of([(folder / f"{name}.py").read_text("utf-8") for name in MODULES])

    @classmethod
    def of(cls, texts: Sequence[str]) -> Corpus:
        """The corpus of some texts: what is held out of each is its last tenth.

        Example:
            >>> corpus = Corpus.of(["abcabcabca", "bébbbbbbbbbc"])
            >>> corpus.vocabulary, corpus.held_out.tolist()
            ('abc', [0, 2])
        """
        printable = set(string.printable)
        kept = ["".join(c for c in text if c in printable)[:MOST_CHARACTERS] for text in texts]
        vocabulary = "".join(sorted(set().union(*kept)))
        numbers = {character: number for number, character in enumerate(vocabulary)}
        train, held_out = [], []
        for text in kept:
            codes = [numbers[character] for character in text]
            end = len(codes) - len(codes) // HELD_OUT
            train += codes[:end]
            held_out += codes[end:]
        return cls(vocabulary, torch.tensor(train), torch.tensor(held_out))


def windows(characters: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Stretches of text, and what comes after each of their characters.

    Args:
        characters: int64 ``[n]``.
        starts: int64 ``[b]``, each at most ``n - CONTEXT - 1``.

    Returns:
        Two tensors, int64 ``[b, CONTEXT]``, the second one character further on.
    """
    places = starts[:, None] + torch.arange(CONTEXT + 1)
    taken = characters[places]
    return taken[:, :-1], taken[:, 1:]


class Block(nn.Module):
    """A transformer block: attention to what came before, and two linear layers.

    Args:
        width: of each place, a multiple of `heads`.
        heads: of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm_again = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[b, t, width]`` to the same."""
        mixed: Tensor = x + self.mix(self.attend(self.norm(x)))
        widened = F.gelu(self.widen(self.norm_again(mixed)))
        return mixed.add(self.narrow(widened))

    def attend(self, x: Tensor) -> Tensor:
        """What each place finds in those up to it."""
        parts = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return found.transpose(1, 2).flatten(-2)


class Transformer(nn.Module):
    """A language model over characters.

    Args:
        vocabulary: how many characters there are.
        width: of each place.
        layers: how many blocks.
        heads: of each block.
    """

    def __init__(self, vocabulary: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(CONTEXT, width)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps characters, int64 ``[b, t]``, to logits ``[b, t, vocabulary]`` of the next ones."""
        embedded = self.characters(x) + self.places(torch.arange(x.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(embedded)))
        return logits
