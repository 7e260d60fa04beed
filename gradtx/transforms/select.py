"""`filter_params` and `skip_bn`: which leaves the compressors see."""

from __future__ import annotations

from gradtx.core.combinators import Filter
from gradtx.core.predicates import Test, is_batch_norm
from gradtx.core.predicates import predicate as as_predicate
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation


def filter_params(predicate: Test) -> Transformation:
    """Leaves for which a predicate is false bypass the compressors to the right.

    They are averaged densely. All other stages see every leaf. Several filters intersect.

    Args:
        predicate: ``predicate(path, leaf, info) -> bool``: the key path, such as
            ``"conv1.weight"``, the parameter, and its `LeafInfo` (None where `init` was not given
            an `nn.Module`). Asked once a leaf, at `init`. Ready-made: `is_matrix`, `is_bias`,
            `is_batch_norm`, `min_size`, `path_glob`; combine them by ``&``, ``|`` and ``~``.

    Returns:
        A stage for `chain`.

    Raises:
        TypeError: if the predicate is not callable.

    Example:
        >>> import gradtx as gx
        >>> gx.chain(gx.filter_params(gx.is_matrix & gx.min_size(1000)), gx.topk(0.01), gx.ef())
        gx.chain(gx.filter_params(gx.is_matrix & gx.min_size(1000)), gx.topk(0.01), gx.ef())
    """
    keep = as_predicate(predicate)
    return Filter(_stage("filter_params", Argument("predicate", keep)), keep)


def skip_bn() -> Transformation:
    """Leaves of normalisation layers with running statistics bypass the compressors to the right.

    Short for ``filter_params(~is_batch_norm)``. Give `init` the module, and the layers are known by
    their class; otherwise they are known by path (``bn1``, ``BatchNorm_0``, ...).

    The recipe ``'batchnorm' in str(type(param)).lower()`` matches nothing: the type of every
    parameter is `nn.Parameter`, whatever its layer.

    Returns:
        A stage for `chain`.

    Example:
        >>> import torch, gradtx as gx
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
        >>> tx = gx.chain(gx.skip_bn(), gx.topk(0.5), gx.ef())
        >>> grads = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        >>> {path: type(u).__name__ for path, u in tx.update(grads, tx.init(model))[0].items()}
        {'0.weight': 'Sparse', '0.bias': 'Sparse', '1.weight': 'Tensor', '1.bias': 'Tensor'}
    """
    return Filter(_stage("skip_bn"), ~is_batch_norm)


def _stage(name: str, *arguments: Argument) -> Stage:
    return Stage(name, Kind.FILTER, arguments, linear=True)
