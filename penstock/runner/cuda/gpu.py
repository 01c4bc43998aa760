"""What torch says of the GPU."""

from __future__ import annotations

from collections import Counter
from math import prod

import torch

from penstock.config import GpuFacts
from penstock.models.layer import Attention, GatedMlp
from penstock.models.spec import ModelSpec
from penstock.ops.fp8_product import fits
from penstock.ops.wishes import wishes_bytes

FP8_CAPABILITY = (8, 9)
CHECKED = ("LlamaForCausalLM", "Qwen3ForCausalLM")      # against transformers, on a GPU


def gpu_facts(spec: ModelSpec, stored_dtype: str) -> GpuFacts:
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    dtype = stored_dtype if stored_dtype in ("bfloat16", "float16") else "bfloat16"
    return GpuFacts(torch.cuda.get_device_name(), total, free, 2 * spec.num_parameters, bytes_per_step_token(spec),
                    spec.vocab_size, dtype, wishes_bytes(spec.vocab_size),
                    torch.cuda.get_device_capability() >= FP8_CAPABILITY, spec.architecture in CHECKED, fp8_bytes(spec),
                    layer_bytes(spec))


def fp8_bytes(spec: ModelSpec) -> int:
    """Of all weights, the layers' matrices in 8-bit floats where they can be, the rest at 16 bits."""
    total = 2 * spec.num_parameters
    for name, shape in spec.parameters().items():
        if name.startswith("layers.") and len(shape) == 2 and fits(*shape):
            total += 4 * shape[0] - prod(shape)
    return total


def layer_bytes(spec: ModelSpec) -> int:
    """Of the widest layer's weights at 16 bits."""
    sizes: Counter[str] = Counter()
    for name, shape in spec.parameters().items():
        if name.startswith("layers."):
            sizes[name.split(".")[1]] += 2 * prod(shape)
    return max(sizes.values(), default=0)


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
