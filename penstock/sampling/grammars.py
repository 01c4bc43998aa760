"""Grammars compiled once, whoever asks: under limits, away from the caller's stack, within a time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from penstock.errors import InvalidRequest
from penstock.sampling.bound import least_plain_tokens, least_tokens
from penstock.sampling.closing import Closer, Place, literals
from penstock.sampling.grammar import Grammar, reason
from penstock.sampling.lexicon import Lexicon
from penstock.sampling.plain import is_plain
from penstock.sampling.source import llguidance_grammar
from penstock.types import Request, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

COMPILE_S = 10.0
SEARCH_S = 2.0               # for a short answer; a grammar that needs more is left to its budget
MAX_COMPILING = 4            # threads; one that ran out of time still counts until it ends
STACK_BYTES = 512 << 20      # of such a thread: the compiler goes into itself for each rule within a rule
MAX_FORCED = 1 << 14         # bytes
MAX_KEPT = 64                # beside those in use
MAX_LEXER_STATES = 50_000    # of 1 to 2 kB each
LEAST_GROWTH, MOST_GROWTH = 32, 192


class CompiledGrammar:
    """A grammar's start, from which each answer begins with a copy, and how short an answer can be."""

    def __init__(self, asked: StructuredOutputsParams, start: LLMatcher, lexicon: Lexicon) -> None:
        self.asked = asked
        self.start = start
        self.lexicon = lexicon
        self.searchable = True               # whether a way to an end can be looked for within a step
        self.is_json = asked.json is not None or bool(asked.json_object)
        # By how much one token may lengthen the way to the end: what it opens was written out in the source.
        self.growth = max(LEAST_GROWTH, min(MOST_GROWTH, len(asked.source) // 4))

    @cached_property
    def closing(self) -> tuple[int, ...] | None:
        """A short whole answer."""
        if self.asked.choice is not None:
            covers = [self.lexicon.cover(choice.encode()) for choice in self.asked.choice]
            return min((cover for cover in covers if cover), key=len, default=None)
        found = self.closer().search(self.start, Place() if self.is_json else None)
        return None if found is None else self.lexicon.cover(found)

    def closer(self) -> Closer:
        return Closer(self.lexicon, () if self.is_json else literals(self.asked.source))

    @cached_property
    def _least(self) -> tuple[int, tuple[int, ...] | None]:
        if self.asked.choice is not None and self.closing is not None:
            return len(self.closing), self.closing
        if self.is_json and is_plain(self.asked):
            return least_plain_tokens(self.start, self.lexicon)
        return least_tokens(self.start, self.lexicon, self.is_json)

    def closing_within(self, max_tokens: int) -> tuple[int, ...] | None:
        """The same; where it is too long for the budget, the shortest if that is known."""
        if self.closing is not None and len(self.closing) <= max_tokens:
            return self.closing
        return self._least[1] or self.closing

    def require_fit(self, max_tokens: int) -> None:
        """Refuse a budget that no answer fits into; only where that is certain."""
        path = self.closing_within(max_tokens)
        if (path is None or len(path) > max_tokens) and max_tokens < self._least[0]:
            raise InvalidRequest(f"max_tokens={max_tokens} is too small for any answer that matches: at least "
                                 f"{self._least[0]} tokens are needed")

    def begin(self, request: Request) -> Grammar:
        sampling = request.sampling
        named = [id for id in sampling.stop_token_ids or () if id in self.lexicon.special]
        if sampling.ignore_eos:
            return Grammar(self.start, self.lexicon, named, never=request.eos_token_ids)
        return Grammar(self.start, self.lexicon, [*request.eos_token_ids, *named])


class Grammars:
    """One model's compiled grammars. Safe to use from several threads."""

    def __init__(self, lexicon: Callable[[], Lexicon], compile_s: float = COMPILE_S) -> None:
        self.compile_s = compile_s
        self._make_lexicon = lexicon
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_COMPILING)
        self._kept: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()     # the last used one last
        self._used: WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = WeakValueDictionary()

    @cached_property
    def lexicon(self) -> Lexicon:
        return self._make_lexicon()

    def compile(self, asked: StructuredOutputsParams) -> CompiledGrammar:
        with self._lock:
            known = self._kept.get(asked) or self._used.get(asked)
        if known is None:
            known = self._within_time(asked)
        with self._lock:
            self._used[asked] = self._kept[asked] = known
            self._kept.move_to_end(asked)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return known

    def _within_time(self, asked: StructuredOutputsParams) -> CompiledGrammar:
        if not self._slots.acquire(blocking=False):
            raise InvalidRequest(f"structured_outputs: {MAX_COMPILING} grammars are being compiled for longer than "
                                 f"{self.compile_s:g} s already: try again later, or give simpler ones")
        outcome: list[CompiledGrammar | Exception] = []
        begun = threading.Event()

        def work() -> None:
            try:
                self.lexicon.tokenizer      # noqa: B018  made once for all grammars: none of them is charged for it
                begun.set()
                outcome.append(self._compiled(asked))
            except Exception as error:
                outcome.append(error)
            finally:
                begun.set()
                self._slots.release()

        thread = _spacious(work)
        begun.wait()
        thread.join(self.compile_s)
        if not outcome:
            raise InvalidRequest(f"structured_outputs: the grammar was not compiled within {self.compile_s:g} s: give "
                                 "a simpler one")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _compiled(self, asked: StructuredOutputsParams) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        start = LLMatcher(self.lexicon.tokenizer, llguidance_grammar(asked), log_level=0, limits=limits)
        compiled = CompiledGrammar(asked, start, self.lexicon)
        if not start.is_error():
            start.compute_bitmask()      # the first of a grammar takes longest
        num_forced = len(start.compute_ff_bytes())
        if num_forced > MAX_FORCED:
            raise InvalidRequest(f"structured_outputs: every answer begins with the same {num_forced} bytes: at most "
                                 f"{MAX_FORCED} are compiled; put them into the prompt")
        if start.is_error():
            raise InvalidRequest(f"structured_outputs cannot be compiled: {reason(start.get_error())}")
        begin = time.perf_counter()
        compiled.closing      # noqa: B018  looked for here, where it has time
        compiled.searchable = time.perf_counter() - begin < SEARCH_S
        return compiled


def _spacious(work: Callable[[], None]) -> threading.Thread:
    """A thread with a large stack."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="penstock-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
