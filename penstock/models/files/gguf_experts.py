"""GGUF metadata of models with mixtures of experts → the family's config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import InvalidModel
from penstock.models.files.gguf import Keys
from penstock.models.files.gguf_config import base_config, biases, granite_scales, head_size, read_llama

Config = dict[str, Any]
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # expert_gating_func


def _counts(keys: Keys, num_experts: str = "num_experts", gating: int = SOFTMAX) -> Config:
    """Return how many experts there are and are used; check what the family fixes."""
    keys.require("expert_gating_func", (gating,) if gating == SIGMOID else (gating, 0))
    keys.require("expert_group_count", (0, 1))
    keys.require("expert_group_used_count", (0, 1))
    return {num_experts: keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def _normalizes(keys: Keys, default: bool) -> Config:
    """Read whether weights are made to sum to one; files say it only if that is not the architecture's way."""
    return {"norm_topk_prob": keys.flag("expert_weights_norm", default)}


def expert_width(keys: Keys, layer: int = 0) -> int:
    """Return the width of one expert: by its key, or by the tensors where old files lack it."""
    info = keys.tensors.get(f"blk.{layer}.ffn_up_exps.weight")
    if info is None or len(info.shape) != 3:
        raise InvalidModel(
            f"there is no tensor 'blk.{layer}.ffn_up_exps.weight' of three dimensions: convert the model again if it "
            "was made before experts were stored together"
        )
    return keys.count("expert_feed_forward_length", info.shape[1])


def _reject_shared(keys: Keys) -> None:
    for key in ("expert_shared_count", "expert_shared_feed_forward_length"):
        keys.require(key, (0,))


def _scale(keys: Keys) -> float:
    return keys.number("expert_weights_scale", 1.0) or 1.0


def _reject_scale(keys: Keys) -> None:
    keys.require("expert_weights_scale", (0.0, 1.0))


def _llama(keys: Keys) -> Config:
    """Read Llama, Mistral, or Mixtral, which bear the same name."""
    if keys.get("expert_count") in (None, 0):
        keys.require("expert_used_count", (0,))
        return read_llama(keys)
    _reject_shared(keys)
    _reject_scale(keys)
    keys.require("expert_weights_norm", (True,))
    config = base_config(keys, "MixtralForCausalLM", "mixtral") | {"head_dim": head_size(keys)}
    config["intermediate_size"] = expert_width(keys)
    return (
        config
        | _counts(keys, "num_local_experts")
        | {"sliding_window": keys.optional_count("attention.sliding_window")}
    )


def _qwen2(keys: Keys) -> Config:
    _reject_scale(keys)
    info = keys.tensors.get("blk.0.ffn_up_shexp.weight")
    shared = keys.count("expert_shared_feed_forward_length", info.shape[0] if info else None)
    return (
        base_config(keys, "Qwen2MoeForCausalLM", "qwen2_moe")
        | _counts(keys)
        | _normalizes(keys, False)
        | {
            "moe_intermediate_size": expert_width(keys),
            "shared_expert_intermediate_size": shared,
            "qkv_bias": keys.has("blk.0.attn_q.bias"),
        }
    )


def _qwen3(keys: Keys) -> Config:
    _reject_shared(keys)
    _reject_scale(keys)
    return (
        base_config(keys, "Qwen3MoeForCausalLM", "qwen3_moe")
        | _counts(keys)
        | _normalizes(keys, True)
        | {
            "head_dim": head_size(keys),
            "moe_intermediate_size": expert_width(keys),
            "attention_bias": keys.has("blk.0.attn_q.bias"),
        }
    )


def _olmoe(keys: Keys) -> Config:
    _reject_shared(keys)
    _reject_scale(keys)
    config = base_config(keys, "OlmoeForCausalLM", "olmoe") | _counts(keys) | _normalizes(keys, False)
    return config | {"intermediate_size": expert_width(keys), "attention_bias": keys.has("blk.0.attn_q.bias")}


def _granite(keys: Keys) -> Config:
    _reject_shared(keys)
    _reject_scale(keys)
    keys.require("expert_weights_norm", (True,))
    bias = biases(keys)["attention_bias"]
    config = base_config(keys, "GraniteMoeForCausalLM", "granitemoe") | granite_scales(keys)
    config["intermediate_size"] = expert_width(keys)
    return config | _counts(keys, "num_local_experts") | {"attention_bias": bias}


