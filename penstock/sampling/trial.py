"""Trying a grammar: whether it compiles, and how short an answer can be. May take any time and memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import InvalidRequest
from penstock.sampling.bound import Deadline, least_plain_tokens, least_tokens
from penstock.sampling.closing import MAX_LITERALS, Closer, Hints, Place, literals
from penstock.sampling.examples import has_long_strings, string_examples
from penstock.sampling.grammar import reason
from penstock.sampling.lexicon import Lexicon
from penstock.sampling.plain import is_plain
from penstock.sampling.source import Source, write_grammar
from penstock.sampling.tags import literal_words
from penstock.types import GrammarFacts, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

SEARCH_S = 2.0  # of this thread, for a short answer; a grammar that needs more is left to its budget
PROVE_S = 2.0  # for the least number of tokens: what is proven by then holds
STACK_BYTES = 512 << 20  # of the thread that compiles: the compiler goes into itself for each rule within a rule
MAX_FORCED = 1 << 14  # bytes
MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each
UNMERGED = {"min/maxProperties only supported": "minProperties", "patternProperty regexes": "patternProperties"}
Made = TypeVar("Made")


def is_json(asked: StructuredOutputsParams) -> bool:
    return asked.json is not None or bool(asked.json_object)


def hints_of(asked: StructuredOutputsParams, lexicon: Lexicon) -> Hints:
    if is_json(asked):
        spelled = [(text, path) for text in string_examples(asked) if (path := lexicon.cover(text)) is not None]
        return Hints((), tuple(sorted(spelled, key=lambda one: len(one[1]))), has_long_strings(asked))
    if asked.structural_tag is not None:
        return Hints(tuple(literal_words(asked.source)[:MAX_LITERALS]))
    return Hints(tuple(literals(asked.source)))


def compile_start(asked: StructuredOutputsParams, lexicon: Lexicon) -> tuple[LLMatcher, tuple[str, ...]]:
    """The grammar's start, from which every answer begins with a copy, and what was relaxed in it."""
    source = write_grammar(asked, lexicon.special)
    start = _start(source, lexicon)
    left_out: set[str] = set()
    while start.is_error() and not asked.strict and (more := _unmerged(start.get_error()) - left_out):
        left_out |= more
        source = write_grammar(asked, lexicon.special, left_out)
        start = _start(source, lexicon)
    num_forced = len(start.compute_ff_bytes())
    if num_forced > MAX_FORCED:
        raise InvalidRequest(
            f"structured_outputs: every answer begins with the same {num_forced} bytes: at most "
            f"{MAX_FORCED} are compiled; put them into the prompt"
        )
    if start.is_error():
        raise InvalidRequest(f"structured_outputs cannot be compiled: {reason(start.get_error())}")
    return start, source.relaxed


def _unmerged(error: str) -> set[str]:
    """Keywords that llguidance takes in each schema, and not in what it made of several."""
    return {keyword for said, keyword in UNMERGED.items() if said in error}


def _start(source: Source, lexicon: Lexicon) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    start = LLMatcher(lexicon.tokenizer, source.grammar, log_level=0, limits=limits)
    if not start.is_error():
        start.compute_bitmask()  # the first of a grammar takes longest
    return start


def find_closing(asked: StructuredOutputsParams, start: LLMatcher, lexicon: Lexicon) -> tuple[int, ...] | None:
    """A short whole answer, if one is found."""
    if asked.choice is not None:
        covers = [lexicon.cover(choice.encode()) for choice in asked.choice]
        return min((cover for cover in covers if cover), key=len, default=None)
    closer = Closer(lexicon, hints_of(asked, lexicon))
    found = closer.search(start, Place() if is_json(asked) else None, within_s=2 * SEARCH_S)
    return None if found is None else lexicon.cover(found)


def prove_least(
    asked: StructuredOutputsParams, start: LLMatcher, lexicon: Lexicon, closing: tuple[int, ...] | None
) -> tuple[int, tuple[int, ...] | None]:
    """No answer has fewer tokens than this; and one that has so many, if it was found."""
    if asked.choice is not None and closing is not None:
        return len(closing), closing
    if is_json(asked) and is_plain(asked):
        return least_plain_tokens(start, lexicon, Deadline(PROVE_S))
    return least_tokens(start, lexicon, is_json(asked), Deadline(PROVE_S))


def try_grammar(lexicon: Lexicon, asked: StructuredOutputsParams, max_tokens: int) -> GrammarFacts:
    """Compile the grammar and look for a short answer; where none of `max_tokens` is found, prove the least."""
    start, relaxed = compile_start(asked, lexicon)
    begin = time.thread_time()
    closing = find_closing(asked, start, lexicon)
    facts = GrammarFacts(closing, time.thread_time() - begin < SEARCH_S, relaxed=relaxed)
    if facts.decides(max_tokens):
        return facts
    min_tokens, shortest = prove_least(asked, start, lexicon, closing)
    return replace(facts, min_tokens=min_tokens, shortest=shortest)


def on_large_stack(work: Callable[[], Made], within_s: float | None = None) -> Made:
    """Call `work` in a thread with a large stack. TimeoutError where it takes longer; it then goes on by itself."""
    outcome: list[Made] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failed.append(error)

    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="penstock-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join(within_s)
    if failed:
        raise failed[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]
