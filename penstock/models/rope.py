"""Reading rotary positions from a config, as transformers 4 (`rope_scaling`) or 5 (`rope_parameters`) spells them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.errors import InvalidConfig
from penstock.models.config import MAX_POSITIONS, Config
from penstock.models.layer import LinearScaling, Llama3Scaling, LongScaling, Rope, Scaling, YarnScaling

KINDS = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")}
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_FACTOR = 1e6


def _parameters(c: Config, layer_type: str) -> Config | None:
    """The object that holds the rope's constants, wherever this config keeps it."""
    new, old = c.section("rope_parameters"), c.section("rope_scaling")
    if new is not None and old is not None and new.values != old.values:
        c.refuse("rope_scaling", "contradicts rope_parameters: keep one of them")
    if new is not None and any(key in LAYER_TYPES for key in new.values):
        for key in LAYER_TYPES:
            new.section(key)
        return new.section(layer_type)
    return (new or old) if layer_type == "full_attention" else None


def _kind(p: Config | None, aliases: Mapping[str, str]) -> str:
    if p is None:
        return "default"
    return p.choice("rope_type", "type", choices={**KINDS, **aliases}, default="default")


def _factor(p: Config, default: float | None = None) -> float:
    if default is None:
        return p.number("factor", above=0.0, most=MAX_FACTOR)
    return p.number("factor", default=default, above=0.0, most=MAX_FACTOR)


def _base_positions(c: Config) -> int:
    return c.count("max_position_embeddings", "n_positions", "seq_length", most=MAX_POSITIONS)


def _original(c: Config, p: Config) -> int:
    """Positions of pretraining: beside the rope's constants (Phi-3), among them, or the model's own."""
    inside = p.count("original_max_position_embeddings", default=_base_positions(c), least=2, most=MAX_POSITIONS)
    return c.count("original_max_position_embeddings", default=inside, least=2, most=MAX_POSITIONS)


def max_positions(c: Config, aliases: Mapping[str, str] | None = None) -> int:
    """The context the model was made for, scaling included."""
    positions = _base_positions(c)
    c.ignore("original_max_position_embeddings")
    p = _parameters(c, "full_attention")
    kind = _kind(p, aliases or {})
    if p is not None and kind == "dynamic":
        positions = int(positions * max(1.0, _factor(p)))
    if p is not None and kind == "yarn":
        original = _original(c, p)
        positions = max(positions, int(original * _factor(p, positions / original)))
    return min(positions, MAX_POSITIONS)


def max_model_len(c: Config, positions: int) -> int:
    """The length to resolve for: what the user asked, or all the model has."""
    if c.max_model_len is None:
        return positions
    if not 1 <= c.max_model_len <= positions:
        raise InvalidConfig(
            f"max_model_len={c.max_model_len} is over the model's context of {positions}: set 1 to {positions}"
        )
    return c.max_model_len


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(c: Config, p: Config) -> YarnScaling:
    original = _original(c, p)
    factor = _factor(p, _base_positions(c) / original)
    mscale, mscale_all = p.number("mscale", default=0.0), p.number("mscale_all_dim", default=0.0)
    usual = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor)
    p.ignore("finetuned")
    return YarnScaling(
        factor,
        original,
        p.number("attention_factor", default=usual, above=0.0),
        p.number("beta_fast", default=0.0) or 32.0,
        p.number("beta_slow", default=0.0) or 1.0,
        p.flag("truncate", True),
    )


def _long(c: Config, p: Config, size: int, length: int) -> LongScaling:
    original = _original(c, p)
    factor = _factor(p, _base_positions(c) / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = p.numbers("short_factor", size // 2), p.numbers("long_factor", size // 2)
    return LongScaling(long if length > original else short, p.number("attention_factor", default=usual, above=0.0))


def _llama3(c: Config, p: Config) -> Llama3Scaling:
    low = p.number("low_freq_factor", above=0.0)
    return Llama3Scaling(_factor(p), low, p.number("high_freq_factor", above=low), _original(c, p))


def _dynamic_theta(c: Config, p: Config, size: int, theta: float, length: int) -> float:
    """NTK-aware scaling as it stands for sequences of `length`."""
    if size < 4:
        p.refuse("rope_type", f"needs at least 4 rotated dimensions a head, not {size}")
    factor, positions = _factor(p), _base_positions(c)
    growth = factor * max(length, positions) / positions - (factor - 1)
    return float(theta * growth ** (size / (size - 2)))


def rope(
    c: Config,
    head_size: int,
    *,
    layer_type: str = "full_attention",
    theta: float = 10000.0,
    theta_keys: Sequence[str] = ("rope_theta",),
    fraction: float = 1.0,
    fraction_keys: Sequence[str] = ("partial_rotary_factor",),
    aliases: Mapping[str, str] | None = None,
) -> Rope:
    """The rope of one kind of layer. `theta` and `fraction` are the family's defaults under their old key names."""
    p = _parameters(c, layer_type)
    kind = _kind(p, aliases or {})
    theta = c.number(*theta_keys, default=theta, above=1.0, most=1e15)
    fraction = c.number(*fraction_keys, default=fraction, above=0.0, most=1.0)
    if p is not None:
        theta = p.number("rope_theta", default=theta, above=1.0, most=1e15)
        fraction = p.number("partial_rotary_factor", default=fraction, above=0.0, most=1.0)
    size = int(head_size * fraction)
    if size < 2 or size % 2:
        c.refuse(fraction_keys[0], f"rotates {size} of a head's {head_size} dimensions: they must be even in number")
    if p is None or kind == "default":
        return Rope(size, theta)
    length = max_model_len(c, max_positions(c, aliases))
    if kind == "dynamic":
        return Rope(size, _dynamic_theta(c, p, size, theta, length))
    scaling: Scaling
    if kind == "linear":
        scaling = LinearScaling(_factor(p))
    elif kind == "llama3":
        scaling = _llama3(c, p)
    elif kind == "yarn":
        scaling = _yarn(c, p)
    elif kind == "factors":  # as GGUF files keep them: what each frequency is divided by
        scaling = LongScaling(p.numbers("factors", size // 2), 1.0)
    else:
        scaling = _long(c, p, size, length)
    return Rope(size, theta, scaling)
