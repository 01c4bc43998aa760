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


def least_tokens(start: LLMatcher, lexicon: Lexicon, is_json: bool) -> tuple[int, tuple[int, ...] | None]:
    """No answer has fewer tokens than this; and one that has so many, if it was found.

    Every text of one token, then of two, and so on is tried, so what it says is proven. It ends where there are too
    many texts. In JSON blanks alone between other tokens are left out: an answer without them is one token shorter.
    """
    bits = np.zeros(lexicon.mask_words, dtype=np.int32)
    level: dict[bytes, tuple[LLMatcher, tuple[int, ...]]] = {b"": (start, ())}
    num_texts, length = 0, 0
    while level:
        following: dict[bytes, tuple[LLMatcher, tuple[int, ...]]] = {}
        for text, (matcher, path) in level.items():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if matcher.is_error():
                return length + 1, None
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:lexicon.size]).tolist()
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
