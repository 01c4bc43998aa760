"""From the bytes of a body to its type, at a bounded cost: large ones are counted before they are decoded."""

from __future__ import annotations

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from penstock.server.errors import WHOLE_LIMIT, ApiError, invalid_body
from penstock.server.record import Budget
from penstock.server.room import SMALL_BYTES
from penstock.server.unknown import UnknownKeys

# In a body, but for its texts; each bounds what decoding takes of memory. 2048 lists of 512 token ids have 2^20 commas.
MAX_OPENED = 200_000  # { and [
MAX_QUOTES = 300_000  # two for each text
MAX_COMMAS = 1_250_000
SLICE_BYTES = 1 << 18  # looked at at once: other threads run in between

_SURROGATE = re.compile(rb"\\u[dD][89abAB]")  # the first half of a character beyond U+FFFF
# an escaped half of a character without the other
_LONE = re.compile(
    rb"(?<!\\)\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|"
    rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
HALF_BYTES = 6  # of such a half
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # gzip, zstd
Typed = TypeVar("Typed", bound=BaseModel)


def decode(raw: bytearray, kind: type[Typed], max_text_bytes: int, unknown: UnknownKeys | None = None) -> Typed:
    """The body as `kind`; whatever is wrong with it is an ApiError that says what. `raw` is emptied on the way.

    `max_text_bytes` is what the body's texts may take once they are decoded. `unknown` learns of keys passed over.
    """
    if raw.startswith(BOM_UTF8):
        del raw[: len(BOM_UTF8)]
    if len(raw) > SMALL_BYTES:
        check_size(raw, max_text_bytes)
    values = _decode(raw)
    raw.clear()
    if not isinstance(values, dict):
        raise ApiError(
            400, f"the body is a JSON {_NAMES.get(type(values), 'number')}: send an object", code="invalid_value"
        )
    try:
        return kind.model_validate(values, context=Budget(unknown=unknown or UnknownKeys()))
    except ValidationError as error:
        raise invalid_body(error) from None
    except RecursionError:
        raise _too_deep() from None


def check_size(raw: bytearray, max_text_bytes: int) -> None:
    """Refuse what would take far more memory than it has bytes."""
    found = Marks(raw.count(b"{") + raw.count(b"["), raw.count(b'"') - raw.count(b'\\"'), raw.count(b","))
    if found.excess() is not None:
        found = count_marks(raw)  # texts may have any number of them
        if (excess := found.excess()) is not None:
            raise ApiError(400, f"the body has {excess}; send less at once", code="invalid_json")
    if not raw.isascii() or b"\\u" in raw:
        _check_text(raw, max_text_bytes)


@dataclass(frozen=True)
class Marks:
    """How often a body has the marks that make values of it."""

    num_opened: int = 0  # { and [
    num_quotes: int = 0
    num_commas: int = 0

    def excess(self) -> str | None:
        """The first of the limits that is exceeded, and by how many."""
        for count, most, name in (
            (self.num_opened, MAX_OPENED, "objects and lists"),
            (self.num_quotes, MAX_QUOTES, "quotes"),
            (self.num_commas, MAX_COMMAS, "commas"),
        ):
            if count > most:
                return f"{count} {name}: the limit is {most}"
        return None


def count_marks(raw: bytearray) -> Marks:
    """Count the marks outside of texts, up to the slice in which there are too many."""
    found, inside, start = Marks(), 0, 0
    while start < len(raw) and found.excess() is None:
        part = bytes(raw[start : start + SLICE_BYTES])
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape that goes on
            part += raw[start + SLICE_BYTES : start + SLICE_BYTES + 1]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[inside::2])
        found = Marks(
            found.num_opened + outside.count(b"{") + outside.count(b"["),
            found.num_quotes + len(pieces) - 1,
            found.num_commas + outside.count(b","),
        )
        inside ^= (len(pieces) - 1) & 1
        start += max(1, len(part))
    return found


def _check_text(raw: bytearray, max_text_bytes: int) -> None:
    """Bound what texts take in memory: one character beyond U+FFFF makes all of its text four bytes wide."""
    if 4 * len(raw) <= max_text_bytes:
        return
    num_chars, width = 0, 2
    for start in range(0, len(raw), SLICE_BYTES):
        part = raw[start : start + SLICE_BYTES + 11]  # a character that is cut off is whole in one of two parts
        text = part.decode("utf-8", "ignore")
        num_chars += min(len(text), SLICE_BYTES)
        if len(text.encode("utf-16-le")) > 2 * len(text) or _SURROGATE.search(part):
            width = 4
    if width * num_chars > max_text_bytes:
        raise ApiError(
            413,
            f"the body has {num_chars} characters, some of which take {width} bytes in memory: the "
            f"limit for such bodies is {max_text_bytes // width}; send less at once, or start the "
            "server with a larger --max-body-mb",
            code="body_too_large",
        )


def _decode(raw: bytearray) -> Any:
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise _invalid(_other_coding(raw) or "it is not UTF-8") from None
    except msgspec.MsgspecError as error:
        if not raw or raw.isspace():
            raise ApiError(400, "the body is empty: send a JSON object", code="invalid_json") from None
        if "out of range" in str(error):
            raise _invalid(f"a whole number is out of range: {WHOLE_LIMIT}") from None
        raise _invalid(_other_coding(raw) or _lone_half(raw, str(error)) or str(error)) from None


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the body is no valid JSON: {why}", code="invalid_json")


def _other_coding(raw: bytearray) -> str | None:
    """Name what a body is written in, if its first bytes are not those of UTF-8."""
    if raw.startswith(COMPRESSED):
        return "it is compressed; send it uncompressed"
    if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in raw[:4]:
        return "it is UTF-16 or UTF-32; send UTF-8"
    return None


def _lone_half(raw: bytearray, error: str) -> str | None:
    """Name the half of a character for which msgspec has other words."""
    if not any(word in error for word in ("surrogate", "escape", "truncated")):
        return None
    for start in range(0, len(raw), SLICE_BYTES):
        begin = max(0, start - HALF_BYTES)  # with both neighbours of what begins in the slice
        for found in _LONE.finditer(raw[begin : start + SLICE_BYTES + 2 * HALF_BYTES]):
            at = begin + found.start()
            if start <= at < start + SLICE_BYTES:
                return f"{found[0].decode()} (byte {at}) is half of a surrogate pair; send both halves, or leave it out"
    return None


def _too_deep() -> ApiError:
    return ApiError(400, "the body is nested too deeply: flatten it", code="invalid_json")


_NAMES = {list: "list", str: "string", bool: "boolean", type(None): "null"}
