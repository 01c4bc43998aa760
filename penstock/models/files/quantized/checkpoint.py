"""A quantized folder as a checkpoint of the plain model: its names and shapes, and its matrices in codes or widened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from math import prod
from pathlib import Path
from typing import Any

import torch

from penstock.errors import InvalidModel
from penstock.models.config import Config
from penstock.models.files.checkpoint import Checkpoint, Format, Span
from penstock.models.files.json_file import quote_name, read_object
from penstock.models.files.quantized.bitsandbytes import STATE, find_bitsandbytes
from penstock.models.files.quantized.compressed import find_compressed
from penstock.models.files.quantized.fp8 import find_fbgemm, find_fp8, find_mxfp4
from penstock.models.files.quantized.gptq import find_awq, find_gptq
from penstock.models.files.quantized.hqq import find_hqq
from penstock.models.files.quantized.matrix import Parts, QuantizedMatrix
from penstock.models.files.safetensors import SafetensorsCheckpoint
from penstock.quant.coded import Coded
from penstock.quant.ints import quantize
from penstock.quant.packed import Stored

Find = Callable[[Parts, Config], list[QuantizedMatrix]]

KEYS = ("quantization_config", "compression_config")  # of config.json
FILES = ("quantize_config.json", "quant_config.json")  # of folders older than the key
METHODS: dict[str, Find] = {
    "awq": find_awq,
    "bitsandbytes": find_bitsandbytes,
    "compressed-tensors": find_compressed,
    "fbgemm_fp8": find_fbgemm,
    "fp8": find_fp8,
    "gptq": find_gptq,
    "hqq": find_hqq,
    "mxfp4": find_mxfp4,
}

# Last parts of names that no plain model has, of all methods: where nothing uses them, the folder is damaged or mixed.
PARTS = frozenset(
    """
    qweight qzeros scales g_idx weight_packed weight_scale weight_scale_inv weight_zero_point weight_shape weight_g_idx
    weight_global_scale compressed bitmask SCB absmax quant_map nested_absmax nested_quant_map W_q
""".split()
)
# Scales of activations, which are rounded by their own range here, and of keys and values.
ACTIVATION_SCALES = frozenset("input_scale input_zero_point input_global_scale activation_scale output_scale".split())
KV_SCALES = frozenset("k_scale v_scale kv_scale q_scale prob_scale k_zero_point v_zero_point".split())
MAX_SCALES = 1024  # of one tensor: a scale for each head
WIDE = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


def find_settings(file: SafetensorsCheckpoint) -> dict[str, Any] | None:
    """Return a folder's quantization settings, wherever its writer put them; None if it is not quantized."""
    text = file.config.get("text_config")  # where some multimodal models have the text's
    places = {"": file.config, "text_config.": text if isinstance(text, dict) else {}}
    found = [
        (f"{place}{key}", config[key])
        for place, config in places.items()
        for key in KEYS
        if config.get(key) not in (None, {})
    ]
    if any(settings != found[0][1] for _, settings in found):
        names = " and ".join(key for key, _ in found)
        raise InvalidModel(f"{file.path}: config keys {names} differ: keep one of them")
    if found:
        key, settings = found[0]
        if not isinstance(settings, dict):
            raise InvalidModel(f"{file.path}: config key {key} must be a JSON object")
        return settings
    old = [file.path / name for name in FILES if (file.path / name).is_file()]
    if not old or not any(name.endswith(".qweight") for name in file.names()):
        return None
    method = "gptq" if old[0].name == FILES[0] else "awq"
    return {"quant_method": method} | read_object(old[0])


def _find_method(file: SafetensorsCheckpoint, settings: Mapping[str, Any]) -> Any:
    """Return the method that the settings name, or that their keys belong to."""
    method = settings.get("quant_method")
    if method is not None:
        return method
    if "config_groups" in settings or "sparsity_config" in settings:
        return "compressed-tensors"
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    if any(name.endswith(".biases") for name in file.names()):
        raise InvalidModel(
            f"{file.path}: its weights are in MLX's own format, which is not read: take the model they were made of, "
            "or a .gguf file of it"
        )
    return None


def wrap_folder(file: SafetensorsCheckpoint) -> SafetensorsCheckpoint | QuantizedCheckpoint:
    """Wrap a folder that is quantized; return another as it is."""
    settings = find_settings(file)
    if settings is None:
        _refuse_leftovers(file, Parts(file), "without a quantization_config in config.json")
        return file
    return QuantizedCheckpoint(file, settings)


def _refuse_leftovers(file: SafetensorsCheckpoint, parts: Parts, why: str) -> None:
    for name in file.names():
        if name not in parts.used and (name.rpartition(".")[2] in PARTS or f".{STATE}" in name):
            raise InvalidModel(
                f"{file.path}: tensor {quote_name(name)} is a part of a quantized matrix, {why}: the folder is damaged "
                "or of two methods; fetch the model again"
            )


def _is_scale(name: str) -> bool:
    """Return True for a scale of activations, keys or values, which nothing here uses."""
    return name.rpartition(".")[2] in ACTIVATION_SCALES | KV_SCALES


