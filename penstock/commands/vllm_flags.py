"""Flags of `vllm serve` that Penstock has no use for: taken where they change nothing, and kept out of the help."""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from typing import Any

from penstock.config import EngineConfig, option
from penstock.porting import HARMLESS, LIMITED, SERVER_HARMLESS, SERVER_LIMITED, take_flag
from penstock.server.config import ServerConfig


def _kinds() -> dict[str, type]:
    """By name; what the engine or the server has as its own option is that."""
    own = {field.name for config in (EngineConfig, ServerConfig) for field in fields(config)}
    tables = (HARMLESS, LIMITED, SERVER_HARMLESS, SERVER_LIMITED)
    return {name: entry[0] for table in tables for name, entry in table.items() if name not in own}


def _take_all(**options: Any) -> None:
    """Say of each that it has no effect, or refuse it."""
    for name, value in options.items():
        take_flag(name, value)


VllmFlags: Any = make_dataclass(
    "VllmFlags",
    [(name, kind, option(None, "vLLM's")) for name, kind in _kinds().items()],
    namespace={"from_options": staticmethod(_take_all)},
)
