"""Going on by one token, as nearly every sequence does in nearly every step: the same as planning and accounting for it
in full, without looking at what cannot matter then."""

from __future__ import annotations

from penstock.cache.kv import KVCache
from penstock.engine.plan import Output, Row, RowResult
from penstock.engine.sequence import Flight, Sequence


class Steady:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._size = cache.block_size
        self._refs = cache.pool.refs
        self._possible = cache.only_full

    def row(self, sequence: Sequence, plan: int) -> Row | None:
        """The sequence's next position, entered into the plan; None if more is to be looked at."""
        computed = sequence.computed
        known, settled = len(sequence.tokens), computed
        for flight in sequence.flights:
            known += flight.expected
            settled -= flight.count
        holding = sequence.holding
        if known - computed != 1 or computed < sequence.num_prompt or known >= sequence.limit or not self._possible \
                or sequence.special or sequence.draft or sequence.suspect or not sequence.admitted or holding is None:
            return None
        size = self._size
        for table in holding.tables:
            if len(table) * size <= computed:
                return None
            for index in range(settled // size, len(table)):
                if self._refs[table[index]] > 1:
                    return None
        holding.plan = plan
        sequence.flights.append(Flight(plan, 1, 1))
        sequence.computed = computed + 1
        return Row(sequence.row, computed, 1, Output.SAMPLE, self._cache.changes(holding))

    def accepts(self, sequence: Sequence, outcome: RowResult) -> bool:
        """Take in the one token of such a row; False, with nothing changed, if more is to be looked at."""
        tokens = outcome.tokens
        if len(tokens) != 1 or outcome.error is not None or outcome.logprobs or outcome.draft or outcome.complete \
                or outcome.forced or sequence.special or sequence.suspect or sequence.keys or not self._possible:
            return False
        flights, holding = sequence.flights, sequence.holding
        if flights[0].expected != 1 or tokens[0] in sequence.stops or len(sequence.tokens) + 1 >= sequence.limit \
                or holding is None:
            return False
        settled = sequence.computed
        for flight in flights[1:]:
            settled -= flight.count
        if holding.node is not None and (holding.num_inserted + 1) * self._size <= settled:
            return False                # a block is whole
        del flights[0]
        sequence.tokens.append(tokens[0])
        return True
