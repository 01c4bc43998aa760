"""Ranks of a model before anything is loaded: their layers, and the bytes of their weights and of their cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from penstock.api.engine.load import DTYPES, META
from penstock.api.ranks.share import count_state, cut_share, make_layout
from penstock.config import EngineConfig, choose_plain_dtype
from penstock.config.ranks import count_ranks
from penstock.models.files import Checkpoint
from penstock.models.load import Options
from penstock.models.spec import ModelSpec
from penstock.passes.outline import blank_model, weight_bytes


@dataclass(frozen=True)
class RankUse:
    rank: int
    node: int
    stage: int
    first_layer: int
    last_layer: int
    shard: int
    weight_bytes: int
    cache_bytes_per_token: int

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def list_ranks(checkpoint: Checkpoint | None, spec: ModelSpec, config: EngineConfig) -> list[RankUse]:
    """Count each rank's bytes; none for a single rank. Ranks of a stage are counted by their shares of its values."""
    if count_ranks(config) == 1:
        return []
    layout, options = make_layout(config), Options(DTYPES.get(config.dtype), config.quantization)
    kv_dtype = choose_plain_dtype(config) if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    sizes: dict[range, int] = {}
    found = []
    for rank in range(layout.num_ranks):
        share = cut_share(spec, config, rank)
        stage = share.stage
        assert stage is not None
        alone = replace(spec, stage=stage)
        if stage not in sizes:
            sizes[stage] = weight_bytes(blank_model(checkpoint, alone, options, META))
        part = count_values(share) / count_values(alone)
        found.append(
            RankUse(
                rank,
                layout.node(rank),
                layout.stage(rank),
                stage.start,
                stage.stop - 1,
                layout.shard(rank),
                int(part * sizes[stage]),
                count_state(share, kv_dtype),
            )
        )
    return found


def count_values(share: ModelSpec) -> int:
    return sum(prod(shape) for name, shape in share.parameters().items() if share.holds(name))
