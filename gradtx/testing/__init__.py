"""For whoever writes a transformation: ranks in one process, the laws, Hypothesis strategies.

`strategies` needs hypothesis, the others do not.
"""

from typing import Any

from gradtx.testing.laws import LawViolation, check_laws
from gradtx.testing.ranks import run_ranks

__all__ = ["LawViolation", "check_laws", "run_ranks", "strategies"]


def __getattr__(name: str) -> Any:
    if name == "strategies":
        import importlib

        return importlib.import_module("gradtx.testing.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
