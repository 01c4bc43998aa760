"""The ranks of an engine as the API process knows them, and the last one that was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.messages import LastBeat, LostRank, RankRecord

MAX_SILENCE_S = 3.0  # of a rank that counts as up; it sends a heartbeat every second


@dataclass
class RankLoss:
    rank: int  # -1: not known
    why: str
    at_s: float  # since the epoch
    back_s: float | None = None  # when an engine was ready again

    def explain(self) -> str:
        """Say why requests waited for another engine, without names of machines."""
        return f"{'a rank' if self.rank < 0 else f'rank {self.rank}'} was lost and the engine was restarted"

    def describe(self) -> dict[str, Any]:
        back = None if self.back_s is None else round(self.back_s, 3)
        return {"rank": self.rank, "why": self.why, "at": round(self.at_s, 3), "back_at": back}


class RankWatch:
    """The ranks of an engine process and its successors; none where the model has one rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.facts: Sequence[RankRecord] = ()  # of the last process that was ready
        self.loss: RankLoss | None = None
        self.num_losses = 0
        self._is_lost = False  # one of the present process
        self._clock = clock
        self._heard: dict[int, float] = {}
        self._beats: dict[int, LastBeat] = {}  # of the present process

    def open(self, facts: Sequence[RankRecord]) -> None:
        """Begin with the ranks of a process that is ready."""
        now = self._clock()
        self.facts, self._heard = facts, {one.rank: now for one in facts}
        if self.loss is not None and self.loss.back_s is None:
            self.loss.back_s = time.time()

    def take(self, beats: Sequence[LastBeat]) -> None:
        now = self._clock()
        for beat in beats:
            self._heard[beat.rank], self._beats[beat.rank] = now - beat.silence_s, beat

    def lose(self, lost: LostRank) -> None:
        self.loss = RankLoss(lost.rank, lost.error, time.time())
        self.num_losses += 1
        self._is_lost = True

    def close(self) -> RankLoss | None:
        """Forget what the process told, which has ended; returns the loss of a rank that ended it, if it was that."""
        self._beats.clear()
        is_cause, self._is_lost = self._is_lost, False
        return self.loss if is_cause else None

    def measure_silence(self, rank: int) -> float:
        """Return the seconds since a rank's last heartbeat, or since it was ready."""
        return max(0.0, self._clock() - self._heard[rank])

    def is_up(self, rank: int) -> bool:
        return rank in self._beats and self.measure_silence(rank) < MAX_SILENCE_S

    def describe(self) -> dict[str, Any]:
        """Describe the ranks and the last that was lost; nothing for a model of one rank."""
        if not self.facts:
            return {}
        loss = None if self.loss is None else self.loss.describe()
        return {"ranks": [self._describe(one) for one in self.facts], "lost_rank": loss}

    def _describe(self, record: RankRecord) -> dict[str, Any]:
        beat = self._beats.get(record.rank)
        return {
            **describe_facts(record),
            "is_up": self.is_up(record.rank),
            "silence_s": round(self.measure_silence(record.rank), 3),
            "resident_bytes": beat and beat.resident_bytes,
            "free_bytes": beat and beat.free_bytes,
        }


def describe_facts(record: RankRecord) -> dict[str, Any]:
    """Describe a rank as it was when it was ready."""
    return {
        "rank": record.rank,
        "stage": record.stage,
        "shard": record.shard,
        "node": record.node,
        "pid": record.pid,
        "first_layer": record.first_layer,
        "last_layer": record.last_layer,
        "weight_bytes": record.weight_bytes,
        "cache_bytes": record.cache_bytes,
    }
