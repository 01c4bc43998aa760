"""How few tokens a grammar's shortest answer has, as far as that can be proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.sampling.closing import BLANKS, Place
from penstock.sampling.lexicon import Lexicon

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_TEXTS = 4000         # looked at in all
MAX_BRANCHES = 512       # ids that may follow one text
MAX_FORCED = 1024        # bytes that must follow


def least_tokens(start: LLMatcher, lexicon: Lexicon, is_json: bool) -> tuple[int, tuple[int, ...] | None]:
    """No answer has fewer tokens than this; and one that has so many, if it was found.

    Every text of one token, then of two, and so on is tried, so what it says is proven. It ends where there are too
    many texts. In JSON blanks alone between other tokens are left out: an answer without them is one token shorter.
    """
    level: dict[bytes, tuple[LLMatcher, tuple[int, ...]]] = {b"": (start, ())}
    num_texts, length = 0, 0
    while level:
        following: dict[bytes, tuple[LLMatcher, tuple[int, ...]]] = {}
        for text, (matcher, path) in level.items():
            allowed = _following(matcher, lexicon)
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
    found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:lexicon.size]).tolist()
    return found
