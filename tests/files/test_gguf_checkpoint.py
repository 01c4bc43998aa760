"""A tiny model of every GGUF architecture, written with the `gguf` package: read back, it is the transformers original.

The config we derive must build the same transformers model, the tensors must be its state dict, and the two must give
the same logits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from convert import FACTORS, LLAMA3, MODELS, tiny_model, write_gguf

from penstock.cache.group import group_layers
from penstock.errors import InvalidModel
from penstock.models.decoder import Decoder
from penstock.models.files import open_checkpoint
from penstock.models.files.gguf_checkpoint import GgufCheckpoint
from penstock.models.load import load_model
from penstock.models.spec import spec_from_config
from penstock.runner.memory import BlockMemory
from penstock.runner.step import Step

IDS = torch.tensor([[5, 17, 60, 3, 44, 91, 2, 33, 70, 8, 21, 50, 6, 77, 12, 39, 64, 28, 90, 11, 46, 83, 19, 55]])


RENAMED = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX's head, on disk and in transformers 5


original = cache(tiny_model)


def written(tmp_path: Path, name: str, **options: object) -> tuple[transformers.PreTrainedModel, GgufCheckpoint]:
    model = original(name)
    write_gguf(model, MODELS[name][0], tmp_path / f"{name}.gguf", **options)
    checkpoint = open_checkpoint(tmp_path / f"{name}.gguf")
    assert isinstance(checkpoint, GgufCheckpoint)
    return model, checkpoint


def rebuilt(checkpoint: GgufCheckpoint) -> transformers.PreTrainedModel:
    """The transformers model of our config and tensors."""
    values = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "model_type")}
    if values.get("rope_scaling", {}).get("rope_type") == "factors":
        values["rope_scaling"] = LLAMA3 | dict(original_max_position_embeddings=64, rope_theta=100.0)
    config = transformers.AutoConfig.for_model(checkpoint.config["model_type"], **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    assert [type(model).__name__] == checkpoint.config["architectures"]
    tensors = {RENAMED.get(name, name): checkpoint.tensor(name) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_the_originals(name: str, tmp_path: Path) -> None:
    model, checkpoint = written(tmp_path, name)
    state = {key: value for key, value in model.state_dict().items() if not key.endswith((".attn.bias", "inv_freq"))}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert sorted(RENAMED.get(key, key) for key in checkpoint.names()) == sorted(state)
    for key in checkpoint.names():
        value, tensor = state[RENAMED.get(key, key)], checkpoint.tensor(key)
        assert checkpoint.shape(key) == tuple(value.shape) == tuple(tensor.shape) and checkpoint.dtype(key) == "float32"
        if name.startswith("gemma") and key.endswith("norm.weight"):  # 1 was added and taken away: a rounding each
            assert torch.allclose(tensor, value, rtol=0, atol=2**-23), key
        else:
            assert torch.equal(tensor, value), key


@pytest.mark.parametrize("name", MODELS)
def test_config_builds_the_same_model(name: str, tmp_path: Path) -> None:
    model, checkpoint = written(tmp_path, name)
    if name == "phi3-long":  # transformers 5 takes the factors' original length from the rope's own constants
        checkpoint.config["rope_scaling"]["original_max_position_embeddings"] = 32
    with torch.no_grad():
        expected, found = model(IDS).logits, rebuilt(checkpoint)(IDS).logits
    exact = not name.startswith("gemma")
    assert torch.equal(found, expected) if exact else torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_our_model_gives_the_originals_logits(name: str, tmp_path: Path) -> None:
    """From the file through our own family and layers: names, config and values belong together."""
    model, checkpoint = written(tmp_path, name)
    spec = spec_from_config(checkpoint.config, 32)
    decoder = load_model(checkpoint, spec)
    assert isinstance(decoder, Decoder)
    count, int32 = IDS.shape[1], torch.int32
    step = Step(
        IDS[0],
        torch.arange(count),
        [torch.arange(count)],
        [torch.arange(2, dtype=int32)[None]],
        torch.tensor([0, count], dtype=int32),
        torch.tensor([count], dtype=int32),
    )
    caches = [
        BlockMemory(2, 16, group_layers([state], 16), "float32").views([memory])[0]
        for state, memory in zip(spec.states(), spec.memories())
    ]
    with torch.no_grad():
        expected = model(IDS).logits[0]
        found = decoder.logits(decoder.forward(step, caches), torch.arange(count))
    scale = expected.abs().max()
    assert (found - expected).abs().max() < 2e-5 * scale, (found - expected).abs().max() / scale


@pytest.mark.parametrize("name", MODELS)
def test_config_has_the_originals_values(name: str, tmp_path: Path) -> None:
    model, checkpoint = written(tmp_path, name)
    original = model.config.to_dict() | {"architectures": [type(model).__name__]}
    rope = original.get("rope_parameters") or {}
    original |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if "full_attention" in rope:
        original |= {
            "rope_theta": rope["full_attention"]["rope_theta"],
            "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        }
    original |= {
        "rotary_emb_base": rope.get("rope_theta"),
        "rotary_pct": rope.get("partial_rotary_factor"),
        "seq_length": 2048,
    }
    derived = {"rope_scaling", "n_inner", "head_dim", "num_kv_heads", "num_ln_in_parallel_attn"}
    for key, value in checkpoint.config.items():
        if key not in derived or original.get(key) is not None:
            expected = original.get(key)
            if name == "falcon-7b" and key == "num_kv_heads":
                expected = 1
            if key != "rope_scaling":
                assert value == expected and type(value) is type(expected), key
    assert spec_from_config(checkpoint.config).vocab_size == 96


def test_rope_scaling_is_recognised(tmp_path: Path) -> None:
    scaling: dict[str, Any] = {
        name: written(tmp_path, name)[1].config.get("rope_scaling")
        for name in ("llama", "llama-linear", "llama-3.2", "llama-factors", "qwen2-yarn", "phi3-long")
    }
    assert scaling["llama"] is None
    assert scaling["llama-linear"] == {"rope_type": "linear", "factor": 2.5}
    assert scaling["llama-3.2"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    factors = scaling["llama-factors"]
    assert factors["rope_type"] == "factors" and len(factors["factors"]) == 8
    assert factors["factors"][0] == 1.0 and factors["factors"][-1] == 32.0 and 1 < factors["factors"][3] < 32
    assert scaling["qwen2-yarn"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert scaling["phi3-long"] == {"rope_type": "longrope"} | FACTORS


@pytest.mark.parametrize(
    "extra, scaling",
    [
        ({"llama.rope.scale_linear": (4.0, gguf.GGUFValueType.FLOAT32)}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.factor": (0.0, gguf.GGUFValueType.FLOAT32)}, None),
        (
            {
                "llama.rope.scaling.factor": (4.0, gguf.GGUFValueType.FLOAT32),
                "llama.rope.scaling.type": ("none", gguf.GGUFValueType.STRING),
            },
            None,
        ),
        (
            {
                "llama.rope.scaling.factor": (4.0, gguf.GGUFValueType.FLOAT32),
                "llama.rope.scaling.type": ("yarn", gguf.GGUFValueType.STRING),
                "llama.rope.scaling.yarn_beta_fast": (16.0, gguf.GGUFValueType.FLOAT32),
            },
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_without_tensors(extra: dict[str, tuple], scaling: dict | None, tmp_path: Path) -> None:
    assert written(tmp_path, "llama", extra=extra)[1].config.get("rope_scaling") == scaling


@pytest.mark.parametrize(
    "ggml_type",
    [gguf.GGMLQuantizationType[each] for each in ("F16", "BF16", "Q8_0", "Q5_1")],
    ids=lambda each: each.name,
)
def test_rows_of_quantized_matrices_are_put_back(ggml_type: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Quantization works along rows, so it commutes with the row orders that the converter changed."""
    for name in ("llama", "falcon-40b", "bloom", "gpt2"):
        model, checkpoint = written(tmp_path, name, ggml_type=ggml_type)
        for key in checkpoint.names():
            value = model.state_dict()[key]
            if value.ndim == 1:
                continue
            transposed = name == "gpt2" and ".c_" in key
            plain = (value.T if transposed else value).contiguous().numpy()
            divides = plain.shape[-1] % gguf.GGML_QUANT_SIZES[ggml_type][0] == 0
            kind = ggml_type if divides else gguf.GGMLQuantizationType.F16
            expected = gguf.quants.dequantize(gguf.quants.quantize(plain, kind), kind)
            found = checkpoint.tensor(key).float().numpy()
            assert np.array_equal(found.T if transposed else found, expected), (name, key)
        assert checkpoint.quantization == ggml_type.name


