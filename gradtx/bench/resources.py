"""What this process and its machine spend: bytes on an interface, memory, its bandwidth."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from pathlib import Path

import torch

COPIES = 5
SMALLEST_COPY = 1 << 24  # bytes, beyond what caches hold
_CLEAR_PEAK = "5"  # to /proc/self/clear_refs: see proc(5)


def bytes_sent(interface: str, table: str = "/proc/self/net/dev") -> int:
    """What a network interface has sent so far, in bytes of Ethernet frames.

    Args:
        interface: such as ``"eth0"``, in this process's network namespace.
        table: where the kernel lists them.

    Raises:
        OSError: if there is no such table, or no such interface in it.
    """
    for line in Path(table).read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[8])
    raise OSError(f"{table} has no interface {interface}")


class PeakMemory:
    """How far this process's memory grows, at most, from when it is made; Linux only.

    What earlier work has left behind is given back to the system first, so that it does not hide
    what is taken now. A file in memory counts, swapped pages do not.

    Example:
        >>> memory = PeakMemory()
        >>> grown = memory.growth()
        >>> grown is None or grown >= 0
        True
    """

    def __init__(self) -> None:
        self._begin = _resident("VmRSS") if self.restart() else None

    def restart(self) -> bool:
        """Forgets the peak so far, not where it began; gives whether that can be done here."""
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
        except (AttributeError, OSError):
            return False
        return True

    def growth(self) -> int | None:
        """The peak over the beginning, in bytes; None if the system does not tell."""
        return None if self._begin is None else max(0, _resident("VmHWM") - self._begin)


def resident_bytes() -> int:
    """This process's memory, once what is free is given back; -1 if the system does not tell."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        return _resident("VmRSS")
    except (AttributeError, OSError):
        return -1


def open_files() -> int:
    """How many files and sockets this process has open; -1 if the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # Without that of the folder.
    except OSError:
        return -1


def _resident(name: str) -> int:
    """One of the sizes in /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


def memory_bandwidth(values: int) -> float:
    """Bytes that one thread reads and writes in a second when it copies FP32 values.

    Args:
        values: how many; at least 16 MiB of them are copied, or caches would answer.
    """
    source = torch.ones(max(values, SMALLEST_COPY // 4))
    target = torch.ones_like(source)
    seconds = []
    for _ in range(COPIES):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * 4 * source.numel() / statistics.median(seconds)
