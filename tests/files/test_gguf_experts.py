"""Tiny mixtures of experts written as GGUF by the rules of llama.cpp's converter give the originals' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from convert import TINY, write_tensors

from penstock.errors import InvalidModel
from penstock.models.decoder import Decoder
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.spec import spec_from_config
from penstock.quant.packed import Packed
from tests.models import oracle
from tests.models.paged import Paged

Kind = gguf.GGMLQuantizationType
WIDE = TINY | dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256)
YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, truncate=False, original_max_position_embeddings=32)
# GGUF architecture: the class and its config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("MixtralForCausalLM", WIDE | dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2moe": ("Qwen2MoeForCausalLM", WIDE | MOE | dict(shared_expert_intermediate_size=512)),
    "qwen3moe": ("Qwen3MoeForCausalLM", WIDE | MOE | dict(norm_topk_prob=True)),
    "olmoe": ("OlmoeForCausalLM", WIDE | dict(num_experts=4, num_experts_per_tok=2)),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        WIDE
        | dict(num_local_experts=4, num_experts_per_tok=2)
        | dict(embedding_multiplier=6.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=4.0),
    ),
    "glm4moe": (
        "Glm4MoeForCausalLM",
        WIDE
        | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, n_shared_experts=1)
        | dict(use_qk_norm=True, routed_scaling_factor=2.5, first_k_dense_replace=1, attention_bias=True),
    ),
    "llama4": (
        "Llama4ForCausalLM",
        WIDE
        | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size_mlp=512, num_hidden_layers=4)
        | dict(interleave_moe_layer_step=2),
    ),
    "ernie4_5-moe": (
        "Ernie4_5_MoeForCausalLM",
        WIDE | dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=256, moe_num_shared_experts=1),
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        WIDE | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=12, rope_parameters=YARN),
    ),
}


def _keys(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    is_llama4 = architecture == "llama4"
    writer.add_feed_forward_length(config.intermediate_size_mlp if is_llama4 else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(32 if architecture == "glm4moe" else 64)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if is_llama4:
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if architecture == "ernie4_5-moe":
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if architecture in ("qwen2moe", "qwen3moe", "glm4moe", "ernie4_5-moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "glm4moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(True)
        writer.add_expert_shared_count(1)
        writer.add_leading_dense_block_count(1)
    if architecture == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)


def _permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


RENAMED = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{each}_proj": f"ffn_{each}_shexp" for each in ("gate", "up", "down")},
    **{f"mlp.shared_expert{s}.{each}_proj": f"ffn_{each}_shexp" for s in ("", "s") for each in ("gate", "up", "down")},
}


def _tensors(architecture: str, model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    after = "post_attention_norm" if architecture in ("glm4moe", "gpt-oss") else "ffn_norm"
    for name, tensor in model.state_dict().items():
        if name in outer or name == "lm_head.weight":
            found[outer.get(name, "output.weight")] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        module, _, kind = rest.rpartition(".")
        if ".experts." in rest:
            transposed = architecture in ("gpt-oss", "llama4") and not rest.endswith("_bias")
            tensor = tensor.transpose(1, 2) if transposed else tensor
            kind = "bias" if rest.endswith("_bias") else "weight"
            if "gate_up" in rest:
                halves = (tensor[:, ::2], tensor[:, 1::2]) if architecture == "gpt-oss" else tensor.chunk(2, 1)
                for half, part in zip(("gate", "up"), halves):
                    found[f"blk.{layer}.ffn_{half}_exps.{kind}"] = part
            else:
                found[f"blk.{layer}.ffn_down_exps.{kind}"] = tensor
            continue
        if architecture in ("llama", "granitemoe") and ".q_proj" in name:
            tensor = _permuted(tensor, heads)
        if architecture in ("llama", "granitemoe") and ".k_proj" in name:
            tensor = _permuted(tensor, kv_heads)
        if rest in RENAMED:
            found[f"blk.{layer}.{RENAMED[rest]}"] = tensor.flatten()
        else:
            module = after if module == "post_attention_layernorm" else RENAMED[module]
            found[f"blk.{layer}.{module}.{kind}"] = tensor.squeeze(0) if "inp_shexp" in module else tensor
    return found


def write(
    tmp_path: Path, architecture: str, kinds: dict[str, Kind] | None = None, changes: dict[str, Any] | None = None
) -> tuple[Any, Path]:
    """Write a tiny model; `kinds` are the types of experts' tensors by a part of their names, others are float32."""
    name, config = MODELS[architecture]
    model, path = oracle.make(name, config, spread=0.08), tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    _keys(writer, architecture, model.config)
    tensors = _tensors(architecture, model) | (changes or {})
    write_tensors(
        writer, tensors, lambda each: next((k for part, k in (kinds or {}).items() if part in each), Kind.F32)
    )
    return model, path


def answers(path: Path, **options: Any) -> list[torch.Tensor]:
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, spec_from_config(checkpoint.config, 64), **options)
    assert isinstance(model, Decoder)
    return [torch.stack(row.logits) for row in Paged(model).run([[5, 17, 60, 3, 44, 91], [2, 33, 70]], 20, chunk=5)]


@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_the_originals(architecture: str, tmp_path: Path) -> None:
    model, path = write(tmp_path, architecture)
    checkpoint = open_checkpoint(path)
    ours = load_model(checkpoint, spec_from_config(checkpoint.config, 64))
    assert isinstance(ours, Decoder)
    for row in Paged(ours).run([[5, 17, 60, 3, 44, 91], [2, 33, 70]], 20, chunk=5):
        expected = oracle.logits(model, row.tokens[:-1])
        found = torch.stack(row.logits)
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "kinds",
    [
        {"exps": Kind.Q8_0},
        {"exps": Kind.Q4_0},
        {"_down_exps": Kind.Q5_0, "exps": Kind.Q4_1},
        {"_gate_exps": Kind.Q8_0, "_up_exps": Kind.Q4_0, "_down_exps": Kind.F16},
    ],
    ids=str,
)
def test_packed_experts_are_multiplied_as_stored(kinds: dict[str, Kind], tmp_path: Path) -> None:
    """Types may differ between gates, ups and downs; float activations give the widened weights' values."""
    _, path = write(tmp_path, "qwen3moe", kinds)
    checkpoint = open_checkpoint(path)
    packed = load_model(checkpoint, spec_from_config(checkpoint.config, 64), dtype=None)
    scheme: Any = packed.blocks[0].ffn.gate_up.scheme  # type: ignore[union-attr]
    assert isinstance(scheme, Packed) and len(scheme.parts) == (2 if "_gate_exps" in kinds else 1)
    for widened, kept in zip(answers(path), answers(path, dtype=None, rounded=False)):
        assert (widened - kept).abs().max() <= 1e-4 * widened.abs().max()


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("blk.1.ffn_up_exps.weight", (3, 256, 256), r"has shape \[3, 256, 256\], but its config says \[4, 256, 256\]"),
        ("blk.1.ffn_down_exps.weight", (4, 512, 256), r"has shape \[4, 512, 256\], but its config says"),
        ("blk.0.ffn_up_exps.weight", (256, 256), "no tensor 'blk.0.ffn_up_exps.weight' of three dimensions"),
    ],
)
def test_damage_is_named(name: str, shape: tuple[int, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=said):
        answers(write(tmp_path, "llama", changes={name: torch.zeros(shape)})[1])
