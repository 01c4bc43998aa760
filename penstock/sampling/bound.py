"""How few tokens a grammar's shortest answer has, as far as that can be proven."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.sampling.closing import BLANKS, Place
from penstock.sampling.lexicon import Lexicon
from penstock.sampling.plain import simplest

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_TEXTS = 4000  # looked at in all
MAX_BRANCHES = 512  # ids that may follow one text
MAX_FORCED = 1024  # bytes that must follow


class Deadline:
    """An end by this thread's computing time, so that a busy machine proves as much as an idle one."""

    def __init__(self, seconds: float) -> None:
        self._end = time.thread_time() + seconds

    @property
    def passed(self) -> bool:
        return time.thread_time() > self._end


def least_tokens(
    start: LLMatcher, lexicon: Lexicon, is_json: bool, deadline: Deadline
) -> tuple[int, tuple[int, ...] | None]:
    """No answer has fewer tokens than this; and one that has so many, if it was found.

    Every text of one token, then of two, and so on is tried, so what it says is proven. It ends where there are too
    many texts, or when its time is up. In JSON blanks alone between other tokens are left out: an answer without them
    is one token shorter.
    """
    level: dict[bytes, tuple[LLMatcher, tuple[int, ...]]] = {b"": (start, ())}
    num_texts, length = 0, 0
    while level:
        following: dict[bytes, tuple[LLMatcher, tuple[int, ...]]] = {}
        for text, (matcher, path) in level.items():
            allowed = None if deadline.passed else _following(matcher, lexicon)
            if allowed is None:
                return length + 1, None
            if is_json and not Place().after(text).quoted:
                allowed = [token for token in allowed if lexicon.spellings[token].strip(BLANKS)]
            num_texts += len(allowed)
            if len(allowed) > MAX_BRANCHES or num_texts > MAX_TEXTS:
                return length + 1, None
            for token in allowed:
                after = text + (lexicon.spellings[token] or b"\xff" + str(token).encode())
                if after in following:
                    continue
                copy = matcher.deep_copy()
                if not copy.consume_token(token):
                    continue
                if copy.is_accepting():
                    return length + 1, (*path, token)
                following[after] = (copy, (*path, token))
        level, length = following, length + 1
    return length + 1, None


def least_plain_tokens(start: LLMatcher, lexicon: Lexicon, deadline: Deadline) -> tuple[int, tuple[int, ...] | None]:
    """The same for JSON whose strings and numbers may be any. Of texts that differ in those alone one is followed, and
    within a string only what closes it: tokens that do not are there in vain."""
    level: dict[bytes, tuple[LLMatcher, bool]] = {b"": (start, False)}
    known = {b""}
    num_texts, length = 0, 0
    while level:
        following: dict[bytes, tuple[LLMatcher, bool]] = {}
        for text, (matcher, within) in level.items():
            if within:
                more = lexicon.closings
            else:
                allowed = _following(matcher, lexicon)
                if allowed is None or len(allowed) > MAX_BRANCHES:
                    return length + 1, None
                more = [lexicon.spellings[token] for token in allowed]
            for spelled in more:
                if deadline.passed:
                    return length + 1, None
                after, is_within = simplest(text + spelled)
                if after in known:
                    continue
                copy, path = start.deep_copy(), lexicon.cover(after)
                if path is None or not copy.consume_tokens(list(path)):
                    if _leads(matcher, lexicon.cover(spelled)):
                        return length + 1, None  # another string or number was not as good
                    continue
                if copy.is_accepting():
                    return length + 1, path if len(path) == length + 1 else None
                known.add(after)
                following[after] = (copy, is_within)
                num_texts += 1
                if num_texts > MAX_TEXTS:
                    return length + 1, None
        level, length = following, length + 1
    return length + 1, None


def _leads(matcher: LLMatcher, path: tuple[int, ...] | None) -> bool:
    return path is None or matcher.validate_tokens(list(path)) == len(path)


def _following(matcher: LLMatcher, lexicon: Lexicon) -> list[int] | None:
    """Every id that may follow; where bytes are forced llguidance's mask names one way to spell them only."""
    forced = matcher.compute_ff_bytes()
    if len(forced) > MAX_FORCED:
        return None
    if matcher.compute_ff_tokens() and b"\xff" not in forced:
        return [token for token in lexicon.along(forced) if matcher.validate_tokens([token])]
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        return None
    found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: lexicon.size]).tolist()
    return found
