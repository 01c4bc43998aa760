"""Decode bodies into their types at a bounded cost: large ones are counted before they are decoded."""

from __future__ import annotations

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeVar, cast

import msgspec
from pydantic import BaseModel, GetCoreSchemaHandler, RootModel, ValidationError, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from penstock.server.connections.body_memory import SMALL_BYTES
from penstock.server.http.errors import WHOLE_LIMIT, ApiError, make_body_error
from penstock.server.http.unknown_keys import UnknownKeys

MAX_ENTRIES = 1_000  # of a mapping, unless its field says otherwise
MAX_FREE_VALUES = 100_000  # per body, of free-form JSON: schemas, arguments, template values
MAX_FREE_CHARS = 4 << 20
MAX_FREE_DEPTH = 64
_MAPS_FAIL_FAST = "fail_fast" in signature(core_schema.dict_schema).parameters  # not in older releases
# keys of a schema that hold schemas
_INNER = ("schema", "fields", "items_schema", "keys_schema", "values_schema", "choices", "extras_schema", "definitions")
# Limits outside of strings; each bounds decoding memory. 2048 lists of 512 token ids have 2^20 commas.
MAX_OPENED = 200_000  # { and [
MAX_QUOTES = 300_000  # two per string
MAX_COMMAS = 1_250_000
SLICE_BYTES = 1 << 18  # scanned at once; other threads run in between
_SURROGATE = re.compile(rb"\\u[dD][89abAB]")  # a high surrogate
# a lone surrogate
_LONE = re.compile(
    rb"(?<!\\)\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|"
    rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
ESCAPE_BYTES = 6  # of \\uXXXX
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # gzip, zstd
Typed = TypeVar("Typed", bound=BaseModel)


@dataclass
class JsonBudget:
    """The free-form values and characters a body may still have, and its unknown keys."""

    num_values: int = MAX_FREE_VALUES
    num_chars: int = MAX_FREE_CHARS
    unknown: UnknownKeys = field(default_factory=UnknownKeys)

    def take(self, value: Any) -> None:
        """Count a value and everything in it; raise where it is too large or too deep."""
        self._count(1, 0)
        level = [value]
        for _ in range(MAX_FREE_DEPTH):
            below: list[Any] = []
            for one in level:
                if isinstance(one, str):
                    self._count(0, len(one))
                elif isinstance(one, dict):
                    self._count(len(one), sum(map(len, one)))
                    below += one.values()
                elif isinstance(one, list):
                    self._count(len(one), 0)
                    below += one
            if not below:
                return
            level = below
        raise ValueError(f"it is nested more than {MAX_FREE_DEPTH} levels: flatten it")

    def _count(self, num_values: int, num_chars: int) -> None:
        self.num_values -= num_values
        self.num_chars -= num_chars
        if self.num_values < 0:
            raise ValueError(f"a body may have {MAX_FREE_VALUES} free-form values in all: send fewer")
        if self.num_chars < 0:
            raise ValueError(f"free-form values may have {MAX_FREE_CHARS} characters in all: send fewer")


@dataclass(frozen=True)
class _MaxEntries:
    """Refuse a mapping by its size before its entries are validated."""

    limit: int

    def __call__(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > self.limit:
            raise ValueError(f"it has {len(value)} entries: the limit is {self.limit}; send fewer")
        return value


def _charge_budget(value: Any, info: ValidationInfo) -> Any:
    if isinstance(info.context, JsonBudget):
        info.context.take(value)
    return value


def _add_bounds(schema: Any, source: Any) -> Any:
    """Add this module's bounds to a pydantic schema; nested models have their own."""
    if isinstance(schema, (list, tuple)):
        return type(schema)(_add_bounds(one, source) for one in schema)
    if (
        not isinstance(schema, dict)
        or _is_bounded(schema)
        or schema.get("type") == "model"
        and schema["cls"] is not source
    ):
        return schema
    if not isinstance(schema.get("type"), str):  # keyed by field names (one may be "type") or tags
        return {name: _add_bounds(one, source) for name, one in schema.items()}
    made = {key: _add_bounds(value, source) if key in _INNER else value for key, value in schema.items()}
    if schema["type"] == "list":
        made["fail_fast"] = True
    elif schema["type"] == "any" or schema["type"] == "dict" and schema["values_schema"]["type"] == "any":
        return core_schema.with_info_before_validator_function(_charge_budget, schema)
    elif schema["type"] == "dict":
        max_entries = _MaxEntries(made.setdefault("max_length", MAX_ENTRIES))
        if _MAPS_FAIL_FAST:
            made["fail_fast"] = True
        return core_schema.no_info_before_validator_function(max_entries, made)
    return made


def _is_bounded(schema: dict[str, Any]) -> bool:
    """True for a schema already seen as part of another model."""
    function = schema["function"].get("function") if schema.get("type") == "function-before" else None
    return function is _charge_budget or isinstance(function, _MaxEntries)


class BoundedModel(BaseModel):
    """Part of a body. Lists stop at the first wrong element, mappings are bounded before validation, and free-form
    values are counted against the JsonBudget in the validation context."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cast(CoreSchema, _add_bounds(handler(source), source))


def decode(raw: bytearray, kind: type[Typed], max_text_bytes: int, unknown: UnknownKeys | None = None) -> Typed:
    """Decode the body as `kind`; an ApiError says what is wrong. `raw` is emptied on the way.

    `max_text_bytes` bounds the decoded strings. `unknown` collects the keys that are ignored.
    """
    if raw.startswith(BOM_UTF8):
        del raw[: len(BOM_UTF8)]
    if len(raw) > SMALL_BYTES:
        check_size(raw, max_text_bytes)
    values = _decode(raw)
    raw.clear()
    if not isinstance(values, list if issubclass(kind, RootModel) else dict):
        wanted = "a list" if issubclass(kind, RootModel) else "an object"
        raise ApiError(
            400, f"the body is a JSON {_NAMES.get(type(values), 'number')}: send {wanted}", code="invalid_value"
        )
    try:
        return kind.model_validate(values, context=JsonBudget(unknown=unknown or UnknownKeys()))
    except ValidationError as error:
        raise make_body_error(error) from None
    except RecursionError:
        raise _make_depth_error() from None


def check_size(raw: bytearray, max_text_bytes: int) -> None:
    """Refuse a body whose decoded form is far larger than its bytes."""
    found = JsonCounts(raw.count(b"{") + raw.count(b"["), raw.count(b'"') - raw.count(b'\\"'), raw.count(b","))
    if found.excess() is not None:
        found = count_tokens(raw)  # strings may contain any number
        if (excess := found.excess()) is not None:
            raise ApiError(400, f"the body has {excess}; send less at once", code="invalid_json")
    if not raw.isascii() or b"\\u" in raw:
        _check_text(raw, max_text_bytes)


@dataclass(frozen=True)
class JsonCounts:
    """Number of JSON tokens in a body."""

    num_opened: int = 0  # { and [
    num_quotes: int = 0
    num_commas: int = 0

    def excess(self) -> str | None:
        """Name the first limit exceeded, and by how much."""
        for count, most, name in (
            (self.num_opened, MAX_OPENED, "objects and lists"),
            (self.num_quotes, MAX_QUOTES, "quotes"),
            (self.num_commas, MAX_COMMAS, "commas"),
        ):
            if count > most:
                return f"{count} {name}: the limit is {most}"
        return None


def count_tokens(raw: bytearray) -> JsonCounts:
    """Count JSON tokens outside of strings, up to the slice where there are too many."""
    found, inside, start = JsonCounts(), 0, 0
    while start < len(raw) and found.excess() is None:
        part = bytes(raw[start : start + SLICE_BYTES])
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape continues in the next slice
            part += raw[start + SLICE_BYTES : start + SLICE_BYTES + 1]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[inside::2])
        found = JsonCounts(
            found.num_opened + outside.count(b"{") + outside.count(b"["),
            found.num_quotes + len(pieces) - 1,
            found.num_commas + outside.count(b","),
        )
        inside ^= (len(pieces) - 1) & 1
        start += max(1, len(part))
    return found


def _check_text(raw: bytearray, max_text_bytes: int) -> None:
    """Bound the memory of strings: one character beyond U+FFFF makes its whole string four bytes wide."""
    if 4 * len(raw) <= max_text_bytes:
        return
    num_chars, width = 0, 2
    for start in range(0, len(raw), SLICE_BYTES):
        part = raw[start : start + SLICE_BYTES + 11]  # overlap, so that a cut character is whole in one part
        text = part.decode("utf-8", "ignore")
        num_chars += min(len(text), SLICE_BYTES)
        if len(text.encode("utf-16-le")) > 2 * len(text) or _SURROGATE.search(part):
            width = 4
    if width * num_chars > max_text_bytes:
        raise ApiError(
            413,
            f"the body has {num_chars} characters, up to {width} bytes each in memory: the "
            f"limit for such bodies is {max_text_bytes // width}; send less at once, or start the "
            "server with a larger --max-body-mb",
            code="body_too_large",
        )


def _decode(raw: bytearray) -> Any:
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise _make_depth_error() from None
    except UnicodeDecodeError:
        raise _make_error(_find_encoding(raw) or "it is not UTF-8") from None
    except msgspec.MsgspecError as error:
        if not raw or raw.isspace():
            raise ApiError(400, "the body is empty: send a JSON object", code="invalid_json") from None
        if "out of range" in str(error):
            raise _make_error(f"a whole number is out of range: {WHOLE_LIMIT}") from None
        raise _make_error(_find_encoding(raw) or _find_lone_surrogate(raw, str(error)) or str(error)) from None


def _make_error(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json")


def _find_encoding(raw: bytearray) -> str | None:
    """Name the body's encoding if its first bytes are not UTF-8."""
    if raw.startswith(COMPRESSED):
        return "it is compressed; send it uncompressed"
    if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in raw[:4]:
        return "it is UTF-16 or UTF-32; send UTF-8"
    return None


def _find_lone_surrogate(raw: bytearray, error: str) -> str | None:
    """Name a lone surrogate and its offset, which msgspec does not."""
    if not any(word in error for word in ("surrogate", "escape", "truncated")):
        return None
    for start in range(0, len(raw), SLICE_BYTES):
        begin = max(0, start - ESCAPE_BYTES)  # overlap by one escape on either side
        for found in _LONE.finditer(raw[begin : start + SLICE_BYTES + 2 * ESCAPE_BYTES]):
            at = begin + found.start()
            if start <= at < start + SLICE_BYTES:
                return f"{found[0].decode()} (byte {at}) is half of a surrogate pair; send both halves, or leave it out"
    return None


def _make_depth_error() -> ApiError:
    return ApiError(400, "the body is nested too deeply: flatten it", code="invalid_json")


_NAMES = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
