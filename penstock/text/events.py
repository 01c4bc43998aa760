"""What an answer consists of once tool calls and reasoning are told apart from its text."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int  # of the call within the answer, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of a call's arguments; all pieces of one index together are its JSON."""

    index: int
    text: str


Event = Text | Reasoning | CallBegin | CallArguments


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)
