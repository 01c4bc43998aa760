"""How alike two vectors are."""

from __future__ import annotations

import math
from collections.abc import Sequence


def cosine(one: Sequence[float], two: Sequence[float]) -> float:
    dot = math.fsum(a * b for a, b in zip(one, two))
    norms = math.sqrt(math.fsum(a * a for a in one) * math.fsum(b * b for b in two))
    return dot / norms if norms else 0.0
