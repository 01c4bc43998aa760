"""Fetch what another server computed of a prompt, before the prompt is scheduled here."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.cache.group import Group
from penstock.cache.radix import Root
from penstock.cache.store import DIGEST_BYTES, BlockNames, name_slot
from penstock.errors import PenstockError
from penstock.runner.ranks.link import Credentials, RankLink, connect
from penstock.runner.store.blocks import FETCH_MS, FETCHED, FETCHED_BYTES, MISSING, BlockStore
from penstock.runner.store.exchange import ask_for
from penstock.types import Request

WAIT_S = 5.0  # for a server's next frame
AVOIDED_S = 10.0  # that a server which did not answer is left alone
_log = logging.getLogger(__name__)
Connect = Callable[[tuple[str, int], Credentials, float], RankLink]


@dataclass(frozen=True)
class CacheLayout:
    """The blocks of a cache, as far as their names and sizes depend on it."""

    groups: Sequence[Group]
    block_size: int
    block_bytes: int

    @property
    def max_state_bytes(self) -> int:
        return self.block_bytes * max((group.blocks_per_state for group in self.groups), default=1)

    def is_needed(self, name: bytes) -> bool:
        """True if no later block can be used without this one."""
        return self.groups[int.from_bytes(name[DIGEST_BYTES:], "little")].spec.kind == "full"


def list_names(names: BlockNames, layout: CacheLayout, request: Request, num_known: int) -> list[bytes]:
    """Name the blocks that a request can begin with, but those of its first `num_known` tokens, which are here."""
    root, size = Root(request.salt, request.num_public, request.lora_key), layout.block_size
    most = (len(request.tokens) - 1) // size
    digest, listed = names.start(root), []
    if digest is None:
        return []
    for index in range(most):
        digest = names.extend(digest, root.key(request.tokens, index * size, size))
        for g, group in enumerate(layout.groups):
            first = group.spec.find_first_needed(most * size) // size if group.is_paged else 0
            if index >= max(first, num_known // size):
                listed.append(name_slot(digest, g))
    return listed


class BlockFetcher:
    """Fetches blocks into a store. A server that does not answer costs a few seconds; what it has not is computed."""

    def __init__(
        self,
        store: BlockStore,
        names: BlockNames,
        layout: CacheLayout,
        credentials: Credentials,
        *,
        make_link: Connect = connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._names, self._layout, self._credentials = store, names, layout, credentials
        self._connect, self._clock = make_link, clock
        self._avoided: dict[str, float] = {}  # servers, until when
        self._told: set[str] = set()  # servers that had nothing, which was said

    def fetch(self, request: Request, num_known: int) -> int:
        """Fetch what the request's source has of its prompt and this store has not; returns the number of blocks."""
        source, begin = request.blocks_from, time.perf_counter()
        if self._avoided.get(source, 0.0) > self._clock():
            return 0
        listed = list_names(self._names, self._layout, request, num_known)
        wanted = self._choose([name for name in listed if not self._store.has(name)])
        if not wanted:
            return 0
        found = Counter({FETCHED: 0, MISSING: 0, FETCHED_BYTES: 0})
        try:
            self._fetch_all(source, wanted, found)
        except (PenstockError, OSError, ValueError) as error:
            found[MISSING] = max(1, found[MISSING])
            self._avoided = {**self._list_avoided(), source: self._clock() + AVOIDED_S}
            _log.warning("cache blocks could not be fetched from %s, and are computed here: %s", source, error)
        found[FETCH_MS] = round(1e3 * (time.perf_counter() - begin))
        self._store.note_traffic(found)
        if not found[FETCHED]:
            self._warn(source, len(wanted))
        return found[FETCHED]

    def _fetch_all(self, source: str, wanted: list[bytes], found: Counter[str]) -> None:
        """Save what comes, up to the first block that is missing and without which those after it are of no use."""
        link = self._connect(split_address(source), self._credentials, 0.0)
        try:
            for name, data in ask_for(link, wanted, self._layout.max_state_bytes, WAIT_S):
                found[MISSING if data is None else FETCHED] += 1
                if data is not None:
                    self._store.save(name, data)
                    found[FETCHED_BYTES] += len(data)
                elif self._layout.is_needed(name):
                    return
        finally:
            link.close()

    def _list_avoided(self) -> dict[str, float]:
        now = self._clock()
        return {source: until_s for source, until_s in self._avoided.items() if until_s > now}

    def _choose(self, missing: list[bytes]) -> list[bytes]:
        """Return as many as the store can hold: of a prefix, the beginning is what counts."""
        if self._store.files is not None:
            return missing
        return missing[: self._store.max_bytes // max(1, self._layout.max_state_bytes)]

    def _warn(self, source: str, num_wanted: int) -> None:
        """Say once of a server that it has nothing of a prompt that it computed."""
        if source not in self._told and source not in self._avoided:
            self._told.add(source)
            _log.warning(
                "%s has none of the %d cache blocks of a prompt that it computed: give both servers the same version, "
                "model files, kind of processor and settings, and a store that holds their prompts",
                source,
                num_wanted,
            )


def split_address(source: str) -> tuple[str, int]:
    host, _, port = source.rpartition(":")
    return host.strip("[]"), int(port)
