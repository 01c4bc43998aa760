"""Messages between ranks, and the descriptions that they compare before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from penstock.cache.store import Transfer
from penstock.engine.executor import Answer
from penstock.engine.plan import Admission, Plan
from penstock.errors import InvalidConfig, quote
from penstock.types import Request


class Identity(msgspec.Struct, frozen=True):
    """A description of a rank's code, model and options, which is the same on all: else bits would differ."""

    version: str
    config: dict[str, Any]  # the model's
    weights: dict[str, str]  # each tensor's dtype, shape and samples
    options: dict[str, Any]
    cpu_path: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank is there, and has read the model's headers. Hidden states are awaited at `port`."""

    rank: int
    identity: Identity
    host: str  # its address, as rank 0 is reached
    node: str  # the machine's name
    pid: int
    port: int
    num_cores: int
    free_bytes: int
    segment: str = ""  # where its tensor-parallel ranks meet, if it is their first


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The layers to load, and where hidden states go. Settings are those of all ranks but `threads`."""

    settings: dict[str, Any]
    num_blocks: int
    segment: str = ""  # where it meets those that share its layers
    next_address: tuple[str, int] | None = None


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 does not take this rank."""

    error: str


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank is ready for plans, and holds so much."""

    weight_bytes: int
    cache_bytes: int


class Compute(msgspec.Struct, frozen=True, tag=True):
    """A plan's step; where some rank has lost a part of what the plan loads, none computes it."""

    plan: Plan
    is_lost: bool = False


class KeepBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copies between pool and store, and what becomes of the store; a `ControlAnswer` with this number follows."""

    number: int
    saves: tuple[Transfer, ...] = ()
    loads: tuple[Transfer, ...] = ()
    flush: bool = False
    forget: bool = False


class ControlMessage(msgspec.Struct, frozen=True, tag=True):
    """A message of `engine.executor` by its name and fields; `ControlAnswer` with the same number follows."""

    number: int
    name: str
    values: dict[str, Any]


class ControlAnswer(msgspec.Struct, frozen=True, tag=True):
    number: int
    answer: Answer


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on, because of another if that is not -1."""

    error: str
    rank: int = -1


class RankBeat(msgspec.Struct, frozen=True, tag=True):
    """The sender is alive, and its memory is so."""

    resident_bytes: int = 0
    free_bytes: int = 0  # of its machine


class End(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class HiddenHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a connection that carries hidden states."""

    rank: int  # whose they are


ToRank = Setup | RankRefused | Compute | KeepBlocks | ControlMessage | RankBeat | End
FromRank = Hello | RankReady | ControlAnswer | RankFailed | RankBeat | HiddenHello

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


def strip(admission: Admission, keeps_prompt: bool) -> Admission:
    """Leave out what only a rank that samples needs. Those that share its logits are asked for the prompt's, too."""
    request = admission.request
    return replace(
        admission,
        request=Request(id=request.id, tokens=request.tokens if keeps_prompt else (), loras=request.loras),
        mu=None,
    )


def require_equal(rank: int, own: Identity, theirs: Identity) -> None:
    """Require that a rank is as rank 0 is; the error names what differs, and both values."""
    for field, remedy in REMEDIES.items():
        ours, found = getattr(own, field), getattr(theirs, field)
        if ours == found:
            continue
        what = f"{field} "
        if isinstance(ours, dict):
            names = [name for name in {**ours, **found} if ours.get(name) != found.get(name)]
            what = PREFIXES[field].format(count=len(names), total=len(ours)) + f"{names[0]}="
            ours, found = ours.get(names[0]), found.get(names[0])
        raise InvalidConfig(f"rank {rank} has {what}{quote(found)}, but rank 0 has {quote(ours)}: {remedy}")


PREFIXES = {
    "config": "another config: ",
    "weights": "other weights: {count} of {total} tensors differ, the first is ",
    "options": "",
}
REMEDIES = {
    "version": "install the same Penstock on all machines",
    "config": "copy the model's files to all machines",
    "weights": "copy the model's files to all machines",
    "options": "give all machines the same options",
    "cpu_path": "kernels of other widths; set PENSTOCK_CPU to a value that all machines have",
}
