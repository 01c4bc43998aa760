"""How an answer can be brought to a valid end from where it stands.

The search goes byte by byte and tries first what usually closes: each choice costs its place in that order, and of
texts that cost the same the longest goes on. Which of all ids may follow a state tells states apart almost as well as
the states themselves would, together with the place in the JSON text where it is one. A state that looks like one met
before waits, and is dropped if the text was of the same length then: so loops cost little, and counted repetitions
still get through. What was found is a valid end; that there is none shorter is not claimed.
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

from penstock.sampling.lexicon import Lexicon

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_STATES = 2000  # looked at in one search; one takes 20 to 100 µs
MAX_BYTES = 1 << 14  # of an end
BETWEEN = b'}],:1234567890"tfn-.eE[{'  # JSON outside its strings: what closes, then the shortest values
WITHIN = b'"})];>\n@:.-/1234567890'  # any other text
FREE = 110  # bytes: where more may follow, any text goes, and few stand for all
FREE_BYTES = b"\"\n'a1./)]}>|;,@"
MANY = 8  # letters: of more, one and a long word stand for all
DEAREST = 3  # the last in order costs no more than the one in this place
PLACE = 8  # what each place in the order costs
AGAIN = 1  # what a state costs that looks like one met before
DEEPER = 4  # and each bracket: what may contain itself is not gone into for ever
MAX_LITERALS = 8
QUOTE = ord('"')
BLANKS = b" \t\n\r"
_BETWEEN = {byte: place for place, byte in enumerate(BETWEEN)}
_WITHIN = {byte: place for place, byte in enumerate(WITHIN)}
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LITERAL = re.compile(r"(?<!\\)[^\W_]{2,32}")
_STRUCTURE = re.compile(rb'\\.|["\[\]{},]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a JSON text: how many levels it has left since the search began, the commas on each level since, and
    whether it is within a string."""

    left: int = 0
    commas: tuple[int, ...] = (0,)
    quoted: bool = False

    def after(self, data: bytes) -> Place:
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
        return Place(left, tuple(commas), quoted)


@dataclass(frozen=True, slots=True, order=True)
class _Step:
    cost: int
    remaining: int  # less for a longer text
    order: int
    matcher: LLMatcher = field(compare=False)  # after `text`, before `more`
    text: bytes = field(compare=False)
    place: Place | None = field(compare=False)
    more: bytes | None = field(compare=False)  # None: this state waited to be gone on from


def literals(source: str) -> list[bytes]:
    """Runs of letters and digits in the text of a grammar, the first few."""
    return [word.encode() for word in dict.fromkeys(_LITERAL.findall(source))][:MAX_LITERALS]


@dataclass(frozen=True, slots=True)
class Hints:
    """Text that may be needed before an end, which no set of ids shows: `words` outside JSON, `strings` in JSON, and
    whether such strings are long."""

    words: tuple[bytes, ...] = ()
    strings: tuple[tuple[bytes, tuple[int, ...]], ...] = ()  # each with its ids
    has_long_strings: bool = False


class Closer:
    def __init__(self, lexicon: Lexicon, hints: Hints | None = None) -> None:
        self.lexicon = lexicon
        self._hints = hints or Hints()
        self._bits = np.zeros(lexicon.mask_words, dtype=np.int32)

    def search(
        self, start: LLMatcher, place: Place | None = None, most: int = MAX_STATES, within_s: float = math.inf
    ) -> bytes | None:
        """Bytes after which the grammar may end; None if none were found, after `most` states or `within_s` of this
        thread's time. `place` is given for JSON."""
        end = time.thread_time() + within_s
        steps = [_Step(0, 0, 0, start, b"", place, b"")]
        seen: set[object] = set()
        order = 0
        for _ in range(most):
            if not steps or time.thread_time() > end:
                return None
            step = heapq.heappop(steps)
            if step.more is not None:
                step = self._taken(step)
                if step.matcher.is_error():
                    continue
                if step.matcher.is_accepting():
                    return step.text
                key = (self._look(step.matcher), step.place)
                if key in seen:
                    again = (key, len(step.text))
                    if again not in seen:
                        seen.add(again)
                        heapq.heappush(steps, replace(step, cost=step.cost + AGAIN))
                    continue
                seen.add(key)
            else:
                self._look(step.matcher)
            following = [(more, min(index, DEAREST)) for index, more in enumerate(self._next(step.place))]
            for more, rank in [*self._hinted(step), *following]:
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

    def _hinted(self, step: _Step) -> list[tuple[bytes, int]]:
        """Texts that may lead to an end, and their places in the order: in a string that may not end here, one after
        which it may."""
        if step.place is None:
            return [(word, 1) for word in self._hints.words]
        if not step.place.quoted or self._leads(step.matcher, ()):
            return []
        for text, path in self._hints.strings:
            if self._leads(step.matcher, path):
                return [(text, 0)]
        stretched = self._stretched(step.matcher) if self._hints.has_long_strings else None
        return [] if stretched is None else [(stretched, 0)]

    def _leads(self, matcher: LLMatcher, path: Sequence[int]) -> bool:
        """After these ids a string may end."""
        closed = [*path, int(self.lexicon.bytes_alone[QUOTE])]
        return bool(matcher.validate_tokens(closed) == len(closed))

    def _stretched(self, matcher: LLMatcher) -> bytes | None:
        """Any text that is long enough: the same word again and again, and the beginning of it."""
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

    def _look(self, matcher: LLMatcher) -> bytes:
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return self._bits.tobytes()

    def _taken(self, step: _Step) -> _Step:
        """With its own matcher, after `more` and whatever must follow that."""
        matcher, text, more, place = step.matcher.deep_copy(), step.text, step.more or b"", step.place
        while True:
            path = self.lexicon.cover(more[:MAX_BYTES])
            if path is None or len(text) + len(more) > MAX_BYTES or not matcher.consume_tokens(list(path)):
                matcher.consume_token(self.lexicon.size)  # no such bytes: the matcher is of no more use
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

    def _next(self, place: Place | None) -> list[bytes]:
        """Continuations to try in a state with these bits, the likeliest to close first."""
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
        if word:
            closes = bool(found) and (found[0] == b'"' and place is not None if free else useful[0] in ranks)
            found.insert(1 if closes else 0, word)
        return found
