"""The shapes and request sets that engines are compared on, on one GPU.

Random weights, temperature 1, the end of a sequence ignored, the prefix cache on. No prompt is ever seen twice.
"""

from __future__ import annotations

import random
from typing import Any

Prompt = list[int]

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "attention_bias": False, "mlp_bias": False, "initializer_range": 0.02},
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "attention_bias": False, "initializer_range": 0.02},
}
KINDS = ("bs1", "bs32", "256x1024in128out", "256x128in512out", "nano", "shared")
VOCABULARY = 100_000
PREFIX = 2048               # tokens that the requests of "shared" have in common
_EQUAL = {"bs1": (1, 128, 256), "bs32": (32, 128, 256), "256x1024in128out": (256, 1024, 128),
          "256x128in512out": (256, 128, 512)}


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
    raise KeyError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
