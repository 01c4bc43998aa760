"""The decode fast path: as full planning and accounting for one token, without the checks that cannot apply."""

from __future__ import annotations

from penstock.cache.holding import Holding
from penstock.cache.kv import KVCache
from penstock.engine.plan import Output, Row
from penstock.engine.sequence import InFlight, Sequence

ONE_TOKEN = InFlight(1, 1)
SAMPLE = Output.SAMPLE


class DecodeFastPath:
    """Checks made at one position hold for those after it, up to the holding's `steady_until`. Whatever else happens to
    the sequence sets that to 0."""

    def __init__(self, cache: KVCache, exact_starts: bool = False) -> None:
        self._size = cache.block_size
        self._refs = cache.pool.refs
        self._possible = cache.only_full
        self._exact_starts = exact_starts
        self._ahead = [group.ahead for group in cache.groups]

    def plan_row(self, sequence: Sequence, plan: int) -> Row | None:
        """Plan the sequence's next position; None if it needs full planning."""
        computed, holding = sequence.computed, sequence.holding
        if holding is None:
            return None
        if computed < holding.steady_until:
            row = Row(sequence.row, computed, 1, SAMPLE)
        else:
            holding.steady_until = self._until(sequence, holding)
            if computed >= holding.steady_until:
                return None
            row = Row(sequence.row, computed, 1, SAMPLE, holding.take_changes())
        holding.plan = plan
        sequence.flights.append(ONE_TOKEN)
        sequence.computed = computed + 1
        return row

    def _until(self, sequence: Sequence, holding: Holding) -> int:
        """The position up to which it decodes one token at a time, in blocks that it has alone; 0 if it does not."""
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
            or self._exact_starts
            and sequence.verifies
        ):
            return 0
        size, until = self._size, sequence.limit - 1
        for table, ahead in zip(holding.tables, self._ahead):
            until = min(until, len(table) * size - ahead)
            for index in range(certain // size, len(table)):
                if self._refs[table[index]] > 1:
                    return 0
        return until

    def accept(self, sequence: Sequence, token: int) -> bool:
        """Append the one token of such a row; False, with nothing changed, if it needs full accounting."""
        flights, holding, known = sequence.flights, sequence.holding, sequence.tokens
        if (
            sequence.special
            or sequence.suspect
            or sequence.keys
            or sequence.draft
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
        """Require that what was seen of a running sequence is still so."""
        holding = sequence.held
        if sequence.computed < holding.steady_until and (
            holding.steady_until > self._until(sequence, holding) or any(holding.changed)
        ):
            raise AssertionError(f"sequence {sequence.number}: its decode fast path is stale")
