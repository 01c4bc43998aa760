"""Translate GGUF metadata to the family's config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import InvalidModel
from penstock.models.files.gguf import Keys

# All Llama 3.1 and later models use these; only the factor differs. A file stores the resulting factors.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope(keys: Keys, head_size: int, partial: bool = False) -> dict[str, Any]:
    """Return rope_theta and, if they matter, partial_rotary_factor and rope_scaling."""
    config: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    size = keys.count("rope.dimension_count", head_size)
    if size > head_size or size % 2 or (size < head_size and not partial):
        raise InvalidModel(
            f"{keys.architecture}.rope.dimension_count is {size} with heads of {head_size}; "
            f"{'an even part' if partial else 'the whole'} of the head must be rotated"
        )
    if config["rope_theta"] <= 0:
        raise InvalidModel(f"{keys.architecture}.rope.freq_base is {config['rope_theta']}; it must be above 0")
    if size < head_size:
        config["partial_rotary_factor"] = _part(size, head_size)
    scaling = _read_scaling(keys, size // 2, config["rope_theta"])
    return config if scaling is None else config | {"rope_scaling": scaling}


def _part(size: int, head_size: int) -> float:
    """Return a fraction that truncates back to `size` when multiplied."""
    part = size / head_size
    return part if int(head_size * part) == size else math.nextafter(part, 1.0)


def _read_scaling(keys: Keys, num_frequencies: int, theta: float) -> dict[str, Any] | None:
    keys.require("rope.scaling.type", ("none", "linear", "yarn", "longrope"))
    keys.require("rope.scaling.yarn_ext_factor", (1.0, -1.0))
    kind = keys.get("rope.scaling.type") or "linear"  # the default when a file names only a factor
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    original = keys.optional_count("rope.scaling.original_context_length")
    if factor <= 0 or attention <= 0:
        raise InvalidModel(f"{keys.architecture}.rope.scaling has factors {factor} and {attention}; both must exceed 0")
    short, long = (_factors(keys, f"rope_factors_{each}.weight", num_frequencies) for each in ("short", "long"))
    if short and long:
        return _longrope(keys, short, long, attention)
    if short or long or kind == "longrope":
        raise InvalidModel("rope scaling longrope needs the tensors rope_factors_short.weight and _long.weight")
    if factors := _factors(keys, "rope_freqs.weight", num_frequencies):
        factors = [each * factor for each in factors] if kind == "linear" else factors
        return _llama3(factors, theta) or {"rope_type": "factors", "factors": factors}
    if kind == "yarn":
        return _yarn(keys, factor, attention, original)
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None


def _factors(keys: Keys, tensor: str, count: int) -> list[float]:
    factors = keys.vector(tensor)
    if factors and (len(factors) != count or not all(math.isfinite(each) and each > 0 for each in factors)):
        raise InvalidModel(f"tensor {tensor!r} must hold {count} factors above 0, it has {len(factors)}")
    return factors


def _llama3(factors: list[float], theta: float) -> dict[str, Any] | None:
    """Recover Llama 3's parameters from its factors; None for other factors."""
    factor = float(f"{max(factors):.6g}")
    original = LLAMA3["original_max_position_embeddings"]
    for index, found in enumerate(factors):
        turns = original / (2 * math.pi * theta ** (index / len(factors)))  # rotations within the original context
        smooth = min(1.0, max(0.0, (turns - LLAMA3["low_freq_factor"]) / (LLAMA3["high_freq_factor"] - 1)))
        if not math.isclose(found, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-4):
            return None
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _longrope(keys: Keys, short: list[float], long: list[float], attention: float) -> dict[str, Any]:
    """Convert longrope; the attention factor is set only if it differs from that of the lengths."""
    scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    longest = keys.count("context_length")
    original = keys.count("rope.scaling.original_context_length", longest)
    stretch = longest / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 < original else 1.0
    return scaling if math.isclose(attention, usual, rel_tol=1e-5) else scaling | {"attention_factor": attention}


def _yarn(keys: Keys, factor: float, attention: float, original: int | None) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original:
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    attention *= keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if attention != 1.0:
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


Config = dict[str, Any]
Make = Callable[[Keys], Config]


