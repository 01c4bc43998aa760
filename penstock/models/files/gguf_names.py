"""GGUF tensor names to those of the Hugging Face checkpoint, and what the converter did to the values on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import InvalidModel
from penstock.models.files.damage import shown

# What config reading consumed, or what a runtime recomputes.
CONSUMED = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"})

TENSOR = re.compile(r"(?:blk\.(0|[1-9]\d{0,5})\.)?([a-z0-9_]+)\.(weight|bias)")


@dataclass(frozen=True)
class Spelling:
    """Modules of an architecture. Orders of rows differ where the converter changed them:

    `rotated`: each head's rows alternate between its two rotary halves; `stacked`: all queries, then all keys, then all
    values, where the checkpoint has them head by head (Falcon: group by group). `transposed` matrices are [in, out] in
    the checkpoint; `one_plus` norms are stored with 1 added.
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]
    stack: str = "model.layers"
    rotated: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    one_plus: bool = False


@dataclass(frozen=True)
class Origin:
    """A tensor under its checkpoint name, and what undoes the converter's work."""

    name: str
    rotated: bool = False
    stacked: bool = False
    transposed: bool = False
    one_plus: bool = False


def find(spelling: Spelling, tensor: str, num_layers: int) -> Origin | None:
    """The tensor's origin; None for one that only the config needed."""
    match = TENSOR.fullmatch(tensor)
    layer, module, kind = match.groups() if match else (None, "", "")
    if module in CONSUMED:
        return None
    known = (spelling.layer if layer else spelling.model).get(module)
    if known is None or (layer and int(layer) >= num_layers):
        raise InvalidModel(f"tensor {shown(tensor)} does not belong to a model of this kind with {num_layers} layers")
    return Origin(
        f"{spelling.stack}.{layer}.{known}.{kind}" if layer else f"{known}.{kind}",
        rotated=module in spelling.rotated,
        stacked=module in spelling.stacked,
        transposed=module in spelling.transposed and kind == "weight",
        one_plus=spelling.one_plus and module.endswith("norm") and kind == "weight",
    )


EMBEDDINGS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
WIDE = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
QKV = frozenset({"attn_qkv"})

LLAMA = Spelling(EMBEDDINGS, NORMS | ATTENTION | GATED, rotated=frozenset({"attn_q", "attn_k"}))
QWEN = Spelling(EMBEDDINGS, NORMS | ATTENTION | QK_NORMS | GATED)

SPELLINGS: dict[str, Spelling] = {
    "llama": LLAMA,
    "granite": LLAMA,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "gemma": Spelling(EMBEDDINGS, NORMS | ATTENTION | GATED, one_plus=True),
    "gemma2": Spelling(EMBEDDINGS, SANDWICH | ATTENTION | GATED, one_plus=True),
    "gemma3": Spelling(EMBEDDINGS, SANDWICH | ATTENTION | QK_NORMS | GATED, one_plus=True),
    "olmo2": Spelling(EMBEDDINGS, AFTER | ATTENTION | QK_NORMS | GATED),
    "starcoder2": Spelling(EMBEDDINGS, NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "phi3": Spelling(
        EMBEDDINGS,
        NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "gpt2": Spelling(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "ln_1",
            "ffn_norm": "ln_2",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        stack="transformer.h",
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    "gptneox": Spelling(
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        NORMS | WIDE | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        stack="gpt_neox.layers",
        stacked=QKV,
    ),
    "bloom": Spelling(
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        NORMS | WIDE | {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
        stack="transformer.h",
        stacked=QKV,
    ),
    "bert": Spelling(
        {
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
        },
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        stack="encoder.layer",
    ),
}

_FALCON_MODEL = {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"}
_FALCON_LAYER = WIDE | {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"}
FALCON = Spelling(_FALCON_MODEL, _FALCON_LAYER | {"attn_norm": "input_layernorm"}, "transformer.h", stacked=QKV)
FALCON_TWO_NORMS = Spelling(
    _FALCON_MODEL, _FALCON_LAYER | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}, "transformer.h", stacked=QKV
)


def spelling_of(architecture: str, two_norms: bool) -> Spelling:
    """`two_norms`: Falcon's larger models norm the input of attention and MLP separately."""
    if architecture == "falcon":
        return FALCON_TWO_NORMS if two_norms else FALCON
    return SPELLINGS[architecture]
