"""What torch says of the GPU, and what its driver says before torch opens it."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from math import prod

import torch

from penstock.config import GpuFacts
from penstock.models.layer import Attention, GatedMlp
from penstock.models.load import OUTER
from penstock.models.spec import ModelSpec
from penstock.ops.extras import extras_bytes
from penstock.ops.fp8_product import fits
from penstock.ops.wishes import wishes_bytes

FP8_CAPABILITY = (8, 9)
LEAST_CAPABILITY = (8, 0)  # older ones cannot multiply bfloat16
LEAST_TRITON, LEAST_TORCH = (3, 6), "2.10"  # older Tritons do not compile all kernels
# Compared with transformers on a GPU by tests/gpu.
CHECKED = (
    "BertModel",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Starcoder2ForCausalLM",
)


PROCESSORS, MAJOR, MINOR = 16, 75, 76  # of the driver's device attributes


@dataclass(frozen=True)
class Glimpse:
    """Of the first GPU."""

    capability: tuple[int, int]
    num_processors: int
    total_bytes: int


def cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def glimpse(driver: ctypes.CDLL) -> Glimpse | None:
    """The GPU is not opened for it, so a process may be forked afterwards."""
    device, size = ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return None
    values = []
    for attribute in (MAJOR, MINOR, PROCESSORS):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
        values.append(value.value)
    return Glimpse((values[0], values[1]), values[2], size.value)


def gpu_facts(spec: ModelSpec, stored_dtype: str) -> GpuFacts:
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return _facts(spec, stored_dtype, torch.cuda.get_device_name(), total, free, torch.cuda.get_device_capability())


def likely_facts(spec: ModelSpec, stored_dtype: str, seen: Glimpse) -> GpuFacts:
    """The same as far as it can be known, all memory taken for free."""
    return _facts(spec, stored_dtype, "", seen.total_bytes, seen.total_bytes, seen.capability)


def _facts(
    spec: ModelSpec, stored_dtype: str, name: str, total: int, free: int, capability: tuple[int, int]
) -> GpuFacts:
    usual = "float16" if spec.is_encoder else "bfloat16"  # an embedding shows every bit that is lost
    dtype = stored_dtype if stored_dtype in ("bfloat16", "float16") else usual
    wishes = (
        0 if spec.is_encoder else (wishes_bytes(spec.vocab_size) + extras_bytes(spec.vocab_size, spec.max_model_len))
    )
    return GpuFacts(
        name,
        total,
        free,
        2 * spec.num_parameters,
        bytes_per_step_token(spec),
        spec.vocab_size,
        dtype,
        wishes,
        capability >= FP8_CAPABILITY,
        spec.architecture in CHECKED,
        fp8_bytes(spec),
        layer_bytes(spec),
        *matrix_bytes(spec),
        lacking(name, capability, triton_version()),
    )


def lacking(name: str, capability: tuple[int, int], triton: str | None) -> str:
    """What kernels need and such a GPU with that version of Triton does not have, and what to do about it."""
    if capability < LEAST_CAPABILITY:
        return (
            f"compute capability 8.0 or later (Ampere); {name or 'this GPU'} has {capability[0]}.{capability[1]}: "
            "use another GPU"
        )
    if triton is None:
        return f"Triton, which is not installed: install torch {LEAST_TORCH} or newer for Linux, which brings it along"
    if tuple(map(int, triton.split(".")[:2])) < LEAST_TRITON:
        return (
            f"Triton {'.'.join(map(str, LEAST_TRITON))} or newer; this is {triton}: install torch {LEAST_TORCH} or "
            "newer, which brings it along"
        )
    return ""


def triton_version() -> str | None:
    """None where it cannot be imported."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


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


def matrix_bytes(spec: ModelSpec) -> tuple[int, int]:
    """Of embedding and head together, and of the largest matrix, at 16 bits."""
    shapes = spec.parameters()
    return (
        sum(2 * prod(shape) for name, shape in shapes.items() if name.startswith(OUTER)),
        max(2 * prod(shape) for shape in shapes.values()),
    )


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
