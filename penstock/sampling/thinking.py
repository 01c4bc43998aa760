"""An answer that may think first: reasoning between two markers, then what the answer must match.

Reasoning is free. It is ended once its budget is used up, or while there is still room for a whole answer, by tokens
that spell a line break and the end marker; what must match begins right behind that. Everything follows from the
request and its tokens so far, so an answer that is resumed goes the same way.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from penstock.sampling.arrays import Array
from penstock.sampling.grammar import GrammarFailed
from penstock.sampling.grammars import Grammars
from penstock.sampling.guide import Guide
from penstock.sampling.masks import NEVER
from penstock.sampling.words import add, every_token, no_token, remove
from penstock.types import ReasoningBlock, Request

MIN_ANSWER_TOKENS = 16  # kept for the answer, beyond twice its shortest form
ANSWER_SHARE = 4  # one part in so many of all tokens is kept for the answer


class Phase(Enum):
    MAYBE = auto()  # nothing but what may become the opening marker
    THINKING = auto()
    ANSWER = auto()


class Place(NamedTuple):
    """There is one for every token, and most are the one before."""

    phase: Phase
    begin: int = 0  # of the phase: how many tokens stand before it
    matched: int = 0  # bytes of the marker that may come next
    num_closing: int = 0  # tokens of reasoning that were forced


class ReasoningGuide:
    """Takes the place of a Guide, and holds one for the answer where that must match a grammar."""

    def __init__(self, request: Request, block: ReasoningBlock, grammars: Grammars) -> None:
        asked = request.sampling.structured_outputs
        self._request = request
        self._lexicon = grammars.lexicon
        self._begin, self._end = grammars.marker(block.begin), grammars.marker(block.end)
        self._compiled = None if asked is None else grammars.compile(asked)
        self._closing = self._end.write("\n")
        self._budget = request.sampling.thinking_token_budget
        self._last = self._find_last(request.max_tokens)
        self._tokens: list[int] = []
        may_open = self._last > len(self._begin.write())
        phase = Phase.THINKING if block.is_open else Phase.MAYBE if may_open else Phase.ANSWER
        self._places = [Place(phase)]
        self._guide: Guide | None = None
        self._guided_from = 0
        if self._compiled is not None:
            self._ends = np.array(self._compiled.begin(request).ends, dtype=np.int64)
            if phase is not Phase.THINKING:
                self._begin_guide(0)

    def _find_last(self, max_tokens: int) -> int:
        """How many tokens there may be before reasoning is ended, so that an answer fits behind it."""
        if self._compiled is None:
            return max_tokens
        path = self._compiled.closing_within(max_tokens)
        shortest = len(path) if path is not None else 1
        kept = max(2 * shortest + MIN_ANSWER_TOKENS, max_tokens // ANSWER_SHARE)
        return max(0, max_tokens - len(self._closing) - kept)

    @property
    def _place(self) -> Place:
        return self._places[-1]

    @property
    def forced(self) -> int | None:
        """The token that must come next, so that reasoning ends; None: any that is allowed."""
        place = self._place
        if place.phase is not Phase.THINKING:
            return None
        is_due = self._budget is not None and len(self._tokens) - place.begin >= self._budget
        if place.num_closing or is_due or self._compiled is not None and len(self._tokens) >= self._last:
            return self._closing[place.num_closing]
        return None

    @property
    def finished(self) -> bool:
        return self._guide is not None and self._guide.finished

    @property
    def complete(self) -> bool:
        return self._guide is not None and self._guide.complete

    @property
    def free(self) -> bool:
        return self._guide is None or self._guide.free

    def late_at(self, num_generated: int) -> bool:
        """True if the mask after so many tokens depends on all of them."""
        if self._compiled is not None:
            return True
        place = self._place
        if place.phase is Phase.ANSWER or self._budget is None:
            return False
        begin = place.begin if place.phase is Phase.THINKING else len(self._tokens)
        return place.num_closing > 0 or num_generated - begin >= self._budget

    def words(self, size: int) -> Array:
        forced, place = self.forced, self._place
        if forced is not None:
            words = no_token(size)
            add(words, np.array([forced], dtype=np.int64))
            return words
        if self._compiled is None:
            return every_token(size)
        if place.phase is Phase.THINKING:
            words = every_token(size)
            remove(words, self._forbidden(place))
            return words
        words = no_token(size) if self._guide is None else self._guide.words(size)
        if place.phase is Phase.MAYBE:
            add(words, self._begin.steps(place.matched))
        return words

    def mask(self, logits: Array) -> None:
        """Rule out, in place, what may not come next."""
        forced, place = self.forced, self._place
        if forced is not None:
            logits[:] = NEVER
            logits[forced] = 0.0
        elif self._compiled is None:
            return
        elif place.phase is Phase.THINKING:
            ids = self._forbidden(place)
            logits[ids[ids < len(logits)]] = NEVER
        else:
            opening = self._begin.steps(place.matched) if place.phase is Phase.MAYBE else self._ends[:0]
            opening = opening[opening < len(logits)]
            kept = logits[opening]
            if self._guide is None:
                logits[:] = NEVER
            else:
                self._guide.mask(logits)
            logits[opening] = kept

    def _forbidden(self, place: Place) -> Array:
        """In reasoning before an answer that must match: what would end the answer, or begin it within a token."""
        return np.concatenate([self._ends, self._end.overruns(place.matched)])

    def instead_of(self, token: int) -> int | None:
        place = self._place
        if self._guide is None or place.phase is Phase.MAYBE and token in self._begin.steps(place.matched):
            return None
        return self._guide.instead_of(token)

    def append(self, token: int) -> None:
        before = self._place
        after, behind = self._after(before, token)
        self._tokens.append(token)
        self._places.append(after)
        if self._compiled is None:
            return
        if behind:
            raise GrammarFailed(f"token {token} ends the reasoning and begins the answer: allow other tokens")
        if after.phase is Phase.THINKING:
            self._guide = None
        elif before.phase is Phase.THINKING:
            self._begin_guide(after.begin)
        elif self._guide is not None:
            if after.phase is Phase.MAYBE and not self._guide.accepts(token):
                self._guide = None
            else:
                self._guide.append(token)

    def _after(self, place: Place, token: int) -> tuple[Place, bytes]:
        """The place behind one more token, and what that spells behind the end marker."""
        if place.phase is Phase.ANSWER:
            return place, b""
        data = self._lexicon.spell(token)
        if place.phase is Phase.THINKING:
            matched, behind = self._end.follow(place.matched, data)
            if behind is None:
                num_closing = place.num_closing + (self.forced is not None)
                after = Place(Phase.THINKING, place.begin, matched, num_closing)
                return place if after == place else after, b""
            return Place(Phase.ANSWER, len(self._tokens) + 1), behind
        text = self._begin.text[: place.matched] + (data if place.matched else data.lstrip())
        if text.startswith(self._begin.text):
            matched = self._end.follow(0, text[len(self._begin.text) :])[0]
            return Place(Phase.THINKING, len(self._tokens) + 1, matched), b""
        if self._begin.text.startswith(text):
            return Place(Phase.MAYBE, matched=len(text)), b""
        return Place(Phase.ANSWER), b""

    def _begin_guide(self, begin: int) -> None:
        assert self._compiled is not None
        self._guide = Guide(self._compiled, self._request, self._request.max_tokens - begin)
        self._guided_from = begin

    def truncate(self, count: int) -> None:
        """Forget the last `count` tokens."""
        length = len(self._tokens) - count
        del self._tokens[length:], self._places[length + 1 :]
        place = self._place
        if self._compiled is None:
            return
        if place.phase is Phase.THINKING:
            self._guide = None
        elif self._guide is not None and self._guided_from == place.begin:
            self._guide.truncate(count)
        else:
            self._begin_guide(place.begin)
            for token in self._tokens[place.begin :]:
                if self._guide is not None and (place.phase is Phase.ANSWER or self._guide.accepts(token)):
                    self._guide.append(token)
                else:
                    self._guide = None
