"""Models whose steps are noted: tiny ones of every family, and large ones on the meta device."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import penstock.models.families  # noqa: F401  registers them
import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock.cache.group import LAYOUTS, group_layers
from penstock.models.spec import FAMILIES
from penstock.passes.load import load_lowered
from penstock.quant.ints import quantize
from penstock.runner.cuda.gpu import CHECKED
from penstock.runner.memory import BlockMemory

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Scheme:
    """How a model is held and computed."""

    dtype: str
    quantization: str | None = None
    rounded: bool = True  # CPU: packed weights meet activations rounded to 8 bits
    kv: str = "float16"
    exact: bool = False  # GPU: deterministic
    parts: bool = False  # CPU: packed as a file has it, some matrices that are computed together of unlike types


CPU_SCHEMES = {
    "float32": Scheme("float32"),
    "float32,kv=float32": Scheme("float32", kv="float32"),
    "bfloat16": Scheme("bfloat16"),
    "bfloat16,kv=int8": Scheme("bfloat16", kv="int8"),
    "int8": Scheme("bfloat16", "int8"),
    "int8,unrounded": Scheme("bfloat16", "int8", rounded=False),
    "int4": Scheme("bfloat16", "int4"),
    "int4,unrounded": Scheme("bfloat16", "int4", rounded=False),
    "int4,kv=int8": Scheme("bfloat16", "int4", kv="int8"),
}
BLOCK_SCHEMES = {
    "blocks": Scheme("bfloat16", parts=True),
    "blocks,unrounded": Scheme("bfloat16", rounded=False, parts=True),
}
BF16 = Scheme("bfloat16", kv="bfloat16")
GPU_SCHEMES = {
    "bfloat16": BF16,
    "bfloat16,exact": replace(BF16, exact=True),
    "bfloat16,kv=fp8": replace(BF16, kv="fp8"),
    "float16": Scheme("float16", kv="float16"),
    "float32": Scheme("float32", kv="float32"),
    "int8": replace(BF16, quantization="int8"),
    "int4": replace(BF16, quantization="int4"),
    "int4,kv=fp8": replace(BF16, quantization="int4", kv="fp8"),
    "fp8": replace(BF16, quantization="fp8"),
    "fp8,exact": replace(BF16, quantization="fp8", exact=True),
    "fp8,kv=fp8": replace(BF16, quantization="fp8", kv="fp8"),
    "fp8,kv=fp8,exact": replace(BF16, quantization="fp8", kv="fp8", exact=True),
}
ODD = {  # what no tiny config of a family has: panels of gates and values, widths that are not quantized or not fp8
    "odd": ("LlamaForCausalLM", {"intermediate_size": 40}),
    "narrow": ("LlamaForCausalLM", {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
WIDE = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}


def tiny_configs() -> dict[str, dict[str, Any]]:
    """Every tiny config of every family with kernels, and some odd ones, under names such as LlamaForCausalLM.0."""
    configs = {
        f"{name}.{variant}": {"architectures": [name], **like}
        for name, family in FAMILIES.items()
        for variant, like in enumerate(family.like)
        if name in CHECKED
    }
    odd = {f"{name}.{what}": configs[f"{name}.0"] | changes for what, (name, changes) in ODD.items()}
    return configs | odd


def load(spec: Any, scheme: Scheme, device: torch.device) -> Any:
    """Make the model with weights from a seed, or on the meta device with none."""
    dtype = None if scheme.parts else getattr(torch, scheme.dtype)
    held: dict[str, Any] = {"dtype": dtype, "quantization": scheme.quantization, "rounded": scheme.rounded}
    checkpoint: Any = Blocks(spec) if scheme.parts else None
    return load_lowered(
        checkpoint, spec, dummy_seed=None if scheme.parts else 0, device=device, exact=scheme.exact, **held
    )


class Blocks:
    """A checkpoint of quantized blocks, 8 bits for most matrices, 4 for values and what gates are multiplied with."""

    path = Path("blocks")

    def __init__(self, spec: Any) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        merges = spec.merges()
        for parameter, shape in spec.parameters().items():
            module, _, suffix = parameter.rpartition(".")
            names = {parameter: shape}
            if module in merges:
                above = module.rpartition(".")[0]
                names = {f"{above}.{part}.{suffix}": (rows, *shape[1:]) for part, rows in merges[module].parts}
            self._shapes |= {spec.names.spelling(name): shape for name, shape in names.items()}

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return "float32"

    def tensor(self, name: str) -> Tensor:
        return torch.full(self._shapes[name], 0.02)

    def read_codes(self, name: str) -> None:
        return None

    def read_ggml(self, name: str) -> Any:
        if len(self._shapes[name]) != 2:
            return None
        return quantize(self.tensor(name), "int4" if re.search(r"\b(v|up)_proj", name) else "int8")


def make_memory(spec: Any, scheme: Scheme, num_blocks: int, device: torch.device) -> Any:
    """Make the cache of these many blocks, all zero: what was there before must not decide who chooses a token."""
    grouping = group_layers(spec.states(LAYOUTS[scheme.kv]), BLOCK_SIZE)
    memory = BlockMemory(num_blocks, BLOCK_SIZE, grouping, scheme.kv, device)
    memory.blocks.zero_()
    return memory
