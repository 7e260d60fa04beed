"""For whoever writes a transformation: ranks in one process, Hypothesis strategies, the laws."""

from gradtx.testing.ranks import run_ranks

__all__ = ["run_ranks"]
