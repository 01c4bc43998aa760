"""Read a multimodal checkpoint as its text part: the text model's config, and where its tensors are.

Weights that encode media are not loaded; requests with media are refused where their bodies are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidModel, quote
from penstock.models.config import HARMLESS
from penstock.models.names import Names

# Keys of text_config that published checkpoints leave to transformers' defaults.
_LLAMA = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
) | dict(max_position_embeddings=2048)
_MISTRAL = _LLAMA | dict(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072)
_LLAMA4 = dict(
    vocab_size=202048, hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8
) | dict(head_dim=128, intermediate_size=8192, max_position_embeddings=131072)
_GEMMA3 = dict(
    vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8
) | dict(num_key_value_heads=4, max_position_embeddings=131072)


@dataclass(frozen=True)
class TextModel:
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


# model_type of a text_config → the family that computes it
TEXT_MODELS = {
    "llama": TextModel("LlamaForCausalLM", _LLAMA),
    "llama4_text": TextModel("Llama4ForCausalLM", _LLAMA4),
    "mistral": TextModel("MistralForCausalLM", _MISTRAL),
    "gemma3_text": TextModel("Gemma3ForCausalLM", _GEMMA3),
    "qwen2": TextModel("Qwen2ForCausalLM"),
    "qwen2_vl_text": TextModel("Qwen2ForCausalLM"),
    "qwen2_5_vl_text": TextModel("Qwen2ForCausalLM"),
    "qwen3": TextModel("Qwen3ForCausalLM"),
    "qwen3_vl_text": TextModel("Qwen3ForCausalLM"),
}

# architecture → model_type of the text, where a config does not name it
MULTIMODAL = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "",
    "Llama4ForConditionalGeneration": "llama4_text",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "SmolVLMForConditionalGeneration": "llama",
    "VoxtralForConditionalGeneration": "llama",
}

# Keys beside text_config that say how media are encoded and marked.
MEDIA_KEYS = frozenset(
    """
    vision_config audio_config image_token_index image_token_id video_token_index video_token_id audio_token_id
    vision_start_token_id vision_end_token_id vision_token_id boi_token_index eoi_token_index mm_tokens_per_image
    projector_hidden_act projection_dim multimodal_projector_bias spatial_merge_size vision_feature_layer
    vision_feature_select_strategy vision_aspect_ratio image_seq_length image_grid_pinpoints use_image_newline_parameter
    scale_factor downsample_ratio downsample_factor alignment_intermediate_size adapter_layer_norm_eps
""".split()
)
BOOKKEEPING = HARMLESS | {"_pad_token_id", "ignore_index", "hidden_size", "vocab_size", "is_encoder_decoder"}
# Keys within text_config that computing a text does not read.
DROPPED_KEYS = MEDIA_KEYS | frozenset(
    """
    _flash_attn_2_enabled is_composition neftune_noise_alpha perceiver_config pixel_shuffle_factor use_resampler
""".split()
)
ROPE_KEYS = ("rope_scaling", "rope_parameters")
SHARED_KEYS = ("tie_word_embeddings", "quantization_config")  # of the whole model, text included

NAMES = Names(
    prefixes=("language_model.model.", "model.language_model.", "language_model.", "model.text_model."),
    ignored=(
        "vision_tower.",
        "vision_model.",
        "visual.",
        "audio_tower.",
        "multi_modal_projector.",
        "connector.",
        "image_newline",
    ),
)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    return bool(_find_architecture(config))


def _find_architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") if isinstance(config, Mapping) else None
    known = [name for name in named if isinstance(name, str) and name in MULTIMODAL] if isinstance(named, list) else []
    return known[0] if known else ""


def read_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model as its own checkpoint would have it."""
    architecture = _find_architecture(config)
    text = config.get("text_config")
    if text is None:  # older Qwen-VL checkpoints have the text's keys beside the others
        text = config
    elif not isinstance(text, Mapping):
        raise InvalidModel(f"config key text_config={quote(text)} must be an object")
    else:
        _refuse_unknown(config, text)
    kind = text.get("model_type", MULTIMODAL[architecture])
    kind = MULTIMODAL[architecture] if text.get("architectures") == [architecture] else kind
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        raise InvalidModel(
            f"{architecture}: its text model {quote(kind)} is not supported: the known ones are "
            f"{', '.join(TEXT_MODELS)}"
        )
    model = TEXT_MODELS[kind]
    shared = {key: config[key] for key in SHARED_KEYS if config.get(key) is not None}
    named = {key: value for key, value in text.items() if value is not None or key in ABSENCES}
    found = {key: value for key, value in {**model.defaults, **named}.items() if key not in DROPPED_KEYS}
    for key in ROPE_KEYS:
        if isinstance(found.get(key), Mapping):
            found[key] = _flatten_rope(found[key])
    return {**found, **shared, "architectures": [model.architecture]}


ABSENCES = ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping")  # null has a meaning of its own


def _refuse_unknown(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Refuse keys beside text_config that nothing is known of. Some repeat the text's own, as transformers saves
    Qwen-VL's: then text_config counts."""
    known = MEDIA_KEYS | BOOKKEEPING | {"text_config", *SHARED_KEYS, *text}
    if any(key in text for key in ROPE_KEYS):
        known |= {"rope_theta", *ROPE_KEYS}
    for key, value in config.items():
        is_plain_rope = key in ROPE_KEYS and isinstance(value, Mapping) and _is_plain(_flatten_rope(value))
        if key not in known and not is_plain_rope and value not in (None, False, "", [], {}):
            raise InvalidModel(
                f"config key {key}={quote(value)} is unknown and may change the results, so the model is refused"
            )


def _is_plain(scaling: Mapping[str, Any]) -> bool:
    return all(key in ("type", "rope_type") and value == "default" for key, value in scaling.items())


def _flatten_rope(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the split of positions in time, height and width: the three are one position in a text."""
    kept = {key: value for key, value in scaling.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {
        key: "default" if value == "mrope" and key in ("type", "rope_type") else value for key, value in kept.items()
    }
