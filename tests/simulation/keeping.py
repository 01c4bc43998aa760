"""A store beside the simulated device that loses and damages what it has, and forgets it when it likes."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from penstock.cache.store import BlockNames, Offloading
from tests.simulation.device import require

FINGERPRINT = "simulated"


class FakeStore:
    """`loss_rate`: of loads that find nothing any more, `drop_rate`: of names that are gone before anyone asks."""

    def __init__(self, seed: int, loss_rate: float = 0.0, drop_rate: float = 0.0) -> None:
        self.rng = random.Random(seed * 31 + 7)
        self.loss_rate, self.drop_rate = loss_rate, drop_rate
        self.kept: dict[bytes, list[list[int]]] = {}
        self.num_hits = self.num_lost = self.num_saved = 0

    def has(self, name: bytes) -> bool:
        if name in self.kept and self.rng.random() < self.drop_rate:
            del self.kept[name]
        return name in self.kept

    def flush(self) -> None:
        """It is there at once."""

    def refresh(self) -> None:
        """Nobody else has it."""

    def forget(self) -> None:
        self.kept.clear()

    def count(self) -> dict[str, int]:
        return {"num_store_blocks": len(self.kept)}

    def save(self, name: bytes, cells: Seq[list[int]]) -> None:
        old = self.kept.get(name)
        require(old is None or old == [list(some) for some in cells], "one name for two contents", name)
        self.num_saved += 1
        if self.rng.random() >= self.loss_rate:
            self.kept[name] = [list(some) for some in cells]

    def load(self, name: bytes) -> list[list[int]] | None:
        """A damaged block is lost as well: its checksum tells."""
        found = self.kept.get(name)
        if found is None or self.rng.random() < self.loss_rate:
            self.kept.pop(name, None)
            self.num_lost += 1
            return None
        self.num_hits += 1
        return found


def offload_to(store: FakeStore, max_saves: int = 8) -> Offloading:
    return Offloading(store, BlockNames(FINGERPRINT), max_saves)
