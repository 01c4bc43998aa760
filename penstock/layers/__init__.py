"""Weights and shapes: each layer holds its tensors and calls ops.

In: hidden states, a step and a layer's cache. Out: hidden states. Layers know nothing of configs, checkpoints or
sequences, and compute nothing themselves: arithmetic by torch would be missing where a step is replayed.
"""

from __future__ import annotations

from penstock.layers.attention import Attention, EncoderAttention
from penstock.layers.block import Block, ParallelBlock, PostNormBlock
from penstock.layers.embedding import Embedding
from penstock.layers.head import Head
from penstock.layers.linear import Linear
from penstock.layers.mlp import GatedMlp, Mlp
from penstock.layers.norm import LayerNorm, RmsNorm
from penstock.layers.rope import RopeTable
from penstock.layers.step import Ends, LayerCache, Step

__all__ = [
    "Attention",
    "Block",
    "Embedding",
    "EncoderAttention",
    "Ends",
    "GatedMlp",
    "Head",
    "LayerCache",
    "LayerNorm",
    "Linear",
    "Mlp",
    "ParallelBlock",
    "PostNormBlock",
    "RmsNorm",
    "RopeTable",
    "Step",
]
