"""Adapters that a server begins with, as `--lora-modules` names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.errors import InvalidConfig, quote

FLAG = "--lora-modules"


@dataclass(frozen=True)
class LoraModule:
    """An adapter's name and folder; `base` is the model it is for, the first if None."""

    name: str
    path: str
    base: str | None = None


class _Json(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's form."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_modules(given: Sequence[str]) -> list[LoraModule]:
    """Read NAME=PATH, a JSON object with name, path and base_model_name, or a JSON list of such objects."""
    modules = [module for text in given for module in _parse(text.strip())]
    names = [module.name for module in modules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidConfig(f"{FLAG} names {quote(twice)} twice: give each adapter a name of its own")
    return modules


def _parse(text: str) -> list[LoraModule]:
    if text.startswith(("{", "[")):
        try:
            found = msgspec.json.decode(text, type=_Json | list[_Json])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidConfig(
                f"{FLAG} {quote(text)} is not valid: {error}; give NAME=PATH, or an object with name and path"
            ) from None
        entries = found if isinstance(found, list) else [found]
        modules = [LoraModule(entry.name, entry.path, entry.base_model_name) for entry in entries]
    else:
        name, _, path = text.partition("=")
        modules = [LoraModule(name, path)]
    for module in modules:
        if not module.name or not module.path:
            raise InvalidConfig(f"{FLAG} {quote(text)} is not valid: give NAME=PATH, with an adapter's folder")
    return modules
