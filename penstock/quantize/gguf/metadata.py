"""Describe a model to GGUF readers: the source file's own keys, or new ones made of a model folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import InvalidModel
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.files.gguf import Keys, TensorInfo
from penstock.models.files.gguf_checkpoint import MIXTURES
from penstock.models.files.gguf_config import read_config
from penstock.models.layer import Attention, GatedMlp, LinearScaling, Llama3Scaling, RmsNorm, YarnScaling
from penstock.models.spec import ModelSpec, spec_from_config

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
REPLACED = ("general.file_type", "general.quantization_version")
QUANTIZATION_VERSION = 2


def find_architecture(checkpoint: Checkpoint, spec: ModelSpec) -> str:
    """Return GGUF's name of the model's architecture, or refuse it."""
    if checkpoint.metadata is not None:
        return str(checkpoint.metadata["general.architecture"])
    if spec.architecture not in ARCHITECTURES:
        raise InvalidModel(
            f"{checkpoint.path}: GGUF files are made of {', '.join(ARCHITECTURES)} and of other GGUF files, not of "
            f"{spec.architecture}: choose a scheme without gguf:, or convert the model with llama.cpp first"
        )
    return ARCHITECTURES[spec.architecture]


def make_metadata(spec: ModelSpec, name: str) -> dict[str, Any]:
    """Describe a model of a folder: the keys of its architecture."""
    mixer, ffn, norm = spec.layers[0].mixer, spec.layers[0].ffn, spec.norm
    assert isinstance(mixer, Attention) and isinstance(ffn, GatedMlp) and isinstance(norm, RmsNorm)
    architecture = ARCHITECTURES[spec.architecture]
    found = {
        "context_length": spec.max_positions,
        "embedding_length": spec.width,
        "block_count": spec.num_layers,
        "feed_forward_length": ffn.hidden,
        "attention.head_count": mixer.num_heads,
        "attention.head_count_kv": mixer.num_kv_heads,
        "attention.layer_norm_rms_epsilon": float(norm.eps),
        "attention.key_length": mixer.head_size,
        "attention.value_length": mixer.head_size,
        "vocab_size": spec.vocab_size,
    }
    if mixer.window:
        found["attention.sliding_window"] = mixer.window
    if mixer.rope is not None:
        found["rope.freq_base"] = float(mixer.rope.theta)
        if architecture == "llama":
            found["rope.dimension_count"] = mixer.rope.size
        found |= _scale_keys(mixer.rope.scaling)
    keys = {f"{architecture}.{key}": value for key, value in found.items()}
    return {"general.architecture": architecture, "general.name": name, **keys}


def _scale_keys(scaling: object) -> dict[str, Any]:
    if isinstance(scaling, LinearScaling):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if isinstance(scaling, YarnScaling):
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(scaling.factor),
            "rope.scaling.original_context_length": scaling.original,
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        }
    return {}


def rope_factors(spec: ModelSpec) -> np.ndarray | None:
    """Return Llama 3's divisors of the rotary frequencies, which a file holds as a tensor."""
    rope = spec.layers[0].mixer.rope if isinstance(spec.layers[0].mixer, Attention) else None
    if rope is None or not isinstance(rope.scaling, Llama3Scaling):
        return None
    scaling, factors = rope.scaling, []
    for index in range(rope.size // 2):
        turns = scaling.original / (2 * math.pi * rope.theta ** (2 * index / rope.size))
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, dtype=np.float32)


class Planned:
    """A file that is not yet written, as the reader of configs sees it."""

    def __init__(self, metadata: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Any) -> None:
        self.metadata, self.factors = metadata, factors
        self.tensors = {name: TensorInfo(name, shape, 0, 0, 4 * math.prod(shape)) for name, shape in shapes.items()}

    def raw(self, info: TensorInfo) -> np.ndarray:
        raw: np.ndarray = self.factors.view(np.uint8)
        return raw


def check_description(spec: ModelSpec, planned: Planned, checkpoint: Checkpoint) -> None:
    """Refuse a model that its GGUF metadata would describe otherwise."""
    read = spec_from_config(read_config(Keys(planned), MIXTURES), spec.max_model_len)
    for name in ("embedding", "layers", "norm", "head", "max_positions"):
        if getattr(read, name) != getattr(spec, name):
            raise InvalidModel(
                f"{checkpoint.path}: GGUF's keys for {planned.metadata['general.architecture']} cannot describe the "
                f"model's {name}: choose a scheme without gguf:"
            )
