"""Ranks of a model, as `info` and `plan` show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.commands.output import Table
from penstock.hub.download_errors import readable_bytes


def add_ranks(table: Table, ranks: Iterable[Mapping[str, Any]]) -> None:
    """Add a row for each rank: its layers, and its bytes."""
    for each in ranks:
        layers = f"layers {each['first_layer']} to {each['last_layer']}"
        weights, cache = readable_bytes(each["weight_bytes"]), readable_bytes(each["cache_bytes_per_token"])
        table.add(
            f"rank {each['rank']}",
            f"stage {each['stage']} ({layers}), share {each['shard']}: {weights} of weights, {cache} of cache a token",
        )
