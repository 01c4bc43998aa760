"""Waiting and running sequences, their rows and blocks, and the prompt blocks that they are about to compute."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from penstock.cache.holding import Holding
from penstock.cache.kv import KVCache
from penstock.cache.radix import chain_hash
from penstock.cache.sessions import Sessions, retain
from penstock.engine.journal import RequestJournal
from penstock.engine.loras import LoraSlots
from penstock.engine.sequence import Sequence, Status
from penstock.types import Request


class PendingPrefixes:
    """Keys are hashes: a collision makes a sequence wait a little, never share a wrong block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._keys: Counter[int] = Counter()

    def announce(self, sequence: Sequence) -> None:
        """The sequence runs and will compute its prompt from `computed` on."""
        holding = sequence.held
        if holding.node is None:
            return
        keys = self._keys_after(sequence, holding.num_inserted, holding.node.chain)
        sequence.keys = list(keys)[sequence.computed // self.block_size - holding.num_inserted :]
        self._keys.update(sequence.keys)

    def progress(self, sequence: Sequence, inserted: int) -> None:
        """Blocks up to `inserted` are in the tree now."""
        count = len(sequence.keys) - max(0, len(sequence.request.tokens) // self.block_size - inserted)
        self._forget(sequence, max(0, count))

    def withdraw(self, sequence: Sequence) -> None:
        self._forget(sequence, len(sequence.keys))

    def is_awaited(self, sequence: Sequence, hit: int, chain: int) -> bool:
        """True if another sequence computes the block after the first `hit` positions, whose chain hash is `chain`."""
        index = hit // self.block_size
        if not self._keys or (index + 1) * self.block_size > len(sequence.request.tokens) - 1:
            return False
        sequence.awaits = next(self._keys_after(sequence, index, chain))
        return sequence.awaits in self._keys

    def is_still_awaited(self, sequence: Sequence) -> bool:
        """True while the block that it waits for is being computed."""
        return sequence.awaits in self._keys

    def _keys_after(self, sequence: Sequence, num_blocks: int, chain: int) -> Iterator[int]:
        """A key per whole block of the prompt after the first `num_blocks`, each over everything before it."""
        tokens, size, root = sequence.request.tokens, self.block_size, sequence.root
        for start in range(num_blocks * size, len(tokens) - size + 1, size):
            chain = chain_hash(chain, root.key(tokens, start, size))
            yield chain

    def _forget(self, sequence: Sequence, count: int) -> None:
        """Withdraw the first `count` blocks that the sequence announced: no plan computes them any more."""
        for key in sequence.keys[:count]:
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]
        del sequence.keys[:count]


class Roster:
    """The only place where a sequence changes its status, takes or leaves a row, and gives its blocks back."""

    def __init__(self, cache: KVCache, max_num_seqs: int) -> None:
        self.cache, self.loras = cache, LoraSlots()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.rows = list(range(max_num_seqs - 1, -1, -1))  # free ones
        self.requests: dict[str, list[Sequence]] = {}
        self.tenants: Counter[str] = Counter()  # of requests that wait or run
        self.prefixes = PendingPrefixes(cache.block_size)
        self.journal = RequestJournal()
        self.sessions = Sessions(cache.tree, time.monotonic)

    def enter(self, request: Request, sequences: list[Sequence]) -> None:
        self.sessions.expire()
        self.requests[request.id] = sequences
        self.tenants[request.tenant] += 1
        self.waiting.extend(sequences)
        for sequence in sequences:
            self.journal.wait(sequence)

    def uses_lora(self, number: int) -> bool:
        """True if a waiting or running sequence has this adapter."""
        return any(use.number == number for one in (*self.waiting, *self.running) for use in one.request.loras)

    def branch(self, parent: Sequence, child: Sequence, holding: Holding | None) -> None:
        """A new sequence of a known request; it runs at once if it has a holding."""
        self.requests[parent.request.id].append(child)
        self.waiting.append(child)
        self.journal.wait(child)
        if holding is not None:
            self.run(child, holding, parent.computed)

    def run(self, sequence: Sequence, holding: Holding, computed: int) -> None:
        sequence.holding, sequence.computed = holding, computed
        sequence.row, sequence.status = self.rows.pop(), Status.RUNNING
        sequence.adapter = self.loras.take(sequence.root.adapter)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.journal.run(sequence, computed)

    def preempt(self, sequence: Sequence, why: str = "", tenant: str = "") -> None:
        """Back to the queue with its tokens; its state is computed again, as far as the tree has not kept it.
        `tenant`: whose request gets the blocks."""
        self._leave_row(sequence)
        sequence.status = Status.WAITING
        self.waiting.append(sequence)
        self.journal.wait(sequence)
        self.journal.preempt(sequence, why, tenant)

    def finish(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._retain(sequence)
            self._leave_row(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        if all(other.done for other in self.requests[sequence.request.id]):
            del self.requests[sequence.request.id]
            self.tenants -= Counter([sequence.request.tenant])

    def _retain(self, sequence: Sequence) -> None:
        """Keep the sequence's path in the cache as long as its request asks."""
        request, node = sequence.request, sequence.held.node
        if node is None:
            return
        if request.cache_priority:
            retain(node, request.cache_priority)
        if request.session:
            self.sessions.keep(request, node, sequence.tokens)

    def _leave_row(self, sequence: Sequence) -> None:
        self.prefixes.withdraw(sequence)
        self.loras.release(sequence.root.adapter)
        self.cache.release(sequence.held)
        self.rows.append(sequence.row)
        self.running.remove(sequence)
        sequence.rewind()

    def check(self) -> None:
        for sequence in self.running + self.waiting:
            sequence.check()
        self.loras.check(s.root.adapter for s in self.running)
        rows = [s.row for s in self.running] + self.rows
        if len(set(rows)) != len(rows):
            raise AssertionError("a row has two owners")
        self.cache.check([s.held for s in self.running])
        alive = {s for sequences in self.requests.values() for s in sequences if not s.done}
        if alive != set(self.running) | set(self.waiting):
            raise AssertionError("a live sequence neither waits nor runs")
        if self.tenants != Counter(sequences[0].request.tenant for sequences in self.requests.values()):
            raise AssertionError("the requests of a tenant are miscounted")
