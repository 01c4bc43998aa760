"""GGUF files of DeepSeek-V2 and later: their config, and keys and values that are stored apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock.errors import InvalidModel
from penstock.models.files.gguf import Keys
from penstock.models.files.gguf_config import count_layers, vocab_size
from penstock.models.files.gguf_experts import SIGMOID, SOFTMAX, expert_width
from penstock.models.files.gguf_rope import rope

Config = dict[str, Any]
K_UP, V_UP, KV_UP = "k_b_proj.weight", "v_b_proj.weight", "kv_b_proj.weight"
# Of files from before groups were written down, by their number of experts: V2 and V3.
GROUPS = {160: (8, 3), 256: (8, 4)}


def read_deepseek2(keys: Keys) -> Config:
    """Read V2, V3 and their like: a file with sigmoid routing is a V3."""
    count, dense = keys.optional_count("expert_count") or 0, keys.optional_count("leading_dense_block_count") or 0
    keys.require("expert_gating_func", (0, SOFTMAX, SIGMOID))
    is_v3 = keys.get("expert_gating_func") == SIGMOID
    num_layers = count_layers(keys) - (keys.optional_count("nextn_predict_layers") or 0)
    if num_layers < 1:
        raise InvalidModel(f"{keys.architecture}.nextn_predict_layers leaves none of the model's own layers")
    heads = keys.count("attention.head_count")
    keys.require("attention.head_count_kv", (1, heads))
    turned = keys.count("rope.dimension_count")
    config = {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "vocab_size": vocab_size(keys),
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": keys.count("context_length"),
        "tie_word_embeddings": not keys.has("output.weight"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "q_lora_rank": keys.optional_count("attention.q_lora_rank"),
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "first_k_dense_replace": dense if count else num_layers,
    }
    config |= _head_sizes(keys, turned) | _rope(keys, turned)
    return config | _experts(keys, count, dense, is_v3) if count and dense < num_layers else config


def _head_sizes(keys: Keys, turned: int) -> Config:
    """Return the sizes of a head's parts. Files that hold keys and values apart name those of the latents beside
    them."""
    whole, value = keys.count("attention.key_length"), keys.count("attention.value_length")
    whole, value = keys.count("attention.key_length_mla", whole), keys.count("attention.value_length_mla", value)
    if whole <= turned:
        raise InvalidModel(
            f"{keys.architecture}: heads have {whole} numbers, of which {turned} are rotated; there must be more"
        )
    return {"qk_nope_head_dim": whole - turned, "v_head_dim": value}


def _rope(keys: Keys, turned: int) -> Config:
    """Return the rope. The logarithm's factor is a tenth of what configs call mscale and mscale_all_dim."""
    config = rope(keys, turned)
    factor = float(f"{10 * keys.number('rope.scaling.yarn_log_multiplier', 0.0):.6g}")
    scaling = config.get("rope_scaling")
    if factor and scaling and scaling["rope_type"] == "yarn":
        config["rope_scaling"] = scaling | {"mscale": factor, "mscale_all_dim": factor}
    return config


def _experts(keys: Keys, count: int, dense: int, is_v3: bool) -> Config:
    groups, used = GROUPS.get(count, (1, 1))
    groups = keys.optional_count("expert_group_count") or groups
    used = keys.optional_count("expert_group_used_count") or used
    config = {
        "n_routed_experts": count,
        "num_experts_per_tok": keys.count("expert_used_count"),
        "n_shared_experts": keys.optional_count("expert_shared_count") or 0,
        "moe_intermediate_size": expert_width(keys, dense),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm", is_v3),
        "n_group": groups,
        "topk_group": used,
    }
    return config if is_v3 or groups == 1 else config | {"topk_method": "group_limited_greedy"}


def pair_parts(names: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Map the name of each joint matrix of keys and values to those of its parts, where files hold them apart."""
    pairs = {}
    for name in names:
        above = name.removesuffix(K_UP)
        if above != name and above + V_UP in names:
            pairs[above + KV_UP] = name, above + V_UP
    return pairs


def join_parts(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Join k[H, rank, key] and v[H, value, rank] head by head → [H · (key + value), rank]."""
    return torch.cat([k.transpose(1, 2).float(), v.float()], dim=1).flatten(0, 1)


def join_shapes(k: tuple[int, ...], v: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of what `join_parts` makes of such parts."""
    if len(k) != 3 or len(v) != 3 or (k[0], k[1]) != (v[0], v[2]):
        raise InvalidModel(
            f"attn_k_b {list(k)} and attn_v_b {list(v)} must be [heads, rank, key] and [heads, value, rank]"
        )
    return k[0] * (k[2] + v[1]), k[1]
