"""One engine as the dispatcher sees it, and the choice of the engine for a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.engine.messages import Abort, Add, RankRecord
from penstock.server.config import BOTH, DECODE, PREFILL
from penstock.server.engines.prefixes import BLOCK_TOKENS, MIN_KNOWN_TOKENS, SentPrefixes
from penstock.server.engines.quarantine import Quarantine
from penstock.types import Request

if TYPE_CHECKING:
    from penstock.server.engines.in_flight import InFlightRequest, RequestPart

MAX_AHEAD = 8  # sequences queued in an engine beyond those it can run, so that it never idles
MAX_SLOTLESS = 256  # beyond them, that wait in the engine for a slot for their adapters
ROW_TOKENS = 32  # prompt tokens that cost an engine as much as the rest of an average answer
MIN_HANDED_OVER = 64  # prompt tokens; with fewer, a step of a decoding engine is hardly longer
RECOMPUTE = 4  # work that an engine may have above another's, per token that the other would compute again


class Replica:
    """An engine's rows, suspects and latest prompts; `send` sends it a command. It is closed until it has rows."""

    def __init__(self, number: int, send: Callable[[Add | Abort], None], role: str = BOTH) -> None:
        self.number, self.send, self.role = number, send, role
        self.max_rows: int | None = None  # of the present process
        self.num_slots = 0  # for adapters
        self.ranks: Sequence[RankRecord] = ()  # of the present process, where there are several
        self.transfer_port: int | None = None  # that other servers fetch its blocks from
        self.quarantine = Quarantine()
        self.prefixes = SentPrefixes()
        self.num_rows = 0
        self.num_pending = 0  # prompt tokens sent and not computed yet, as far as known
        self._pending: dict[RequestPart, int] = {}
        self._adapted: dict[RequestPart, str] = {}  # parts with adapters, and which; the oldest first

    @property
    def is_open(self) -> bool:
        return self.max_rows is not None

    @property
    def has_room(self) -> bool:
        if self.max_rows is None or self.num_rows < self.max_rows + MAX_AHEAD:
            return self.max_rows is not None
        return self.num_rows < self.most_parts + MAX_AHEAD

    @property
    def is_short(self) -> bool:
        """True if it can run more than it has, so that it takes prompts that others know better."""
        return self.max_rows is not None and self.num_rows < self.most_parts

    @property
    def most_parts(self) -> int:
        """Rows, and sequences that take none yet: they wait for a slot for their adapters. Those with which none has
        begun have no slot, beyond as many sets of adapters as there are slots."""
        if len(keys := set(self._adapted.values())) <= self.num_slots:
            return self.max_rows or 0
        begun = [key for part, key in self._adapted.items() if part.num_tokens]
        held = list(dict.fromkeys((*begun, *self._adapted.values())))[: self.num_slots]
        keys.difference_update(held)
        slotless = sum(len(part.siblings) for part, key in self._adapted.items() if key in keys)
        return (self.max_rows or 0) + min(slotless, MAX_SLOTLESS)

    @property
    def work(self) -> int:
        """Estimate what is left to do, in prompt tokens."""
        return self.num_pending + ROW_TOKENS * self.num_rows

    def open(self, max_rows: int, cache_tokens: int, now_s: float) -> None:
        """Begin with a new process, which has an empty cache."""
        self.max_rows = max_rows
        self.prefixes.reset(max(MIN_KNOWN_TOKENS, cache_tokens) // BLOCK_TOKENS)
        self.quarantine.open(now_s)

    def add(self, part: RequestPart, digests: Sequence[bytes]) -> None:
        """Count a part that is sent; `digests` are empty where there is one engine."""
        num_tokens = len(part.flight.request.tokens)
        num_new = max(1, num_tokens - BLOCK_TOKENS * self.prefixes.count(digests))
        self._pending[part] = num_new
        self.num_pending += num_new
        self.num_rows += len(part.siblings)
        self.prefixes.add(digests)
        if part.flight.request.loras:
            self._adapted[part] = part.flight.request.lora_key

    def begin(self, part: RequestPart) -> None:
        """Count a part's prompt as computed: a token has come."""
        self.num_pending -= self._pending.pop(part, 0)

    def remove(self, part: RequestPart) -> None:
        self.begin(part)
        self.num_rows -= len(part.siblings)
        self._adapted.pop(part, None)

    def clear(self) -> None:
        """Forget the parts of a dead process."""
        self.max_rows = None
        self.num_rows = self.num_pending = 0
        self._pending.clear()
        self._adapted.clear()
        self.prefixes.clear()


class Replicas:
    """All engines of a model."""

    def __init__(self) -> None:
        self._replicas: list[Replica] = []

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, send: Callable[[Add | Abort], None], role: str = BOTH) -> Replica:
        self._replicas.append(replica := Replica(len(self), send, role))
        return replica

    @property
    def max_rows(self) -> int:
        """Rows of all open engines."""
        return sum(replica.max_rows or 0 for replica in self)

    @property
    def most_parts(self) -> int:
        """Sequences that take rows of open engines, or none yet."""
        return sum(replica.most_parts for replica in self)

    def measure(self, num_waiting: int) -> tuple[int, ...]:
        """Return counts; while they stay the same, no further request can be sent."""
        rows, pending = sum(one.num_rows for one in self), sum(one.num_pending for one in self)
        return num_waiting, rows, pending, self.most_parts

    @property
    def has_room(self) -> bool:
        return any(replica.has_room for replica in self)

    @property
    def can_answer(self) -> bool:
        """True if answers are not left to other servers."""
        return any(replica.role != PREFILL for replica in self)

    @property
    def has_trials(self) -> bool:
        return any(replica.quarantine.has_trials for replica in self)

    def digest(self, flight: InFlightRequest) -> Sequence[bytes]:
        """Return the digests of a prompt; none where there is no choice."""
        return flight.digests if len(self) > 1 else ()

    def choose(self, flight: InFlightRequest) -> Replica:
        """Choose an open engine for a request, whether it has room or not."""
        return choose_replica(self._list_fit(flight), self.digest(flight))

    def _list_fit(self, flight: InFlightRequest) -> list[Replica]:
        """List the open engines whose role a request needs now; all if there is none."""
        found = [one for one in self if one.is_open]
        wanted = PREFILL if self._is_handed_over(flight) else DECODE
        return [one for one in found if one.role in (wanted, BOTH)] or found

    def _is_handed_over(self, flight: InFlightRequest) -> bool:
        """True if a prompt is long, but for what a decoding engine knows of it, and its blocks can be handed over."""
        decoding = [one for one in self if one.role != PREFILL and one.is_open]
        if len(decoding) == len(self) or any(flight.outputs.values()) or not can_hand_over(flight.request):
            return False
        digests = self.digest(flight)
        known = max((one.prefixes.count(digests) for one in decoding), default=0)
        return len(flight.request.tokens) - BLOCK_TOKENS * known >= MIN_HANDED_OVER

    def choose_with_room(self, flight: InFlightRequest) -> Replica:
        """Choose an engine that can take a request now: the best one if it can, else one that runs dry."""
        best = self.choose(flight)
        if best.has_room:
            return best
        free = [one for one in self._list_fit(flight) if one.has_room]
        short = [one for one in free if one.is_short]
        return choose_replica(short or free or [best], self.digest(flight))

    def fits(self, flight: InFlightRequest) -> bool:
        """True if the engine that is best for a request has room."""
        return self.choose(flight).has_room

    def find_movable(self, flights: Sequence[InFlightRequest], num_waiting: int) -> Sequence[int]:
        """Pick queued requests to move to an idle engine where waiting costs more than recomputing; cheapest first."""
        backlog: Counter[int] = Counter()  # tokens by engine
        groups: dict[tuple[int, bytes], list[_Move]] = {}
        for at, flight in enumerate(flights):
            best, digests = self.choose(flight), self.digest(flight)
            num_known = best.prefixes.count(digests)
            num_new = len(flight.request.tokens) - BLOCK_TOKENS * num_known
            backlog[best.number] += (ROW_TOKENS + num_new) * num_waiting // len(flights)
            short = [one for one in self._list_fit(flight) if one.is_short]
            if short:
                engine = choose_replica(short, digests)
                begin = engine.prefixes.count(digests)
                first = b"".join(digests[begin : begin + 1])
                move = _Move(at, best, engine, max(1, BLOCK_TOKENS * (num_known - begin)))
                groups.setdefault((engine.number, first), []).append(move)
        if not groups and any(one.is_short for one in self):
            return (0,)  # beyond its engine's room, so that those behind it get to the other one
        worth = ([one for one in moves if one.is_worth(backlog[one.source.number])] for moves in groups.values())
        cheapest = max(filter(None, worth), key=_count_per_token, default=[])
        return [move.at for move in cheapest]


