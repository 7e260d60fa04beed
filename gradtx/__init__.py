"""Gradient transformations for training across machines: composed, checked, and small on the wire.

import gradtx as gx

tx = gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())
"""

__version__ = "0.1.0"

from gradtx.compressors.sign import Signs, sign, sign_quantize
from gradtx.compressors.topk import Sparse, topk, topk_sparsify
from gradtx.core.chain import Chain, ChainState, chain
from gradtx.core.combinators import apply_if_finite, ef, error_feedback, masked
from gradtx.core.errors import ChainOrderError, RankMismatchError, Violation
from gradtx.core.explain import explain
from gradtx.core.predicates import (
    Predicate,
    is_batch_norm,
    is_bias,
    is_matrix,
    min_size,
    path_glob,
)
from gradtx.core.transformation import Transformation, declare
from gradtx.core.tree import LeafInfo
from gradtx.exchange.allreduce import allreduce
from gradtx.pipeline import Pipeline, SyncReport
from gradtx.transforms.select import filter_params, skip_bn
from gradtx.transforms.unscale import unscale

__all__ = [
    "Chain",
    "ChainOrderError",
    "ChainState",
    "LeafInfo",
    "Pipeline",
    "Predicate",
    "RankMismatchError",
    "Signs",
    "Sparse",
    "SyncReport",
    "Transformation",
    "Violation",
    "allreduce",
    "apply_if_finite",
    "chain",
    "declare",
    "ef",
    "error_feedback",
    "explain",
    "filter_params",
    "is_batch_norm",
    "is_bias",
    "is_matrix",
    "masked",
    "min_size",
    "path_glob",
    "sign",
    "sign_quantize",
    "skip_bn",
    "topk",
    "topk_sparsify",
    "unscale",
]
