"""Fuzzes one target, guided by coverage."""

import argparse
import random
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path

import atheris
import torch

_ROOM = 2**30  # bytes that the fuzzer's own corpus may grow by
_NUMBERS = (0, 1, 2, 7, 127, 128, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
_WIDE = (*_NUMBERS, 2**52, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -1.0, 0.5, 1e38, 3.4e38, 1e300, float("inf"), float("-inf"), float("nan"))
_FORMATS = {
    "<B": _NUMBERS,
    "<H": _NUMBERS,
    "<I": _NUMBERS,
    "<Q": _WIDE,
    "<f": _FLOATS,
    "<d": _FLOATS,
}


def edited(data: bytearray, drawn: random.Random) -> bytearray:
    """Bytes of the same length, with some numbers in them others."""
    for _ in range(drawn.randint(1, 4)):
        layout = drawn.choice(list(_FORMATS))
        length = struct.calcsize(layout)
        if drawn.random() < 0.3 and data:
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
        elif len(data) > length:
            # The first byte says which layout it is; numbers behind it are aligned, mostly.
            start = drawn.randrange(len(data) - length)
            start -= start % drawn.choice([1, length])
            value = drawn.choice(_FORMATS[layout])
            if layout[1] not in "fd":
                value %= 256**length
            elif layout[1] == "f" and abs(value) > 3.5e38:
                value = float("inf")
            struct.pack_into(layout, data, 1 + start, value)
    return data


def main() -> None:
    torch.set_num_threads(1)
    with atheris.instrument_imports(include=["gradtx"]):
        from .targets import TARGETS

    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, help="a folder to go on with (a temporary one)")
    options, rest = parser.parse_known_args()
    target = TARGETS[options.target]()
    target.warm()
    count, began = 0, time.monotonic()

    def one(data: bytes) -> None:
        nonlocal count
        count += 1
        if data:
            # Counting memory takes as long as decoding does, and tracemalloc takes some for ever.
            if count % 8:
                target.run(data)
            else:
                target.check(data, objects=not count % 64)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        drawn = random.Random(seed)
        how = drawn.random()
        if how < 0.4 or not data:
            return atheris.Mutate(data, most)
        start = drawn.choice(target.seeds) if how < 0.6 else data
        return bytes(edited(bytearray(start), drawn))[:most]

    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or Path(folder)
        for number, seed in enumerate(target.seeds):
            (corpus / f"seed{number}").write_bytes(seed)
            one(seed)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM, resource.RLIM_INFINITY))
        longest = 2 * max(map(len, target.seeds)) + 64
        limits = [f"-max_total_time={options.seconds}", f"-max_len={longest}", "-timeout=10"]
        shown = ["-print_final_stats=1", "-use_value_profile=1", "-rss_limit_mb=2048"]
        atheris.Setup(
            [sys.argv[0], *limits, *shown, *rest, str(corpus)], one, custom_mutator=mutated
        )
        print(f"{options.target}: {len(target.seeds)} seeds", flush=True)
        try:
            atheris.Fuzz()
        finally:
            print(f"{options.target}: {count} runs in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
