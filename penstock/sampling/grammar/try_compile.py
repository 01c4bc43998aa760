"""Try a grammar: compile it and find its shortest answer. Unbounded in time and memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.errors import InvalidRequest
from penstock.sampling.grammar.closer import BLANKS, MAX_LITERALS, Closer, Hints, JsonPosition, literals
from penstock.sampling.grammar.lexicon import Lexicon, canonicalize, is_unconstrained
from penstock.sampling.grammar.matcher import reason
from penstock.sampling.grammar.regex_examples import has_long_strings, string_examples
from penstock.sampling.grammar.structural_tags import literal_words
from penstock.sampling.grammar.translate import GrammarSource, write_grammar
from penstock.types import GrammarFacts, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher


MAX_TEXTS = 4000  # tried in total
MAX_BRANCHES = 512  # ids that may follow one text
MAX_FORCED_BYTES = 1024  # forced bytes


class Deadline:
    """A deadline in CPU time of this thread, so that a busy machine proves as much as an idle one."""

    def __init__(self, seconds: float) -> None:
        self._end = time.thread_time() + seconds

    @property
    def passed(self) -> bool:
        return time.thread_time() > self._end


def find_min_tokens(
    start: LLMatcher, lexicon: Lexicon, is_json: bool, deadline: Deadline
) -> tuple[int, tuple[int, ...] | None]:
    """Return the fewest tokens any answer can have, and an answer of that length if found.

    Breadth-first over texts of one token, two tokens and so on, so the bound is proven. Stops at too many texts or at
    the deadline. In JSON, tokens of whitespace alone are skipped: an answer without them is shorter.
    """
    level: dict[bytes, tuple[LLMatcher, tuple[int, ...]]] = {b"": (start, ())}
    num_texts, length = 0, 0
    while level:
        following: dict[bytes, tuple[LLMatcher, tuple[int, ...]]] = {}
        for text, (matcher, path) in level.items():
            allowed = None if deadline.passed else _list_allowed(matcher, lexicon)
            if allowed is None:
                return length + 1, None
            if is_json and not JsonPosition().after(text).quoted:
                allowed = [token for token in allowed if lexicon.spellings[token].strip(BLANKS)]
            num_texts += len(allowed)
            if len(allowed) > MAX_BRANCHES or num_texts > MAX_TEXTS:
                return length + 1, None
            for token in allowed:
                after = text + (lexicon.spellings[token] or b"\xff" + str(token).encode())
                if after in following:
                    continue
                copy = matcher.deep_copy()
                if not copy.consume_token(token):
                    continue
                if copy.is_accepting():
                    return length + 1, (*path, token)
                following[after] = (copy, (*path, token))
        level, length = following, length + 1
    return length + 1, None


def find_min_tokens_unconstrained(
    start: LLMatcher, lexicon: Lexicon, deadline: Deadline
) -> tuple[int, tuple[int, ...] | None]:
    """Same for JSON whose strings and numbers are unconstrained: follow one text per canonical form, and inside a
    string only tokens that close it."""
    level: dict[bytes, tuple[LLMatcher, bool]] = {b"": (start, False)}
    known = {b""}
    num_texts, length = 0, 0
    while level:
        following: dict[bytes, tuple[LLMatcher, bool]] = {}
        for text, (matcher, within) in level.items():
            if within:
                more = lexicon.closings
            else:
                allowed = _list_allowed(matcher, lexicon)
                if allowed is None or len(allowed) > MAX_BRANCHES:
                    return length + 1, None
                more = [lexicon.spellings[token] for token in allowed]
            for spelled in more:
                if deadline.passed:
                    return length + 1, None
                after, is_within = canonicalize(text + spelled)
                if after in known:
                    continue
                copy, path = start.deep_copy(), lexicon.cover(after)
                if path is None or not copy.consume_tokens(list(path)):
                    if _leads(matcher, lexicon.cover(spelled)):
                        return length + 1, None  # another string or number might have matched
                    continue
                if copy.is_accepting():
                    return length + 1, path if len(path) == length + 1 else None
                known.add(after)
                following[after] = (copy, is_within)
                num_texts += 1
                if num_texts > MAX_TEXTS:
                    return length + 1, None
        level, length = following, length + 1
    return length + 1, None


def _leads(matcher: LLMatcher, path: tuple[int, ...] | None) -> bool:
    return path is None or matcher.validate_tokens(list(path)) == len(path)


def _list_allowed(matcher: LLMatcher, lexicon: Lexicon) -> list[int] | None:
    """Return every id that may follow. Under forced bytes llguidance's mask shows only one tokenization; find all."""
    forced = matcher.compute_ff_bytes()
    if len(forced) > MAX_FORCED_BYTES:
        return None
    if matcher.compute_ff_tokens() and b"\xff" not in forced:
        return [token for token in lexicon.along(forced) if matcher.validate_tokens([token])]
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        return None
    found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: lexicon.size]).tolist()
    return found


