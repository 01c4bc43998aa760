"""Cutting a spec: refused sizes, and what a rank reads of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import InvalidConfig
from penstock.models.files import open_checkpoint
from penstock.models.load import match
from penstock.models.reading import from_checkpoint, from_seed, read_cut_blocks
from penstock.models.spec import FAMILIES, ModelSpec, spec_from_config
from penstock.passes.shard import find_sizes, shard
from tests.agreement.reference import model_path
from tests.models import oracle
from tests.parallel.jobs import describe

COUNTS = {name: len(family.like) for name, family in FAMILIES.items()}


def make(architecture: str, variant: int = 0, **changes: Any) -> ModelSpec:
    return spec_from_config(describe(architecture, variant, **changes))


@pytest.mark.parametrize(
    ("spec", "size", "whole", "message"),
    [
        (make("LlamaForCausalLM"), 3, False, "does not divide the model's 4 attention heads: use one of the sizes 1"),
        (make("MiniCPM3ForCausalLM", 1), 2, False, "the model's 5 attention heads: use one of the sizes 1"),
        (
            make("LlamaForCausalLM", num_attention_heads=12, num_key_value_heads=4, head_dim=8, intermediate_size=192),
            3,
            False,
            "the model's 4 key/value heads: use one of the sizes 1, 2, 4, 12",
        ),
        (make("LlamaForCausalLM", intermediate_size=98), 4, False, "98 values within an FFN: use one of the sizes 1"),
        (make("MixtralForCausalLM"), 4, False, "values within an expert: use one of the sizes 1, 2"),
        (make("MixtralForCausalLM", 1), 2, True, "experts: use one of the sizes 1"),
        (make("Mamba2ForCausalLM"), 3, False, "8 Mamba-2 heads: use one of the sizes 1, 2, 4, 8"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide(spec: ModelSpec, size: int, whole: bool, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        shard(spec, 0, size, "out", whole)
    assert str(caught.value).startswith(f"tensor_parallel_size={size} ")
    assert size not in find_sizes(spec, "out", whole)


@pytest.mark.parametrize("by", ["out", "in"])
@pytest.mark.parametrize(
    ("architecture", "variant"), [(name, i) for name in FAMILIES for i in range(len(FAMILIES[name].like))]
)
def test_ranks_have_every_value_once(architecture: str, variant: int, by: Any) -> None:
    """Cut parameters are whole together; what is on every rank is little."""
    spec = make(architecture, variant)
    sizes = find_sizes(spec, by)
    size = sizes[-1]
    all_cuts = [shard(spec, rank, size, by)[1] for rank in range(size)]
    for name, shape in spec.parameters().items():
        cuts = [each.parameters.get(name) for each in all_cuts]
        seen = torch.zeros(shape)
        for cut in cuts:
            if cut is not None and not cut.is_zero:
                columns = slice(None) if cut.columns is None else slice(cut.columns.start, cut.columns.stop)
                for run in cut.rows or (range(shape[0]),):
                    part = seen[run.start : run.stop]
                    (part if part.ndim == 1 else part[:, columns]).add_(1)
        if all(cut is None for cut in cuts):
            continue
        assert seen.min() >= 1
        repeats = ".qkv." in name or ".mixer." in name  # key heads, and groups of Mamba-2 heads
        assert repeats or seen.max() == 1
    held = [spec_.num_parameters for spec_ in (shard(spec, rank, size, by)[0] for rank in range(size))]
    assert size == 1 or max(held) < spec.num_parameters


LAYOUTS = [
    ("FalconForCausalLM", 0),  # heads in groups
    ("GPT2LMHeadModel", 0),  # transposed
    ("GptOssForCausalLM", 0),  # stacks of gates and ups in turn, transposed
    ("Qwen3MoeForCausalLM", 0),
    ("GemmaForCausalLM", 0),  # norms less one
    ("Phi3ForCausalLM", 0),  # merged in the file
]


class Watched:
    """A checkpoint that notes the names of the tensors read."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.read = inner, set[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def tensor(self, name: str) -> torch.Tensor:
        self.read.add(name)
        tensor: torch.Tensor = self.inner.tensor(name)
        return tensor


@pytest.mark.parametrize(("architecture", "variant"), LAYOUTS)
def test_a_rank_reads_its_part(architecture: str, variant: int, tmp_path: Path) -> None:
    """Of every layout of a file, the values that a cut takes of the whole; other ranks' experts are not read."""
    theirs = oracle.make(architecture, FAMILIES[architecture].like[variant])
    checkpoint = Watched(open_checkpoint(oracle.save(theirs, tmp_path)))
    spec = spec_from_config(checkpoint.config)
    sources = match(checkpoint, spec)
    whole = from_checkpoint(checkpoint, sources, torch.float32)
    for by, deals in (("out", False), ("in", False), ("out", True)):
        _, cuts = shard(spec, 1, 2, by, deals)  # type: ignore[arg-type]
        checkpoint.read.clear()
        take = from_checkpoint(checkpoint, sources, torch.float32, cuts)
        taken = {name: take(name) for name in spec.parameters()}
        num_read = len(checkpoint.read)
        for name, cut in cuts.parameters.items():
            assert torch.equal(taken[name], cut.take(whole(name)))
        if deals and architecture == "Qwen3MoeForCausalLM":
            assert num_read < len(checkpoint.names())


def test_a_rank_maps_its_rows_of_a_file() -> None:
    """No more of a GGUF file is read than a rank packs."""
    checkpoint = open_checkpoint(model_path("smollm2"))
    spec = spec_from_config(checkpoint.config)
    sources = match(checkpoint, spec)
    _, cuts = shard(spec, 2, 3, "out")
    for name in ("layers.3.mlp.down.weight", "embedding.tokens.weight"):
        [stored] = read_cut_blocks(checkpoint, sources[name], cuts.parameters[name]) or []
        [whole] = read_cut_blocks(checkpoint, sources[name], None) or []
        assert stored.num_out == whole.num_out // 3
        assert np.shares_memory(stored.raw, whole.raw) and 3 * len(stored.raw) == len(whole.raw)  # type: ignore[union-attr]
    checkpoint.close()


def test_random_weights_are_those_of_the_whole_model() -> None:
    spec = make("LlamaForCausalLM")
    part, cuts = shard(spec, 1, 2, "out")
    whole, mine = from_seed(spec, 3, torch.float32), from_seed(part, 3, torch.float32)
    for name, cut in cuts.parameters.items():
        assert torch.equal(mine(name), cut.take(whole(name)))
