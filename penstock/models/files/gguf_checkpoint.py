"""A GGUF file as a checkpoint, with the config, names and values of the Hugging Face checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import InvalidModel
from penstock.models.files.checkpoint import Format, Span
from penstock.models.files.gguf import Keys, TensorInfo, Tensors
from penstock.models.files.gguf_config import read_config
from penstock.models.files.gguf_experts import EXPERT_CONFIGS
from penstock.models.files.gguf_latent import join_parts, join_shapes, pair_parts, read_deepseek2
from penstock.models.files.gguf_names import Origin, find, find_names
from penstock.models.files.gguf_parts import GgufModel
from penstock.models.files.json_file import quote_name
from penstock.quant.gguf import GGML_TYPES, dequantize
from penstock.quant.packed import GgmlMatrix

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


MIXTURES = {**EXPERT_CONFIGS, "deepseek2": read_deepseek2}  # architectures that may have experts


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
        self.config = read_config(Keys(self.file), MIXTURES)
        self.generation_config = _generation_config(self.file.metadata)
        architecture: str = self.file.metadata["general.architecture"]
        spelling = find_names(architecture, "blk.0.attn_norm_2.weight" in self.file.tensors)
        num_layers = self.config.get("num_hidden_layers") or self.config["n_layer"]
        num_drafting = self.file.metadata.get(f"{architecture}.nextn_predict_layers", 0)
        self.origins: dict[str, tuple[Origin, TensorInfo]] = {}
        for info in self.file.tensors.values():
            origin = find(spelling, info.name, num_layers, num_drafting)
            if origin is not None:
                self.origins[origin.name] = origin, _check_order(origin, info)
        self.pairs = pair_parts(self.origins)  # joint matrices → the parts that the file holds
        self.num_bytes = sum(info.num_bytes for info in self.file.tensors.values())
        self.quantization = _quantization(self.file)

    def names(self) -> list[str]:
        parts = {part for pair in self.pairs.values() for part in pair}
        return [*(name for name in self.origins if name not in parts), *self.pairs]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.pairs:
            k, v = self.pairs[name]
            return join_shapes(self.shape(k), self.shape(v))
        origin, info = self.origins[name]
        if origin.row and len(info.shape) == 1:
            return (1, *info.shape)
        return info.shape[::-1] if origin.transposed else info.shape

    def dtype(self, name: str) -> str:
        ggml_type = self.origins[self.pairs.get(name, (name,))[0]][1].ggml_type
        return str(DENSE[ggml_type]).removeprefix("torch.") if ggml_type in DENSE else GGML_TYPES[ggml_type].name

    def tensor(self, name: str) -> torch.Tensor:
        if name in self.pairs:
            k, v = self.pairs[name]
            return join_parts(self.tensor(k), self.tensor(v))
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
        if origin.row:
            tensor = tensor.reshape(self.shape(name))
        return tensor.T.contiguous() if origin.transposed else tensor

    def read_ggml(self, name: str) -> GgmlMatrix | None:
        if name in self.pairs:
            return None
        origin, info = self.origins[name]
        if info.ggml_type in DENSE or len(info.shape) not in (2, 3) or origin.one_plus:
            return None
        num_rows = math.prod(info.shape[:-1])  # of a stack of matrices: all of them
        raw = self.file.raw(info).reshape(num_rows, -1)
        return GgmlMatrix(info.ggml_type, raw, info.shape[-1], self._order(origin, num_rows), origin.transposed)

    def read_codes(self, name: str) -> None:
        return None

    def list_spans(self) -> dict[str, Span]:
        return self.file.list_spans()

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
