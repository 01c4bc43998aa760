"""Exchange cache blocks with other servers: serve those of prompts computed here, fetch those computed there."""

from __future__ import annotations

from penstock.engine.engine import Engine
from penstock.engine.fetching import Fetch
from penstock.engine.messages import BlockTransfer
from penstock.errors import InvalidConfig
from penstock.runner.ranks.link import Credentials
from penstock.runner.store.blocks import BlockStore
from penstock.runner.store.exchange import BlockServer
from penstock.runner.store.fetch import BlockFetcher, CacheLayout


class Exchange:
    """An engine's block server and its fetcher, which last as long as it does."""

    def __init__(self, server: BlockServer | None, fetch: Fetch | None) -> None:
        self._server, self.fetch = server, fetch

    @property
    def port(self) -> int | None:
        return None if self._server is None else self._server.port


def open_exchange(engine: Engine, transfer: BlockTransfer) -> Exchange:
    """Serve and fetch as `transfer` says, before the engine has any request."""
    cache = engine.scheduler.cache
    saves = cache.saves
    if saves is None:
        raise InvalidConfig("role hands prompts over by their cache blocks, which this model has none of: leave it out")
    saves.names.share_between_machines()
    store, credentials = saves.store, Credentials(bytes.fromhex(transfer.secret))
    if not isinstance(store, BlockStore):  # several ranks, each with a part of every block
        return Exchange(None, None)
    server = None
    if transfer.port is not None:
        server = BlockServer(store, transfer.host, transfer.port, credentials)
    layout = CacheLayout(cache.groups, cache.block_size, saves.block_bytes)
    return Exchange(server, BlockFetcher(store, saves.names, layout, credentials).fetch)
