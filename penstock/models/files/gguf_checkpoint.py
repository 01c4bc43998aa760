"""A GGUF file as a checkpoint, with the config, names and values of the Hugging Face checkpoint."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import InvalidModel
from penstock.models.files.checkpoint import Format
from penstock.models.files.gguf import Keys, TensorInfo, Tensors
from penstock.models.files.gguf_config import read_config
from penstock.models.files.gguf_parts import GgufModel
from penstock.models.files.json_file import quote_name
from penstock.quant.gguf import GGML_TYPES, dequantize
from penstock.quant.packed import GgmlMatrix

# Consumed by the config, or recomputed at run time.
CONSUMED = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"})

TENSOR = re.compile(r"(?:blk\.(0|[1-9]\d{0,5})\.)?([a-z0-9_]+)\.(weight|bias)")


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


@dataclass(frozen=True)
class Origin:
    """A tensor's checkpoint name, and how to undo the converter's changes."""

    name: str
    rotated: bool = False
    stacked: bool = False
    transposed: bool = False
    one_plus: bool = False


def find(spelling: GgufNames, tensor: str, num_layers: int) -> Origin | None:
    """Return the tensor's origin; None if only the config needs it."""
    match = TENSOR.fullmatch(tensor)
    layer, module, kind = match.groups() if match else (None, "", "")
    if module in CONSUMED:
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

LLAMA = GgufNames(EMBEDDINGS, NORMS | ATTENTION | GATED, rotated=frozenset({"attn_q", "attn_k"}))
QWEN = GgufNames(EMBEDDINGS, NORMS | ATTENTION | QK_NORMS | GATED)

SPELLINGS: dict[str, GgufNames] = {
    "llama": LLAMA,
    "granite": LLAMA,
    "qwen2": QWEN,
    "qwen2vl": QWEN,
    "qwen3": QWEN,
    "qwen3vl": QWEN,
    "gemma": GgufNames(EMBEDDINGS, NORMS | ATTENTION | GATED, one_plus=True),
    "gemma2": GgufNames(EMBEDDINGS, SANDWICH | ATTENTION | GATED, one_plus=True),
    "gemma3": GgufNames(EMBEDDINGS, SANDWICH | ATTENTION | QK_NORMS | GATED, one_plus=True),
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


# general.file_type: the quantizer's target; single tensors differ.
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
    39: "NVFP4",
}
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # kept as stored
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repeat_last_n",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


