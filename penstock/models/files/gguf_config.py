"""Translate GGUF metadata to the family's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import InvalidModel
from penstock.models.files.gguf import Keys
from penstock.models.files.gguf_rope import rope

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


def vocab_size(keys: Keys) -> int:
    info = keys.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise InvalidModel("there is no tensor 'token_embd.weight' of two dimensions")
    return info.shape[0]


def count_layers(keys: Keys) -> int:
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
        "vocab_size": vocab_size(keys),
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": count_layers(keys),
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


def _text_of_vision(keys: Keys, read: Callable[[Keys], Config]) -> Config:
    """Read a text model made for pictures: time, height and width of a text's token are one position."""
    keys.read |= {"rope.dimension_sections", "n_deepstack_layers"}
    return read(keys)


def _qwen2(keys: Keys) -> Config:
    return base_config(keys, "Qwen2ForCausalLM", "qwen2")


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
        "vocab_size": vocab_size(keys),
        "n_embd": keys.count("embedding_length"),
        "n_inner": keys.count("feed_forward_length"),
        "n_layer": count_layers(keys),
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
        "vocab_size": vocab_size(keys),
        "hidden_size": width,
        "ffn_hidden_size": up.shape[0] if up else 4 * width,
        "num_hidden_layers": count_layers(keys),
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
        "vocab_size": vocab_size(keys),
        "hidden_size": keys.count("embedding_length"),
        "n_layer": count_layers(keys),
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
        "vocab_size": vocab_size(keys),
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": count_layers(keys),
        "num_attention_heads": keys.count("attention.head_count"),
        "max_position_embeddings": keys.count("context_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "type_vocab_size": keys.tensors["token_types.weight"].shape[0] if keys.has("token_types.weight") else 1,
    }


def _command_r(keys: Keys) -> Config:
    """Read Command R; R7B has windows in three of four layers."""
    windows = keys.architecture == "cohere2"
    name, kind = ("Cohere2ForCausalLM", "cohere2") if windows else ("CohereForCausalLM", "cohere")
    config = _decoder_config(keys, name, kind) | rope(keys, head_size(keys))
    config |= {"layer_norm_eps": keys.number("attention.layer_norm_epsilon"), "hidden_act": "silu"}
    config |= {"logit_scale": keys.number("logit_scale", 1.0), "attention_bias": keys.has("blk.0.attn_q.bias")}
    if not windows:
        return config
    layers = _layer_types(keys, config["num_hidden_layers"], 4)
    return config | {"sliding_window": keys.count("attention.sliding_window"), "layer_types": layers}


def _olmo(keys: Keys) -> Config:
    """Read OLMo 2, or OLMo 3, which has windows and the same name."""
    window = keys.optional_count("attention.sliding_window")
    if not window:
        return base_config(keys, "Olmo2ForCausalLM", "olmo2")
    config = base_config(keys, "Olmo3ForCausalLM", "olmo3")
    return config | {"sliding_window": window, "layer_types": _layer_types(keys, config["num_hidden_layers"], 4)}


def _exaone4(keys: Keys) -> Config:
    config, window = base_config(keys, "Exaone4ForCausalLM", "exaone4"), keys.optional_count("attention.sliding_window")
    layers = config["num_hidden_layers"]
    kinds = _layer_types(keys, layers, 4) if window else ["full_attention"] * layers
    return config | {"head_dim": head_size(keys), "sliding_window": window, "layer_types": kinds}


def _glm4(keys: Keys) -> Config:
    config = base_config(keys, "Glm4ForCausalLM", "glm4", partial=True)
    part = config.get("partial_rotary_factor", 1.0)
    bias = keys.has("blk.0.attn_q.bias")
    return config | {"head_dim": head_size(keys), "partial_rotary_factor": part, "attention_bias": bias}


def _stablelm(keys: Keys) -> Config:
    config = _decoder_config(keys, "StableLmForCausalLM", "stablelm") | rope(keys, head_size(keys), partial=True)
    return config | {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "silu",
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "use_qkv_bias": keys.has("blk.0.attn_q.bias"),
        "use_parallel_residual": keys.flag("use_parallel_residual", False),
    }


def _phi2(keys: Keys) -> Config:
    config = _decoder_config(keys, "PhiForCausalLM", "phi") | rope(keys, head_size(keys), partial=True)
    part = config.get("partial_rotary_factor", 1.0)
    eps = keys.number("attention.layer_norm_epsilon")
    return config | {"layer_norm_eps": eps, "hidden_act": "gelu_new", "partial_rotary_factor": part}


def _with_head_dim(keys: Keys, architecture: str, model_type: str, *biases: str) -> Config:
    """Read a decoder whose heads have a size of their own; these keys say whether there are biases."""
    config = base_config(keys, architecture, model_type) | {"head_dim": head_size(keys)}
    return config | dict.fromkeys(biases, keys.has("blk.0.attn_q.bias"))


ENCODERS = frozenset({"bert"})
CONFIGS: dict[str, Make] = {
    "qwen2": _qwen2,
    "qwen2vl": lambda keys: _text_of_vision(keys, _qwen2),
    "qwen3": _qwen3,
    "qwen3vl": lambda keys: _text_of_vision(keys, _qwen3),
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "falcon": _falcon,
    "bloom": _bloom,
    "starcoder2": _starcoder2,
    "olmo2": _olmo,
    "command-r": _command_r,
    "cohere2": _command_r,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "stablelm": _stablelm,
    "phi2": _phi2,
    "smollm3": lambda keys: _with_head_dim(keys, "SmolLM3ForCausalLM", "smollm3") | biases(keys),
    "ernie4_5": lambda keys: _with_head_dim(keys, "Ernie4_5ForCausalLM", "ernie4_5", "use_bias"),
    "arcee": lambda keys: _with_head_dim(keys, "ArceeForCausalLM", "arcee") | biases(keys) | {"hidden_act": "relu2"},
    "seed_oss": lambda keys: (
        _with_head_dim(keys, "SeedOssForCausalLM", "seed_oss", "attention_bias")
        | {"attention_out_bias": keys.has("blk.0.attn_output.bias")}
    ),
    "granite": _granite,
    "bert": _bert,
}
