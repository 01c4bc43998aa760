"""Read the JSON files of a model's folder: objects of bounded size, and errors about damaged files on one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import InvalidModel


class Damaged(InvalidModel):
    """Bytes that no writer of the format would produce."""


def quote_name(name: str) -> str:
    """Format a name from the file for a one-line error."""
    return repr(name if len(name) <= 80 else name[:79] + "…")


MAX_CONFIG_BYTES = 1 << 22


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys at any depth."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_once)
    except Damaged:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or too many digits
        raise Damaged(f"it is not valid JSON ({_reason(error)})") from None
    if not isinstance(value, dict):
        raise Damaged(f"it must hold a JSON object, not a {type(value).__name__}")
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in line {error.lineno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("\n")[0][:80]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Damaged(f"key {quote_name(name)} is duplicated")
        found[name] = value
    return found


def read_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > max_bytes:
        raise InvalidModel(f"{path} is larger than {max_bytes} bytes; that is too large for a model's file")
    try:
        return parse_object(text)
    except Damaged as error:
        raise InvalidModel(f"{path}: {error}; correct it or download it again") from None


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not _is_there(path):
        raise InvalidModel(f"{folder} has no config.json, so it is not a model folder{_instead(folder)}")
    return read_object(path)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the authors' sampling defaults; empty if there are none."""
    path = folder / "generation_config.json"
    return read_object(path) if _is_there(path) else {}


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror}") from None


def _instead(folder: Path) -> str:
    found = sorted(folder.glob("*.gguf"))
    return f"; to load a GGUF model, name the file: {found[0]}" if found else "; name a folder that holds one"
