"""What the rank processes of the tests are asked to do: functions of a mesh and plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.models.decoder import Decoder
from penstock.models.layer import Shapes
from penstock.models.names import Names
from penstock.models.spec import FAMILIES, ModelSpec, spec_from_config
from penstock.parallel import Mesh
from penstock.passes.load import load_lowered
from penstock.passes.outline import weight_bytes
from penstock.passes.shard import shard
from tests.models.paged import Paged
from tests.models.stored import Stored

LENGTHS = (1, 6, 21)
NUM_NEW = 5
CHUNK = 7


def describe(architecture: str, variant: int = 0, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **FAMILIES[architecture].like[variant], **changes}


def make_spec(config: dict[str, Any]) -> ModelSpec:
    """Describe a tiny model whose checkpoint has our names of all parameters."""
    spec = spec_from_config(config)
    modules = [name.rpartition(".")[0] for name in spec.parameters()]
    inner = [name.split(".", 2)[2] for name in modules if name.startswith("layers.")]
    names = Names(stack="layers", model={name: name for name in modules}, layer={name: name for name in inner})
    return replace(spec, names=names)


def make_checkpoint(config: dict[str, Any], shapes: Shapes) -> Stored:
    """Random weights: matrices wide enough that logits differ, norms about 1, biases about 0."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        tensors[name] = (1.0 + 0.2 * noise) if is_norm else 0.15 * noise
    return Stored(config, tensors)


def load(mesh: Mesh, config: dict[str, Any], by: str, experts_whole: bool = False, **options: Any) -> Decoder:
    """Load a rank's part of a tiny model; all of it on a mesh of one."""
    spec = make_spec(config)
    checkpoint = make_checkpoint(config, spec.parameters())
    if mesh.size > 1:
        spec, _ = shard(spec, mesh.rank, mesh.size, by, experts_whole)  # type: ignore[arg-type]
    model = load_lowered(checkpoint, spec, mesh=mesh, **options)
    assert isinstance(model, Decoder)
    return model


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def answer(mesh: Mesh, config: dict[str, Any], by: str = "out", checks_ends: bool = False, **options: Any) -> Any:
    """Answer some prompts, in chunks of random sizes → each row's tokens and logits, and the bytes of the weights."""
    with torch.inference_mode():
        model = load(mesh, config, by, **options)
        driver = Paged(model)
        driver.checks_ends = checks_ends
        rows = driver.run(prompts(model.spec.vocab_size), NUM_NEW, CHUNK)
        return {
            "tokens": [row.tokens for row in rows],
            "logits": [torch.stack(row.logits).numpy() for row in rows],
            "bytes": weight_bytes(model),
        }


def same_bits(a: Any, b: Any) -> bool:
    """True for answers whose tokens and logits are the same bits."""
    words = [[one.view(np.int32) for one in each["logits"]] for each in (a, b)]
    return a["tokens"] == b["tokens"] and all(map(np.array_equal, *words))
