"""The engine's own entries of the ledger: how weights and cache are stored, and which kernels compute."""

from __future__ import annotations

import re

from penstock.config import Resolved
from penstock.config.cache_dtypes import name_cache
from penstock.config.speculation import REJECTION, parse_speculation
from penstock.ops import cpu
from penstock.types import Applied


def list_static(settings: Resolved, stored: str, packed: float, has_cache: bool) -> tuple[Applied, ...]:
    """List the entries of every request. `stored` is the format of the checkpoint's weights, `packed` the quantized
    share of its matrices."""
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


def _name_weights(settings: Resolved, stored: str, stays_packed: bool, is_whole: bool, rounded: bool) -> str:
    """Name the storage. `stored` may say what a CPU widens: `int4 g32, fp8 as bfloat16`."""
    file = re.sub(r" as [a-z0-9]+", "", stored)
    if settings.quantization and not (stays_packed and is_whole):
        return f"{file} as {settings.quantization}"
    if settings.dtype != "auto" and not stays_packed:
        return f"{file} as {settings.dtype}"
    if not rounded:
        return stored.replace(" as int8", " widened")
    return f"{stored}, levels rounded to 8 bits" if {"nf4", "fp4"} & set(stored.split()) else stored
