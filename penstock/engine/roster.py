"""Who waits, who runs, on which row, with which blocks."""

from __future__ import annotations

from collections import Counter

from penstock.cache.kv import Holding, KVCache
from penstock.engine.prefixes import PendingPrefixes
from penstock.engine.sequence import Sequence, Status
from penstock.types import Request


class Roster:
    """The only place where a sequence changes its status, takes or leaves a row, and gives its blocks back."""

    def __init__(self, cache: KVCache, max_num_seqs: int) -> None:
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.rows = list(range(max_num_seqs - 1, -1, -1))  # free ones
        self.requests: dict[str, list[Sequence]] = {}
        self.tenants: Counter[str] = Counter()  # of requests that wait or run
        self.prefixes = PendingPrefixes(cache.block_size)

    def enter(self, request: Request, sequences: list[Sequence]) -> None:
        self.requests[request.id] = sequences
        self.tenants[request.tenant] += 1
        self.waiting.extend(sequences)

    def branch(self, parent: Sequence, child: Sequence, holding: Holding | None) -> None:
        """A new sequence of a known request; it runs at once if it has a holding."""
        self.requests[parent.request.id].append(child)
        self.waiting.append(child)
        if holding is not None:
            self.run(child, holding, parent.computed)

    def run(self, sequence: Sequence, holding: Holding, computed: int) -> None:
        sequence.holding, sequence.computed = holding, computed
        sequence.row, sequence.status = self.rows.pop(), Status.RUNNING
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue with its tokens; its state is computed again, as far as the tree has not kept it."""
        self._leave_row(sequence)
        sequence.status = Status.WAITING
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._leave_row(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        if all(other.done for other in self.requests[sequence.request.id]):
            del self.requests[sequence.request.id]
            self._leave_tenant(sequence.request.tenant)

    def _leave_row(self, sequence: Sequence) -> None:
        self.prefixes.withdraw(sequence)
        self.cache.release(sequence.held)
        self.rows.append(sequence.row)
        self.running.remove(sequence)
        sequence.rewind()

    def _leave_tenant(self, tenant: str) -> None:
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def check(self) -> None:
        for sequence in self.running + self.waiting:
            sequence.check()
        rows = [s.row for s in self.running] + self.rows
        if len(set(rows)) != len(rows):
            raise AssertionError("a row has two owners")
        self.cache.check([s.held for s in self.running])
        alive = {s for sequences in self.requests.values() for s in sequences if not s.done}
        if alive != set(self.running) | set(self.waiting):
            raise AssertionError("a live sequence neither waits nor runs")
        if self.tenants != Counter(sequences[0].request.tenant for sequences in self.requests.values()):
            raise AssertionError("the requests of a tenant are miscounted")
