"""Find where a text's last tokens stood before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MIN_MATCH = 2  # tokens
MAX_MATCH = 16
MAX_CANDIDATES = 16  # earlier places that are compared
END = -1  # stands between two texts


class Match(NamedTuple):
    after: int  # index of the token that followed
    length: int  # tokens that agree before it


class TextIndex:
    """Tokens with hash chains over pairs of them, as in LZ77: every pair knows where it stood before.

    Appending costs one lookup per token; finding compares at most MAX_CANDIDATES places."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # pair → index of its second token
        self._before: list[int] = []  # per index: where the pair that ends there stood before, -1 if nowhere
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        known, before, latest = self.tokens, self._before, self._latest
        last = known[-1] if known else END
        for token in tokens:
            pair = (last, token)
            before.append(latest.get(pair, -1))
            latest[pair] = len(known)
            known.append(token)
            last = token

    def find(self, tail: Sequence[int], is_own: bool = False, max_match: int = MAX_MATCH) -> Match | None:
        """Return the longest match, up to `max_match`, of the last tokens of `tail`, the latest one of equals. With
        `is_own` the tail is the end of this text, and only earlier places count."""
        if len(tail) < MIN_MATCH:
            return None
        at = self._latest.get((tail[-2], tail[-1]), -1)
        if is_own and at >= 0:
            at = self._before[at]
        best = Match(0, 0)
        for _ in range(MAX_CANDIDATES):
            if at < 0:
                break
            length = self._compare(tail, at, max_match)
            if length > best.length and at + 1 < len(self.tokens):
                best = Match(at + 1, length)
                if length == max_match:
                    break
            at = self._before[at]
        return best if best.length else None

    def _compare(self, tail: Sequence[int], at: int, max_match: int) -> int:
        """Count the tokens that agree up to index `at`; the last two are known to."""
        tokens, length = self.tokens, MIN_MATCH
        most = min(max_match, len(tail), at + 1)
        while length < most and tokens[at - length] == tail[-1 - length]:
            length += 1
        return length

    def read(self, after: int, most: int, is_own: bool = False) -> list[int]:
        """Return up to `most` tokens from index `after` on, to the end of that text. With `is_own` a copy that
        reaches the end goes on with what it has copied: a cycle is continued."""
        copied = self.tokens[after : after + most]
        if END in copied:
            copied = copied[: copied.index(END)]
        elif is_own and copied:
            period = len(copied)
            while len(copied) < most:
                copied.append(copied[len(copied) - period])
        return copied
