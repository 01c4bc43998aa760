"""The task of a rank's process, the first line of its standard input: no other process can read that."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.host.machine import python_command
from penstock.runner.ranks.layout import RankLayout
from penstock.runner.ranks.link import Credentials

REFUSED = 2  # exit status: another try would end the same
COMMAND = python_command("penstock.api.ranks.process")


class RankTask(msgspec.Struct, frozen=True):
    rank: int
    layout: RankLayout
    model: str
    options: dict[str, Any]
    host: str  # of rank 0
    port: int
    credentials: Credentials | None  # None: this machine has them in a file or its environment
    wait_s: float  # for rank 0
    threads: int

    @property
    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


decode_task = msgspec.json.Decoder(RankTask).decode