SEARCH_S = 2.0  # CPU time of the search for a short answer; slower grammars are not searched in steps
PROVE_S = 2.0  # CPU time for the lower bound
STACK_BYTES = 512 << 20  # the compiler recurses for each nested rule
MAX_FORCED = 1 << 14  # bytes
MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each
UNMERGED = {"min/maxProperties only supported": "minProperties", "patternProperty regexes": "patternProperties"}
Made = TypeVar("Made")


def is_json(params: StructuredOutputsParams) -> bool:
    return params.json is not None or bool(params.json_object)


def find_hints(params: StructuredOutputsParams, lexicon: Lexicon) -> Hints:
    if is_json(params):
        spelled = [(text, path) for text in string_examples(params) if (path := lexicon.cover(text)) is not None]
        return Hints((), tuple(sorted(spelled, key=lambda one: len(one[1]))), has_long_strings(params))
    if params.structural_tag is not None:
        return Hints(tuple(literal_words(params.source)[:MAX_LITERALS]))
    return Hints(tuple(literals(params.source)))


def compile_start(params: StructuredOutputsParams, lexicon: Lexicon) -> tuple[LLMatcher, tuple[str, ...]]:
    """Return the grammar's initial matcher, copied for every answer, and its relaxed keywords."""
    source = write_grammar(params, lexicon.special)
    start = _start(source, lexicon)
    left_out: set[str] = set()
    while start.is_error() and not params.strict and (more := _unmergeable(start.get_error()) - left_out):
        left_out |= more
        source = write_grammar(params, lexicon.special, left_out)
        start = _start(source, lexicon)
    num_forced = len(start.compute_ff_bytes())
    if num_forced > MAX_FORCED:
        raise InvalidRequest(
            f"structured_outputs: every answer begins with the same {num_forced} bytes; the limit is "
            f"{MAX_FORCED}; put them into the prompt"
        )
    if start.is_error():
        raise InvalidRequest(f"cannot compile structured_outputs: {reason(start.get_error())}")
    return start, source.relaxed


def _unmergeable(error: str) -> set[str]:
    """Return keywords that llguidance supports in one schema but not in a merged one."""
    return {keyword for said, keyword in UNMERGED.items() if said in error}


def _start(source: GrammarSource, lexicon: Lexicon) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    start = LLMatcher(lexicon.load_tokenizer(), source.grammar, log_level=0, limits=limits)
    if not start.is_error():
        start.compute_bitmask()  # the first mask of a grammar is the slowest
    return start


def find_closing(params: StructuredOutputsParams, start: LLMatcher, lexicon: Lexicon) -> tuple[int, ...] | None:
    """Return a short complete answer, or None."""
    if params.choice is not None:
        covers = [lexicon.cover(choice.encode()) for choice in params.choice]
        return min((cover for cover in covers if cover), key=len, default=None)
    closer = Closer(lexicon, find_hints(params, lexicon))
    found = closer.search(start, JsonPosition() if is_json(params) else None, within_s=2 * SEARCH_S)
    return None if found is None else lexicon.cover(found)


def prove_min_tokens(
    params: StructuredOutputsParams, start: LLMatcher, lexicon: Lexicon, closing: tuple[int, ...] | None
) -> tuple[int, tuple[int, ...] | None]:
    """Return the fewest tokens any answer can have, and an answer of that length if found."""
    if params.choice is not None and closing is not None:
        return len(closing), closing
    if is_json(params) and is_unconstrained(params):
        return find_min_tokens_unconstrained(start, lexicon, Deadline(PROVE_S))
    return find_min_tokens(start, lexicon, is_json(params), Deadline(PROVE_S))


def try_grammar(lexicon: Lexicon, params: StructuredOutputsParams, max_tokens: int) -> GrammarFacts:
    """Compile the grammar and find a short answer; if none fits `max_tokens`, prove the lower bound."""
    start, relaxed = compile_start(params, lexicon)
    begin = time.thread_time()
    closing = find_closing(params, start, lexicon)
    facts = GrammarFacts(closing, time.thread_time() - begin < SEARCH_S, relaxed=relaxed)
    if facts.decides(max_tokens):
        return facts
    min_tokens, shortest = prove_min_tokens(params, start, lexicon, closing)
    return replace(facts, min_tokens=min_tokens, shortest=shortest)


def on_large_stack(work: Callable[[], Made], within_s: float | None = None) -> Made:
    """Call `work` in a thread with a large stack. Raises TimeoutError after `within_s`; the thread runs on."""
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
