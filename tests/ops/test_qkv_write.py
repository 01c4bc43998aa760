"""The joint op gives the bits of the ops it joins."""

from __future__ import annotations

import copy

import pytest
import torch

from penstock import ops
from penstock.ops import OPS
from penstock.ops.attention.cache import head_size_of
from penstock.ops.attention.qkv_write import over_source
from tests.ops.check import same_bits
from tests.ops.examples import example_of, examples_of

OP = OPS["qkv_write"]
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")


@pytest.mark.parametrize("index", range(len(examples_of(OP))))
def test_the_same_bits_as_one_by_one(index: int, path: str) -> None:
    joint = example_of(OP, index)
    apart = copy.deepcopy(joint)
    if "source" in apart:
        apart["qkv"] = over_source(apart["qkv"], apart["source"], apart["source_eps"])
    num_kv_heads, head_size = joint["k_cache"].shape[1], head_size_of(joint["k_cache"])
    heads = apart["qkv"].view(apart["qkv"].shape[0], apart["qkv"].shape[1] // head_size, head_size)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    q = ops.rms_norm(q, apart["q_norm"], apart["eps"]) if "q_norm" in apart else q
    k = ops.rms_norm(k, apart["k_norm"], apart["eps"]) if "k_norm" in apart else k
    if "cos" in apart:
        q, k = (ops.rope(x, apart["positions"], apart["cos"], apart["sin"]) for x in (q, k))
    ops.cache_write(k, v, **{name: apart[name] for name in CACHES if name in apart}, slots=apart["slots"])
    assert same_bits(ops.qkv_write(**joint), q.contiguous())
    assert all(same_bits(joint[name], apart[name]) for name in CACHES if name in joint)
    assert not joint["qkv"].numel() or joint["v_cache"].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    example = example_of(OP, 2)
    wrong = {
        "qkv": torch.ones(7, 100),
        "q_norm": torch.ones(3),
        "sin": None,
        "slots": torch.arange(3),
        "cos": torch.ones(50, 200),
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="do not fit|has the shape"):
            ops.qkv_write(**(example | {name: value}))
