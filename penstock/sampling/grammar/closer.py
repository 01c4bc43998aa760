"""Search for a valid end of an answer from its present state.

The search extends the text by bytes, likely closers first: a choice costs its position in that order, and on ties the
longest text goes first. States are told apart by their token bitmask and, in JSON, by the position in the document. A
state that looks like an earlier one is deferred, and dropped if the text had the same length then: loops stay cheap,
counted repetitions still pass. A result is a valid end, not necessarily the shortest.
"""

from __future__ import annotations

import heapq
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.sampling.grammar.lexicon import Lexicon

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_STATES = 2000  # per search; one takes 20 to 100 µs
MAX_BYTES = 1 << 14  # of an end
BETWEEN = b'}],:1234567890"tfn-.eE[{'  # JSON outside strings: closers, then the shortest values
WITHIN = b'"})];>\n@:.-/1234567890'  # any other text
FREE = 110  # if more bytes than this may follow, the text is free and FREE_BYTES stand for all
FREE_BYTES = b"\"\n'a1./)]}>|;,@"
MANY = 8  # if more letters than this may follow, one letter and a long word stand for all
DEAREST = 3  # positions after this one cost no more
PLACE = 8  # cost per position in the order
AGAIN = 1  # cost of a state that looks like an earlier one
DEEPER = 4  # cost of each open bracket, so that recursive schemas end
MAX_LITERALS = 8
QUOTE = ord('"')
BLANKS = b" \t\n\r"
_BETWEEN = {byte: place for place, byte in enumerate(BETWEEN)}
_WITHIN = {byte: place for place, byte in enumerate(WITHIN)}
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LITERAL = re.compile(r"(?<!\\)[^\W_]{2,32}")
_STRUCTURE = re.compile(rb'\\.|["\[\]{},]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonPosition:
    """Position in a JSON text: levels closed since the search began, commas per open level, inside a string or not."""

    left: int = 0
    commas: tuple[int, ...] = (0,)
    quoted: bool = False

    def after(self, data: bytes) -> JsonPosition:
        left, commas, quoted = self.left, list(self.commas), self.quoted
        for found in _STRUCTURE.findall(data):
            if found == b'"':
                quoted = not quoted
            elif quoted or len(found) > 1:
                continue
            elif found in b"[{":
                commas.append(0)
            elif found == b",":
                commas[-1] += 1
            elif len(commas) > 1:
                commas.pop()
            else:
                left, commas = left + 1, [0]
        return JsonPosition(left, tuple(commas), quoted)


@dataclass(frozen=True, slots=True, order=True)
class _Step:
    cost: int
    remaining: int  # lower for a longer text
    order: int
    matcher: LLMatcher = field(compare=False)  # after `text`, before `more`
    text: bytes = field(compare=False)
    place: JsonPosition | None = field(compare=False)
    more: bytes | None = field(compare=False)  # None: a deferred state


def literals(source: str) -> list[bytes]:
    """Return the first few runs of letters and digits in a grammar's source."""
    return [word.encode() for word in dict.fromkeys(_LITERAL.findall(source))][:MAX_LITERALS]


@dataclass(frozen=True, slots=True)
class Hints:
    """Text that may be needed before an end and shows in no bitmask: `words` outside JSON, `strings` in JSON, and
    whether those strings are long."""

    words: tuple[bytes, ...] = ()
    strings: tuple[tuple[bytes, tuple[int, ...]], ...] = ()  # each with its ids
    has_long_strings: bool = False


class Closer:
    """Best-first search for bytes that bring a grammar to an end."""

    def __init__(self, lexicon: Lexicon, hints: Hints | None = None) -> None:
        self.lexicon = lexicon
        self._hints = hints or Hints()
        self._bits = np.zeros(lexicon.mask_words, dtype=np.int32)

    def search(
        self,
        start: LLMatcher,
        place: JsonPosition | None = None,
        max_states: int = MAX_STATES,
        within_s: float = math.inf,
    ) -> bytes | None:
        """Return bytes after which the grammar may end; None after `max_states` states or `within_s` of CPU
        time. `place` is given for JSON."""
        end = time.thread_time() + within_s
        steps = [_Step(0, 0, 0, start, b"", place, b"")]
        seen: set[object] = set()
        order = 0
        for _ in range(max_states):
            if not steps or time.thread_time() > end:
                return None
            step = heapq.heappop(steps)
            if step.more is not None:
                step = self._advance(step)
                if step.matcher.is_error():
                    continue
                if step.matcher.is_accepting():
                    return step.text
                key = (self._compute_bits(step.matcher), step.place)
                if key in seen:
                    again = (key, len(step.text))
                    if again not in seen:
                        seen.add(again)
                        heapq.heappush(steps, replace(step, cost=step.cost + AGAIN))
                    continue
                seen.add(key)
            else:
                self._compute_bits(step.matcher)
            following = [(more, min(index, DEAREST)) for index, more in enumerate(self._list_continuations(step.place))]
            for more, rank in [*self._find_hints(step), *following]:
                order += 1
                heapq.heappush(
                    steps,
                    _Step(
                        step.cost + PLACE * rank,
                        -len(step.text) - len(more),
                        order,
                        step.matcher,
                        step.text,
                        step.place,
                        more,
                    ),
                )
        return None

    def _find_hints(self, step: _Step) -> list[tuple[bytes, int]]:
        """Return texts that may lead to an end, with their positions in the order. Used in strings that may not end
        here."""
        if step.place is None:
            return [(word, 1) for word in self._hints.words]
        if not step.place.quoted or self._leads(step.matcher, ()):
            return []
        for text, path in self._hints.strings:
            if self._leads(step.matcher, path):
                return [(text, 0)]
        stretched = self._find_filler(step.matcher) if self._hints.has_long_strings else None
        return [] if stretched is None else [(stretched, 0)]

    def _leads(self, matcher: LLMatcher, path: Sequence[int]) -> bool:
        """True if a string may end after these ids."""
        closed = [*path, int(self.lexicon.bytes_alone[QUOTE])]
        return bool(matcher.validate_tokens(closed) == len(closed))

    def _find_filler(self, matcher: LLMatcher) -> bytes | None:
        """Return filler text of the required length: one long word repeated, then a prefix of it."""
        words = self.lexicon.words
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[words]
        if not allowed.any():
            return None
        word = int(words[allowed.argmax()])
        spelled = self.lexicon.spellings[word]
        too_few, enough = 0, 1
        while not self._leads(matcher, [word] * enough):
            too_few, enough = enough, 2 * enough
            if enough * len(spelled) > MAX_BYTES:
                return None
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if self._leads(matcher, [word] * middle) else (middle, enough)
        for length in range(1, len(spelled)):
            path = self.lexicon.cover(spelled[:length])
            if path is not None and self._leads(matcher, [*[word] * too_few, *path]):
                return spelled * too_few + spelled[:length]
        return spelled * enough

    def _compute_bits(self, matcher: LLMatcher) -> bytes:
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return self._bits.tobytes()

    def _advance(self, step: _Step) -> _Step:
        """Return the step with its own matcher, advanced past `more` and all forced bytes."""
        matcher, text, more, place = step.matcher.deep_copy(), step.text, step.more or b"", step.place
        while True:
            path = self.lexicon.cover(more[:MAX_BYTES])
            if path is None or len(text) + len(more) > MAX_BYTES or not matcher.consume_tokens(list(path)):
                matcher.consume_token(self.lexicon.size)  # those bytes do not exist: retire the matcher
                break
            text += more
            place = place.after(more) if place else None
            if matcher.is_stopped():
                break
            more = matcher.compute_ff_bytes()
            if not more or b"\xff" in more:
                break
        deeper = len(place.commas) - len(step.place.commas) if place and step.place else 0
        return replace(
            step,
            cost=step.cost + DEEPER * max(0, deeper),
            remaining=-len(text),
            matcher=matcher,
            text=text,
            place=place,
            more=None,
        )

    def _list_continuations(self, place: JsonPosition | None) -> list[bytes]:
        """Return continuations to try in this state, likeliest to close first."""
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self.lexicon.size]
        singles = self.lexicon.bytes_alone
        possible = np.flatnonzero((singles >= 0) & (allowed[singles] > 0)).tolist()
        letters = [byte for byte in possible if byte in _LETTERS]
        word = b""
        if len(letters) > MANY:
            words = self.lexicon.words
            if allowed[longest := words[allowed[words].argmax()]]:
                word = self.lexicon.spellings[longest]
            possible = [byte for byte in possible if byte not in _LETTERS or byte == letters[0]]
        free = len(possible) + len(letters) > FREE
        if free:
            possible = [byte for byte in possible if byte in FREE_BYTES]
        useful = [byte for byte in possible if byte not in BLANKS] or possible
        ranks = _WITHIN if place is None or place.quoted else _BETWEEN
        useful.sort(key=lambda byte: (ranks.get(byte, 99), byte))
        found = [bytes([byte]) for byte in useful]
        if place is None:  # in JSON blanks end nothing
            found += [bytes([byte]) for byte in possible if byte in BLANKS and byte not in useful]
        if word:
            closes = bool(found) and (found[0] == b'"' and place is not None if free else useful[0] in ranks)
            found.insert(1 if closes else 0, word)
        return found
