"""Tiny DeepSeek-V2 and V3 models written as GGUF by the rules of llama.cpp's converter give the originals' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from convert import write_tensors

from penstock.errors import InvalidModel
from penstock.models.decoder import Decoder
from penstock.models.files import gguf_latent, open_checkpoint
from penstock.models.load import load_model
from penstock.models.spec import spec_from_config
from tests.models import oracle
from tests.models.paged import Paged

Kind = gguf.GGMLQuantizationType
TINY = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=8,
    v_head_dim=16,
    max_position_embeddings=128,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
# As DeepSeek's own: both mscales are equal, so that only the scores are scaled.
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=32,
    mscale=0.707,
    mscale_all_dim=0.707,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lite": ("DeepseekV2ForCausalLM", TINY | dict(q_lora_rank=None, rope_parameters=YARN)),
    "v2": (
        "DeepseekV2ForCausalLM",
        TINY
        | dict(q_lora_rank=24, topk_method="group_limited_greedy", n_group=4, topk_group=2)
        | dict(routed_scaling_factor=2.0),
    ),
    "v3": (
        "DeepseekV3ForCausalLM",
        TINY | dict(q_lora_rank=24, n_group=4, topk_group=2, n_shared_experts=1, rope_parameters=YARN),
    ),
}
RENAMED = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{each}_proj": f"ffn_{each}_shexp" for each in ("gate", "up", "down")},
}


def add_keys(writer: gguf.GGUFWriter, config: Any, apart: bool, changes: dict[str, int | None]) -> None:
    """Write the metadata, with keys and values `apart` as newer converters do."""
    heads, turned = config.num_attention_heads, config.qk_rope_head_dim
    whole, value = config.qk_nope_head_dim + turned, config.v_head_dim
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if apart else heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(turned)
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + turned if apart else whole)
    writer.add_value_length(config.kv_lora_rank if apart else value)
    if apart:
        writer.add_key_length_mla(whole)
        writer.add_value_length_mla(value)
    is_v3 = config.model_type == "deepseek_v3"
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(is_v3)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    if config.n_group:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    for key, number in changes.items():
        writer.kv_data[0].pop(f"deepseek2.{key}", None)
        if number is not None:
            writer.add_uint32(f"deepseek2.{key}", number)


def name_tensors(model: Any, apart: bool) -> dict[str, torch.Tensor]:
    config, found = model.config, {}
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in model.state_dict().items():
        if name in outer or name == "lm_head.weight":
            found[outer.get(name, "output.weight")] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        at, module = f"blk.{layer}.", rest.rpartition(".")[0]
        if rest == "mlp.experts.gate_up_proj":
            found[f"{at}ffn_gate_exps.weight"], found[f"{at}ffn_up_exps.weight"] = tensor.chunk(2, 1)
        elif rest == "mlp.experts.down_proj":
            found[f"{at}ffn_down_exps.weight"] = tensor
        elif rest == "mlp.gate.e_score_correction_bias":
            found[f"{at}exp_probs_b.bias"] = tensor
        elif module == "self_attn.kv_b_proj" and apart:
            heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            found[f"{at}attn_k_b.weight"], found[f"{at}attn_v_b.weight"] = k.transpose(1, 2), v
        else:
            found[f"{at}{RENAMED[module]}.weight"] = tensor
    return found


def write(
    folder: Path,
    name: str,
    apart: bool,
    kind: Kind = Kind.F32,
    changes: dict[str, int | None] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> tuple[Any, Path]:
    architecture, config = MODELS[name]
    model, path = oracle.make(architecture, config), folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    add_keys(writer, model.config, apart, changes or {})
    write_tensors(writer, name_tensors(model, apart) | (tensors or {}), lambda _: kind)
    return model, path


def answer(path: Path, **options: Any) -> list[tuple[list[int], torch.Tensor]]:
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, spec_from_config(checkpoint.config, 64), **options)
    assert isinstance(model, Decoder)
    rows = Paged(model).run([[5, 17, 60, 3, 44, 91], [2, 33, 70]], 20, chunk=5)
    return [(row.tokens, torch.stack(row.logits)) for row in rows]


@pytest.mark.parametrize("apart", [False, True], ids=["joint", "apart"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_originals(name: str, apart: bool, tmp_path: Path) -> None:
    model, path = write(tmp_path, name, apart)
    for tokens, found in answer(path):
        expected = oracle.logits(model, tokens[:-1])
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("apart", [False, True], ids=["joint", "apart"])
def test_packed_files_give_what_their_values_give(apart: bool, tmp_path: Path) -> None:
    """Absorbed matrices are held in 16 bits, all others as stored."""
    _, path = write(tmp_path, "v3", apart, Kind.Q8_0)
    for (_, widened), (_, kept) in zip(answer(path), answer(path, dtype=None, rounded=False)):
        assert (widened - kept).abs().max() <= 2e-3 * widened.abs().max()


def test_files_without_groups_have_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gguf_latent.GROUPS, 8, (4, 2))
    nothing: dict[str, int | None] = {"expert_group_count": None, "expert_group_used_count": None}
    model, path = write(tmp_path, "v3", False, changes=nothing)
    for tokens, found in answer(path):
        expected = oracle.logits(model, tokens[:-1])
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("changes", "tensors", "said"),
    [
        ({"rope.dimension_count": 40}, {}, "heads have 40 numbers, of which 40 are rotated"),
        ({"expert_gating_func": 3}, {}, "expert_gating_func is '3'; it must be"),
        ({"nextn_predict_layers": 2}, {}, "leaves none of the model's own layers"),
        ({"expert_group_count": 3}, {}, "n_group=3 does not divide"),
        ({"attention.head_count_kv": 2}, {}, "head_count_kv is '2'; it must be 1 or 4"),
        ({"attention.kv_lora_rank": 31}, {}, "has shape"),
        ({"attention.surprise": 1}, {}, "is unknown and may change the results"),
        ({}, {"blk.0.attn_k_b.weight": torch.zeros(4, 32)}, r"attn_k_b \[4, 32\] and attn_v_b .* must be"),
        ({}, {"blk.1.attn_v_b.weight": torch.zeros(4, 16, 8)}, r"attn_v_b \[4, 16, 8\] must be"),
    ],
)
def test_damage_is_named(
    changes: dict[str, int | None], tensors: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=said):
        answer(write(tmp_path, "v3", True, changes=changes, tensors=tensors)[1])


def test_one_part_alone_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_k_b.weight": torch.zeros(4, 32, 32)}
    with pytest.raises(InvalidModel, match="k_b_proj.weight' is unknown to DeepseekV3ForCausalLM"):
        answer(write(tmp_path, "v3", False, tensors=extra)[1])