class _Move(NamedTuple):
    """A waiting request that may go to `target` instead of `source`, which would be better but has no room."""

    at: int
    source: Replica
    target: Replica
    num_again: int  # tokens that are computed again

    def is_worth(self, backlog: int) -> bool:
        """True if it is computed earlier there; `backlog`: tokens that wait for the source."""
        return self.source.work + backlog > self.target.work + self.num_again


def _count_per_token(moves: Sequence[_Move]) -> float:
    """Return how many requests share what is computed again for the first of them."""
    return len(moves) / min(one.num_again for one in moves)


def can_hand_over(request: Request) -> bool:
    """True if the answer may be continued by another engine without computing the prompt again."""
    return not (request.pool or request.beam or request.sampling.prompt_logprobs is not None)


def choose_replica(replicas: Sequence[Replica], digests: Sequence[bytes]) -> Replica:
    """Choose the replica with the longest cached prefix, unless it is overloaded: its load exceeds the least busy one's
    by more than RECOMPUTE times the tokens saved. A prompt cached nowhere goes where the cache has room, else to the
    least busy."""

    def cost(replica: Replica) -> tuple[float, int, int]:
        prefixes = replica.prefixes
        num_new = len(digests) - prefixes.count(digests)
        lost = RECOMPUTE * BLOCK_TOKENS * num_new * (1 + prefixes.fill)  # what it forgets for that is computed again
        return replica.work + lost, prefixes.oldest_turn, replica.number

    return replicas[0] if len(replicas) == 1 else min(replicas, key=cost)
