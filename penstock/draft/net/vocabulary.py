"""Two vocabularies that share tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.errors import InvalidConfig

MIN_SHARED = 0.5  # of the smaller vocabulary: with fewer, hardly a draft is right


def map_vocabularies(
    own: Mapping[str, int], target: Mapping[str, int], own_size: int, target_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the target's id of each of the draft model's tokens, -1 for one it does not have, and the other way round,
    where a token that the draft model does not have becomes its first."""
    shared = {token for token in own.keys() & target.keys() if own[token] < own_size and target[token] < target_size}
    least = min(len(own), len(target))
    if len(shared) < MIN_SHARED * least:
        raise InvalidConfig(
            f"speculative_config: the draft model's {len(own)} tokens and the model's {len(target)} have only "
            f"{len(shared)} in common, under {MIN_SHARED:.0%} of the smaller vocabulary: give one of the model's "
            "family"
        )
    target_ids, own_ids = np.full(own_size, -1, dtype=np.int64), np.zeros(target_size, dtype=np.int64)
    for token in shared:
        target_ids[own[token]] = target[token]
        own_ids[target[token]] = own[token]
    return target_ids, own_ids