def test_stored_floats_keep_their_dtype(tmp_path: Path) -> None:
    _, checkpoint = written(tmp_path, "llama", ggml_type=gguf.GGMLQuantizationType.BF16)
    assert checkpoint.dtype("model.embed_tokens.weight") == "bfloat16"
    assert checkpoint.tensor("model.embed_tokens.weight").dtype == torch.bfloat16
    _, checkpoint = written(tmp_path, "llama", ggml_type=gguf.GGMLQuantizationType.Q8_0)
    assert checkpoint.dtype("model.embed_tokens.weight") == "Q8_0"
    assert checkpoint.tensor("model.embed_tokens.weight").dtype == torch.float32


def test_vision_models_run_as_their_text(tmp_path: Path) -> None:
    sections = {"qwen2vl.rope.dimension_sections": ([2, 3, 3, 0], gguf.GGUFValueType.ARRAY)}
    _, checkpoint = written(tmp_path, "qwen2vl", extra=sections)
    assert checkpoint.config["architectures"] == ["Qwen2ForCausalLM"]


def test_generation_config_has_every_end_and_the_sampling_defaults(tmp_path: Path) -> None:
    uint32, float32 = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32
    extra = {
        "tokenizer.ggml.eot_token_id": (7, uint32),
        "general.sampling.temp": (0.6, float32),
        "general.sampling.top_k": (20, gguf.GGUFValueType.INT32),
        "general.sampling.penalty_last_n": (64, gguf.GGUFValueType.INT32),
    }
    _, checkpoint = written(tmp_path, "qwen3", extra=extra)
    assert checkpoint.generation_config == {
        "eos_token_id": [2, 7],
        "temperature": 0.6,
        "top_k": 20,
        "repeat_last_n": 64,
    }
    assert checkpoint.tokenizer_source()["tokenizer.ggml.eot_token_id"] == 7