class QuantizedCheckpoint:
    """A folder whose matrices are quantized, under the names and shapes of the plain model."""

    format: Format = "safetensors"
    metadata = None
    requantizes = False  # matrices that a CPU multiplies as integers of 8 bits are read so
    keeps_floats = False  # matrices of 8-bit floats are read in their codes

    def __init__(self, file: SafetensorsCheckpoint, settings: Mapping[str, Any]) -> None:
        self.file, self.path = file, file.path
        self.config = {key: value for key, value in file.config.items() if key not in KEYS}
        self.generation_config, self.num_bytes = file.generation_config, file.num_bytes
        method = _find_method(file, settings)
        find = METHODS.get(method) if isinstance(method, str) else None
        if find is None:
            raise InvalidModel(
                f"{self.path}: quantization_config.quant_method={quote_name(str(method))} is unknown: the known ones "
                f"are {', '.join(METHODS)}; quantize the model with one of them, or use a .gguf file of it"
            )
        parts = Parts(file)
        self.matrices = {matrix.name: matrix for matrix in self._find(find, parts, settings)}
        kept = [name for name in file.names() if name not in parts.used and not _is_scale(name)]
        _refuse_leftovers(file, parts, f"which quant_method={method} does not have")
        twice = next((name for name in kept if name in self.matrices), None)
        if twice is not None:
            raise InvalidModel(f"{self.path}: tensor {quote_name(twice)} is stored both plain and quantized")
        self._names = [*kept, *self.matrices]
        self.wide = self._find_wide()
        self.method = str(method)
        self.quantization = self.describe(self._tell_on_cpu)

    def describe_kv_scales(self) -> str:
        """Count the scales of keys and values, which no cache here uses, and name their range; empty if there are
        none."""
        found = [name for name in self.file.names() if name.rpartition(".")[2] in KV_SCALES]
        values = torch.cat(
            [self.file.tensor(name).float().flatten()[:MAX_SCALES] for name in found] or [torch.zeros(0)]
        )
        values = values[values.isfinite()]
        between = f" ({values.min():.3g} to {values.max():.3g})" if len(values) else ""
        return f"{len(found)} scales of keys and values{between}" if found else ""

    def _find(self, find: Find, parts: Parts, settings: Mapping[str, Any]) -> list[QuantizedMatrix]:
        reader = Config(settings, path="quantization_config.")
        reader.ignore("quant_method")
        try:
            found = find(parts, reader)
            reader.finish()
        except InvalidModel as error:
            place = "" if str(error).startswith(str(self.path)) else f"{self.path}: "
            raise InvalidModel(f"{place}{error}") from None
        return found

    def _find_wide(self) -> str:
        """Return the dtype that matrices without a kernel are held in: the one the model was made for."""
        asked = self.config.get("dtype") or self.config.get("torch_dtype")
        return asked if isinstance(asked, str) and asked in WIDE else "bfloat16"

    def _tell_on_cpu(self, matrix: QuantizedMatrix) -> str:
        return "" if matrix.is_packed else f" as {'int8' if matrix.is_requantized else self.wide}"

    def describe(self, tell: Callable[[QuantizedMatrix], str]) -> str:
        """Name the storage of most values, each kind with what `tell` says of how it is held."""
        sizes: Counter[str] = Counter()
        for matrix in self.matrices.values():
            sizes[matrix.kind + tell(matrix)] += prod(matrix.shape)
        kinds = ", ".join(kind for kind, _ in sizes.most_common())
        return kinds if kinds.startswith(self.method) else f"{self.method} {kinds or '(none)'}"

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.matrices[name].shape if name in self.matrices else self.file.shape(name)

    def dtype(self, name: str) -> str:
        return self.wide if name in self.matrices else self.file.dtype(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the values, those of a quantized matrix in float32 as its format defines them."""
        if name not in self.matrices:
            return self.file.tensor(name)
        found = self.matrices[name].read()
        if not isinstance(found, Coded):
            return found
        values, shape = found.widen(), self.matrices[name].shape
        return values.view(shape[0], shape[2], shape[1]).transpose(1, 2) if len(shape) == 3 else values

    def list_spans(self) -> dict[str, Span]:
        return self.file.list_spans()

    def is_packed(self, name: str) -> bool:
        return name in self.matrices and self.matrices[name].is_packed

    def is_float8(self, name: str) -> bool:
        return name in self.matrices and self.matrices[name].is_float8

    def read_ggml(self, name: str) -> None:
        return None

    def read_codes(self, name: str) -> Stored | None:
        """Return a matrix in its codes; None if it has none that a packed format holds."""
        if self.requantizes and name in self.matrices and self.matrices[name].is_requantized:
            return quantize(self.tensor(name).flatten(0, -2), "int8")
        if self.keeps_floats and self.is_float8(name):
            coded = self.matrices[name].read()
            return coded if isinstance(coded, Coded) else None
        if not self.is_packed(name):
            return None
        found = self.matrices[name].read()
        return found if isinstance(found, Coded) and found.format is not None else None

    def tokenizer_source(self) -> Path:
        return self.path

    def close(self) -> None:
        self.file.close()


def requantize_floats(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint with its matrices of 8-bit floats, and others that no packed format holds, as integers of
    8 bits with a scale for each 32 values."""
    if not isinstance(checkpoint, QuantizedCheckpoint):
        return checkpoint
    changed = copy(checkpoint)
    changed.requantizes = True
    return changed


def keep_floats(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its matrices of 8-bit floats in their codes, as some GPUs multiply them."""
    if not isinstance(checkpoint, QuantizedCheckpoint):
        return checkpoint
    changed = copy(checkpoint)
    changed.keeps_floats = True
    return changed


def is_float8(checkpoint: Checkpoint, name: str) -> bool:
    """Return True if a folder has the tensor in 8-bit floats with scales."""
    return isinstance(checkpoint, QuantizedCheckpoint) and checkpoint.is_float8(name)


def is_requantized(checkpoint: Checkpoint, name: str) -> bool:
    """Return True if a CPU multiplies the tensor as integers of 8 bits that the file does not hold."""
    matrices = checkpoint.matrices if isinstance(checkpoint, QuantizedCheckpoint) else {}
    return name in matrices and matrices[name].is_requantized
