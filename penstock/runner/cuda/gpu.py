"""GPU properties, from torch or, before CUDA is initialized, from the driver."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from dataclasses import dataclass, replace
from math import prod

import torch

from penstock.config import GpuFacts
from penstock.models.load import FP8_CAPABILITY, KEPT_WIDE, OUTER
from penstock.models.spec import ModelSpec
from penstock.ops.matmul.fp8_product import can_store
from penstock.ops.sampling.extras import extras_bytes
from penstock.ops.sampling.row_params import row_params_bytes
from penstock.ops.triton.tuning import max_captured_tokens
from penstock.runner.rows import LOGIT_ROWS

# Matrices that adapters have no room for: tables, what latents absorb, and stacks.
NO_ADAPTERS = re.compile(r"embedding\.(positions|types)|head\.project|.*\.kv_b|.*\.experts\..*")
MIN_CAPABILITY = (8, 0)  # older ones cannot multiply bfloat16
MIN_TRITON, MIN_TORCH = (3, 6), "2.10"  # older Tritons do not compile all kernels
# Compared with transformers on a GPU by tests/gpu.
CHECKED = (
    "ArceeForCausalLM",
    "BertModel",
    "BloomForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "LlamaForCausalLM",
    "MiniCPM3ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "YoutuForCausalLM",
)
NUM_SMS, MAJOR, MINOR = 16, 75, 76  # of the driver's device attributes


@dataclass(frozen=True)
class DriverInfo:
    """Properties of the first GPU."""

    capability: tuple[int, int]
    num_sms: int
    total_bytes: int


def cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def read_driver(driver: ctypes.CDLL) -> DriverInfo | None:
    """Read a GPU's properties without initializing CUDA, so that the process may still fork."""
    device, size = ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return None
    values = []
    for attribute in (MAJOR, MINOR, NUM_SMS):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
        values.append(value.value)
    return DriverInfo((values[0], values[1]), values[2], size.value)


def gpu_facts(spec: ModelSpec, stored_dtype: str) -> GpuFacts:
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return _facts(spec, stored_dtype, torch.cuda.get_device_name(), total, free, torch.cuda.get_device_capability())


def likely_facts(spec: ModelSpec, stored_dtype: str, seen: DriverInfo) -> GpuFacts:
    """Facts from the driver alone: all memory counts as free."""
    return _facts(spec, stored_dtype, "", seen.total_bytes, seen.total_bytes, seen.capability)


def known_facts(
    spec: ModelSpec, stored_dtype: str, name: str, total_bytes: int, capability: tuple[int, int]
) -> GpuFacts:
    """Facts of a GPU that need not be here; whatever software it needs is taken to be there."""
    facts = _facts(spec, stored_dtype, name, total_bytes, total_bytes, capability)
    lacks = spec.cpu_only or find_missing(name, capability, ".".join(map(str, MIN_TRITON)))
    return replace(facts, lacks=lacks)


def _facts(
    spec: ModelSpec, stored_dtype: str, name: str, total: int, free: int, capability: tuple[int, int]
) -> GpuFacts:
    usual = "float16" if spec.is_encoder else "bfloat16"  # an embedding shows every bit that is lost
    dtype = stored_dtype if stored_dtype in ("bfloat16", "float16") else usual
    row_params = (
        0
        if spec.is_encoder
        else (row_params_bytes(spec.vocab_size) + extras_bytes(spec.vocab_size, spec.max_model_len))
    )
    return GpuFacts(
        name,
        total,
        free,
        2 * spec.num_parameters,
        spec.scratch_bytes(2),
        spec.vocab_size,
        dtype,
        row_params,
        capability >= FP8_CAPABILITY,
        spec.architecture in CHECKED,
        fp8_bytes(spec),
        layer_bytes(spec),
        *matrix_bytes(spec),
        spec.cpu_only or find_missing(name, capability, triton_version()),
        LOGIT_ROWS,
        0 if spec.is_encoder else max_captured_tokens(spec.num_parameters),
        lora_bytes=0 if spec.is_encoder else lora_bytes(spec),
        kept_bytes=kept_bytes(spec),
        layer_matrix_bytes=layer_matrix_bytes(spec),
    )


def find_missing(name: str, capability: tuple[int, int], triton: str | None) -> str:
    """Find a requirement of the kernels that this GPU or Triton does not meet, with the remedy; empty if none."""
    if capability < MIN_CAPABILITY:
        return (
            f"compute capability 8.0 or later (Ampere); {name or 'this GPU'} has {capability[0]}.{capability[1]}: "
            "use another GPU"
        )
    if triton is None:
        return f"Triton, which is not installed: install torch {MIN_TORCH} or newer for Linux, which brings it along"
    if tuple(map(int, triton.split(".")[:2])) < MIN_TRITON:
        return (
            f"Triton {'.'.join(map(str, MIN_TRITON))} or newer; this is {triton}: install torch {MIN_TORCH} or "
            "newer, which brings it along"
        )
    return ""


def triton_version() -> str | None:
    """Triton's version; None if it cannot be imported."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def fp8_bytes(spec: ModelSpec) -> int:
    """Bytes of all weights: the layers' matrices in FP8 where possible, the rest at 16 bits."""
    every = spec.parameters().items()
    shapes = [shape for name, shape in every if name.startswith("layers.") and not name.endswith(KEPT_WIDE)]
    stored = [shape for shape in shapes if len(shape) == 2 and can_store(*shape)]
    return 2 * spec.num_parameters + sum(4 * shape[0] - prod(shape) for shape in stored)


def kept_bytes(spec: ModelSpec) -> int:
    """Bytes, at 16 bits, of the matrices that no quantization rounds."""
    return sum(2 * prod(shape) for name, shape in spec.parameters().items() if name.endswith(KEPT_WIDE))


def lora_bytes(spec: ModelSpec) -> int:
    """Bytes, for each of its ranks, of an adapter of every linear that may have one, at 16 bits with scales of 32; each
    part of a linear has its own a."""
    merges, total = spec.merges(), 0
    for name, shape in spec.parameters().items():
        linear = name.removesuffix(".weight")
        merge = merges.get(linear)
        if len(shape) == 2 and linear != name and not NO_ADAPTERS.fullmatch(linear):
            num_parts = len(merge.parts) if merge else 1
            total += 2 * (shape[0] + num_parts * shape[1]) + 4 * num_parts
    if spec.head is not None and spec.head.tied:
        total += 2 * (spec.embedding.vocab_size + spec.embedding.row) + 4
    return total


def layer_bytes(spec: ModelSpec) -> int:
    """Bytes of the widest layer's weights at 16 bits."""
    sizes: Counter[str] = Counter()
    for name, shape in spec.parameters().items():
        if name.startswith("layers."):
            sizes[name.split(".")[1]] += 2 * prod(shape)
    return max(sizes.values(), default=0)


def layer_matrix_bytes(spec: ModelSpec) -> int:
    """Bytes of the layers' largest matrix, or stack of experts, at 16 bits."""
    return max((2 * prod(shape) for name, shape in spec.parameters().items() if name.startswith("layers.")), default=0)


def matrix_bytes(spec: ModelSpec) -> tuple[int, int]:
    """Bytes of embedding and head together, and of the largest matrix, at 16 bits."""
    shapes = spec.parameters()
    return (
        sum(2 * prod(shape) for name, shape in shapes.items() if name.startswith(OUTER)),
        max(2 * prod(shape) for shape in shapes.values()),
    )
