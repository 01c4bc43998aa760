"""Layers that keep keys and values in full where the KV cache is quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import InvalidConfig, quote

if TYPE_CHECKING:
    from penstock.config.options import EngineConfig

AUTO_KV_DTYPE = "float16"
QUANTIZED = ("int8", "int4", "fp8")
OPTION = "kv_cache_dtype_skip_layers"
WINDOWS = "sliding_window"
MAX_NAMES = 1000


def choose_plain_dtype(config: EngineConfig) -> str:
    """Return the dtype of a cache that is not quantized: on a GPU, of settings that name the weights' dtype."""
    return AUTO_KV_DTYPE if config.dtype == "auto" else config.dtype


def parse_skips(text: str | None) -> tuple[frozenset[int], bool]:
    """Parse layer numbers and `sliding_window`, with commas or spaces between them: the layers, and if those with a
    window are among them."""
    names = (text or "").replace(",", " ").split()
    layers = frozenset(int(name) for name in names if name.isascii() and name.isdigit() and len(name) < 6)
    wrong = [name for name in names if name != WINDOWS and not (name.isascii() and name.isdigit() and len(name) < 6)]
    if wrong or text is not None and not names or len(names) > MAX_NAMES:
        raise InvalidConfig(
            f"{OPTION}={quote(wrong[0] if wrong else text)} is not valid: give layers by number, from 0 on, or "
            f"{WINDOWS}, with commas between them"
        )
    return layers, WINDOWS in names


def name_cache(config: EngineConfig) -> str:
    """Name how keys and values are stored, and which layers otherwise."""
    names = (config.kv_cache_dtype_skip_layers or "").replace(",", " ").split()
    if not names or config.kv_cache_dtype not in QUANTIZED:
        return config.kv_cache_dtype
    return f"{config.kv_cache_dtype}, {choose_plain_dtype(config)} in layers {' '.join(names)}"
