"""Compile each grammar once and share it.

A grammar is first compiled in a `trial`: a sandboxed process with limits on time and memory. One that passed is then
compiled here, which takes no longer.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from penstock.errors import InvalidRequest
from penstock.sampling.grammar.closer import Closer
from penstock.sampling.grammar.lexicon import Lexicon, ReasoningMarker
from penstock.sampling.grammar.matcher import GrammarMatcher
from penstock.sampling.grammar.try_compile import compile_start, find_hints, is_json, on_large_stack, try_grammar
from penstock.types import GrammarFacts, Request, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("penstock")

COMPILE_S = 10.0
MAX_COMPILING = 4  # at once; others wait
MAX_KEPT = 64  # beside those in use
MIN_GROWTH, MAX_GROWTH = 32, 192
ANY = 1 << 30  # a budget that every answer fits into
Trial = Callable[[StructuredOutputsParams, int], GrammarFacts]


class CompiledGrammar:
    """A grammar's initial matcher, copied for each answer, and its shortest known answer."""

    def __init__(
        self, params: StructuredOutputsParams, start: LLMatcher, lexicon: Lexicon, facts: GrammarFacts
    ) -> None:
        self.asked, self.start, self.lexicon, self.facts = params, start, lexicon, facts
        self.is_json = is_json(params)
        self._hints = find_hints(params, lexicon)
        # Bound on how much one token lengthens the closing path: all that it opens stands in the source.
        self.growth = max(MIN_GROWTH, min(MAX_GROWTH, len(params.source) // 4))

    @property
    def closing(self) -> tuple[int, ...] | None:
        """A short complete answer."""
        return self.facts.closing

    def closer(self) -> Closer:
        return Closer(self.lexicon, self._hints)

    def begin(self, request: Request) -> GrammarMatcher:
        sampling = request.sampling
        named = [id for id in sampling.stop_token_ids or () if id in self.lexicon.special]
        if sampling.ignore_eos:
            return GrammarMatcher(self.start, self.lexicon, named, never=request.eos_token_ids)
        return GrammarMatcher(self.start, self.lexicon, [*request.eos_token_ids, *named])


class GrammarCompiler:
    """One model's compiled grammars. Thread-safe."""

    def __init__(
        self, lexicon: Callable[[], Lexicon], trial: Trial | None = None, compile_s: float = COMPILE_S
    ) -> None:
        """Without a `trial`, grammars compile in a thread of this process, which cannot be stopped."""
        self.compile_s, self._make_lexicon = compile_s, lexicon
        self._trial = trial or self._try_here
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_COMPILING)
        self._making: dict[StructuredOutputsParams, Future[CompiledGrammar]] = {}
        self._kept: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()  # least recently used first
        self._markers: dict[str, ReasoningMarker] = {}
        self._used: WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = WeakValueDictionary()

    @cached_property
    def lexicon(self) -> Lexicon:
        return self._make_lexicon()

    def compile(
        self, params: StructuredOutputsParams, max_tokens: int | None = None, facts: GrammarFacts | None = None
    ) -> CompiledGrammar:
        """Compile a grammar, or refuse it if no answer fits `max_tokens`. `facts` come from an earlier trial."""
        with self._lock:
            known = self._kept.get(params) or self._used.get(params)
        if known is None:
            known = self._compile_once(params, facts, ANY if max_tokens is None else max_tokens)
        if max_tokens is not None and not known.facts.decides(max_tokens):
            known.facts = facts or self._trial(params, max_tokens)
        if max_tokens is not None:
            known.facts.require_fit(max_tokens)
        with self._lock:
            self._used[params] = self._kept[params] = known
            self._kept.move_to_end(params)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return known

    def marker(self, text: str) -> ReasoningMarker:
        """Return a reasoning marker, cached: a model has few."""
        known = self._markers.get(text)
        if known is None:
            known = self._markers[text] = ReasoningMarker(text, self.lexicon)
        return known

    def _compile_once(
        self, params: StructuredOutputsParams, facts: GrammarFacts | None, max_tokens: int
    ) -> CompiledGrammar:
        """Compile once for all concurrent callers."""
        with self._lock:
            made = self._making.get(params)
            is_first = made is None
            if made is None:
                made = self._making[params] = Future()
        if not is_first:
            return made.result()
        try:
            made.set_result(self._compile(params, facts, max_tokens))
        except BaseException as error:
            made.set_exception(error)
        finally:
            with self._lock:
                del self._making[params]
        return made.result()

    def _compile(self, params: StructuredOutputsParams, facts: GrammarFacts | None, max_tokens: int) -> CompiledGrammar:
        if facts is None:
            facts = self._trial(params, max_tokens)
            if facts.relaxed:
                log.warning("relaxed keywords in a JSON schema: %s", ", ".join(facts.relaxed))
        with self._slots:
            start, _ = on_large_stack(partial(compile_start, params, self.lexicon))
        return CompiledGrammar(params, start, self.lexicon, facts)

    def _try_here(self, params: StructuredOutputsParams, max_tokens: int) -> GrammarFacts:
        self.lexicon.load_tokenizer()  # shared: not charged to this grammar's time
        try:
            return on_large_stack(lambda: try_grammar(self.lexicon, params, max_tokens), self.compile_s)
        except TimeoutError:
            raise InvalidRequest(
                f"structured_outputs: the grammar was not compiled within {self.compile_s:g} s: give a simpler one"
            ) from None