@pytest.mark.parametrize(
    "extra, reason",
    [
        ({"llama.expert_count": (8, gguf.GGUFValueType.UINT32)}, "no tensor 'blk.0.ffn_up_exps.weight'"),
        ({"llama.attention.causal": (False, gguf.GGUFValueType.BOOL)}, "llama.attention.causal"),
        ({"llama.attention.clamp_kqv": (8.0, gguf.GGUFValueType.FLOAT32)}, "'llama.attention.clamp_kqv' is unknown"),
        ({"llama.rope.scaling.type": ("spiral", gguf.GGUFValueType.STRING)}, "it must be none or linear or yarn"),
        ({"llama.rope.scaling.type": ("longrope", gguf.GGUFValueType.STRING)}, "needs the tensors rope_factors_short"),
        ({"llama.rope.scaling.factor": (-2.0, gguf.GGUFValueType.FLOAT32)}, "factors -2.0 and 1.0; both must exceed 0"),
        ({"llama.rope.freq_base_swa": (2.0, gguf.GGUFValueType.FLOAT32)}, "'llama.rope.freq_base_swa' is unknown"),
        ({"split.count": (3, gguf.GGUFValueType.UINT16)}, "split.no is missing"),
    ],
)
def test_metadata_that_changes_the_maths_is_refused(extra: dict[str, tuple], reason: str, tmp_path: Path) -> None:
    write_gguf(original("llama"), "llama", tmp_path / "model.gguf", extra=extra)
    with pytest.raises(InvalidModel, match=reason) as caught:
        open_checkpoint(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in str(caught.value)
