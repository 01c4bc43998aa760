"""Constrain an answer that may reason first: text between two markers, then the grammar.

Reasoning is free. It is closed by a line break and the end marker once its budget is spent, or while a whole answer
still fits. The grammar begins right after. All of it depends on the request and its tokens alone, so a resumed answer
is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from penstock.sampling.grammar.answer_guide import AnswerGuide
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.grammar.matcher import GrammarFailed
from penstock.sampling.logits import Array
from penstock.sampling.masks import NEVER, allow, allow_all, allow_none, forbid
from penstock.types import ReasoningBlock, Request

MIN_ANSWER_TOKENS = 16  # reserved for the answer, beyond twice its shortest form
ANSWER_SHARE = 4  # 1/4 of all tokens is reserved for the answer


class Phase(Enum):
    MAYBE = auto()  # only a prefix of the opening marker so far
    THINKING = auto()
    ANSWER = auto()


class ReasoningPosition(NamedTuple):
    """Position in the answer; one per token, mostly shared with the token before."""

    phase: Phase
    begin: int = 0  # tokens before this phase
    matched: int = 0  # bytes of the next marker already matched
    num_closing: int = 0  # closing tokens forced so far


class ReasoningGuide:
    """Guides reasoning, then hands over to a Guide if the answer must match a grammar."""

    def __init__(self, request: Request, block: ReasoningBlock, grammars: GrammarCompiler) -> None:
        asked = request.sampling.structured_outputs
        self._request, self._lexicon = request, grammars.lexicon
        self._begin, self._end = grammars.marker(block.begin), grammars.marker(block.end)
        self._compiled = None if asked is None else grammars.compile(asked)
        self._closing = self._end.write("\n")
        self._budget = request.sampling.thinking_token_budget
        self._last = self._find_last(request.max_tokens)
        self._tokens: list[int] = []
        may_open = self._last > len(self._begin.write())
        phase = Phase.THINKING if block.is_open else Phase.MAYBE if may_open else Phase.ANSWER
        self._places = [ReasoningPosition(phase)]
        self._guide: AnswerGuide | None = None
        self._guided_from = 0
        if self._compiled is not None:
            self._ends = np.array(self._compiled.begin(request).ends, dtype=np.int64)
            if phase is not Phase.THINKING:
                self._begin_guide(0)

    def _find_last(self, max_tokens: int) -> int:
        """Return the number of tokens after which reasoning must close for an answer to fit."""
        if self._compiled is None:
            return max_tokens
        path = self._compiled.facts.within(max_tokens)
        shortest = len(path) if path is not None else 1
        kept = max(2 * shortest + MIN_ANSWER_TOKENS, max_tokens // ANSWER_SHARE)
        return max(0, max_tokens - len(self._closing) - kept)

    @property
    def _place(self) -> ReasoningPosition:
        return self._places[-1]

    @property
    def forced(self) -> int | None:
        """The token that must come next to close the reasoning; None if any allowed token may."""
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
        """True if the mask after `num_generated` tokens depends on all of them."""
        if self._compiled is not None:
            return True
        place = self._place
        if place.phase is Phase.ANSWER or self._budget is None:
            return False
        begin = place.begin if place.phase is Phase.THINKING else len(self._tokens)
        return place.num_closing > 0 or num_generated - begin >= self._budget

    def bitmask(self, size: int) -> Array:
        forced, place = self.forced, self._place
        if forced is not None:
            words = allow_none(size)
            allow(words, np.array([forced], dtype=np.int64))
            return words
        if self._compiled is None:
            return allow_all(size)
        if place.phase is Phase.THINKING:
            words = allow_all(size)
            forbid(words, self._forbidden(place))
            return words
        words = allow_none(size) if self._guide is None else self._guide.bitmask(size)
        if place.phase is Phase.MAYBE:
            allow(words, self._begin.steps(place.matched))
        return words

    def forced_tokens(self) -> Sequence[int]:
        """Return the rest of the closing marker, or the tokens that the answer's grammar forces."""
        place = self._place
        if self.forced is not None:
            return self._closing[place.num_closing :]
        return self._guide.forced_tokens() if self._guide is not None and place.phase is Phase.ANSWER else ()

    def mask(self, logits: Array) -> None:
        """Set the logits of tokens that may not come next to -inf, in place."""
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

    def _forbidden(self, place: ReasoningPosition) -> Array:
        """Return tokens that end the answer, or run past the end marker, during reasoning before a grammar."""
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

    def _after(self, place: ReasoningPosition, token: int) -> tuple[ReasoningPosition, bytes]:
        """Return the position after one more token, and the bytes it spells past the end marker."""
        if place.phase is Phase.ANSWER:
            return place, b""
        data = self._lexicon.spell(token)
        if place.phase is Phase.THINKING:
            matched, behind = self._end.follow(place.matched, data)
            if behind is None:
                num_closing = place.num_closing + (self.forced is not None)
                after = ReasoningPosition(Phase.THINKING, place.begin, matched, num_closing)
                return place if after == place else after, b""
            return ReasoningPosition(Phase.ANSWER, len(self._tokens) + 1), behind
        text = self._begin.text[: place.matched] + (data if place.matched else data.lstrip())
        if text.startswith(self._begin.text):
            matched = self._end.follow(0, text[len(self._begin.text) :])[0]
            return ReasoningPosition(Phase.THINKING, len(self._tokens) + 1, matched), b""
        if self._begin.text.startswith(text):
            return ReasoningPosition(Phase.MAYBE, matched=len(text)), b""
        return ReasoningPosition(Phase.ANSWER), b""

    def _begin_guide(self, begin: int) -> None:
        assert self._compiled is not None
        self._guide = AnswerGuide(self._compiled, self._request, self._request.max_tokens - begin)
        self._guided_from = begin

    def truncate(self, count: int) -> None:
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
