"""Gradient transformations for training across machines: composed, checked, and small on the wire.

import gradtx as gx

tx = gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())
"""

__version__ = "0.1.0"

from gradtx.checkpoint import PerRank
from gradtx.checkpoint_files import load_checkpoint, save_checkpoint
from gradtx.compressors.cast import cast
from gradtx.compressors.compressor import compressor, random_compressor
from gradtx.compressors.levels import Levels
from gradtx.compressors.natural import Powers, natural
from gradtx.compressors.powersgd import LowRank, powersgd
from gradtx.compressors.quantize import quantize
from gradtx.compressors.random_k import random_k
from gradtx.compressors.sign import Signs, sign, sign_quantize
from gradtx.compressors.ternary import ternary
from gradtx.compressors.threshold import threshold
from gradtx.compressors.topk import Sparse, topk, topk_sparsify
from gradtx.core.cast import Cast
from gradtx.core.chain import Chain, ChainState, chain
from gradtx.core.combinators import apply_if_finite, ef, error_feedback, masked
from gradtx.core.errors import (
    ChainOrderError,
    NeverFiniteError,
    RankLostError,
    RankMismatchError,
    Violation,
)
from gradtx.core.explain import explain
from gradtx.core.momentum import momentum_correction
from gradtx.core.payload import Payload, register_payload
from gradtx.core.predicates import (
    Predicate,
    is_batch_norm,
    is_bias,
    is_matrix,
    min_size,
    path_glob,
)
from gradtx.core.schedule import Schedule, warmup_density
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation, declare
from gradtx.core.tree import LeafInfo
from gradtx.ddp import DDPHook, ddp_hook
from gradtx.exchange.allreduce import allreduce
from gradtx.exchange.cost import Link
from gradtx.exchange.grid import node_groups
from gradtx.interop.dlpack import to_jax, to_torch
from gradtx.interop.mesh import partition_specs
from gradtx.interop.optax import from_optax, to_optax
from gradtx.pipeline import Pipeline, SyncReport
from gradtx.resharding import reshard
from gradtx.stale.server import ParameterServer, ServerUpdate
from gradtx.stale.worker import PushReport, Worker
from gradtx.transforms.accumulate import accumulate
from gradtx.transforms.clip import clip_by_global_norm, clip_by_local_norm
from gradtx.transforms.delayed import delayed
from gradtx.transforms.loss_scale import dynamic_loss_scale
from gradtx.transforms.master_weights import master_weights
from gradtx.transforms.scale import scale, scale_by_schedule
from gradtx.transforms.select import filter_params, skip_bn
from gradtx.transforms.staleness import delayed_learning_rate, stable_learning_rate
from gradtx.transforms.unscale import unscale
from gradtx.transforms.weight_decay import add_decayed_weights

__all__ = [
    "Argument",
    "Cast",
    "Chain",
    "ChainOrderError",
    "ChainState",
    "DDPHook",
    "Kind",
    "LeafInfo",
    "Levels",
    "Link",
    "LowRank",
    "NeverFiniteError",
    "ParameterServer",
    "Payload",
    "PerRank",
    "Pipeline",
    "Powers",
    "Predicate",
    "PushReport",
    "RankLostError",
    "RankMismatchError",
    "Schedule",
    "ServerUpdate",
    "Signs",
    "Sparse",
    "Stage",
    "SyncReport",
    "Transformation",
    "Violation",
    "Worker",
    "accumulate",
    "add_decayed_weights",
    "allreduce",
    "apply_if_finite",
    "cast",
    "chain",
    "clip_by_global_norm",
    "clip_by_local_norm",
    "compressor",
    "ddp_hook",
    "declare",
    "delayed",
    "delayed_learning_rate",
    "dynamic_loss_scale",
    "ef",
    "error_feedback",
    "explain",
    "filter_params",
    "from_optax",
    "is_batch_norm",
    "is_bias",
    "is_matrix",
    "load_checkpoint",
    "masked",
    "master_weights",
    "min_size",
    "momentum_correction",
    "natural",
    "node_groups",
    "partition_specs",
    "path_glob",
    "powersgd",
    "quantize",
    "random_compressor",
    "random_k",
    "register_payload",
    "reshard",
    "save_checkpoint",
    "scale",
    "scale_by_schedule",
    "sign",
    "sign_quantize",
    "skip_bn",
    "stable_learning_rate",
    "ternary",
    "threshold",
    "to_jax",
    "to_optax",
    "to_torch",
    "topk",
    "topk_sparsify",
    "unscale",
    "warmup_density",
]
