"""Sampling parameters by name, as text: `/set` changes them."""

from __future__ import annotations

import json
from typing import Any

from penstock.commands.flags.sampling import COMMON, RARE
from penstock.errors import InvalidRequest, quote

DEFAULT = "default"
KINDS: dict[str, Any] = {"max_tokens": int, **{name: kind for name, (kind, _) in {**COMMON, **RARE}.items()}}
NOTES = {
    "max_tokens": "Maximum tokens of each answer.",
    **{name: note.partition(" [default")[0] for name, (_, note) in {**COMMON, **RARE}.items()},
}
WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def change(values: dict[str, Any], text: str) -> dict[str, Any]:
    """Return `values` with one of them set by `NAME VALUE` or taken back by `NAME default`; refuse a bad one."""
    from penstock.types import SamplingParams

    name, _, given = text.partition(" ")
    name, given = name.replace("-", "_").lower(), given.strip()
    if name not in KINDS:
        raise InvalidRequest(f"/set has no {quote(name)}: the names are {', '.join(KINDS)}")
    changed = {key: value for key, value in values.items() if key != name}
    if given.lower() != DEFAULT:
        changed[name] = _parse(name, given)
    SamplingParams(**{"max_tokens": None, **changed})
    return changed


def _parse(name: str, text: str) -> Any:
    kind = KINDS[name]
    try:
        if kind in (int, float):
            return kind(text)
        if kind is bool:
            return WORDS[text.lower()]
        return _parse_strings(text)
    except (ValueError, KeyError):
        meant = {int: "a whole number", float: "a number", bool: "on or off"}.get(
            kind, "a text or a JSON list of texts"
        )
        raise InvalidRequest(f"/set {name} takes {meant}, not {quote(text)}; {DEFAULT} takes it back") from None


def _parse_strings(text: str) -> tuple[str, ...]:
    """Read one text, or several as a JSON list; a JSON string may hold escapes."""
    if not text.startswith(("[", '"')):
        return (text,)
    found = json.loads(text)
    return tuple(found) if isinstance(found, list) else (found,)


def describe_setting(name: str, values: dict[str, Any], defaults: Any) -> str:
    """Return the value that holds, and its source."""
    if name in values:
        return f"{_show(values[name])} (set here)"
    value = getattr(defaults, name)
    if name in ("max_tokens", "seed"):
        return {"max_tokens": "as many as fit", "seed": "random"}[name] if value is None else _show(value)
    return _show(value)


def _show(value: Any) -> str:
    """Write a value as `/set` takes it."""
    if isinstance(value, tuple):
        return json.dumps(list(value), ensure_ascii=False) if value else "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else str(value)
