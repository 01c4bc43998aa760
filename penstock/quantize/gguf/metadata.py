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
from penstock.models.latent import LatentAttentionSpec
from penstock.models.layer import (
    Attention,
    GatedMlp,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Mlp,
    RmsNorm,
    YarnScaling,
)
from penstock.models.spec import ModelSpec, spec_from_config
from penstock.quantize.gguf.families import ARCHITECTURES, find_attention, find_experts

REPLACED = ("general.file_type", "general.quantization_version")
QUANTIZATION_VERSION = 2


def find_architecture(checkpoint: Checkpoint, spec: ModelSpec) -> str:
    """Return GGUF's name of the model's architecture, or refuse it."""
    if checkpoint.metadata is not None:
        return str(checkpoint.metadata["general.architecture"])
    if spec.architecture not in ARCHITECTURES:
        raise InvalidModel(
            f"{checkpoint.path}: GGUF files are made of other GGUF files and of {', '.join(ARCHITECTURES)}, not of "
            f"{spec.architecture}: choose a scheme without gguf:, or convert the model with llama.cpp first"
        )
    return ARCHITECTURES[spec.architecture].name


def make_metadata(spec: ModelSpec, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Describe a model of a folder: the keys of its architecture."""
    kind = ARCHITECTURES[spec.architecture]
    found: dict[str, Any] = {
        "context_length": spec.max_positions,
        "embedding_length": spec.width,
        "block_count": spec.num_layers,
        "feed_forward_length": _find_hidden_size(spec, config),
        "vocab_size": spec.vocab_size,
    }
    if isinstance(spec.norm, (RmsNorm, LayerNorm)):
        rms = "rms_" if isinstance(spec.norm, RmsNorm) else ""
        found[f"attention.layer_norm_{rms}epsilon"] = float(spec.norm.eps)
    found |= _describe_attention(spec, kind.says_rotated)
    mixture = find_experts(spec)
    if mixture is not None:
        found |= {"expert_count": mixture.num_experts, "expert_used_count": mixture.routing.num_chosen}
    found |= kind.extra(spec, config)
    keys = {f"{kind.name}.{key}": value for key, value in found.items()}
    return {"general.architecture": kind.name, "general.name": name, **keys}


def _find_hidden_size(spec: ModelSpec, config: Mapping[str, Any]) -> int:
    """Return the width of dense layers, or what the config calls so where all have experts."""
    for layer in spec.layers:
        if isinstance(layer.ffn, (Mlp, GatedMlp)):
            return layer.ffn.hidden
    mixture, named = find_experts(spec), config.get("intermediate_size")
    assert mixture is not None
    return named if isinstance(named, int) else mixture.expert.hidden


def _describe_attention(spec: ModelSpec, says_rotated: bool) -> dict[str, Any]:
    """Describe heads, window and rotary positions; those of layers without a window where there are some."""
    found: dict[str, Any] = {}
    attentions = find_attention(spec)
    for mixer in attentions[:1]:
        found["attention.head_count"] = mixer.num_heads
        found["attention.head_count_kv"] = mixer.num_kv_heads
        if any(each.rope for each in attentions):  # architectures without rope have no key for a size
            found["attention.key_length"] = found["attention.value_length"] = mixer.head_size
    window = max((mixer.window for mixer in attentions), default=0)
    if window:
        found["attention.sliding_window"] = window
    ropes = [layer.mixer.rope for layer in spec.layers if isinstance(layer.mixer, (Attention, LatentAttentionSpec))]
    wide = [mixer.rope for mixer in attentions if not mixer.window]
    rope = next((each for each in (*wide, *ropes) if each is not None), None)
    if rope is not None:
        found["rope.freq_base"] = float(rope.theta)
        if says_rotated:
            found["rope.dimension_count"] = rope.size
        found |= _scale_keys(rope.scaling)
    return found


def _scale_keys(scaling: object) -> dict[str, Any]:
    if isinstance(scaling, LinearScaling):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if isinstance(scaling, LongScaling):
        return {"rope.scaling.attn_factor": float(scaling.attention_factor)}
    if isinstance(scaling, YarnScaling):
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(scaling.factor),
            "rope.scaling.original_context_length": scaling.original,
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        }
    return {}


def rope_factors(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the divisors of rotary frequencies that a file holds as tensors: Llama 3's, and Phi-3's two lists."""
    rope = spec.layers[0].mixer.rope if isinstance(spec.layers[0].mixer, Attention) else None
    if rope is None or not isinstance(rope.scaling, Llama3Scaling):
        if rope is None or not isinstance(rope.scaling, LongScaling):
            return {}
        lists = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kinds = ("long", "short")
        return {f"rope_factors_{kind}.weight": np.array(lists[f"{kind}_factor"], dtype=np.float32) for kind in kinds}
    scaling, factors = rope.scaling, []
    for index in range(rope.size // 2):
        turns = scaling.original / (2 * math.pi * rope.theta ** (2 * index / rope.size))
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return {"rope_freqs.weight": np.array(factors, dtype=np.float32)}


class Planned:
    """A file that is not yet written, as the reader of configs sees it."""

    def __init__(
        self, metadata: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, np.ndarray]
    ) -> None:
        self.metadata, self.factors = metadata, factors
        self.tensors = {name: TensorInfo(name, shape, 0, 0, 4 * math.prod(shape)) for name, shape in shapes.items()}

    def raw(self, info: TensorInfo) -> np.ndarray:
        raw: np.ndarray = self.factors[info.name].view(np.uint8)
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
