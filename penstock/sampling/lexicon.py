"""What the ids of a model spell, as grammars see them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from penstock.sampling.arrays import Array
from penstock.sampling.plain import closings

if TYPE_CHECKING:
    from llguidance import LLTokenizer

END = b"<end of grammar>"


class Lexicon:
    """Bytes of every id. A special id has a name instead, by which a grammar may ask for it; it is never text.

    llguidance is told of one id more than there are, which ends a grammar: which of the model's own ids do that is
    each request's affair, and a model may have none.
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
        self._reach: dict[bytes, int] = {}  # of two bytes: the length of the longest id that begins with them
        for spelled in self.ids:
            self._reach[spelled[:2]] = max(self._reach.get(spelled[:2], 1), len(spelled))
        self.steps = lru_cache(maxsize=512)(self._steps)

    @property
    def size(self) -> int:
        return len(self.spellings)

    @property
    def mask_words(self) -> int:
        """Of 32 bits, one for each id and one for the end of a grammar."""
        return (self.size + 1 + 31) // 32

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        tokens = [self.special.get(id, spelled) for id, spelled in enumerate(self.spellings)]
        return LLTokenizer(
            TokenizerWrapper(_Wrapped([*tokens, END], [*sorted(self.special), self.size], self)), n_vocab=self.size + 1
        )

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
        """What ids may add to a JSON text from the end of a string on."""
        return sorted({rest for spelled in self.ids for rest in closings(spelled)})

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self.ids)

    def along(self, data: bytes) -> list[int]:
        """Ids that spell a beginning of `data`, or all of it and more."""
        found = [id for end in range(1, len(data)) if (id := self.ids.get(data[:end], -1)) >= 0]
        for place in range(bisect_left(self._sorted, data), len(self._sorted)):
            if not self._sorted[place].startswith(data):
                break
            found.append(self.ids[self._sorted[place]])
        return found

    def spell(self, id: int) -> bytes:
        """An id's bytes in a text; a special token's name."""
        return self.special.get(id) or (self.spellings[id] if id < self.size else b"")

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self.spellings[token] for token in tokens if token < self.size])

    def encode(self, text: str) -> list[int]:
        """As the model's tokenizer writes it, unless that reads special tokens into it or adds a space."""
        ids, data = self._encode(text), text.encode()
        if self.bytes_of(ids) != data or any(id in self.special for id in ids):
            return list(self.cover(data) or ())
        return ids

    def cover(self, data: bytes, begin: int = 0) -> tuple[int, ...] | None:
        """The fewest ids that spell `data` from `begin` on; of equals the longest first. None: it cannot be spelt."""
        steps = self.steps(data)
        path: list[int] = []
        while begin < len(data):
            _, id, begin = steps[begin]
            if id < 0:
                return None
            path.append(id)
        return tuple(path)

    def _steps(self, data: bytes) -> list[tuple[int, int, int]]:
        """From each place on: the fewest ids to the end, the first of them, and where that ends."""
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
    """What llguidance's TokenizerWrapper expects."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], lexicon: Lexicon) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = len(tokens) - 1
        self._lexicon = lexicon

    def __call__(self, text: str) -> list[int]:
        return self._lexicon.encode(text)
