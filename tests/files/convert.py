"""Tiny transformers models written as GGUF, by the rules of llama.cpp's converter and the `gguf` package's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16

TINY = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
SMALL = dict(vocab_size=96, bos_token_id=1, eos_token_id=2, pad_token_id=0)
FACTORS = dict(
    short_factor=[1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0], long_factor=[1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 9.0, 11.0]
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)

# name: (GGUF architecture, config class, config)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", TINY),
    "llama-tied": (
        "llama",
        "LlamaConfig",
        TINY | dict(tie_word_embeddings=True, head_dim=24, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True),
    ),
    "llama-linear": (
        "llama",
        "LlamaConfig",
        TINY | dict(rope_parameters=dict(rope_type="linear", rope_theta=20000.0, factor=2.5)),
    ),
    "llama-3.2": ("llama", "LlamaConfig", TINY | dict(rope_parameters=LLAMA3, max_position_embeddings=131072)),
    "llama-factors": (
        "llama",
        "LlamaConfig",
        TINY | dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=64, rope_theta=100.0)),
    ),
    "mistral": ("llama", "MistralConfig", TINY | dict(sliding_window=48)),
    "qwen2": ("qwen2", "Qwen2Config", TINY | dict(rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen2-yarn": (
        "qwen2",
        "Qwen2Config",
        TINY
        | dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32)),
    ),
    "qwen3": ("qwen3", "Qwen3Config", TINY | dict(head_dim=24, tie_word_embeddings=True)),
    "qwen2vl": ("qwen2vl", "Qwen2Config", TINY),
    "qwen3vl": ("qwen3vl", "Qwen3Config", TINY | dict(head_dim=24)),
    "gemma": ("gemma", "GemmaConfig", TINY | dict(head_dim=24, num_key_value_heads=1)),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        TINY
        | dict(
            head_dim=24, query_pre_attn_scalar=24, sliding_window=16, num_hidden_layers=3, final_logit_softcapping=20.0
        ),
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        TINY | dict(head_dim=24, query_pre_attn_scalar=24, sliding_window=16, num_hidden_layers=7),
    ),
    "phi3": ("phi3", "Phi3Config", TINY | dict(num_key_value_heads=4, sliding_window=24)),
    "phi3-long": (
        "phi3",
        "Phi3Config",
        TINY
        | dict(
            original_max_position_embeddings=32,
            rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=32)
            | FACTORS,
        ),
    ),
    "phi3-partial": (
        "phi3",
        "Phi3Config",
        TINY | dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75)),
    ),
    "gpt2": ("gpt2", "GPT2Config", SMALL | dict(n_embd=64, n_layer=2, n_head=4, n_positions=128)),
    "gptneox": (
        "gptneox",
        "GPTNeoXConfig",
        SMALL
        | dict(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            use_parallel_residual=False,
        ),
    ),
    "falcon-7b": (
        "falcon",
        "FalconConfig",
        SMALL | dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=2048),
    ),
    "falcon-40b": (
        "falcon",
        "FalconConfig",
        SMALL
        | dict(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
            tie_word_embeddings=False,
            max_position_embeddings=2048,
        ),
    ),
    "falcon-11b": (
        "falcon",
        "FalconConfig",
        SMALL
        | dict(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
            num_ln_in_parallel_attn=1,
            ffn_hidden_size=80,
            max_position_embeddings=2048,
        ),
    ),
    "bloom": ("bloom", "BloomConfig", SMALL | dict(hidden_size=64, n_layer=2, n_head=4)),
    "starcoder2": ("starcoder2", "Starcoder2Config", TINY),
    "olmo2": ("olmo2", "Olmo2Config", TINY),
    "olmo3": ("olmo2", "Olmo3Config", TINY | dict(num_hidden_layers=4, sliding_window=9)),
    "command-r": ("command-r", "CohereConfig", TINY | dict(logit_scale=0.25)),
    "cohere2": ("cohere2", "Cohere2Config", TINY | dict(logit_scale=0.5, num_hidden_layers=4, sliding_window=9)),
    "smollm3": ("smollm3", "SmolLM3Config", TINY | dict(num_hidden_layers=4)),
    "exaone4": ("exaone4", "Exaone4Config", TINY | dict(num_hidden_layers=4, sliding_window=9)),
    "ernie4_5": ("ernie4_5", "Ernie4_5Config", TINY | dict(head_dim=24, use_bias=True)),
    "stablelm": ("stablelm", "StableLmConfig", TINY | dict(use_qkv_bias=True, partial_rotary_factor=0.25)),
    "phi2": ("phi2", "PhiConfig", TINY | dict(partial_rotary_factor=0.5)),
    "arcee": ("arcee", "ArceeConfig", TINY),
    "seed_oss": ("seed_oss", "SeedOssConfig", TINY | dict(head_dim=24)),
    "glm4": ("glm4", "Glm4Config", TINY | dict(head_dim=16, partial_rotary_factor=0.5)),
    "granite": (
        "granite",
        "GraniteConfig",
        TINY | dict(embedding_multiplier=6.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=4.0),
    ),
}


def tiny_model(name: str, changes: dict[str, Any] | None = None) -> transformers.PreTrainedModel:
    """Random weights, norms and biases included, so that nothing is zero or one by luck."""
    _, config_class, values = MODELS[name]
    config = getattr(transformers, config_class)(**values | (changes or {}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_(0, 0.3)
    return model


def write_gguf(
    model: transformers.PreTrainedModel,
    architecture: str,
    path: Path,
    ggml_type: gguf.GGMLQuantizationType = F32,
    extra: dict[str, Any] | None = None,
) -> None:
    """Matrices as `ggml_type` (F16 where their rows do not divide into its blocks), everything else as F32."""
    writer = gguf.GGUFWriter(path, architecture)
    _parameters(writer, model.config, architecture)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, *value)
    write_tensors(writer, dict(_tensors(model, architecture)), lambda name: ggml_type)


def write_tensors(
    writer: gguf.GGUFWriter, tensors: Mapping[str, torch.Tensor], kind_of: Callable[[str], gguf.GGMLQuantizationType]
) -> None:
    """Write the tensors, matrices in the type of their names, and close the file."""
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor.float().numpy())
        kind = kind_of(name) if values.ndim > 1 else F32
        if kind != F32 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = F16
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _get(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def _parameters(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    width, heads = _get(config, "hidden_size", "n_embd"), _get(config, "num_attention_heads", "n_head")
    writer.add_block_count(_get(config, "num_hidden_layers", "n_layer"))
    writer.add_context_length(_get(config, "max_position_embeddings", "n_positions") or 2048)
    writer.add_embedding_length(width)
    hidden = None if architecture in ("falcon", "bloom", "gpt2") else _get(config, "intermediate_size")
    writer.add_feed_forward_length(hidden or 4 * width)
    writer.add_head_count(heads)
    kv_heads = _get(config, "num_key_value_heads", "num_kv_heads")
    if architecture == "falcon" and not config.new_decoder_architecture:
        kv_heads = 1
    if kv_heads:
        writer.add_head_count_kv(kv_heads)
    if (eps := _get(config, "rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := _get(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")) is not None:
        writer.add_layer_norm_eps(eps)
    if _get(config, "head_dim") and architecture not in ("falcon", "bloom", "gpt2", "gptneox"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if (window := _get(config, "sliding_window")) is not None:
        writer.add_sliding_window(window)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    _rope(writer, config, architecture, width // heads)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture in ("gptneox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if architecture in ("exaone4", "olmo2") and _get(config, "sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _rope(writer: gguf.GGUFWriter, config: Any, architecture: str, size: int) -> None:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    rope = rope.get("full_attention", rope)
    size = _get(config, "head_dim") or size
    if architecture in ("llama", "granite", "phi3", "gptneox", "stablelm", "phi2", "glm4", "smollm3"):
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * size))
    if architecture not in ("gemma", "gemma2", "falcon"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "phi3":
        original = config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            stretch = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))


def _rope_factors(config: Any) -> dict[str, list[float]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {"rope_factors_long.weight": rope["long_factor"], "rope_factors_short.weight": rope["short_factor"]}
    if rope.get("rope_type") != "llama3":
        return {}
    size = _get(config, "head_dim") or config.hidden_size // config.num_attention_heads
    low, high, original = (rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"])
    factors = []
    for frequency in 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)):
        length = 2 * math.pi / float(frequency)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": factors}


def _tensors(model: transformers.PreTrainedModel, architecture: str) -> list[tuple[str, torch.Tensor]]:
    config = model.config
    layers = _get(config, "num_hidden_layers", "n_layer")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper().replace("-", "_")], layers)
    written = [(name, torch.tensor(values)) for name, values in _rope_factors(config).items()]
    for name, tensor in model.state_dict().items():
        if name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")):
            continue
        if name in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        looked_up = name.removeprefix("transformer.") if architecture == "bloom" else name
        found = names.get_name(looked_up, try_suffixes=(".weight", ".bias"))
        assert found, name
        written.append((found, _changed(name, tensor, config, architecture)))
    return written


PERMUTED = ("llama", "granite", "smollm3", "arcee")


def _changed(name: str, tensor: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    heads = _get(config, "num_attention_heads", "n_head")
    if architecture in PERMUTED and ".q_proj." in name:
        return _permuted(tensor, heads)
    if architecture in PERMUTED and ".k_proj." in name:
        return _permuted(tensor, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T
    if "query_key_value" in name:
        groups = heads
        if architecture == "falcon":
            groups = config.num_kv_heads if config.new_decoder_architecture else 1
        size = tensor.shape[0] // (heads + 2 * groups)
        grouped = tensor.reshape(groups, heads // groups + 2, size, *tensor.shape[1:])
        parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    return tensor


def _permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
