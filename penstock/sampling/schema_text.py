"""Keywords of strings."""

from __future__ import annotations

from typing import Any

from penstock.sampling.schema_strings import refusal
from penstock.sampling.schema_writer import Part, Path, Write, Writer

MAX_LENGTH = 4096  # characters that a string must have: each is a state of llguidance's
LENGTHS = ("minLength", "maxLength")


def write_pattern(writer: Writer, work: Part, value: str, path: Path) -> None:
    """With the other keywords of strings, as far as llguidance takes them together."""
    kept: dict[str, Any] = {}
    for keys in (("pattern",), ("format",), LENGTHS):
        more = {key: work.said[key] for key in keys if key in work.said}
        why = refusal({"type": "string", **kept, **more}) if more else None
        if why is None:
            kept |= more
        else:
            for key in more:
                writer.relax(key, work.path, why)
    work.written |= kept


def write_length(writer: Writer, work: Part, value: int, path: Path) -> None:
    if "pattern" in work.said:
        return
    if value > MAX_LENGTH and path[-1] == "minLength":
        writer.relax("minLength", work.path, f"it is over {MAX_LENGTH}")
        return
    work.written[str(path[-1])] = value


def write_format(writer: Writer, work: Part, value: str, path: Path) -> None:
    """Those that are not known are annotations, and not here."""
    if "pattern" not in work.said:
        work.written["format"] = value


KEYWORDS: dict[str, Write] = {
    "pattern": write_pattern,
    "minLength": write_length,
    "maxLength": write_length,
    "format": write_format,
}
