"""Random adapters in PEFT's format, and the mathematics they stand for: b · a, scaled, added to a model's weights."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from penstock.models.spec import spec_from_config
from penstock.runner.cuda.gpu import NO_ADAPTERS

Pairs = dict[str, tuple[Tensor, Tensor]]  # module → a [r, in], b [out, r]
REFUSED = ("positions", "wpe")
OUTER = ("embed_in", "embed_out", "embed_tokens", "lm_head", "word_embeddings", "wte", "embeddings")


def is_target(name: str, module: nn.Module) -> bool:
    """Return whether PEFT adapts this kind of module and we have it as a linear."""
    if any(part in name for part in REFUSED):
        return False
    if isinstance(module, nn.Embedding):
        return name.rpartition(".")[2] in OUTER
    return isinstance(module, nn.Linear | Conv1D)


def sizes(module: Any) -> tuple[int, int]:
    """Return a module's inputs and outputs."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return tuple(module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1])


def list_modules(model: nn.Module, ends: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """List the modules an adapter may have: all, or those whose names end so."""
    found = {name: module for name, module in model.named_modules() if is_target(name, module)}
    return {name: module for name, module in found.items() if ends is None or name.rpartition(".")[2] in ends}


def make_pairs(model: nn.Module, rank: int, seed: int, ends: Sequence[str] | None = None, size: float = 0.3) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, module in list_modules(model, ends).items():
        num_in, num_out = sizes(module)
        a = torch.randn(rank, num_in, generator=generator) * (1.0 if isinstance(module, nn.Embedding) else num_in**-0.5)
        pairs[name] = a, torch.randn(num_out, rank, generator=generator) * size * rank**-0.5
    return pairs


def write(folder: Path, model: nn.Module, pairs: Pairs, alpha: float = 16, **config: Any) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = dict(model.named_modules())
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in pairs.items():
        is_embedding = isinstance(modules[name], nn.Embedding)
        kind, end = ("lora_embedding", "") if is_embedding else ("lora", ".weight")
        tensors |= {
            f"base_model.model.{name}.{kind}_A{end}": a.contiguous(),
            f"base_model.model.{name}.{kind}_B{end}": b.contiguous(),
        }
    save_file(tensors, folder / "adapter_model.safetensors")
    rank = next(iter(pairs.values()))[0].shape[0]
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
        "lora_dropout": 0.1,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def write_for_spec(folder: Path, described: dict[str, Any], rank: int = 8, seed: int = 0, size: float = 1.0) -> Path:
    """Write an adapter of every linear that a GPU has room for."""
    spec, generator = spec_from_config(described), torch.Generator().manual_seed(seed)
    merges, names = spec.merges(), set()
    tensors: dict[str, Tensor] = {}
    for name, shape in spec.parameters().items():
        linear = name.removesuffix(".weight")
        if len(shape) != 2 or linear == name or NO_ADAPTERS.fullmatch(linear) or not name.startswith("layers."):
            continue
        parts = merges[linear].parts if linear in merges else ((linear.rpartition(".")[2], shape[0]),)
        for part, rows in parts:
            spelled = spec.names.spelling(f"{linear.rpartition('.')[0]}.{part}.weight").removesuffix(".weight")
            names.add(spelled)
            a = torch.randn(rank, shape[1], generator=generator) * shape[1] ** -0.5
            b = torch.randn(rows, rank, generator=generator) * size * rank**-0.5
            tensors |= {f"base_model.model.{spelled}.lora_A.weight": a, f"base_model.model.{spelled}.lora_B.weight": b}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank // 2, "target_modules": sorted(names)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_for_llama(folder: Path, config: dict[str, Any], rank: int = 4, size: float = 0.5) -> Path:
    """Write an adapter on the values and downs of a model by its config alone."""
    generator = torch.Generator().manual_seed(rank)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or width // heads
    shapes = {
        "self_attn.v_proj": (width, head_size * config.get("num_key_value_heads", heads)),
        "mlp.down_proj": (config["intermediate_size"], width),
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (num_in, num_out) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator) * size
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["v_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


@torch.no_grad()
def merge(model: Any, pairs: Pairs, scale: float) -> Any:
    """Return a copy of the model with an adapter in its weights; a tied head is untied, as PEFT has it."""
    merged = copy.deepcopy(model)
    modules = dict(merged.named_modules())
    head = merged.get_output_embeddings()
    if head is not None and head.weight is merged.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.clone())
    for name, (a, b) in pairs.items():
        delta = scale * (b @ a)
        is_outer = isinstance(modules[name], nn.Embedding | Conv1D)
        modules[name].weight.data += delta.T if is_outer else delta
    return merged


def scale_of(alpha: float, rank: int, stabilized: bool = False) -> float:
    return alpha / (math.sqrt(rank) if stabilized else rank)
