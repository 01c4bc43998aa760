"""A server's own role, told to the router, and what its engines need for it."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from penstock.engine.messages import BlockTransfer
from penstock.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from penstock.server.config import ServerConfig

PURPOSE = b"penstock kv transfer"


def make_transfer(config: ServerConfig, router_key: str | None) -> BlockTransfer | None:
    """Return what engines need to exchange blocks with other servers; None if the whole way of a prompt is here."""
    if not config.lone_role or router_key is None:
        return None
    secret = hmac.digest(router_key.encode(errors="surrogateescape"), PURPOSE, "sha256")
    return BlockTransfer(secret.hex(), config.host, config.kv_transfer_port)


def check_store(role: str, options: Mapping[str, Any], port: int | None) -> None:
    """Refuse a lone role whose prompts' blocks have no way to another server."""
    num_ranks = int(options.get("tensor_parallel_size") or 1) * int(options.get("pipeline_parallel_size") or 1)
    if options.get("kv_offloading_path"):
        return
    if num_ranks > 1:
        raise InvalidConfig(
            f"role={role} with {num_ranks} ranks hands prompts over through files: set kv_offloading_path to a folder "
            "that the other servers reach, too"
        )
    if not options.get("kv_offloading_size"):
        raise InvalidConfig(
            f"role={role} hands prompts over through a store: set kv_offloading_size for one in memory, or "
            "kv_offloading_path to a folder that the other servers reach, too"
        )
    if role == "prefill" and port is None:
        raise InvalidConfig(
            "role=prefill keeps its prompts' blocks in memory: set kv_transfer_port so that decode servers can fetch "
            "them, or kv_offloading_path to a folder that they reach, too"
        )
