"""Where a server's batches come together with what answers them."""

from __future__ import annotations

from pathlib import Path

from starlette.types import ASGIApp

from penstock.server.batch.client import LocalClient
from penstock.server.batches.room import Batches
from penstock.server.config import MIB
from penstock.server.context import Client
from penstock.server.files.folder import BATCHES, FILES
from penstock.server.files.store import FileStore
from penstock.server.keys import KeyRing
from penstock.server.state import Server


def open_batches(app: ASGIApp, server: Server, ring: KeyRing, folder: Path) -> Batches:
    """Batches and files under `folder`; they are read when the batches start."""

    def is_shared() -> bool:
        return len(ring.weights()) > 1

    def client_for(tenant: str) -> LocalClient:
        return LocalClient(app, Client(tenant, is_batch=True))

    def num_rows() -> int:
        return max((model.facts.max_num_seqs for model in server.catalog if model.loaded), default=0)

    files = FileStore(folder / FILES, server.config.max_files_mb * MIB, is_shared=is_shared)
    return Batches(
        folder / BATCHES,
        files,
        client_for,
        server.config.max_body_mb * MIB,
        num_rows=num_rows,
        is_shared=is_shared,
        is_stopping=lambda: server.draining,
    )
