"""Ranks as rank 0 tells of them: what each is and holds, and the last that was heard of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from penstock.engine.ranks import LastBeat, RankRecord
from penstock.host.machine import free_memory_bytes, resident_bytes
from penstock.passes.outline import weight_bytes
from penstock.runner.cpu.runner import Runner
from penstock.runner.ranks.group import RankGroup
from penstock.runner.ranks.messages import RankReady


def count_held(runner: Runner) -> RankReady:
    """Count the bytes of a rank's weights, and of its part of the cache."""
    return RankReady(weight_bytes(runner.model), runner.memory.blocks.nbytes)


def describe_ranks(group: RankGroup, runner: Runner, stages: Sequence[range]) -> list[RankRecord]:
    """Describe all ranks, once they are ready; `runner` is rank 0's, and `stages` are each one's layers."""
    held = {0: count_held(runner), **group.loaded}
    places = {0: (os.uname().nodename, os.getpid())}
    places |= {rank: (hello.node, hello.pid) for rank, hello in group.hellos.items()}
    return [
        RankRecord(
            rank,
            group.layout.stage(rank),
            group.layout.shard(rank),
            *places[rank],
            stage.start,
            stage.stop - 1,
            held[rank].weight_bytes,
            held[rank].cache_bytes,
        )
        for rank, stage in enumerate(stages)
    ]


def list_beats(group: RankGroup) -> list[LastBeat]:
    """List how long ago each rank was heard, and its memory then; rank 0 is this process."""
    now, own = time.monotonic(), LastBeat(0, 0.0, resident_bytes(), free_memory_bytes())
    heard = sorted(group.beats.items())
    return [own, *(LastBeat(rank, now - at, one.resident_bytes, one.free_bytes) for rank, (at, one) in heard)]
