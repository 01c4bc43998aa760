"""Sampling defaults that a user sets: the names there are, and `override_generation_config` as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidConfig, InvalidRequest, shown
from penstock.types import SamplingParams

NAMES = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
RARE_NAMES = (
    "presence_penalty",
    "frequency_penalty",
    "repeat_last_n",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)
LENGTH = "max_new_tokens"  # as generation_config.json calls max_tokens
OPTION = "override_generation_config"


def parse_override(text: str) -> dict[str, Any]:
    """The values by name. None stands for the neutral value, whatever the model recommends."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidConfig(f'{OPTION}={shown(text)} is not understood: give a JSON object like {{"temperature": 0.5}}')
    for name, value in values.items():
        if name not in (*NAMES, *RARE_NAMES, LENGTH):
            raise InvalidConfig(f"{OPTION} has no {shown(name)}: give {', '.join((*NAMES, *RARE_NAMES))} or {LENGTH}")
        if value is not None:
            _check(name, value)
    return values


def _check(name: str, value: Any) -> None:
    try:
        sampling_of({name: value})
    except InvalidRequest as error:
        raise InvalidConfig(f"{OPTION}: {str(error).replace('max_tokens', LENGTH)}") from None


def sampling_of(values: Mapping[str, Any]) -> SamplingParams:
    """Parameters with such values, by generation_config.json's names."""
    return SamplingParams(**{"max_tokens" if name == LENGTH else name: value for name, value in values.items()})
