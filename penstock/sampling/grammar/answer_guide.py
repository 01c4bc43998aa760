"""Constrain one answer: its grammar state and the budget reserved for its end.

A closing path (tokens to a valid end) is kept. While many tokens remain it is searched again only now and then. Once a
single token could make it too long, every token is tried first; one that leaves no path within the budget is replaced
by the next token of the path. All of it depends on tokens and budget alone, so a resumed answer is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.sampling.grammar.closer import JsonPosition
from penstock.sampling.grammar.compiler import CompiledGrammar
from penstock.sampling.grammar.matcher import GrammarFailed, GrammarMatcher
from penstock.sampling.logits import Array
from penstock.types import Request

PER_TOKEN = 8  # average bound on how much one token lengthens the path
MAX_STATES = 800  # per step
CUTS = 12  # leading bytes of the old path that a new token may replace
MAX_RESPELT = 64  # leading tokens of the old path to tokenize again
ALWAYS = 1 << 60


@dataclass(frozen=True, slots=True)
class ClosingPath:
    """`path` leads to a valid end from the state it was found in: the present one if `fresh`."""

    path: tuple[int, ...] | None
    wake: int  # search again at this many tokens left
    fresh: bool = True


class ClosingBudget:
    """Keeps enough tokens of `max_tokens` in reserve to close the answer."""

    def __init__(self, compiled: CompiledGrammar, grammar: GrammarMatcher, max_tokens: int) -> None:
        self.max_tokens, self._compiled, self._grammar = max_tokens, compiled, grammar
        self._closer = compiled.closer()
        self._tokens: list[int] = []
        self._ways = [self._make_path(compiled.facts.within(max_tokens), max_tokens)]
        self._sample_branches: tuple[int, int, ClosingPath] | None = None  # (tokens before, token tried, path after)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self._tokens)

    @property
    def free(self) -> bool:
        """True if no next token would be replaced."""
        return self.remaining - 1 > self._ways[-1].wake

    def instead_of(self, token: int) -> int | None:
        """Return the token to take instead of one that leaves no path to an end; None to keep it."""
        left = self.remaining - 1
        now = self._ways[-1]
        if left > now.wake or token in self._grammar.ends:
            return None
        try:
            self._grammar.advance(token)
            then = self._path_after(token, left)
        except GrammarFailed:
            then = None
        finally:
            self._grammar.rollback(1)
        if then is not None:
            self._sample_branches = (len(self._tokens), token, then)
            if then.path is not None and len(then.path) <= left:
                return None
        path = now.path if now.fresh else self._search(self._tokens)
        if path is None or len(path) > left + 1:
            return None
        if not path:
            return self._grammar.ends[0] if self._grammar.ends else None
        return path[0]

    def append(self, token: int) -> None:
        """Add a token; call after the grammar has advanced."""
        if self._sample_branches is not None and self._sample_branches[:2] == (len(self._tokens), token):
            way = self._sample_branches[2]
        else:
            way = self._path_after(token, self.remaining - 1)
        self._tokens.append(token)
        self._ways.append(way)
        self._sample_branches = None

    def truncate(self, count: int) -> None:
        """Drop the last `count` tokens; call after the grammar was rolled back."""
        if count:
            del self._tokens[-count:], self._ways[-count:]
        self._sample_branches = None

    def _path_after(self, token: int, left: int) -> ClosingPath:
        """Return the path after one more token; the grammar has already advanced."""
        now = self._ways[-1]
        if left > now.wake or token in self._grammar.ends:
            return ClosingPath(now.path, now.wake, fresh=False)
        if now.fresh and now.path and now.path[0] == token:
            return self._make_path(now.path[1:], left)
        path = self._shorten(now.path, left)
        return self._make_path(self._search([*self._tokens, token]) if path is None else path, left)

    def _make_path(self, path: tuple[int, ...] | None, left: int) -> ClosingPath:
        if path is None or len(path) > left:
            return ClosingPath(path, left // 2)
        spare = left - len(path) - self._compiled.growth
        return ClosingPath(path, ALWAYS if spare <= 0 else left - max(1, spare // (PER_TOKEN + 1)))

    def _shorten(self, path: tuple[int, ...] | None, left: int) -> tuple[int, ...] | None:
        """Return the old path without its beginning, if that still leads to an end and fits."""
        if path is None:
            return None
        begin, end = path[:MAX_RESPELT], path[MAX_RESPELT:]
        data = self._compiled.lexicon.bytes_of(begin)
        for cut in range(min(CUTS, len(data)), -1, -1):
            rest = self._compiled.lexicon.cover(data, cut)
            if rest is not None and len(rest) + len(end) <= left and self._leads((*rest, *end)):
                return (*rest, *end)
        return None

    def _leads(self, path: tuple[int, ...]) -> bool:
        matcher = self._grammar.matcher
        if matcher.validate_tokens(list(path)) < len(path):
            return False
        copy = matcher.deep_copy()
        return bool(copy.consume_tokens(list(path)) and copy.is_accepting())

    def _search(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        if not self._compiled.facts.searchable:
            return None
        place = None
        if self._compiled.is_json:
            place = JsonPosition(quoted=JsonPosition().after(self._compiled.lexicon.bytes_of(tokens)).quoted)
        found = self._closer.search(self._grammar.matcher, place, MAX_STATES)
        return None if found is None else self._compiled.lexicon.cover(found)


class AnswerGuide:
    """Allows the tokens that continue the grammar and still let the answer end in time."""

    def __init__(self, compiled: CompiledGrammar, request: Request, max_tokens: int | None = None) -> None:
        """`max_tokens` are the tokens left for the constrained part."""
        self.grammar = compiled.begin(request)
        self.budget = ClosingBudget(compiled, self.grammar, request.max_tokens if max_tokens is None else max_tokens)
        self.forced: int | None = None  # only ReasoningGuide forces a single token

    @property
    def finished(self) -> bool:
        return self.grammar.complete or self.budget.remaining <= 0 and self.grammar.may_end

    @property
    def complete(self) -> bool:
        """True if nothing can follow, whatever the budget."""
        return self.grammar.complete

    def late_at(self, num_generated: int) -> bool:
        return True

    def accepts(self, token: int) -> bool:
        return self.grammar.accepts(token)

    @property
    def free(self) -> bool:
        """True if the grammar alone decides the next token: the budget is ample and an end is known."""
        return not self.finished and self.budget.free

    def bitmask(self, size: int) -> Array:
        return self.grammar.bitmask(size)

    def forced_tokens(self) -> Sequence[int]:
        """Return the tokens that follow whatever the model says, if the budget does not interfere."""
        return self.grammar.forced_tokens() if self.free else ()

    def mask(self, logits: Array) -> None:
        self.grammar.mask(logits)

    def instead_of(self, token: int) -> int | None:
        return self.budget.instead_of(token)

    def append(self, token: int) -> None:
        self.grammar.advance(token)
        self.budget.append(token)

    def truncate(self, count: int) -> None:
        self.grammar.rollback(count)
        self.budget.truncate(count)
