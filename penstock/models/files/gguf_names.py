"""Names of GGUF tensors, by architecture: which tensor of the Hugging Face checkpoint each is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import InvalidModel
from penstock.models.files.json_file import quote_name

# Consumed by the config, or recomputed at run time.
CONSUMED = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"})

TENSOR = re.compile(r"(?:blk\.(0|[1-9]\d{0,5})\.)?((?:nextn\.)?[a-z0-9_]+)\.(weight|bias)")


@dataclass(frozen=True)
class GgufNames:
    """Module names of an architecture, and where the converter changed the order of rows:

    `rotated`: each head's rows alternate between its two rotary halves; `stacked`: all queries, then keys, then values,
    where the checkpoint has them head by head (Falcon: group by group). `transposed` matrices are [in, out] in the
    checkpoint; `one_plus` norms are stored with 1 added.
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]
    stack: str = "model.layers"
    rotated: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    one_plus: bool = False
    rows: frozenset[str] = frozenset()  # matrices of one row, which are stored as vectors


@dataclass(frozen=True)
class Origin:
    """A tensor's checkpoint name, and how to undo the converter's changes."""

    name: str
    rotated: bool = False
    stacked: bool = False
    transposed: bool = False
    one_plus: bool = False
    row: bool = False


def find(spelling: GgufNames, tensor: str, num_layers: int, num_drafting: int = 0) -> Origin | None:
    """Return the tensor's origin; None if only the config needs it."""
    match = TENSOR.fullmatch(tensor)
    layer, module, kind = match.groups() if match else (None, "", "")
    if module in CONSUMED:
        return None
    if layer and num_layers <= int(layer) < num_layers + num_drafting:
        return None
    known = (spelling.layer if layer else spelling.model).get(module)
    if known is None or (layer and int(layer) >= num_layers):
        raise InvalidModel(
            f"tensor {quote_name(tensor)} does not belong to a model of this kind with {num_layers} layers"
        )
    return Origin(
        f"{spelling.stack}.{layer}.{known}.{kind}" if layer else f"{known}.{kind}",
        rotated=module in spelling.rotated,
        stacked=module in spelling.stacked,
        transposed=module in spelling.transposed and kind == "weight",
        row=module in spelling.rows,
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

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_exps",
    "ffn_up_exps": "mlp.experts.up_exps",
    "ffn_down_exps": "mlp.experts.down_exps",
}
SHARED = {f"ffn_{each}_shexp": f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")}

LLAMA = GgufNames(EMBEDDINGS, NORMS | ATTENTION | GATED | EXPERTS, rotated=frozenset({"attn_q", "attn_k"}))
QWEN = GgufNames(EMBEDDINGS, NORMS | ATTENTION | QK_NORMS | GATED)
QWEN_MOE = GgufNames(
    EMBEDDINGS,
    NORMS | ATTENTION | QK_NORMS | GATED | EXPERTS | SHARED | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    rows=frozenset({"ffn_gate_inp_shexp"}),
)
GLM_MOE = GgufNames(
    EMBEDDINGS,
    {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    | ATTENTION
    | QK_NORMS
    | GATED
    | EXPERTS
    | SHARED
    | {"exp_probs_b": "mlp.gate.e_score_correction"},
)

LATENT = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
}
DEEPSEEK = GgufNames(
    EMBEDDINGS, NORMS | LATENT | GATED | EXPERTS | SHARED | {"exp_probs_b": "mlp.gate.e_score_correction"}
)

GPT_OSS = GgufNames(
    EMBEDDINGS,
    {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"}
    | ATTENTION
    | EXPERTS
    | {"ffn_gate_inp": "mlp.router"},
)

LLAMA4 = GgufNames(
    EMBEDDINGS,
    NORMS
    | ATTENTION
    | {"ffn_gate_inp": "feed_forward.router"}
    | {f"ffn_{each}": f"feed_forward.{each}_proj" for each in ("gate", "up", "down")}
    | {f"ffn_{each}_exps": f"feed_forward.experts.{each}_exps" for each in ("gate", "up", "down")}
    | {f"ffn_{each}_shexp": f"feed_forward.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
)

SPELLINGS: dict[str, GgufNames] = {
    "llama4": LLAMA4,
    "ernie4_5-moe": GgufNames(
        EMBEDDINGS, NORMS | ATTENTION | GATED | EXPERTS | SHARED | {"exp_probs_b": "mlp.gate.e_score_correction"}
    ),
    "llama": LLAMA,
    "deepseek2": DEEPSEEK,
    "granite": LLAMA,
    "granitemoe": LLAMA,
    "olmoe": QWEN_MOE,
    "qwen2moe": QWEN_MOE,
    "qwen3moe": QWEN_MOE,
    "glm4moe": GLM_MOE,
    "gpt-oss": GPT_OSS,
    "qwen2": QWEN,
    "qwen2vl": QWEN,
    "qwen3": QWEN,
    "qwen3vl": QWEN,
    "gemma": GgufNames(EMBEDDINGS, NORMS | ATTENTION | GATED, one_plus=True),
    "gemma2": GgufNames(EMBEDDINGS, SANDWICH | ATTENTION | GATED, one_plus=True),
    "gemma3": GgufNames(EMBEDDINGS, SANDWICH | ATTENTION | QK_NORMS | GATED, one_plus=True),
    "command-r": QWEN,
    "cohere2": QWEN,
    "smollm3": LLAMA,
    "arcee": LLAMA,
    "ernie4_5": QWEN,
    "stablelm": QWEN,
    "seed_oss": GgufNames(
        EMBEDDINGS,
        {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"} | ATTENTION | GATED,
    ),
    "exaone4": GgufNames(EMBEDDINGS, AFTER | ATTENTION | QK_NORMS | GATED),
    "glm4": GgufNames(
        EMBEDDINGS,
        NORMS
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
        | ATTENTION
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
    ),
    "phi2": GgufNames(
        {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        {"attn_norm": "input_layernorm", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
        | ATTENTION
        | {"attn_output": "self_attn.dense"},
    ),
    "olmo2": GgufNames(EMBEDDINGS, AFTER | ATTENTION | QK_NORMS | GATED),
    "starcoder2": GgufNames(EMBEDDINGS, NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "phi3": GgufNames(
        EMBEDDINGS,
        NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "gpt2": GgufNames(
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
    "gptneox": GgufNames(
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        NORMS | WIDE | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        stack="gpt_neox.layers",
        stacked=QKV,
    ),
    "bloom": GgufNames(
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
    "bert": GgufNames(
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
FALCON = GgufNames(_FALCON_MODEL, _FALCON_LAYER | {"attn_norm": "input_layernorm"}, "transformer.h", stacked=QKV)
FALCON_TWO_NORMS = GgufNames(
    _FALCON_MODEL, _FALCON_LAYER | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}, "transformer.h", stacked=QKV
)


def find_names(architecture: str, two_norms: bool) -> GgufNames:
    """Return an architecture's spelling. `two_norms`: Falcon's larger models norm attention and MLP inputs
    separately."""
    if architecture == "falcon":
        return FALCON_TWO_NORMS if two_norms else FALCON
    return SPELLINGS[architecture]
