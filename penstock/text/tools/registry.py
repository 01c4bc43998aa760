"""The tool parsers by name, and which of them a chat template's calls need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.text.events import Event
from penstock.text.tools.hermes import HermesParser
from penstock.text.tools.llama_json import LlamaJsonParser
from penstock.text.tools.mistral import MistralParser
from penstock.text.tools.pythonic import PythonicParser


class ToolParser(Protocol):
    """One answer's text in, in any pieces; events out, whose sum does not depend on the pieces. Never raises: a call
    that is malformed or cut off keeps what was emitted of it; if nothing was, its text comes out as text."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


TOOL_PARSERS: dict[str, Callable[..., ToolParser]] = {  # named as in vLLM
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}

_MARKS = (  # in order: Llama 4's templates name the JSON form too
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)


def detect_parser(chat_template: str | None) -> str:
    """The parser for what the template teaches; Hermes, which `describe` teaches, where it teaches nothing."""
    return next((name for mark, name in _MARKS if mark in (chat_template or "")), "hermes")
