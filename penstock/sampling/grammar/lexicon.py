"""Bytes that the ids of a model spell, as grammars see them."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidRequest, quote
from penstock.sampling.logits import Array
from penstock.types import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer


# In a schema without these, "" stands for any string and 1 for any number.
PARTICULAR = frozenset(
    {
        "enum",
        "const",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "propertyNames",
        "patternProperties",
        "contentEncoding",
        "contentMediaType",
        "uniqueItems",
        "not",
        "oneOf",
        "if",
        "dependentSchemas",
    }
)
_PARTS = re.compile(
    rb'"(?:\\.|[^"\\])*(?:\\\Z|(?P<end>"?))|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|[ \t\r\n]+|.', re.DOTALL
)


def is_unconstrained(params: StructuredOutputsParams) -> bool:
    """True if the schema constrains no string and no number."""
    if params.json_object:
        return True
    return params.json is not None and not _names(json.loads(params.source)) & PARTICULAR


def _names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set().union(*map(_names, value)) if isinstance(value, list) else set()


def canonicalize(text: bytes) -> tuple[bytes, bool]:
    """Return an equivalent prefix with "" for string values, 1 for numbers and no whitespace, and whether it ends
    inside a string."""
    parts: list[bytes] = []
    open_: list[bytes] = []
    names = within = False  # the next string is a property name; the text ends inside a string
    for found in _PARTS.finditer(text):
        part = found[0]
        first = part[:1]
        within = False
        if first == b'"':
            end = found["end"] or b""
            within = not names and not end
            part = part if names else b'"' + end
        elif first in b"-0123456789" and len(part) > (first == b"-"):
            part = b"1"
        elif first in b"{[":
            open_.append(first)
        elif first in b"}]" and open_:
            open_.pop()
        elif first in b" \t\r\n":
            part = b""
        if part:
            names = bool(open_) and open_[-1] == b"{" and first in b"{,"
        parts.append(part)
    return b"".join(parts), within


def closings(spelled: bytes) -> set[bytes]:
    """Return what `spelled` may add from the end of a string on, also if the id before ended in a backslash."""
    return {spelled[end:] for begin in (0, 1) if (end := _string_end(spelled, begin)) >= 0}


def _string_end(spelled: bytes, begin: int) -> int:
    while begin < len(spelled):
        if spelled[begin : begin + 1] == b'"':
            return begin
        begin += 2 if spelled[begin : begin + 1] == b"\\" else 1
    return -1


END = b"<end of grammar>"


class Lexicon:
    """Bytes of every id. A special id has a name instead, by which a grammar may ask for it; it is never text.

    llguidance is given one extra id that ends a grammar: the ids that end an answer differ per request, and a model may
    have none.
    """

    def __init__(
        self, spellings: Sequence[bytes], special: Mapping[int, bytes], encode: Callable[[str], list[int]]
    ) -> None:
        self.spellings = [b"" if id in special else spelled for id, spelled in enumerate(spellings)]
        self.special = dict(special)
        self._encode = encode
        self.ids: dict[bytes, int] = {}
        for id, spelled in enumerate(self.spellings):
            if spelled:
                self.ids.setdefault(spelled, id)
        self._tokenizer: LLTokenizer | None = None
        self._reach: dict[bytes, int] = {}  # by first two bytes: length of the longest id that begins with them
        for spelled in self.ids:
            self._reach[spelled[:2]] = max(self._reach.get(spelled[:2], 1), len(spelled))
        self.steps = lru_cache(maxsize=512)(self._steps)

    @property
    def size(self) -> int:
        return len(self.spellings)

    @property
    def mask_words(self) -> int:
        """Number of 32-bit words for all ids and the extra end id."""
        return (self.size + 1 + 31) // 32

    def load_tokenizer(self) -> LLTokenizer:
        """Build llguidance's tokenizer on the first call; return it."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            tokens = [self.special.get(id, spelled) for id, spelled in enumerate(self.spellings)]
            wrapped = _Wrapped([*tokens, END], [*sorted(self.special), self.size], self)
            self._tokenizer = LLTokenizer(TokenizerWrapper(wrapped), n_vocab=self.size + 1)
        return self._tokenizer

    @cached_property
    def bytes_alone(self) -> Array:
        """[256]: the id of each single byte, or -1."""
        return np.array([self.ids.get(bytes([byte]), -1) for byte in range(256)], dtype=np.int64)

    @cached_property
    def words(self) -> Array:
        """Ids of letters and digits alone, longest first."""
        found = [id for spelled, id in self.ids.items() if spelled.isalnum()]
        return np.array(sorted(found, key=lambda id: (-len(self.spellings[id]), id)), dtype=np.int64)

    @cached_property
    def closings(self) -> list[bytes]:
        """All continuations of a JSON text from the end of a string on that single ids can add."""
        return sorted({rest for spelled in self.ids for rest in closings(spelled)})

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self.ids)

    def along(self, data: bytes) -> list[int]:
        """Return the ids that spell a prefix of `data`, or all of it and more."""
        found = [id for end in range(1, len(data)) if (id := self.ids.get(data[:end], -1)) >= 0]
        for place in range(bisect_left(self._sorted, data), len(self._sorted)):
            if not self._sorted[place].startswith(data):
                break
            found.append(self.ids[self._sorted[place]])
        return found

    def spell(self, id: int) -> bytes:
        """Return an id's bytes in a text; a special token's name."""
        return self.special.get(id) or (self.spellings[id] if id < self.size else b"")

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self.spellings[token] for token in tokens if token < self.size])

    def encode(self, text: str) -> list[int]:
        """Tokenize as the model's tokenizer does, unless that reads special tokens or adds a space."""
        ids, data = self._encode(text), text.encode()
        if self.bytes_of(ids) != data or any(id in self.special for id in ids):
            return list(self.cover(data) or ())
        return ids

    def cover(self, data: bytes, begin: int = 0) -> tuple[int, ...] | None:
        """Return the fewest ids that spell `data[begin:]`, longest first on ties; None if there are none."""
        steps = self.steps(data)
        path: list[int] = []
        while begin < len(data):
            _, id, begin = steps[begin]
            if id < 0:
                return None
            path.append(id)
        return tuple(path)

    def _steps(self, data: bytes) -> list[tuple[int, int, int]]:
        """For each position: the fewest ids to the end, the first of them, and where it ends."""
        ids, reach, end = self.ids, self._reach, len(data)
        steps = [(0, -1, end)] * (end + 1)
        for begin in range(end - 1, -1, -1):
            best = (end + 1, -1, end)
            for stop in range(min(end, begin + reach.get(data[begin : begin + 2], 1)), begin, -1):
                count = steps[stop][0] + 1
                if count < best[0] and (id := ids.get(data[begin:stop], -1)) >= 0:
                    best = (count, id, stop)
            steps[begin] = best
        return steps


