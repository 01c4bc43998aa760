"""The engine's own entries of the ledger: how weights and cache are stored, and which kernels compute."""

from __future__ import annotations

import re

from penstock.config import Resolved
from penstock.config.cache_dtypes import name_cache
from penstock.config.speculation import REJECTION, parse_speculation
from penstock.models.files import Checkpoint
from penstock.models.files.quantized.checkpoint import QuantizedCheckpoint
from penstock.models.files.quantized.matrix import QuantizedMatrix
from penstock.ops import cpu
from penstock.types import Applied

IN_CODES = " with float16 scales"  # integers that keep their codes on a GPU


def list_static(settings: Resolved, stored: str, packed: float, has_cache: bool) -> tuple[Applied, ...]:
    """List the entries of every request. `stored` is what `describe_weights` says, `packed` the quantized share of the
    matrices."""
    on_cpu = settings.device == "cpu"
    stays_packed = packed > 0 and settings.keeps_packed
    rounded = on_cpu and settings.activation_dtype == "int8" and (stays_packed or bool(settings.quantization))
    found = [Applied("weights", _name_weights(settings, stored, stays_packed, packed == 1, rounded))]
    if rounded:
        found.append(Applied("activations", "int8"))
    if has_cache:
        found.append(Applied("kv_cache", name_cache(settings)))
    speculation = parse_speculation(settings.speculative_config)
    if speculation is not None and speculation.verification == REJECTION:
        found.append(Applied("verification", REJECTION, exact=False))
    if on_cpu:
        return (*found, Applied("kernels", f"cpu {cpu.path()}"))
    mode = "deterministic" if settings.deterministic else "fast"
    return (*found, Applied("kernels", f"gpu {mode}", exact=settings.deterministic))


def describe_weights(checkpoint: Checkpoint | None, settings: Resolved, has_fp8: bool = False) -> str:
    """Name the format of a checkpoint's weights, and on a GPU how it holds them. `has_fp8`: it multiplies 8-bit
    floats."""
    if checkpoint is None:
        return "dummy"
    if settings.device == "cpu":
        return checkpoint.quantization
    changed = settings.quantization or settings.dtype

    def tell(matrix: QuantizedMatrix) -> str:
        if matrix.is_float8:
            keeps = has_fp8 and (settings.keeps_packed or settings.quantization == "fp8")
            return "" if keeps else f" as {changed}"
        return IN_CODES if settings.keeps_packed and matrix.has_gpu_codes else f" as {changed}"

    if isinstance(checkpoint, QuantizedCheckpoint):
        return checkpoint.describe(tell)
    if settings.keeps_packed and any(checkpoint.is_packed(name) for name in checkpoint.names()):
        return checkpoint.quantization + IN_CODES
    return checkpoint.quantization + (f" as {changed}" if checkpoint.quantization != changed else "")


def _name_weights(settings: Resolved, stored: str, stays_packed: bool, is_whole: bool, rounded: bool) -> str:
    """Name the storage. `stored` may say what a CPU widens: `int4 g32, fp8 as bfloat16`; a GPU's is complete."""
    if settings.device != "cpu":
        return stored
    file = re.sub(r" as [a-z0-9]+", "", stored)
    if settings.quantization and not (stays_packed and is_whole):
        return f"{file} as {settings.quantization}"
    if settings.dtype != "auto" and not stays_packed:
        return f"{file} as {settings.dtype}"
    if not rounded:
        return stored.replace(" as int8", " widened")
    return f"{stored}, levels rounded to 8 bits" if {"nf4", "fp4"} & set(re.findall(r"\w+", stored)) else stored
