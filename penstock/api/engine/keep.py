"""Keep the keys and values of some layers in full where the KV cache is quantized."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import EngineConfig
from penstock.config.cache_dtypes import OPTION, QUANTIZED, WINDOWS, choose_plain_dtype, parse_skips
from penstock.errors import InvalidConfig
from penstock.models.spec import ModelSpec


def keep_layers(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Give the layers that kv_cache_dtype_skip_layers names the dtype that a cache has which is not quantized."""
    if config.kv_cache_dtype_skip_layers is None or spec.is_encoder:
        return spec
    numbers, windows = parse_skips(config.kv_cache_dtype_skip_layers)
    with_window = {index for index, layer in enumerate(spec.layers) if getattr(layer.mixer, "window", 0) > 0}
    with_cache = {index for index, state in enumerate(spec.states()) if state is not None and state.kind != "recurrent"}
    if unknown := sorted(numbers - set(range(spec.num_layers))):
        raise InvalidConfig(
            f"{OPTION}={unknown[0]} is over the model's {spec.num_layers} layers: name those from 0 to "
            f"{spec.num_layers - 1}"
        )
    if stateless := sorted(numbers - with_cache):
        raise InvalidConfig(f"{OPTION}={stateless[0]}: layer {stateless[0]} keeps no keys and values; leave it out")
    if windows and not with_window:
        raise InvalidConfig(f"{OPTION}={WINDOWS}: the model has no layer with a sliding window; name layers by number")
    if config.kv_cache_dtype not in QUANTIZED:
        return spec
    kept, dtype = numbers | (with_window if windows else set()), choose_plain_dtype(config)
    return replace(spec, cache_dtypes=tuple(dtype if index in kept else "" for index in range(spec.num_layers)))