class _Wrapped:
    """The interface that llguidance's TokenizerWrapper expects."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], lexicon: Lexicon) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = len(tokens) - 1
        self._lexicon = lexicon

    def __call__(self, text: str) -> list[int]:
        return self._lexicon.encode(text)


class ReasoningMarker:
    """One marker in one vocabulary: a single token or several; a token may spell its end and more."""

    def __init__(self, text: str, lexicon: Lexicon) -> None:
        self.text = text.encode()
        self._lexicon = lexicon
        self._overruns: dict[int, Array] = {}
        self._steps: dict[int, Array] = {}
        last = self.text[-1:]
        spelled = ((id, lexicon.spell(id)) for id in range(lexicon.size))
        self._near = [(id, data) for id, data in spelled if data and (data in self.text or last in data)]

    def write(self, before: str = "") -> tuple[int, ...]:
        """Return ids that spell the marker after `before`; its own token if there is one."""
        special = next((id for id, name in self._lexicon.special.items() if name == self.text), None)
        if special is None:
            path = self._lexicon.cover(before.encode() + self.text)
        else:
            path = self._lexicon.cover(before.encode())
            path = None if path is None else (*path, special)
        if path is None:
            raise InvalidRequest(
                f"the model's tokens cannot spell {quote(self.text.decode())}, its reasoning "
                "marker: leave thinking_token_budget out, or switch thinking off"
            )
        return path

    def follow(self, matched: int, data: bytes) -> tuple[int, bytes | None]:
        """Feed `data` after the first `matched` bytes; return the bytes matched now and, if complete, the bytes after
        the marker."""
        text = self.text[:matched] + data
        at = text.find(self.text)
        if at >= 0:
            return 0, text[at + len(self.text) :]
        for count in range(min(len(text), len(self.text) - 1), 0, -1):
            if text.endswith(self.text[:count]):
                return count, None
        return 0, None

    def overruns(self, matched: int) -> Array:
        """Return the tokens that complete the marker after `matched` bytes and spell more."""
        if matched not in self._overruns:
            self._overruns[matched] = _ids([id for id, data in self._near if self.follow(matched, data)[1]])
        return self._overruns[matched]

    def steps(self, matched: int) -> Array:
        """Return the tokens that continue the marker after `matched` bytes, past its end included."""
        if matched not in self._steps:
            rest = self.text[matched:]
            self._steps[matched] = _ids(
                [id for id, data in self._near if rest.startswith(data) or data.startswith(rest)]
            )
        return self._steps[matched]


def _ids(tokens: list[int]) -> Array:
    return np.array(tokens, dtype=np.int64)
