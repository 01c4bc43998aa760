"""Read the RoPE of a GGUF file as config.json has it."""

from __future__ import annotations

import math
from typing import Any

from penstock.errors import InvalidModel
from penstock.models.files.gguf import Keys

# All Llama 3.1 and later models use these; only the factor differs. A file stores the resulting factors.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope(keys: Keys, head_size: int, partial: bool = False) -> dict[str, Any]:
    """Return rope_theta and, if they matter, partial_rotary_factor and rope_scaling."""
    config: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    size = keys.count("rope.dimension_count", head_size)
    if size > head_size or size % 2 or (size < head_size and not partial):
        raise InvalidModel(
            f"{keys.architecture}.rope.dimension_count is {size} with heads of {head_size}; "
            f"{'an even part' if partial else 'the whole'} of the head must be rotated"
        )
    if config["rope_theta"] <= 0:
        raise InvalidModel(f"{keys.architecture}.rope.freq_base is {config['rope_theta']}; it must be above 0")
    if size < head_size:
        config["partial_rotary_factor"] = _part(size, head_size)
    scaling = _read_scaling(keys, size // 2, config["rope_theta"])
    return config if scaling is None else config | {"rope_scaling": scaling}


def _part(size: int, head_size: int) -> float:
    """Return a fraction that truncates back to `size` when multiplied."""
    part = size / head_size
    return part if int(head_size * part) == size else math.nextafter(part, 1.0)


def _read_scaling(keys: Keys, num_frequencies: int, theta: float) -> dict[str, Any] | None:
    keys.require("rope.scaling.type", ("none", "linear", "yarn", "longrope"))
    keys.require("rope.scaling.yarn_ext_factor", (1.0, -1.0))
    kind = keys.get("rope.scaling.type") or "linear"  # the default when a file names only a factor
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    original = keys.optional_count("rope.scaling.original_context_length")
    if factor <= 0 or attention <= 0:
        raise InvalidModel(f"{keys.architecture}.rope.scaling has factors {factor} and {attention}; both must exceed 0")
    short, long = (_factors(keys, f"rope_factors_{each}.weight", num_frequencies) for each in ("short", "long"))
    if short and long:
        return _longrope(keys, short, long, attention)
    if short or long or kind == "longrope":
        raise InvalidModel("rope scaling longrope needs the tensors rope_factors_short.weight and _long.weight")
    if factors := _factors(keys, "rope_freqs.weight", num_frequencies):
        factors = [each * factor for each in factors] if kind == "linear" else factors
        return _llama3(factors, theta) or {"rope_type": "factors", "factors": factors}
    if kind == "yarn":
        return _yarn(keys, factor, attention, original)
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None


def _factors(keys: Keys, tensor: str, count: int) -> list[float]:
    factors = keys.vector(tensor)
    if factors and (len(factors) != count or not all(math.isfinite(each) and each > 0 for each in factors)):
        raise InvalidModel(f"tensor {tensor!r} must hold {count} factors above 0, it has {len(factors)}")
    return factors


def _llama3(factors: list[float], theta: float) -> dict[str, Any] | None:
    """Recover Llama 3's parameters from its factors; None for other factors."""
    factor = float(f"{max(factors):.6g}")
    original = LLAMA3["original_max_position_embeddings"]
    for index, found in enumerate(factors):
        turns = original / (2 * math.pi * theta ** (index / len(factors)))  # rotations within the original context
        smooth = min(1.0, max(0.0, (turns - LLAMA3["low_freq_factor"]) / (LLAMA3["high_freq_factor"] - 1)))
        if not math.isclose(found, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-4):
            return None
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _longrope(keys: Keys, short: list[float], long: list[float], attention: float) -> dict[str, Any]:
    """Convert longrope; the attention factor is set only if it differs from that of the lengths."""
    scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    longest = keys.count("context_length")
    original = keys.count("rope.scaling.original_context_length", longest)
    stretch = longest / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 < original else 1.0
    return scaling if math.isclose(attention, usual, rel_tol=1e-5) else scaling | {"attention_factor": attention}


def _yarn(keys: Keys, factor: float, attention: float, original: int | None) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original:
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    attention *= keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if attention != 1.0:
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling
