"""Ranks as an engine tells of them: what each is, once it is ready, a heartbeat every second, and which one is lost."""

from __future__ import annotations

import msgspec


class RankRecord(msgspec.Struct, frozen=True):
    """One of a model's processes: its layers, its share of them, and what it holds."""

    rank: int
    stage: int
    shard: int
    node: str  # the machine's name
    pid: int
    first_layer: int
    last_layer: int
    weight_bytes: int
    cache_bytes: int


class LastBeat(msgspec.Struct, frozen=True):
    """A rank's last heartbeat, and how long ago it came."""

    rank: int
    silence_s: float
    resident_bytes: int
    free_bytes: int  # of its machine


class LostRank(msgspec.Struct, frozen=True, tag=True):
    """The engine ends, since a rank is gone; -1 if it is not known which."""

    rank: int
    error: str
