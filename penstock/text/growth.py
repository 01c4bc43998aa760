"""How much a tokenizer can lengthen a text: refused where its own steps multiply."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

MAX_GROWTH = 64.0  # of published tokenizers none has more than 4
MAX_STEPS = 64  # of a kind; those published have up to 20


def check_growth(backend: Backend) -> None:
    """Raise for a tokenizer whose steps, one after another, could make out of a text one more than MAX_GROWTH times
    as long. A chain of replacements that each double takes 40 steps to fill any memory."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        growth, count = 1.0, 0
        for step in _steps(json.loads(part.__getstate__())) if part is not None else ():
            growth, count = growth * _factor(step), count + 1
            if growth > MAX_GROWTH or count > MAX_STEPS:
                raise ValueError(
                    f"its {name} could lengthen a text more than {MAX_GROWTH:g} times (or has more than "
                    f"{MAX_STEPS} steps)"
                )


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = next((part[key] for key in ("normalizers", "pretokenizers", "processors", "decoders") if key in part), None)
    if inner is None:
        yield part
    for step in inner or ():
        yield from _steps(step)


def _factor(step: dict[str, Any]) -> float:
    """An upper bound: characters out for one character in, and for a template ids out for one id in."""
    kind = step.get("type")
    if kind == "Replace":
        pattern = step.get("pattern", {})
        length = len(step.get("content", ""))
        if "String" in pattern and pattern["String"]:
            return max(1.0, length / len(pattern["String"]))
        return max(1.0, length + _matches_nothing(pattern.get("Regex", "")))
    if kind == "TemplateProcessing":
        return max(1.0, float(sum("Sequence" in piece for piece in step.get("single", ()))))
    return 1.0


def _matches_nothing(pattern: str) -> bool:
    """The pattern matches between any two characters, as far as Python can tell."""
    try:
        return re.compile(pattern).match("") is not None
    except re.error:
        return "+" not in pattern and "{" not in pattern
