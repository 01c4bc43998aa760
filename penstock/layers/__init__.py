"""The mathematics of a model, and nothing else: each layer holds its tensors and calls ops.

In: hidden states, a step and a layer's memory. Out: hidden states. Layers know nothing of configs, checkpoints,
devices, storage or fusion (`penstock.passes.lower`). They compute through an `OpTable` alone: torch's own arithmetic
cannot be taped.
"""

from __future__ import annotations

from penstock.layers.attention import Attention, EncoderAttention, Mixer, SinkAttention, TemperedAttention
from penstock.layers.block import (
    AnyBlock,
    Block,
    MixerBlock,
    OutputNormBlock,
    ParallelBlock,
    PostNormBlock,
    ScaledBlock,
)
from penstock.layers.embedding import Embedding
from penstock.layers.experts import Experts, Router, WeighedInputExperts
from penstock.layers.ffn import Ffn, GatedMlp, Mlp
from penstock.layers.head import Head
from penstock.layers.latent import HeadLinear, HeadProduct, LatentAttention, LatentHead, LowRankQuery
from penstock.layers.linear import Linear, Stack
from penstock.layers.memory import KvCache, LatentCache, LayerMemory, StateRows
from penstock.layers.norm import GroupedRmsNorm, LayerNorm, Norm, RmsNorm
from penstock.layers.received import Received
from penstock.layers.recurrent import CausalConv, Mamba2, StateSpace
from penstock.layers.rope import RopeTable
from penstock.layers.step import Ends, StepInputs

__all__ = [
    "AnyBlock",
    "Attention",
    "Block",
    "CausalConv",
    "Embedding",
    "EncoderAttention",
    "Ends",
    "Experts",
    "Ffn",
    "GatedMlp",
    "Head",
    "HeadLinear",
    "HeadProduct",
    "KvCache",
    "LatentAttention",
    "LatentCache",
    "LatentHead",
    "LayerMemory",
    "GroupedRmsNorm",
    "LayerNorm",
    "Linear",
    "LowRankQuery",
    "Mamba2",
    "Mixer",
    "MixerBlock",
    "Mlp",
    "Norm",
    "OutputNormBlock",
    "ParallelBlock",
    "PostNormBlock",
    "Received",
    "RmsNorm",
    "RopeTable",
    "Router",
    "ScaledBlock",
    "SinkAttention",
    "Stack",
    "StateRows",
    "StateSpace",
    "StepInputs",
    "TemperedAttention",
    "WeighedInputExperts",
]
