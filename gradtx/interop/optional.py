"""Packages that only some functions need."""

from __future__ import annotations

import importlib
from typing import Any

_SOURCE = {
    "jax": "gradtx[jax]",
    "optax": "gradtx[jax]",
    "safetensors": "safetensors",
    "torchopt": "gradtx[bench]",
}


def require(package: str, user: str) -> Any:
    """The imported package.

    Args:
        package: ``"jax"``, ``"optax"``, ``"safetensors"``, ``"torchopt"``, a module in one of
            them, or one that is always there.
        user: what needs it, for the error.

    Raises:
        ImportError: saying how to install it, if it is not there.

    Example:
        >>> require("math", "this example").pi
        3.14...
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise ImportError(
            f"{user} needs {name}, which is not installed: pip install '{_SOURCE[name]}'",
            name=name,
        ) from error
