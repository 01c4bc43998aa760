"""One rank's part of a model: its stage's layers, its heads and experts, and its part of the cache."""

from __future__ import annotations

from dataclasses import replace

from penstock.cache.group import LAYOUTS, Grouping, cut_groups
from penstock.config import EngineConfig, Resolved
from penstock.models.spec import ModelSpec
from penstock.passes.shard import shard
from penstock.passes.stages import cut_stages
from penstock.runner.ranks.layout import RankLayout
from penstock.runner.store.open import RankPart

MESH_TIMEOUT_S = 600.0  # a rank that hangs is noticed by its heartbeat


def make_layout(config: EngineConfig) -> RankLayout:
    return RankLayout(config.tensor_parallel_size, config.pipeline_parallel_size, config.nnodes)


def cut_share(spec: ModelSpec, config: EngineConfig, rank: int) -> ModelSpec:
    """Return the spec of a rank. Second products are cut by their outputs: the bits are those of one rank."""
    layout = make_layout(config)
    stage = cut_stages(spec, layout.num_stages)[layout.stage(rank)]
    if layout.num_shards > 1:
        spec, _ = shard(spec, layout.shard(rank), layout.num_shards, "out", config.enable_expert_parallel)
    return replace(spec, stage=stage)


def cut_cache(grouping: Grouping, share: ModelSpec, kv_dtype: str, block_size: int) -> Grouping:
    """Return the groups that a rank keeps of the engine's."""
    assert share.stage is not None
    return cut_groups(grouping, share.stage, share.states(LAYOUTS[kv_dtype]), block_size)


def find_part(grouping: Grouping, spec: ModelSpec, settings: Resolved, rank: int) -> RankPart:
    """Return the part of each block that a rank keeps."""
    shares = [cut_share(spec, settings, one) for one in range(make_layout(settings).num_ranks)]
    num_bytes = [cut_cache(grouping, one, settings.kv_cache_dtype, settings.block_size).block_bytes for one in shares]
    return RankPart(rank, num_bytes[rank] / max(1, sum(num_bytes)))


def count_state(share: ModelSpec, kv_dtype: str) -> int:
    """Count the bytes that a rank keeps per position, states of recurrent layers aside."""
    states = share.cut().states(LAYOUTS[kv_dtype])
    return sum(state.bytes_per_position for state in states if state is not None)
