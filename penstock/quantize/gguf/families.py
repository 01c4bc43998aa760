"""The keys that single architectures add to the usual ones of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.models.experts import Experts
from penstock.models.latent import LatentAttentionSpec
from penstock.models.layer import Attention
from penstock.models.spec import ModelSpec

Found = dict[str, Any]
Config = Mapping[str, Any]
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func


def find_attention(spec: ModelSpec) -> list[Attention]:
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]


def find_experts(spec: ModelSpec) -> Experts | None:
    return next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, Experts)), None)


def count_dense(spec: ModelSpec) -> int:
    """Count the layers before the first with experts."""
    return next((index for index, layer in enumerate(spec.layers) if isinstance(layer.ffn, Experts)), spec.num_layers)


def _nothing(spec: ModelSpec, config: Config) -> Found:
    return {}


def _expert_width(spec: ModelSpec, config: Config) -> Found:
    mixture = find_experts(spec)
    return {} if mixture is None else {"expert_feed_forward_length": mixture.expert.hidden}


def _shared_width(spec: ModelSpec, config: Config) -> Found:
    mixture = find_experts(spec)
    shared = None if mixture is None else mixture.shared
    found = {} if shared is None else {"expert_shared_feed_forward_length": shared.hidden}
    return _expert_width(spec, config) | found


def _describe_routing(spec: ModelSpec, config: Config) -> Found:
    """Say how experts are chosen, where files of the architecture say it."""
    mixture = find_experts(spec)
    if mixture is None:
        return {}
    rule, one = mixture.routing, mixture.expert.hidden
    found: Found = {
        "expert_feed_forward_length": one,
        "expert_shared_count": mixture.shared.hidden // one if mixture.shared else 0,
        "expert_weights_scale": float(rule.scale),
        "expert_weights_norm": rule.normalizes,
        "expert_gating_func": SIGMOID if rule.score == "sigmoid" else SOFTMAX,
        "leading_dense_block_count": count_dense(spec),
    }
    if rule.num_groups > 1:
        found |= {"expert_group_count": rule.num_groups, "expert_group_used_count": rule.top_groups}
    return found


def _latent(spec: ModelSpec, config: Config) -> Found:
    """Describe latents; keys and values are one matrix, as in files whose readers widen them."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    found: Found = {
        "attention.head_count": mixer.num_heads,
        "attention.head_count_kv": mixer.num_heads,
        "attention.key_length": mixer.head_size,
        "attention.value_length": mixer.value_size,
        "attention.kv_lora_rank": mixer.rank,
        "rope.dimension_count": mixer.rope.size,
    }
    if mixer.query_rank:
        found["attention.q_lora_rank"] = mixer.query_rank
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if scaling.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * float(scaling["mscale_all_dim"])
    found |= _describe_routing(spec, config)
    return found if find_experts(spec) else found | {"leading_dense_block_count": spec.num_layers}


def _ernie_moe(spec: ModelSpec, config: Config) -> Found:
    mixture, first = find_experts(spec), count_dense(spec)
    if mixture is None:
        return {}
    later = (i for i in range(first + 1, spec.num_layers) if isinstance(spec.layers[i].ffn, Experts))
    shared = mixture.shared.hidden if mixture.shared else 0
    return {
        "expert_feed_forward_length": mixture.expert.hidden,
        "expert_shared_count": shared // mixture.expert.hidden,
        "expert_shared_feed_forward_length": shared,
        "interleave_moe_layer_step": next(later, first + 1) - first,
        "leading_dense_block_count": first,
    }


def _granite(spec: ModelSpec, config: Config) -> Found:
    block: Any = spec.layers[0]
    assert spec.head is not None
    return {
        "attention.scale": float(block.mixer.scale),
        "embedding_scale": float(spec.embedding.scale),
        "residual_scale": float(block.scale),
        "logit_scale": float(spec.head.divisor),
    }


def _command_r(spec: ModelSpec, config: Config) -> Found:
    return {"logit_scale": float(config.get("logit_scale", 0.0625))}


def _softcaps(spec: ModelSpec, config: Config) -> Found:
    assert spec.head is not None
    found = {"final_logit_softcapping": float(spec.head.softcap)}
    softcap = find_attention(spec)[0].softcap
    return found | ({"attn_logit_softcapping": float(softcap)} if softcap else {})


