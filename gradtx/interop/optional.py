"""Packages that only some functions need."""

from __future__ import annotations

import importlib
from typing import Any

_SOURCE = {"jax": "gradtx[jax]", "optax": "gradtx[jax]", "torchopt": "gradtx[bench]"}


def require(package: str, user: str) -> Any:
    """The imported package.

    Args:
        package: ``"jax"``, ``"optax"``, ``"torchopt"`` or a module that is always there.
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
        raise ImportError(
            f"{user} needs {package}, which is not installed: pip install '{_SOURCE[package]}'",
            name=package,
        ) from error
