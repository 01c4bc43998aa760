"""llama-server's `samplers`: those that it does not name are switched off. Their order is fixed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidRequest, shown

# by name, what switches it off
OFF: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
OTHERS = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "i": "infill"}


def switch_off(samplers: str | list[str]) -> dict[str, Any]:
    """Values that leave only these samplers; a text has a letter for each."""
    names = [
        OTHERS.get(name, name)
        for name in (samplers if isinstance(samplers, list) else [LETTERS.get(char, char) for char in samplers])
    ]
    unknown = next((name for name in names if name not in OFF and name != "infill"), None)
    if unknown is not None:
        raise InvalidRequest(f"samplers: {shown(unknown)} is none of {', '.join(OFF)}")
    return {name: value for sampler, values in OFF.items() if sampler not in names for name, value in values.items()}