def read_config(keys: Keys, mixtures: Mapping[str, Make]) -> Config:
    """Read the config; `mixtures` are the functions for architectures that may have experts."""
    make = mixtures.get(keys.architecture) or CONFIGS.get(keys.architecture)
    if make is None:
        known = ", ".join(sorted({*CONFIGS, *mixtures}))
        raise InvalidModel(f"GGUF architecture {keys.architecture!r} is not known; known: {known}")
    if keys.architecture not in mixtures:
        keys.require("expert_count", (0,))
        keys.require("expert_used_count", (0,))
    keys.require("attention.causal", (keys.architecture not in ENCODERS,))
    config = make(keys)
    keys.refuse_unread()
    return config | _tokens(keys)


def _tokens(keys: Keys) -> Config:
    spelled = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {f"{name}_token_id": keys.metadata.get(f"tokenizer.ggml.{each}_token_id") for name, each in spelled.items()}
    return {name: token for name, token in found.items() if type(token) is int}


def _vocab_size(keys: Keys) -> int:
    info = keys.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise InvalidModel("there is no tensor 'token_embd.weight' of two dimensions")
    return info.shape[0]


def _layers(keys: Keys) -> int:
    count = keys.count("block_count")
    if count > len(keys.tensors):
        raise InvalidModel(f"{keys.architecture}.block_count is {count}; the file has {len(keys.tensors)} tensors")
    return count


def head_size(keys: Keys) -> int:
    usual = keys.count("embedding_length") // keys.count("attention.head_count")
    size = keys.count("attention.key_length", max(1, usual))
    if keys.count("attention.value_length", size) != size:
        raise InvalidModel(
            f"{keys.architecture}.attention.value_length differs from the keys' {size}; "
            "keys and values of one size are supported"
        )
    return size


def _decoder_config(keys: Keys, architecture: str, model_type: str) -> Config:
    """Return what all decoders with separate projections and RoPE share."""
    heads, width, size = keys.count("attention.head_count"), keys.count("embedding_length"), head_size(keys)
    return ({"head_dim": size} if size * heads != width else {}) | {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(keys),
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": _layers(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "max_position_embeddings": keys.count("context_length"),
        "tie_word_embeddings": not keys.has("output.weight"),
    }


def base_config(keys: Keys, architecture: str, model_type: str, partial: bool = False) -> Config:
    """Return what all decoders with RMS norms share."""
    return (
        _decoder_config(keys, architecture, model_type)
        | {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"), "hidden_act": "silu"}
        | rope(keys, head_size(keys), partial)
    )


def read_llama(keys: Keys) -> Config:
    size = {"head_dim": head_size(keys)}
    if window := keys.optional_count("attention.sliding_window"):  # only Mistral has one
        return base_config(keys, "MistralForCausalLM", "mistral") | size | {"sliding_window": window}
    return base_config(keys, "LlamaForCausalLM", "llama") | size | biases(keys)


def biases(keys: Keys) -> Config:
    return {"attention_bias": keys.has("blk.0.attn_q.bias"), "mlp_bias": keys.has("blk.0.ffn_up.bias")}


def _qwen3(keys: Keys) -> Config:
    return base_config(keys, "Qwen3ForCausalLM", "qwen3") | {
        "head_dim": head_size(keys),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }


def _granite(keys: Keys) -> Config:
    return base_config(keys, "GraniteForCausalLM", "granite") | granite_scales(keys) | biases(keys)


def granite_scales(keys: Keys) -> Config:
    return {
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _phi3(keys: Keys) -> Config:
    config = base_config(keys, "Phi3ForCausalLM", "phi3", partial=True)
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    return config | {
        "original_max_position_embeddings": original,
        "sliding_window": keys.optional_count("attention.sliding_window"),
    }


def _gemma(keys: Keys) -> Config:
    return base_config(keys, "GemmaForCausalLM", "gemma") | {
        "head_dim": head_size(keys),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _sandwich(
    keys: Keys, architecture: str, model_type: str, odd_layers: int, period: int, window: int | None
) -> Config:
    """Read Gemma 2 and 3: every `period`-th layer has no window; the largest model scales queries by its width."""
    size, config = head_size(keys), base_config(keys, architecture, model_type)
    del config["hidden_act"]
    layers = config["num_hidden_layers"]
    scalar = max(1, config["hidden_size"] // config["num_attention_heads"]) if layers == odd_layers else size
    kinds = _layer_types(keys, layers, period) if window else ["full_attention"] * layers
    return config | {
        "head_dim": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": kinds,
    }


def _layer_types(keys: Keys, layers: int, period: int) -> list[str]:
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers and all(type(each) is bool for each in pattern):
        return ["sliding_attention" if each else "full_attention" for each in pattern]
    if pattern is not None:
        period = keys.count("attention.sliding_window_pattern")
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]


def _gemma2(keys: Keys) -> Config:
    window = keys.count("attention.sliding_window", 4096)
    return _sandwich(keys, "Gemma2ForCausalLM", "gemma2", 46, 2, window) | {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> Config:
    window = keys.optional_count("attention.sliding_window")
    softcap = keys.number("final_logit_softcapping", 0.0)
    return _sandwich(keys, "Gemma3ForCausalLM", "gemma3_text", 62, 6, window) | {
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": softcap or None,
    }


def _starcoder2(keys: Keys) -> Config:
    return (
        _decoder_config(keys, "Starcoder2ForCausalLM", "starcoder2")
        | rope(keys, head_size(keys))
        | {
            "norm_epsilon": keys.number("attention.layer_norm_epsilon"),
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": keys.has("blk.0.attn_q.bias"),
            "sliding_window": keys.optional_count("attention.sliding_window"),
        }
    )


def _gpt2(keys: Keys) -> Config:
    keys.count("attention.head_count_kv", 1)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": _vocab_size(keys),
        "n_embd": keys.count("embedding_length"),
        "n_inner": keys.count("feed_forward_length"),
        "n_layer": _layers(keys),
        "n_head": keys.count("attention.head_count"),
        "n_positions": keys.count("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": not keys.has("output.weight"),
    }


def _gptneox(keys: Keys) -> Config:
    size = head_size(keys)
    rotary = rope(keys, size, partial=True)
    config = _decoder_config(keys, "GPTNeoXForCausalLM", "gpt_neox")
    del config["num_key_value_heads"]
    return (
        config
        | {
            "hidden_act": "gelu",
            "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
            "use_parallel_residual": keys.flag("use_parallel_residual", True),
            "rotary_emb_base": rotary["rope_theta"],
            "rotary_pct": rotary.get("partial_rotary_factor", 1.0),
            "attention_bias": keys.has("blk.0.attn_qkv.bias"),
        }
        | ({"rope_scaling": rotary["rope_scaling"]} if "rope_scaling" in rotary else {})
    )


def _falcon(keys: Keys) -> Config:
    heads = keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", 1)
    keys.get("feed_forward_length")  # writers assume four times the width; the tensors have the true size
    grouped = kv_heads > 1  # the 7B model has one KV head, later ones a few
    width = keys.count("embedding_length")
    up = keys.tensors.get("blk.0.ffn_up.weight")
    config: Config = {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": _vocab_size(keys),
        "hidden_size": width,
        "ffn_hidden_size": up.shape[0] if up else 4 * width,
        "num_hidden_layers": _layers(keys),
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "max_position_embeddings": keys.count("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "new_decoder_architecture": grouped,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": keys.has("blk.0.attn_qkv.bias"),
        "tie_word_embeddings": not keys.has("output.weight"),
    }
    if grouped:
        config["num_ln_in_parallel_attn"] = 2 if keys.has("blk.0.attn_norm_2.weight") else 1
    return config | rope(keys, head_size(keys))


def _bloom(keys: Keys) -> Config:
    keys.count("attention.head_count_kv", 1)
    keys.get("feed_forward_length")  # always four times the width
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": _vocab_size(keys),
        "hidden_size": keys.count("embedding_length"),
        "n_layer": _layers(keys),
        "n_head": keys.count("attention.head_count"),
        "seq_length": keys.count("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": not keys.has("output.weight"),
    }


def _bert(keys: Keys) -> Config:
    keys.count("attention.head_count_kv", 1)
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": _vocab_size(keys),
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": _layers(keys),
        "num_attention_heads": keys.count("attention.head_count"),
        "max_position_embeddings": keys.count("context_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "type_vocab_size": keys.tensors["token_types.weight"].shape[0] if keys.has("token_types.weight") else 1,
    }


ENCODERS = frozenset({"bert"})
CONFIGS: dict[str, Make] = {
    "qwen2": lambda keys: base_config(keys, "Qwen2ForCausalLM", "qwen2"),
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "falcon": _falcon,
    "bloom": _bloom,
    "starcoder2": _starcoder2,
    "olmo2": lambda keys: base_config(keys, "Olmo2ForCausalLM", "olmo2"),
    "granite": _granite,
    "bert": _bert,
}
