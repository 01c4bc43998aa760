"""Rope frequencies and tables against transformers, every kind, in both spellings, far from position 0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.layers.rope import RopeTable
from penstock.models.layer import Attention
from penstock.models.spec import spec_from_config
from penstock.ops import OpTable
from tests.models import oracle

BASE: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=4096,
    rope_theta=50000.0,
)
KINDS: list[dict[str, Any]] = [
    dict(rope_type="linear", factor=4.0),
    dict(rope_type="dynamic", factor=3.0),
    dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024
    ),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    dict(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=512,
        beta_fast=16,
        beta_slow=2,
        truncate=False,
        mscale=0.7,
        mscale_all_dim=0.3,
    ),
    dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=512, attention_factor=1.3),
    dict(
        rope_type="longrope",
        short_factor=[1.0 + i / 32 for i in range(32)],
        factor=16.0,
        long_factor=[1.0 + i for i in range(32)],
        original_max_position_embeddings=1024,
    ),
    dict(
        rope_type="longrope",
        short_factor=[1.5] * 32,
        long_factor=[2.5] * 32,
        attention_factor=1.1,
        original_max_position_embeddings=2048,
    ),
]


@pytest.mark.parametrize("length", [1000, 3000, 4096])
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_frequencies(number: int, length: int) -> None:
    config = {**BASE, "rope_scaling": KINDS[number]}
    ours = {"architectures": ["LlamaForCausalLM"], **copy.deepcopy(config)}
    theirs = oracle.transformers.LlamaConfig(**copy.deepcopy(config))
    expected, factor = ROPE_INIT_FUNCTIONS[KINDS[number]["rope_type"]](theirs, "cpu", seq_len=length)
    attention = spec_from_config(ours, max_model_len=length).layers[0].mixer
    assert isinstance(attention, Attention) and attention.rope is not None
    assert attention.rope.attention_factor == pytest.approx(factor, rel=1e-12)
    assert torch.equal(attention.rope.frequencies(), expected)


def test_tables_far_out_and_independent_of_their_length() -> None:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    table, longer = (RopeTable(OpTable("cpu"), frequencies, length, 1.25) for length in (9001, 9013))
    angles = torch.arange(9001.0)[:, None] * frequencies
    assert (table.cos - angles.cos() * 1.25).abs().max() <= 2e-7
    assert (table.sin - angles.sin() * 1.25).abs().max() <= 2e-7
    assert torch.equal(table.cos, longer.cos[:9001]) and torch.equal(table.sin, longer.sin[:9001])
