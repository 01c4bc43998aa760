"""An answer's last tokens are kept for its end.

What is known is a way to a valid end, and how many tokens it takes. While many more remain, it is looked for again only
now and then; once a single token could make it too long, every token is tried before it is taken, and one that leaves
no way to an end within the budget is replaced by the next token of the known way. All of it follows from the tokens and
the budget alone, so an answer that is resumed goes the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.sampling.closing import Place
from penstock.sampling.grammar import Grammar, GrammarFailed
from penstock.sampling.grammars import CompiledGrammar

PER_TOKEN = 8  # by which a token lengthens the way at most, on average
MAX_STATES = 800  # looked at within a step
CUTS = 12  # beginnings of the old way that a new token may stand for
MAX_RESPELT = 64  # tokens of the old way that are spelt anew
ALWAYS = 1 << 60


@dataclass(frozen=True, slots=True)
class Way:
    """`path` leads to an end from the state in which it was found: the present one if `fresh`."""

    path: tuple[int, ...] | None
    wake: int  # tokens left at which it is looked for again
    fresh: bool = True


class Budget:
    def __init__(self, compiled: CompiledGrammar, grammar: Grammar, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._compiled = compiled
        self._grammar = grammar
        self._closer = compiled.closer()
        self._tokens: list[int] = []
        self._ways = [self._way(compiled.closing_within(max_tokens), max_tokens)]
        self._tried: tuple[int, int, Way] | None = None  # after how many tokens, which one, what then

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self._tokens)

    @property
    def free(self) -> bool:
        """Whether no token would be replaced by another."""
        return self.remaining - 1 > self._ways[-1].wake

    def instead_of(self, token: int) -> int | None:
        """The token to take in place of one that leaves no way to an end; None: it may be taken."""
        left = self.remaining - 1
        now = self._ways[-1]
        if left > now.wake or token in self._grammar.ends:
            return None
        try:
            self._grammar.advance(token)
            then = self._then(token, left)
        except GrammarFailed:
            then = None
        finally:
            self._grammar.rollback(1)
        if then is not None:
            self._tried = (len(self._tokens), token, then)
            if then.path is not None and len(then.path) <= left:
                return None
        path = now.path if now.fresh else self._search(self._tokens)
        if path is None or len(path) > left + 1:
            return None
        if not path:
            return self._grammar.ends[0] if self._grammar.ends else None
        return path[0]

    def append(self, token: int) -> None:
        """Call after the grammar has advanced."""
        if self._tried is not None and self._tried[:2] == (len(self._tokens), token):
            way = self._tried[2]
        else:
            way = self._then(token, self.remaining - 1)
        self._tokens.append(token)
        self._ways.append(way)
        self._tried = None

    def truncate(self, count: int) -> None:
        """Forget the last `count` tokens; call after the grammar has been rolled back."""
        if count:
            del self._tokens[-count:], self._ways[-count:]
        self._tried = None

    def _then(self, token: int, left: int) -> Way:
        """What is known after one more token, with the grammar already there."""
        now = self._ways[-1]
        if left > now.wake or token in self._grammar.ends:
            return Way(now.path, now.wake, fresh=False)
        if now.fresh and now.path and now.path[0] == token:
            return self._way(now.path[1:], left)
        path = self._shortened(now.path, left)
        return self._way(self._search([*self._tokens, token]) if path is None else path, left)

    def _way(self, path: tuple[int, ...] | None, left: int) -> Way:
        if path is None or len(path) > left:
            return Way(path, left // 2)
        spare = left - len(path) - self._compiled.growth
        return Way(path, ALWAYS if spare <= 0 else left - max(1, spare // (PER_TOKEN + 1)))

    def _shortened(self, path: tuple[int, ...] | None, left: int) -> tuple[int, ...] | None:
        """The old way less its beginning, where that still leads to the end and fits."""
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
        if not self._compiled.searchable:
            return None
        place = None
        if self._compiled.is_json:
            place = Place(quoted=Place().after(self._compiled.lexicon.bytes_of(tokens)).quoted)
        found = self._closer.search(self._grammar.matcher, place, MAX_STATES)
        return None if found is None else self._compiled.lexicon.cover(found)
