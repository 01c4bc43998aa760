"""Grammars compiled once, whoever asks.

A grammar is first tried where it can do no harm (`trial`: a sandboxed process with limits of time and memory). What has
passed is then compiled here, which takes no longer than it took there.
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
from penstock.sampling.closing import Closer
from penstock.sampling.grammar import Grammar
from penstock.sampling.lexicon import Lexicon
from penstock.sampling.marker import Marker
from penstock.sampling.trial import compile_start, hints_of, is_json, on_large_stack, try_grammar
from penstock.types import GrammarFacts, Request, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("penstock")

COMPILE_S = 10.0
MAX_COMPILING = 4  # at once; others wait
MAX_KEPT = 64  # beside those in use
MIN_GROWTH, MAX_GROWTH = 32, 192
ANY = 1 << 30  # tokens: a budget that every answer fits into
Trial = Callable[[StructuredOutputsParams, int], GrammarFacts]


class CompiledGrammar:
    """A grammar's start, from which each answer begins with a copy, and how short an answer can be."""

    def __init__(self, asked: StructuredOutputsParams, start: LLMatcher, lexicon: Lexicon, facts: GrammarFacts) -> None:
        self.asked = asked
        self.start = start
        self.lexicon = lexicon
        self.facts = facts
        self.is_json = is_json(asked)
        self._hints = hints_of(asked, lexicon)
        # By how much one token may lengthen the way to the end: what it opens was written out in the source.
        self.growth = max(MIN_GROWTH, min(MAX_GROWTH, len(asked.source) // 4))

    @property
    def closing(self) -> tuple[int, ...] | None:
        """A short whole answer."""
        return self.facts.closing

    @property
    def searchable(self) -> bool:
        """A way to an end can be looked for within a step."""
        return self.facts.searchable

    def closing_within(self, max_tokens: int) -> tuple[int, ...] | None:
        return self.facts.within(max_tokens)

    def closer(self) -> Closer:
        return Closer(self.lexicon, self._hints)

    def begin(self, request: Request) -> Grammar:
        sampling = request.sampling
        named = [id for id in sampling.stop_token_ids or () if id in self.lexicon.special]
        if sampling.ignore_eos:
            return Grammar(self.start, self.lexicon, named, never=request.eos_token_ids)
        return Grammar(self.start, self.lexicon, [*request.eos_token_ids, *named])


class Grammars:
    """One model's compiled grammars. Safe to use from several threads."""

    def __init__(
        self, lexicon: Callable[[], Lexicon], trial: Trial | None = None, compile_s: float = COMPILE_S
    ) -> None:
        """Without a `trial` grammars are tried in a thread of this process, which cannot be ended."""
        self.compile_s = compile_s
        self._make_lexicon = lexicon
        self._trial = trial or self._try_here
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_COMPILING)
        self._making: dict[StructuredOutputsParams, Future[CompiledGrammar]] = {}
        self._kept: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()  # the last used one last
        self._markers: dict[str, Marker] = {}
        self._used: WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = WeakValueDictionary()

    @cached_property
    def lexicon(self) -> Lexicon:
        return self._make_lexicon()

    def compile(
        self, asked: StructuredOutputsParams, max_tokens: int | None = None, facts: GrammarFacts | None = None
    ) -> CompiledGrammar:
        """The compiled grammar; with `max_tokens`, refused where no answer can be so short. `facts` are of a trial that
        has been made already."""
        known = self._find(asked)
        if known is None:
            known = self._made(asked, facts, ANY if max_tokens is None else max_tokens)
        if max_tokens is not None and not known.facts.decides(max_tokens):
            known.facts = facts or self._trial(asked, max_tokens)
        if max_tokens is not None:
            known.facts.require_fit(max_tokens)
        with self._lock:
            self._used[asked] = self._kept[asked] = known
            self._kept.move_to_end(asked)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return known

    def marker(self, text: str) -> Marker:
        """A marker of reasoning, of which a model has few."""
        known = self._markers.get(text)
        if known is None:
            known = self._markers[text] = Marker(text, self.lexicon)
        return known

    def _find(self, asked: StructuredOutputsParams) -> CompiledGrammar | None:
        with self._lock:
            return self._kept.get(asked) or self._used.get(asked)

    def _made(self, asked: StructuredOutputsParams, facts: GrammarFacts | None, max_tokens: int) -> CompiledGrammar:
        """Made once for all who ask at the same time."""
        with self._lock:
            made = self._making.get(asked)
            is_first = made is None
            if made is None:
                made = self._making[asked] = Future()
        if not is_first:
            return made.result()
        try:
            made.set_result(self._make(asked, facts, max_tokens))
        except BaseException as error:
            made.set_exception(error)
        finally:
            with self._lock:
                del self._making[asked]
        return made.result()

    def _make(self, asked: StructuredOutputsParams, facts: GrammarFacts | None, max_tokens: int) -> CompiledGrammar:
        if facts is None:
            facts = self._trial(asked, max_tokens)
            if facts.relaxed:
                log.warning("a schema is relaxed: %s", ", ".join(facts.relaxed))
        with self._slots:
            start, _ = on_large_stack(partial(compile_start, asked, self.lexicon))
        return CompiledGrammar(asked, start, self.lexicon, facts)

    def _try_here(self, asked: StructuredOutputsParams, max_tokens: int) -> GrammarFacts:
        self.lexicon.tokenizer  # noqa: B018  made once for all grammars: none of them is charged for it
        try:
            return on_large_stack(lambda: try_grammar(self.lexicon, asked, max_tokens), self.compile_s)
        except TimeoutError:
            raise InvalidRequest(
                f"structured_outputs: the grammar was not compiled within {self.compile_s:g} s: give a simpler one"
            ) from None
