"""Blocks outside the pool, by content: their names, and which the next plan saves or loads. No bytes are here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from penstock.cache.pool import BlockPool
from penstock.cache.radix import Key, Node, Place, RadixCache, Root, Slot
from penstock.cache.uncomputed import Uncomputed

DIGEST_BYTES = 16
MAX_LOOKS = 512  # places that are looked at for one plan with rows


class KvStore(Protocol):
    """Blocks outside the pool, by name. One that is there now may be gone when it is to be loaded."""

    def has(self, name: bytes) -> bool: ...

    def flush(self) -> None:
        """Wait until others can find what was saved."""

    def refresh(self) -> None:
        """Take note of what others have put there."""

    def forget(self) -> None:
        """Drop everything."""

    def count(self) -> dict[str, int]:
        """Return figures for the metrics."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A place's content in the store, and the blocks of the pool that it is read from or written to."""

    name: bytes
    blocks: Slot


class BlockNames:
    """Names blocks by digests of the model's fingerprint, the root, and all keys up to the block. Equal names mean
    equal contents in any process."""

    def __init__(
        self,
        fingerprint: str,
        find_adapters: Callable[[str], str | None] = lambda key: None,
        between_machines: str | None = None,
    ) -> None:
        """`find_adapters` maps a root's adapter numbers, which are this process's, to digests of their files; None if
        unknown. `between_machines` is the fingerprint without what copies of a model differ in."""
        self._start = _digest(fingerprint.encode())
        self._between_machines = fingerprint if between_machines is None else between_machines
        self.find_adapters = find_adapters

    def share_between_machines(self) -> None:
        """Give equal copies of a model equal names; before anything is named."""
        self._start = _digest(self._between_machines.encode())

    def start(self, root: Root) -> bytes | None:
        """Return the digest of an empty prefix; None if what computes there has no name."""
        base = root.base
        adapters = self.find_adapters(base.adapter) if base.adapter else ""
        return None if adapters is None else _digest(self._start, repr((base.salt, adapters)).encode())

    def extend(self, digest: bytes, key: Key) -> bytes:
        return _digest(digest, repr(key).encode())

    def of(self, node: Node) -> bytes | None:
        """Return the digest of a node's prefix."""
        missing = []
        while node.digest is None and node.parent is not None:
            missing.append(node)
            node = node.parent
        if node.parent is None:
            node.digest = self.start(node.key[0])  # type: ignore[arg-type]
        digest = node.digest
        if digest is None:
            return None
        for child in reversed(missing):
            digest = child.digest = self.extend(digest, child.key)
        return digest


def _digest(*parts: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        made.update(part)
    return made.digest()


def name_slot(digest: bytes, g: int) -> bytes:
    """Name what group `g` holds at the end of a prefix."""
    return digest + g.to_bytes(2, "little")


@dataclass(frozen=True)
class Offloading:
    """Where blocks are kept outside the pool, and how many a plan with rows saves."""

    store: KvStore
    names: BlockNames
    max_saves: int = 8
    block_bytes: int = 0


class Saves:
    """Places that fell idle and may be worth keeping: a few are saved with each plan, as long as they are there."""

    def __init__(self, tree: RadixCache, uncomputed: Uncomputed, offloading: Offloading) -> None:
        self.tree, self.uncomputed = tree, uncomputed
        self.names, self.store, self.max_saves = offloading.names, offloading.store, offloading.max_saves
        self.block_bytes = offloading.block_bytes
        self.num_saved = 0  # blocks, since the start
        self.is_urgent = False  # something is to be saved at once
        self.idle: dict[Place, None] = {}
        tree.idle = self.idle

    def take(self, plan: int, has_rows: bool) -> tuple[Transfer, ...]:
        """Name what `plan` is to save: nothing that plans which have not ended are still to compute. A plan that
        `has_rows` saves a few only."""
        if not self.idle:
            return ()
        saves, unsure, count = [], set(self.uncomputed.list_places()), 0
        for place in list(islice(self.idle, MAX_LOOKS) if has_rows else self.idle):
            if place in unsure:
                continue
            del self.idle[place]
            saved = self._name(place)
            if saved is not None:
                self.tree.pool.mark_busy(saved.blocks, plan)
                saves.append(saved)
                count += len(saved.blocks)
                if count >= (self.max_saves if has_rows else 16 * self.max_saves):
                    break
        self.num_saved += count
        return tuple(saves)

    def hasten(self, node: Node | None) -> None:
        """Have all that is on the path to a node saved by the next plan, in use or not."""
        path: dict[Place, None] = {}
        while node is not None:
            path |= {(node, g): None for g, slot in enumerate(node.slots) if slot is not None}
            node = node.parent
        rest = {place: None for place in self.idle if place not in path}
        self.idle.clear()
        self.idle.update(path | rest)
        self.is_urgent = True

    def count(self) -> dict[str, int]:
        """Return counters since the start, and the store's figures."""
        return {"num_saved_blocks": self.num_saved, **self.store.count()}

    def forget(self) -> None:
        """Empty the store."""
        self.idle.clear()
        self.store.forget()

    def _name(self, place: Place) -> Transfer | None:
        """Name what the place holds; None if it holds nothing, or what it holds is in the store."""
        node, g = place
        slot = node.slots[g]
        digest = self.names.of(node) if slot is not None else None
        if slot is None or digest is None or self.store.has(name_slot(digest, g)):
            return None
        return Transfer(name_slot(digest, g), slot)


@dataclass(slots=True, eq=False)
class PendingLoad:
    place: Place
    name: bytes
    slot: Slot


class Loads:
    """Loads for the plan being made. Their blocks have an owner here until it is made, and stand in the tree."""

    def __init__(self, pool: BlockPool, tree: RadixCache) -> None:
        self._pool, self._tree = pool, tree
        self.pending: list[PendingLoad] = []
        self.num_loaded = 0  # blocks, since the start
        self._begin = 0

    def add(self, place: Place, name: bytes) -> Slot:
        """Take blocks for a place of the tree, to be filled before the plan's step. Call `evict` first."""
        node, g = place
        slot = tuple(self._pool.take() for _ in range(self._tree.groups[g].blocks_per_state))
        self._tree.hold(node, g, slot)
        self.pending.append(PendingLoad(place, name, slot))
        return slot

    def take(self, plan: int) -> tuple[Transfer, ...]:
        """Hand all to `plan`."""
        taken, self.pending = self.pending, []
        for load in taken:
            self._pool.release_all(load.slot, plan)
            self.num_loaded += len(load.slot)
        return tuple(Transfer(load.name, load.slot) for load in taken)

    def begin(self) -> None:
        """Take what is added from now on, until the next call, as one sequence's."""
        self._begin = len(self.pending)

    def cancel(self) -> None:
        """Drop the last sequence's, and their places: no plan reads them yet."""
        dropped, self.pending = self.pending[self._begin :], self.pending[: self._begin]
        for load in dropped:
            self._pool.release_all(load.slot)
        self._tree.drop(self._tree.find_dependents(load.place for load in dropped))
