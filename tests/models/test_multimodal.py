"""Multimodal checkpoints run as their text part, against transformers on prompts without media."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import InvalidModel
from penstock.models.decoder import Decoder
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.multimodal import MULTIMODAL
from penstock.models.spec import FAMILIES, spec_from_config
from tests.models import oracle
from tests.models.paged import Paged

TEXT = {**FAMILIES["LlamaForCausalLM"].like[0], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
QWEN_VISION = dict(depth=1, hidden_size=32, out_hidden_size=64, num_heads=2, intermediate_size=32)
MROPE = dict(type="mrope", mrope_section=[2, 3, 3])
TINY: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": dict(
        text_config=dict(TEXT, head_dim=16, num_hidden_layers=3, sliding_window=9, sliding_window_pattern=2),
        vision_config=VISION,
        mm_tokens_per_image=4,
    ),
    "Mistral3ForConditionalGeneration": dict(
        text_config=dict(TEXT, model_type="mistral", head_dim=32, sliding_window=12),
        vision_config=dict(VISION, model_type="pixtral", head_dim=16),
        tie_word_embeddings=False,
    ),
    "Llama4ForConditionalGeneration": dict(
        text_config=dict(
            {**FAMILIES["Llama4ForCausalLM"].like[0], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
        ),
        vision_config=dict(
            VISION, vision_output_dim=32, projector_input_dim=32, projector_output_dim=32, pixel_shuffle_ratio=0.5
        ),
    ),
    "LlavaForConditionalGeneration": dict(
        text_config=dict(TEXT, model_type="llama"), vision_config=dict(VISION, model_type="clip_vision_model")
    ),
    "Idefics3ForConditionalGeneration": dict(
        text_config=dict(TEXT, model_type="llama"), vision_config=VISION, scale_factor=2
    ),
    "Qwen2VLForConditionalGeneration": dict(
        text_config=dict(TEXT, rope_scaling=MROPE),
        vision_config=dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=1),
    ),
    "Qwen2_5_VLForConditionalGeneration": dict(text_config=dict(TEXT, rope_scaling=MROPE), vision_config=QWEN_VISION),
    "Qwen3VLForConditionalGeneration": dict(
        text_config=dict(TEXT, head_dim=16, rope_scaling=MROPE | dict(rope_type="default", mrope_interleaved=True)),
        vision_config=QWEN_VISION | dict(deepstack_visual_indexes=[0]),
    ),
}


@pytest.mark.parametrize("architecture", TINY)
def test_text_part_equals_transformers(architecture: str, tmp_path: Path) -> None:
    theirs = oracle.make(architecture, TINY[architecture])
    checkpoint = open_checkpoint(oracle.save(theirs, tmp_path))
    spec = spec_from_config(checkpoint.config)
    ours = load_model(checkpoint, spec)
    assert isinstance(ours, Decoder)
    prompt = torch.randint(2, 200, (23,), generator=torch.Generator().manual_seed(3)).tolist()
    (row,) = Paged(ours).run([prompt], 9, chunk=16)
    expected, found = oracle.logits(theirs, row.tokens[:-1]), torch.stack(row.logits)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert expected[22:].argmax(-1).tolist() == row.tokens[23:]


def test_what_a_config_leaves_out_is_transformers_default() -> None:
    published = {  # as Gemma 3 4B's
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 256,
        "image_token_index": 262144,
    }
    spec = spec_from_config(published)
    attention: Any = spec.layers[0].mixer
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (8, 4, 256)
    assert (spec.vocab_size, spec.num_layers, spec.max_positions) == (262208, 34, 131072)
    assert [state.window for state in spec.states() if state and state.kind == "window"] == [1024] * 29


def test_older_configs_hold_the_text_beside_the_rest(tmp_path: Path) -> None:
    theirs = oracle.make("Qwen2VLForConditionalGeneration", TINY["Qwen2VLForConditionalGeneration"])
    folder = oracle.save(theirs, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    new = spec_from_config(config)
    old = {key: value for key, value in config.items() if key != "text_config"} | config["text_config"]
    old |= {"architectures": config["architectures"], "model_type": "qwen2_vl"}
    old["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    old["rope_theta"] = old.pop("rope_parameters")["rope_theta"]
    assert spec_from_config(old) == new


# as transformers 4.52 saves Qwen2.5-VL
REPEATED = dict(TEXT, hidden_act="silu", rope_theta=1e6, sliding_window=32768, max_window_layers=28)
QWEN_VL = {
    **REPEATED,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "rope_scaling": dict(MROPE, rope_type="default", type="default"),
    "image_token_id": 151655,
    "vision_config": QWEN_VISION,
    "text_config": {
        **REPEATED,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl_text",
        "rope_scaling": dict(MROPE, rope_type="default", type="default"),
        "sliding_window": None,
        "use_sliding_window": False,
        "image_token_id": None,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_token_id": 151654,
        "video_token_id": 151656,
    },
}


def test_keys_that_repeat_the_text_are_passed_over() -> None:
    text = QWEN_VL["text_config"]
    bare = {key: QWEN_VL[key] for key in ("architectures", "text_config")}
    assert spec_from_config(QWEN_VL) == spec_from_config(bare)
    plain = {key: value for key, value in text.items() if key != "rope_scaling"}
    assert spec_from_config(QWEN_VL | {"text_config": plain}) == spec_from_config(bare)
    new = plain | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    del new["rope_theta"]
    assert spec_from_config(QWEN_VL | {"text_config": new}) == spec_from_config(bare)
    for change in (
        {"text_config": {key: value for key, value in text.items() if key != "max_window_layers"}},
        {"text_config": plain, "rope_scaling": dict(MROPE, factor=4.0)},
    ):
        with pytest.raises(InvalidModel, match="max_window_layers|rope_scaling"):
            spec_from_config(QWEN_VL | change)


def test_marks_of_other_tools_are_passed_over() -> None:
    text = {**TEXT, "model_type": "mistral", "is_composition": True}  # as Pixtral 12B's
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    marked = config | {"unsloth_fixed": True, "unsloth_version": "2025.8.1"}
    assert spec_from_config(marked) == spec_from_config(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text_config": {"model_type": "phi9"}}, "phi9"),
        ({"text_config": 7}, "text_config"),
        ({"sparkle": 3}, "sparkle"),
        ({"text_config": {**TEXT, "model_type": "llama", "glitter": 2}}, "glitter"),
        ({"text_config": {**TEXT, "model_type": ["llama"]}}, "llama"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {**TEXT, "model_type": "llama"}}
    with pytest.raises(InvalidModel, match=named):
        spec_from_config(config | change)


def test_a_config_nested_without_end_is_refused_in_one_line() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"text_config": deep}
    with pytest.raises(InvalidModel, match="nested too deep to show"):
        spec_from_config({"architectures": ["LlavaForConditionalGeneration"], "text_config": deep})


def test_tensors_of_media_alone_are_left_out() -> None:
    names = spec_from_config(
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": {**TEXT, "model_type": "llama"}}
    ).names
    assert names.find("vision_tower.anything.at.all.7.weight") is names.find("image_newline") is not None
    assert names.find("model.visual.blocks.0.attn.qkv.weight") is names.find("vision_tower.x")
    found = names.find("language_model.model.layers.1.mlp.up_proj.weight")
    assert found is not None and found.name == "layers.1.mlp.up.weight"
    assert names.find("speech.layers.1.mlp.up_proj.weight") is None


def test_every_multimodal_class_is_one_of_transformers() -> None:
    for architecture in MULTIMODAL:
        assert oracle.find_class(architecture)
