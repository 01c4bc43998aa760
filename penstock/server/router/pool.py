"""All upstream servers: which of them gets a request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence

from penstock.server.config import PREFILL
from penstock.server.handover.counts import HandoverCounts
from penstock.server.router.prompts import PART_BYTES, PromptFacts
from penstock.server.router.upstream import Upstream

MAX_STICKY = 100_000  # ids whose server is remembered
ROW_BYTES = 128  # prompt bytes that cost a server as much as the rest of an average answer
RECOMPUTE = 4  # work that a server may have above another's, per byte that the other would compute again
POLL_S = 0.05


class StickyIds:
    """The servers that have files, batches and stored responses, by id; the latest ones."""

    def __init__(self) -> None:
        self._servers: OrderedDict[str, int] = OrderedDict()

    def put(self, id: str, upstream: Upstream) -> None:
        self._servers[id] = upstream.number
        self._servers.move_to_end(id)
        while len(self._servers) > MAX_STICKY:
            self._servers.popitem(last=False)

    def get(self, id: str) -> int | None:
        return self._servers.get(id)


class UpstreamPool:
    def __init__(self, upstreams: Sequence[Upstream], policy: str = "prefix") -> None:
        self.upstreams = upstreams
        self.sticky = StickyIds()
        self.num_prompt_parts = self.num_known_parts = 0  # of routed prompts
        self.handovers = HandoverCounts()  # of prompts that another server computed
        self.num_continued = 0  # streams that went on on another server
        self._policy = policy
        self._turns: Counter[int] = Counter()

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self.upstreams)

    @property
    def is_ready(self) -> bool:
        return any(one.takes_requests for one in self)

    def choose(self, facts: PromptFacts, tried: Collection[Upstream] = ()) -> Upstream | None:
        """Choose a server that takes requests and was not tried; None if there is none. Several may serve a model: the
        one with the longest prefix of the prompt, unless that is overloaded compared with the least busy."""
        fit = self._list_fit(facts, tried)
        return min(fit, key=lambda one: self._cost(one, facts)) if fit else None

    def _list_fit(self, facts: PromptFacts, tried: Collection[Upstream] = ()) -> list[Upstream]:
        """List the servers that may get a request: the one that holds its session, as long as that is there."""
        ready = [one for one in self if one.takes_requests and one not in tried]
        fit = [one for one in ready if one.serves(facts.model)] or ready
        fit = [one for one in fit if one.role != PREFILL] or fit  # a prefill server answers if there is no other
        holder = None if facts.session is None else self.find_owner(facts.session)
        return [holder] if holder in fit else fit

    def choose_with_room(self, facts: PromptFacts, owner: Upstream | None) -> tuple[Upstream | None, bool]:
        """Choose a server that can run a request at once; the bool is False if there is none to wait for either."""
        fit = self._list_fit(facts) if owner is None else [owner] if owner.is_ready else []
        free = [one for one in fit if one.has_room]
        chosen = min(free, key=lambda one: self._cost(one, facts)) if free else None
        return chosen, bool(fit)

    def _cost(self, upstream: Upstream, facts: PromptFacts) -> tuple[int, int, int]:
        turns = self._turns[upstream.number]
        if self._policy == "round_robin":
            return turns, 0, upstream.number
        if self._policy == "least_busy":
            return upstream.work, turns, upstream.number
        num_new = len(facts.digests) - upstream.prefixes.count(facts.digests)
        return upstream.work + RECOMPUTE * PART_BYTES * num_new, turns, upstream.number

    def begin(self, upstream: Upstream, facts: PromptFacts) -> int:
        """Count a request that a server gets; return its work, for `end`."""
        num_known = upstream.prefixes.count(facts.digests)
        self.num_prompt_parts += len(facts.digests)
        self.num_known_parts += num_known
        self._turns[upstream.number] += 1
        upstream.prefixes.add(facts.digests)
        work = max(0, facts.num_bytes - PART_BYTES * num_known) + ROW_BYTES
        upstream.work += work
        upstream.num_running += 1
        upstream.num_rows += facts.num_rows
        if facts.session is not None:
            self.sticky.put(facts.session, upstream)
        return work

    def end(self, upstream: Upstream, facts: PromptFacts, work: int) -> None:
        upstream.work -= work
        upstream.num_running -= 1
        upstream.num_rows -= facts.num_rows

    def find_owner(self, id: str) -> Upstream | None:
        """Return the server that has a file, a batch or a response, if that is known."""
        number = self.sticky.get(id)
        return None if number is None else self.upstreams[number]

    async def wait_for(self, upstream: Upstream, timeout_s: float) -> bool:
        """Wait until a server's heartbeat says that it is ready; False if it does not in time."""
        end = time.monotonic() + timeout_s
        while not upstream.is_ready and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        return upstream.is_ready

    async def wait_for_any(self, facts: PromptFacts, tried: Collection[Upstream], timeout_s: float) -> Upstream | None:
        """Choose a server, waiting until one takes requests."""
        end = time.monotonic() + timeout_s
        while (chosen := self.choose(facts, tried)) is None and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        return chosen
