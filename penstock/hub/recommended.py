"""Sampling defaults for models whose files recommend none: the short names and their relatives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recommended:
    """Defaults for models of `family` (as in GGUF metadata, without case, spaces and dashes); all sizes, or one."""

    name: str
    family: str
    size: str
    values: Mapping[str, float]


# SmolLM2's authors recommend temperature 0.2 and top_p 0.9. At 135M in 4 bits so wide a nucleus admits first tokens
# that derail the answer: see docs/decisions/0021-one-set-of-defaults.md. Gemma's are Google's.
RECOMMENDED = (
    Recommended("smollm2", "smollm2", "135m", {"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.05}),
    Recommended("SmolLM2", "smollm2", "", {"temperature": 0.2, "top_p": 0.9}),
    Recommended("Gemma 3", "gemma3", "", {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
)


def find_recommended(metadata: Mapping[str, Any]) -> Recommended | None:
    """Return the defaults for the model that a GGUF file's metadata describes."""
    name, size = _plain(metadata.get("general.name")), _plain(metadata.get("general.size_label"))
    family = _plain(metadata.get("general.basename")) or name
    return next((one for one in RECOMMENDED if family.startswith(one.family) and one.size in (size or name)), None)


def _plain(text: object) -> str:
    return re.sub(r"[^a-z0-9]", "", text[:200].lower()) if isinstance(text, str) else ""
