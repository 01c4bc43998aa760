"""Keys of a body that no field has: passed over with a warning, unless they are misspelt or decide the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from penstock.errors import shown
from penstock.server.elsewhere import REAL, why_decisive

MAX_KEYS = 8  # unknown keys of a body that are looked at and named
MAX_KEY_CHARS = 40  # a longer one is no misspelling
MAX_EDITS = 2
CHARS_PER_EDIT = 2  # short keys may have fewer: "stp" one, "n" none
UNKNOWN, UNSUPPORTED = "unknown_key", "unsupported_key"  # the types of their errors


@dataclass
class UnknownKeys:
    """Those of one body. `refuses` makes an error of each."""

    refuses: bool = False
    names: dict[str, None] = field(default_factory=dict)
    has_more: bool = False  # than are named
    _judged: set[tuple[frozenset[str], str]] = field(default_factory=set)

    def judge(
        self, values: Mapping[str, Any], known: frozenset[str], decisive: Mapping[str, str], passed: frozenset[str]
    ) -> list[str]:
        """The keys of a record that are to be passed over, if few; an error for the first that must not be."""
        found = list(islice(_unknown(values, known | passed if passed else known), MAX_KEYS + 1))
        for key in found[:MAX_KEYS]:
            self._judge(key, values[key], known, decisive)
        return found

    def _judge(self, key: str, value: Any, known: frozenset[str], decisive: Mapping[str, str]) -> None:
        if (known, key) not in self._judged and len(self._judged) >= MAX_KEYS:
            return
        self._judged.add((known, key))
        why = why_decisive(key, value, decisive)
        if why is not None:
            raise _error(UNSUPPORTED, key, why)
        meant = find_meant(key, known)
        if meant is not None:
            raise _error(UNKNOWN, key, meant)

    def add(self, keys: list[str]) -> None:
        """Name keys that were passed over."""
        for key in keys:
            if key in self.names or len(self.names) < MAX_KEYS:
                self.names[key] = None
            else:
                self.has_more = True

    def notice(self) -> str | None:
        """A warning of all that were passed over."""
        if not self.names:
            return None
        told = ", ".join(map(shown, self.names)) + (" and more" if self.has_more else "")
        return f"unknown fields were ignored: {told}"


def refuse_unknown(values: Mapping[str, Any], known: frozenset[str]) -> None:
    """Make an error of the first key that is unknown, whatever it holds."""
    key = next((one for one in values if one not in known), None)
    if key is not None:
        raise _error(UNKNOWN, key, find_meant(key, known) or "")


def _unknown(values: Mapping[str, Any], known: frozenset[str]) -> Iterator[str]:
    """A null asks for nothing."""
    return (key for key, value in values.items() if key not in known and value is not None)


def _error(kind: str, key: str, told: str) -> ValidationError:
    error = PydanticCustomError(kind, "{told}", {"told": told})  # type: ignore[arg-type]
    return ValidationError.from_exception_data("body", [InitErrorDetails(type=error, loc=(key,), input=None)])


def find_meant(key: str, known: frozenset[str]) -> str | None:
    """The known key that `key` is a misspelling of. A field of another API is none."""
    return None if len(key) > MAX_KEY_CHARS or key in REAL else _find(key, known)


@lru_cache(maxsize=1024)
def _find(key: str, known: frozenset[str]) -> str | None:
    plain = _plain(key)
    found = [(0, one) for one in known if _plain(one) == plain]
    for one in known:
        most = _may_edit(key, one)
        if abs(len(one) - len(key)) <= most and len(set(one) ^ set(key)) <= 2 * most:  # an edit changes two at most
            edits = count_edits(key, one)
            found += [(edits, one)] if edits <= most else []
    return min(found, default=(0, None))[1]


def _plain(key: str) -> str:
    """Without what spellings of one name differ in: maxTokens, max-tokens."""
    return key.replace("_", "").replace("-", "").lower()


def _may_edit(one: str, two: str) -> int:
    return min(MAX_EDITS, (min(len(one), len(two)) - 1) // CHARS_PER_EDIT)


def count_edits(one: str, two: str) -> int:
    """Characters to put in, take out, change, or swap with the next; MAX_EDITS + 1 where there are more."""
    far = MAX_EDITS + 1
    before: list[int] = []
    above = [min(far, column) for column in range(len(two) + 1)]
    for at in range(1, len(one) + 1):
        row = [min(far, at)] + [far] * len(two)
        for column in range(max(1, at - MAX_EDITS), min(len(two), at + MAX_EDITS) + 1):
            row[column] = min(
                above[column] + 1, row[column - 1] + 1, above[column - 1] + (one[at - 1] != two[column - 1]), far
            )
            if at > 1 and column > 1 and one[at - 2 : at] == two[column - 1] + two[column - 2]:
                row[column] = min(row[column], before[column - 2] + 1)
        if min(row) >= far:
            return far
        before, above = above, row
    return above[-1]
