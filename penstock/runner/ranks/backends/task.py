"""What a rank's process is told as it starts, on the first line of its standard input: no other process can read it."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.host.machine import python_command
from penstock.runner.ranks.layout import Layout
from penstock.runner.ranks.link import Credentials

COMMAND = python_command("penstock.api.ranks.process")


class RankTask(msgspec.Struct, frozen=True):
    rank: int
    layout: Layout
    model: str
    options: dict[str, Any]
    host: str  # of rank 0
    port: int
    credentials: Credentials
    wait_s: float  # for rank 0
    threads: int

    @property
    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


decode_task = msgspec.json.Decoder(RankTask).decode
