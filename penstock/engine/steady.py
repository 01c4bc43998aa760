"""Going on by one token, as nearly every sequence does in nearly every step: the same as planning and accounting for it
in full, without looking at what cannot matter then."""

from __future__ import annotations

from penstock.cache.kv import Holding, KVCache
from penstock.engine.plan import Output, Row
from penstock.engine.sequence import Flight, Sequence

ONE_TOKEN = Flight(1, 1)
SAMPLE = Output.SAMPLE


class Steady:
    """What was seen at one position holds for those after it, up to the holding's `steady_until`, unless something else
    happens to the sequence: whatever that is sets this to 0."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._size = cache.block_size
        self._refs = cache.pool.refs
        self._possible = cache.only_full

    def row(self, sequence: Sequence, plan: int) -> Row | None:
        """The sequence's next position, entered into the plan; None if more is to be looked at."""
        computed, holding = sequence.computed, sequence.holding
        if holding is None:
            return None
        if computed < holding.steady_until:
            row = Row(sequence.row, computed, 1, SAMPLE)
        else:
            holding.steady_until = self._until(sequence, holding)
            if computed >= holding.steady_until:
                return None
            row = Row(sequence.row, computed, 1, SAMPLE, self._cache.changes(holding))
        holding.plan = plan
        sequence.flights.append(ONE_TOKEN)
        sequence.computed = computed + 1
        return row

    def _until(self, sequence: Sequence, holding: Holding) -> int:
        """Up to which position it goes on by one token at a time, in blocks that it has alone; 0 if it does not."""
        computed = sequence.computed
        known, certain = len(sequence.tokens), computed
        for flight in sequence.flights:
            known += flight.expected
            if flight.expected > 1:
                certain -= flight.expected - 1
        if (
            known - computed != 1
            or computed < sequence.num_prompt
            or known >= sequence.limit
            or not self._possible
            or sequence.special
            or sequence.draft
            or sequence.suspect
            or not sequence.admitted
        ):
            return 0
        size, until = self._size, sequence.limit - 1
        for table in holding.tables:
            until = min(until, len(table) * size)
            for index in range(certain // size, len(table)):
                if self._refs[table[index]] > 1:
                    return 0
        return until

    def accepts(self, sequence: Sequence, token: int) -> bool:
        """Take in the one token of such a row; False, with nothing changed, if more is to be looked at."""
        flights, holding, known = sequence.flights, sequence.holding, sequence.tokens
        if (
            sequence.special
            or sequence.suspect
            or sequence.keys
            or not self._possible
            or flights[0].expected != 1
            or token in sequence.stops
            or len(known) + 1 >= sequence.limit
        ):
            return False
        if holding is not None and holding.node is not None:
            whole, settled = (holding.num_inserted + 1) * self._size, sequence.computed
            if whole <= settled:  # at most: those of other unfinished plans are not
                for flight in flights[1:]:
                    settled -= flight.count
                if whole <= settled:
                    return False
        del flights[0]
        known.append(token)
        return True

    def check(self, sequence: Sequence) -> None:
        """A running one; what was seen of it must still be so."""
        holding = sequence.held
        if sequence.computed < holding.steady_until and (
            holding.steady_until > self._until(sequence, holding) or any(holding.changed)
        ):
            raise AssertionError(f"sequence {sequence.number} is not as steady as it was")