def _gemma3(spec: ModelSpec, config: Config) -> Found:
    assert spec.head is not None
    ropes = [mixer.rope for mixer in find_attention(spec) if mixer.window and mixer.rope]
    found: Found = {"final_logit_softcapping": float(spec.head.softcap)} if spec.head.softcap else {}
    return found | ({"rope.freq_base_swa": float(ropes[0].theta)} if ropes else {})


def _pattern(spec: ModelSpec, config: Config) -> Found:
    windows = [bool(mixer.window) for mixer in find_attention(spec)]
    return {"attention.sliding_window_pattern": windows} if any(windows) else {}


def _residual(spec: ModelSpec, config: Config) -> Found:
    return {"use_parallel_residual": type(spec.layers[0]).__name__ == "ParallelBlock"}


def _original(spec: ModelSpec, config: Config) -> Found:
    return {"rope.scaling.original_context_length": int(config.get("original_max_position_embeddings") or 4096)}


@dataclass(frozen=True)
class GgufFamily:
    """GGUF's name of an architecture, the keys that it adds, and whether files say how much of a head is rotated."""

    name: str
    extra: Callable[[ModelSpec, Config], Found] = _nothing
    says_rotated: bool = False


# architecture of config.json → GGUF's
ARCHITECTURES: dict[str, GgufFamily] = {
    "LlamaForCausalLM": GgufFamily("llama", says_rotated=True),
    "MistralForCausalLM": GgufFamily("llama", says_rotated=True),
    "MixtralForCausalLM": GgufFamily("llama", says_rotated=True),
    "Qwen2ForCausalLM": GgufFamily("qwen2"),
    "Qwen3ForCausalLM": GgufFamily("qwen3"),
    "Qwen2MoeForCausalLM": GgufFamily("qwen2moe", _shared_width),
    "Qwen3MoeForCausalLM": GgufFamily("qwen3moe", _expert_width),
    "OlmoeForCausalLM": GgufFamily("olmoe"),
    "Olmo2ForCausalLM": GgufFamily("olmo2"),
    "Olmo3ForCausalLM": GgufFamily("olmo2", _pattern),
    "GraniteForCausalLM": GgufFamily("granite", _granite, says_rotated=True),
    "GraniteMoeForCausalLM": GgufFamily("granitemoe", _granite, says_rotated=True),
    "DeepseekV2ForCausalLM": GgufFamily("deepseek2", _latent),
    "DeepseekV3ForCausalLM": GgufFamily("deepseek2", _latent),
    "Glm4ForCausalLM": GgufFamily("glm4", says_rotated=True),
    "Glm4MoeForCausalLM": GgufFamily("glm4moe", _describe_routing, says_rotated=True),
    "Ernie4_5ForCausalLM": GgufFamily("ernie4_5"),
    "Ernie4_5_MoeForCausalLM": GgufFamily("ernie4_5-moe", _ernie_moe),
    "GptOssForCausalLM": GgufFamily("gpt-oss", _expert_width),
    "GemmaForCausalLM": GgufFamily("gemma"),
    "Gemma2ForCausalLM": GgufFamily("gemma2", _softcaps),
    "Gemma3ForCausalLM": GgufFamily("gemma3", _gemma3),
    "CohereForCausalLM": GgufFamily("command-r", _command_r),
    "Cohere2ForCausalLM": GgufFamily("cohere2", _command_r),
    "SmolLM3ForCausalLM": GgufFamily("smollm3", says_rotated=True),
    "Exaone4ForCausalLM": GgufFamily("exaone4", _pattern),
    "ArceeForCausalLM": GgufFamily("arcee"),
    "SeedOssForCausalLM": GgufFamily("seed_oss"),
    "Starcoder2ForCausalLM": GgufFamily("starcoder2"),
    "StableLmForCausalLM": GgufFamily("stablelm", _residual, says_rotated=True),
    "PhiForCausalLM": GgufFamily("phi2", says_rotated=True),
    "Phi3ForCausalLM": GgufFamily("phi3", _original, says_rotated=True),
    "GPTNeoXForCausalLM": GgufFamily("gptneox", _residual, says_rotated=True),
    "GPT2LMHeadModel": GgufFamily("gpt2"),
    "BloomForCausalLM": GgufFamily("bloom"),
    "FalconForCausalLM": GgufFamily("falcon"),
}