def _glm4(keys: Keys) -> Config:
    drafting = keys.optional_count("nextn_predict_layers") or 0
    dense = keys.optional_count("leading_dense_block_count") or 0
    config = base_config(keys, "Glm4MoeForCausalLM", "glm4_moe", partial=True)
    config["num_hidden_layers"] -= drafting
    if config["num_hidden_layers"] < 1 or dense >= config["num_hidden_layers"]:
        raise InvalidModel(f"{keys.architecture}.block_count leaves no layer with experts after {dense} dense ones")
    return (
        config
        | _counts(keys, "n_routed_experts", SIGMOID)
        | _normalizes(keys, True)
        | {
            "head_dim": head_size(keys),
            "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
            "moe_intermediate_size": expert_width(keys, dense),
            "n_shared_experts": keys.optional_count("expert_shared_count") or 0,
            "routed_scaling_factor": _scale(keys),
            "first_k_dense_replace": dense,
            "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
            "attention_bias": keys.has("blk.0.attn_q.bias"),
        }
    )


def _gpt_oss(keys: Keys) -> Config:
    _reject_shared(keys)
    _reject_scale(keys)
    keys.require("expert_weights_norm", (True,))
    config = base_config(keys, "GptOssForCausalLM", "gpt_oss")
    if "rope_scaling" not in config:
        raise InvalidModel(f"metadata key {keys.architecture}.rope.scaling.type is missing; it must be yarn")
    config["rope_scaling"] = {**config["rope_scaling"], "truncate": False}
    config |= _counts(keys, "num_local_experts", SOFTMAX_OF_CHOSEN)
    return config | {
        "head_dim": head_size(keys),
        "intermediate_size": expert_width(keys),
        "sliding_window": keys.count("attention.sliding_window"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }


CHUNK = 8192  # of Llama 4's attention; no file says it


def _llama4(keys: Keys) -> Config:
    """Read Llama 4: files leave out what all published models have in common, and that the largest has no QK-norm."""
    _reject_scale(keys)
    keys.require("attention.sliding_window", (CHUNK,))
    step = keys.count("interleave_moe_layer_step", 1)
    config = base_config(keys, "Llama4ForCausalLM", "llama4_text")
    if step > config["num_hidden_layers"]:
        raise InvalidModel(f"{keys.architecture}.interleave_moe_layer_step is {step}: no layer has experts")
    config["intermediate_size_mlp"] = config.pop("intermediate_size")
    width = expert_width(keys, step - 1)
    for key in ("expert_shared_count", "expert_shared_feed_forward_length"):
        keys.require(key, (1,) if key.endswith("count") else (width,))
    config |= _counts(keys, "num_local_experts", SIGMOID)
    return config | {
        "head_dim": head_size(keys),
        "intermediate_size": width,
        "interleave_moe_layer_step": step,
        "attention_chunk_size": CHUNK,
        "use_qk_norm": config["num_local_experts"] != 128,
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }


def _ernie(keys: Keys) -> Config:
    _reject_scale(keys)
    dense = keys.optional_count("leading_dense_block_count") or 0
    step = keys.count("interleave_moe_layer_step", 1)
    first = next(layer for layer in range(dense, dense + step) if (layer + 1) % step == 0)
    config = base_config(keys, "Ernie4_5_MoeForCausalLM", "ernie4_5_moe")
    config |= _counts(keys, "moe_num_experts")
    config["moe_k"] = config.pop("num_experts_per_tok")
    width, shared = expert_width(keys, first), keys.optional_count("expert_shared_count") or 0
    keys.require("expert_shared_feed_forward_length", (width * shared,))
    return config | {
        "head_dim": head_size(keys),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": dense,
        "moe_layer_interval": step,
    }


EXPERT_CONFIGS: dict[str, Callable[[Keys], Config]] = {
    "llama": _llama,
    "qwen2moe": _qwen2,
    "qwen3moe": _qwen3,
    "olmoe": _olmoe,
    "granitemoe": _granite,
    "glm4moe": _glm4,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "ernie4_5-moe": _ernie,
}
