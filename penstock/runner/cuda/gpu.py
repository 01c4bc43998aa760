"""What torch says of the GPU."""

from __future__ import annotations

from math import prod

import torch

from penstock.config import GpuFacts
from penstock.models.layer import Attention, GatedMlp
from penstock.models.load import OUTER
from penstock.models.spec import ModelSpec

FP8_CAPABILITY = (8, 9)
CHECKED = ("LlamaForCausalLM", "Qwen3ForCausalLM")      # against transformers, on a GPU


def gpu_facts(spec: ModelSpec, stored_dtype: str) -> GpuFacts:
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    dtype = stored_dtype if stored_dtype in ("bfloat16", "float16") else "bfloat16"
    outer, largest = matrix_bytes(spec)
    return GpuFacts(torch.cuda.get_device_name(), total, free, 2 * spec.num_parameters, bytes_per_step_token(spec),
                    spec.vocab_size, dtype, torch.cuda.get_device_capability() >= FP8_CAPABILITY,
                    spec.architecture in CHECKED, outer_bytes=outer, largest_bytes=largest)


def matrix_bytes(spec: ModelSpec) -> tuple[int, int]:
    """Of embedding and head together, and of the largest matrix, at 16 bits."""
    shapes = spec.parameters()
    return (sum(2 * prod(shape) for name, shape in shapes.items() if name.startswith(OUTER)),
            max(2 * prod(shape) for shape in shapes.values()))


def bytes_per_step_token(spec: ModelSpec) -> int:
    """Of a step's intermediate results at 16 bits, those that are there at once in the widest layer, and some more."""
    widest = 0
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        heads = 3 * attention.num_heads * attention.head_size
        rows = sum(attention.rows) if isinstance(attention, Attention) else heads
        hidden = mlp.hidden * (3 if isinstance(mlp, GatedMlp) else 2)
        widest = max(widest, rows + hidden)
    return 2 * (2 * widest + 6 * spec.width)
