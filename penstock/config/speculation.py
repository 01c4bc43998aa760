"""Options of speculative decoding, by vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import InvalidConfig, quote
from penstock.types.speculation import AUTO as AUTO
from penstock.types.speculation import MAX_DRAFT, METHODS

OPTION = "speculative_config"
OFF = "off"
MIN_LOOKUP, MAX_LOOKUP = 2, 16  # tokens


@dataclass(frozen=True)
class SpeculativeConfig:
    """`auto` drafts from grammars, the request's own text and earlier answers; the others from one source."""

    method: str = AUTO
    num_speculative_tokens: int = 8  # of a draft at most; the controller verifies as many as pay
    prompt_lookup_min: int = MIN_LOOKUP  # tokens that must agree with an earlier place
    prompt_lookup_max: int = MAX_LOOKUP  # tokens that are compared
    tree: bool = False  # verify the drafts of all drafters at once, merged into a tree
    corpus: str | None = None  # a text file whose passages are drafted, whatever the method


_RANGES = {
    "num_speculative_tokens": (1, MAX_DRAFT),
    "prompt_lookup_min": (MIN_LOOKUP, MAX_LOOKUP),
    "prompt_lookup_max": (MIN_LOOKUP, MAX_LOOKUP),
}


def parse_speculation(text: str) -> SpeculativeConfig | None:
    """Parse `auto`, `off` or a JSON object; None stands for off."""
    if text in (AUTO, OFF):
        return SpeculativeConfig() if text == AUTO else None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidConfig(
            f'{OPTION}={quote(text)} is not valid: give {AUTO}, {OFF} or a JSON object like {{"method": "ngram"}}'
        )
    known = [field.name for field in fields(SpeculativeConfig)]
    for name, value in values.items():
        if name not in known:
            raise InvalidConfig(f"{OPTION} has no {quote(name)}: give {', '.join(known)}")
        _check(name, value)
    made = SpeculativeConfig(**values)
    if made.prompt_lookup_min > made.prompt_lookup_max:
        raise InvalidConfig(
            f"{OPTION}: prompt_lookup_min={made.prompt_lookup_min} is over "
            f"prompt_lookup_max={made.prompt_lookup_max}: lower it, or raise the other"
        )
    return made


def _check(name: str, value: Any) -> None:
    if name == "method":
        if value not in METHODS:
            raise InvalidConfig(f"{OPTION}: method={quote(value)} is unknown: choose one of {', '.join(METHODS)}")
        return
    if name == "tree":
        if not isinstance(value, bool):
            raise InvalidConfig(f"{OPTION}: tree={quote(value)} is not valid: give true or false")
        return
    if name == "corpus":
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise InvalidConfig(f"{OPTION}: corpus={quote(value)} is not valid: give the path of a text file")
        return
    least, most = _RANGES[name]
    if type(value) is not int or not least <= value <= most:
        raise InvalidConfig(f"{OPTION}: {name}={quote(value)} is out of range: it must be {least} to {most}")
