"""The shapes and request sets that engines are compared on, on one GPU.

Random weights, temperature 1, the end of a sequence ignored, the prefix cache on. No prompt is ever seen twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

Prompt = list[int]

_COMMON = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "initializer_range": 0.02,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        **_COMMON,
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        **_COMMON,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **_COMMON,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **_COMMON,
    },
}
DEFAULT_SHAPES = ("llama-3.1-8b", "qwen3-0.6b")
KINDS = ("bs1", "bs32", "256x1024in128out", "256x128in512out", "nano", "shared")
# As many requests as help, for engines with 1,024 rows; not among the default sets. PUBLISHED are TensorRT-LLM's
# figures of Llama 3.1 8B in FP8 with an FP8 cache on one H200.
LARGE = {
    "large-128-128": (4096, 128, 128),
    "large-128-2048": (2048, 128, 2048),
    "large-1000-1000": (2048, 1000, 1000),
    "large-2048-128": (1024, 2048, 128),
}
PUBLISHED = {"large-128-128": 27911, "large-128-2048": 26221, "large-1000-1000": 17744, "large-2048-128": 3538}
START = "start"  # the row of seconds from the process's start to the first token
TITLES = {
    "bs1": "1 × 128 in, 256 out",
    "bs32": "32 × 128 in, 256 out",
    "256x1024in128out": "256 × 1024 in, 128 out",
    "256x128in512out": "256 × 128 in, 512 out",
    "nano": "256 × 100–1024 in, 100–1024 out",
    "shared": "256 × (2048 in common + 64), 64 out",
    START: "start to first token, seconds",
}
SHAPE_TITLES = {"llama-3.1-8b": "Llama 3.1 8B", "qwen3-0.6b": "Qwen3 0.6B"}
RIVAL = "vLLM 0.24"
# Output tokens per second, and seconds to ready, of the rival (its imports left out), and at least what we aim at.
_BF16, _FP8, _SMALL = ("llama-3.1-8b", "bf16"), ("llama-3.1-8b", "fp8"), ("qwen3-0.6b", "bf16")
RIVALS: dict[tuple[str, str], dict[str, float]] = {
    _BF16: {
        "bs1": 201.5,
        "bs32": 5427,
        "256x1024in128out": 3877,
        "256x128in512out": 18716,
        "nano": 10069,
        "shared": 8706,
        START: 70.3,
    },
    _FP8: {
        "bs1": 283.7,
        "bs32": 6757,
        "256x1024in128out": 5534,
        "256x128in512out": 23487,
        "nano": 12380,
        "shared": 9416,
        START: 64.4,
    },
    _SMALL: {
        "bs1": 604,
        "bs32": 15720,
        "256x1024in128out": 16505,
        "256x128in512out": 40628,
        "nano": 23345,
        "shared": 14140,
        START: 56.5,
    },
}
_EXPERTS, _LATENTS = ("qwen3-30b-a3b", "bf16"), ("deepseek-v2-lite", "bf16")
RIVALS[_EXPERTS] = {"bs1": 228, "bs32": 1952, "256x128in512out": 10723, "256x1024in128out": 4616, START: 102}
RIVALS[_LATENTS] = {"bs1": 289, "bs32": 6592, "256x128in512out": 31191, "256x1024in128out": 8218, START: 106}
TARGETS: dict[tuple[str, str], dict[str, float]] = {
    _BF16: {
        "bs1": 232,
        "bs32": 6200,
        "256x1024in128out": 4100,
        "256x128in512out": 20500,
        "nano": 11000,
        "shared": 14000,
        START: 15,
    },
    _FP8: {
        "bs1": 380,
        "bs32": 8500,
        "256x1024in128out": 5900,
        "256x128in512out": 27000,
        "nano": 14000,
        "shared": 15000,
        START: 15,
    },
    _SMALL: {
        "bs1": 1300,
        "bs32": 24000,
        "256x1024in128out": 17500,
        "256x128in512out": 50000,
        "nano": 27000,
        "shared": 28000,
        START: 10,
    },
}
TARGETS[_EXPERTS] = {"bs1": 450, "bs32": 2200, "256x128in512out": 13000, "256x1024in128out": 5600, START: 15}
TARGETS[_LATENTS] = {"bs1": 560, "bs32": 7600, "256x128in512out": 36000, "256x1024in128out": 9500, START: 12}
FIRST_SHARE = 0.8  # of the better run, for the first one after ready
VOCABULARY = 100_000
PREFIX = 2048  # tokens that the requests of "shared" have in common
_EQUAL = {
    "bs1": (1, 128, 256),
    "bs32": (32, 128, 256),
    "256x1024in128out": (256, 1024, 128),
    "256x128in512out": (256, 128, 512),
    **LARGE,
}


def target(shape: str, quantization: str | None, kind: str) -> float | None:
    """Tokens per second at least, or seconds at most to a start; None where there is none."""
    return TARGETS.get((shape, quantization or "bf16"), {}).get(kind)


def rival(shape: str, quantization: str | None, kind: str) -> float | None:
    return RIVALS.get((shape, quantization or "bf16"), {}).get(kind)


def is_met(kind: str, value: float, wanted: float) -> bool:
    return value <= wanted if kind == START else value >= wanted


def num_common(prompts: Sequence[Prompt]) -> int:
    """Tokens that all prompts begin with; of one prompt none are in common."""
    if len(prompts) < 2:
        return 0
    low, high = min(prompts), max(prompts)  # what these two have in common, all in between have
    return next((at for at, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))


def requests(kind: str, seed: int) -> list[tuple[Prompt, int]]:
    """Each request's prompt and how many tokens it is to get."""
    chance = random.Random(seed)

    def ids(count: int) -> Prompt:
        return [chance.randrange(1000, VOCABULARY) for _ in range(count)]

    if kind in _EQUAL:
        count, num_in, num_out = _EQUAL[kind]
        return [(ids(num_in), num_out) for _ in range(count)]
    if kind == "nano":
        return [(ids(chance.randint(100, 1024)), chance.randint(100, 1024)) for _ in range(256)]
    if kind == "shared":
        prefix = ids(PREFIX)
        return [(prefix + ids(64), 64) for _ in range(256)]
    raise KeyError(f"kind {kind!r} is not one of {', '.join((*KINDS, *LARGE))}")
