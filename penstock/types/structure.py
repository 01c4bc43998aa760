"""Structured outputs: constraints on an answer, and the result of trying its grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidRequest, quote
from penstock.types.values import PORTED_STRUCTURES, read_strings, require, take_ported

MAX_STRUCTURE_BYTES = 1 << 19
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@take_ported(PORTED_STRUCTURES)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on an answer, exactly one of six, with vLLM's names. `json` and `structural_tag` are kept as JSON
    text."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Seq[str] | None = None
    grammar: str | None = None  # Lark, or GBNF (it has `::=`)
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None  # free text with constrained parts between tags
    disable_any_whitespace: bool = False  # between JSON tokens
    strict: bool = True  # refuse schema keywords that cannot be enforced; False: relax and report them

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise InvalidRequest(f"structured_outputs has {quote(given)}: give exactly one of {', '.join(STRUCTURES)}")
        require(isinstance(self.strict, bool), "strict", self.strict, "True or False")
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            require(value is None or isinstance(value, bool), name, value, "True or False")
            object.__setattr__(self, name, bool(value))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _schema_text(self.structural_tag, "structural_tag"))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            require(value is None or isinstance(value, str) and value != "", name, value, "a non-empty string")
        if self.choice is not None:
            require(not isinstance(self.choice, str), "choice", self.choice, "a list of strings")
            object.__setattr__(self, "choice", tuple(dict.fromkeys(read_strings("choice", self.choice))))
            require(bool(self.choice), "choice", self.choice, "a list of at least one string")
        size = len(self.source.encode(errors="surrogatepass"))
        if size > MAX_STRUCTURE_BYTES:
            raise InvalidRequest(
                f"structured_outputs.{given[0]} has {size} bytes; the limit is {MAX_STRUCTURE_BYTES}: shorten it"
            )
        try:
            self.source.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"structured_outputs.{given[0]} has a lone surrogate at position {error.start}: remove it"
            ) from None

    @property
    def source(self) -> str:
        """The whole text of the constraint."""
        texts = (self.json, self.regex, self.grammar, self.structural_tag, "\n".join(self.choice or ()))
        return next((str(text) for text in texts if text), "")


def _schema_text(schema: str | Mapping[str, Any], name: str = "json") -> str:
    meant = f"a {'JSON schema' if name == 'json' else 'structural tag'}, as a dict or as JSON text"
    try:
        if isinstance(schema, str):
            if len(schema) > MAX_STRUCTURE_BYTES:
                raise ValueError(f"it has {len(schema)} characters; the limit is {MAX_STRUCTURE_BYTES}")
            if not isinstance(json.loads(schema), (dict, bool)):
                raise ValueError("it is not an object")
            return schema
        require(isinstance(schema, Mapping), name, schema, meant)
        return json.dumps(schema, default=dict)
    except RecursionError:
        raise InvalidRequest(f"structured_outputs.{name} is nested too deeply: flatten it with $ref") from None
    except (ValueError, TypeError) as error:
        raise InvalidRequest(
            f"structured_outputs.{name}={quote(schema)} is not valid ({error}): give {meant}"
        ) from None


@dataclass(frozen=True)
class GrammarFacts:
    """Results of trying a grammar."""

    closing: tuple[int, ...] | None  # a short complete answer
    searchable: bool  # a closing search is fast enough to run within a step
    min_tokens: int | None = None  # proven lower bound; None: not computed
    shortest: tuple[int, ...] | None = None  # an answer of `min_tokens`, if found
    relaxed: tuple[str, ...] = ()  # schema keywords that are not enforced, each with its path

    def decides(self, max_tokens: int) -> bool:
        """True if it is known whether an answer of `max_tokens` can match."""
        return self.min_tokens is not None or self.closing is not None and len(self.closing) <= max_tokens

    def within(self, max_tokens: int) -> tuple[int, ...] | None:
        """Return a complete answer; if `closing` exceeds the budget, the shortest known."""
        if self.closing is not None and len(self.closing) <= max_tokens:
            return self.closing
        return self.shortest or self.closing

    def require_fit(self, max_tokens: int) -> None:
        """Refuse a budget that provably no answer fits."""
        path = self.within(max_tokens)
        if (path is None or len(path) > max_tokens) and max_tokens < (self.min_tokens or 0):
            raise InvalidRequest(
                f"max_tokens={max_tokens} is too small for any answer that matches: at least "
                f"{self.min_tokens} tokens are needed"
            )