class GgufCheckpoint:
    """A GGUF model, in one file or several, with names and row orders of the Hugging Face checkpoint."""

    format: Format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GgufModel(path)
        try:
            self._translate()
        except InvalidModel as error:
            self.close()
            raise InvalidModel(f"{path}: {error}") from None

    def _translate(self) -> None:
        self.config = read_config(Keys(self.file))
        self.generation_config = _generation_config(self.file.metadata)
        architecture: str = self.file.metadata["general.architecture"]
        spelling = find_names(architecture, "blk.0.attn_norm_2.weight" in self.file.tensors)
        num_layers = self.config.get("num_hidden_layers") or self.config["n_layer"]
        self.origins: dict[str, tuple[Origin, TensorInfo]] = {}
        for info in self.file.tensors.values():
            origin = find(spelling, info.name, num_layers)
            if origin is not None:
                self.origins[origin.name] = origin, _check_order(origin, info)
        self.num_bytes = sum(info.num_bytes for info in self.file.tensors.values())
        self.quantization = _quantization(self.file)

    def names(self) -> list[str]:
        return list(self.origins)

    def shape(self, name: str) -> tuple[int, ...]:
        origin, info = self.origins[name]
        return info.shape[::-1] if origin.transposed else info.shape

    def dtype(self, name: str) -> str:
        ggml_type = self.origins[name][1].ggml_type
        return str(DENSE[ggml_type]).removeprefix("torch.") if ggml_type in DENSE else GGML_TYPES[ggml_type].name

    def tensor(self, name: str) -> torch.Tensor:
        origin, info = self.origins[name]
        raw = self.file.raw(info)
        order = self._order(origin, info.shape[0])
        if order is not None:
            raw = raw.reshape(info.shape[0], -1)[order].ravel()
        if info.ggml_type in DENSE:
            tensor = torch.from_numpy(raw.copy()).view(DENSE[info.ggml_type]).reshape(info.shape)
        else:
            tensor = torch.from_numpy(dequantize(raw, info.ggml_type, info.shape))
        if origin.one_plus:
            tensor = tensor.float() - 1
        return tensor.T.contiguous() if origin.transposed else tensor

    def read_ggml(self, name: str) -> GgmlMatrix | None:
        origin, info = self.origins[name]
        if info.ggml_type in DENSE or len(info.shape) != 2 or origin.one_plus:
            return None
        raw = self.file.raw(info).reshape(info.shape[0], -1)
        return GgmlMatrix(info.ggml_type, raw, info.shape[1], self._order(origin, info.shape[0]), origin.transposed)

    def read_coded(self, name: str) -> None:
        return None

    def is_packed(self, name: str) -> bool:
        return self.read_ggml(name) is not None

    def _order(self, origin: Origin, num_rows: int) -> np.ndarray | None:
        """Return, for each row of the checkpoint, its row in the file."""
        heads = self.config.get("num_attention_heads") or self.config["n_head"]
        kv_heads = self.config.get("num_key_value_heads") or self.config.get("num_kv_heads") or heads
        if origin.rotated:
            count = heads if ".q_proj." in origin.name else kv_heads
            result: np.ndarray = _rows(num_rows, 2 * count, origin.name).reshape(count, -1, 2).swapaxes(1, 2).ravel()
            return result
        if not origin.stacked:
            return None
        rows = _rows(num_rows, heads + 2 * kv_heads, origin.name)
        if heads % kv_heads:
            raise InvalidModel(f"{self.path}: {heads} heads do not divide into {kv_heads} groups")
        size = num_rows // (heads + 2 * kv_heads)
        parts = np.split(rows, [heads * size, (heads + kv_heads) * size])
        return np.concatenate([part.reshape(kv_heads, -1) for part in parts], axis=1).ravel()

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.file.metadata

    def tokenizer_source(self) -> Mapping[str, Any]:
        return self.file.metadata

    def close(self) -> None:
        self.file.close()


def _rows(num_rows: int, divisor: int, name: str) -> np.ndarray:
    if num_rows % divisor:
        raise InvalidModel(f"tensor {name!r} has {num_rows} rows, which do not divide into {divisor} parts")
    return np.arange(num_rows)


def _check_order(origin: Origin, info: TensorInfo) -> TensorInfo:
    """Refuse what cannot be reordered: rows of a quantized vector, matrices that are not 2-D."""
    reordered = origin.rotated or origin.stacked
    if reordered and len(info.shape) == 1 and info.ggml_type not in DENSE:
        raise InvalidModel(f"tensor {quote_name(info.name)} is a quantized vector whose rows would have to be moved")
    if origin.transposed and len(info.shape) != 2:
        raise InvalidModel(f"tensor {quote_name(info.name)} has {len(info.shape)} dimensions; it must have 2")
    return info


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the end ids and the sampling parameters the authors recommend."""
    ids = [metadata.get(f"tokenizer.ggml.{each}_token_id") for each in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(each for each in ids if type(each) is int))
    config: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    for key, name in SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if type(value) in (int, float):
            config[name] = value if isinstance(value, int) else float(str(np.float32(value)))
    return config


def _quantization(file: Tensors) -> str:
    asked = file.metadata.get("general.file_type")
    if type(asked) is int and asked in FILE_TYPES:
        return FILE_TYPES[asked]
    sizes: Counter[str] = Counter()
    for info in file.tensors.values():
        sizes[GGML_TYPES[info.ggml_type].name] += math.prod(info.shape)
    return sizes.most_common(1)[0][0]
