"""What a target is, and what no decoder may do with any bytes."""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from .memory import Memory

# A message of nothing has objects around it, too.
_ALWAYS = 200_000
_TIMES = 100


@dataclass(frozen=True)
class Target:
    """A decoder.

    Attributes:
        seeds: what encoders have made; the first byte may say which layout it is of.
        run: decodes; raises what is no answer to bytes that are wrong.
        known: bytes that what is known beforehand stands for: shapes, and how many ranks there are.
    """

    seeds: list[bytes]
    run: Callable[[bytes], None]
    known: int = 0

    def warm(self) -> None:
        """Decodes a seed of each layout, for what is imported and kept the first time."""
        for seed in {seed[:1]: seed for seed in self.seeds}.values():
            with Memory():
                self.run(seed)

    def check(self, data: bytes, *, objects: bool = True) -> None:
        """Decodes, and refuses more memory than the bytes and what is known can be a reason for.

        Args:
            data: the bytes.
            objects: whether to count those of Python, too.
        """
        most = _ALWAYS + _TIMES * (len(data) + self.known)
        # Twice, as tables of the interpreter grow now and then.
        if self._used(data, objects) > most and (used := self._used(data, objects)) > most:
            raise AssertionError(f"{used} bytes of memory for {len(data)} bytes: {data[:80]!r}")

    def _used(self, data: bytes, objects: bool) -> int:
        if not objects:
            with Memory() as memory:
                self.run(data)
            return memory.most
        tracemalloc.start()
        try:
            return self._used(data, False) + tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


TARGETS: dict[str, Callable[[], Target]] = {}


def target(make: Callable[[], Target]) -> Callable[[], Target]:
    """Registers what makes a target, by its name (use it as a decorator)."""
    TARGETS[make.__name__] = make
    return make
