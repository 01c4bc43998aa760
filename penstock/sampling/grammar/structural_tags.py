"""Structural tags: free text with constrained parts between tags, in XGrammar's form and vLLM's older one.

They become llguidance's dialect of Lark. Free text before something else is a lazy lexeme: it ends at the first
occurrence of what follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidRequest, quote
from penstock.sampling.grammar.regex_examples import examples

Format = Mapping[str, Any]
MAX_DEPTH = 32
MAX_REPEATS = 1000
TEXT = "TEXT"
_NAMES = {
    "const_string",
    "json_schema",
    "regex",
    "grammar",
    "any_text",
    "sequence",
    "or",
    "optional",
    "plus",
    "star",
    "repeat",
    "tag",
    "triggered_tags",
    "tags_with_separator",
    "dispatch",
}


def literal_words(source: str) -> list[bytes]:
    """Return texts that a tag may need before it ends: end strings, constants and beginnings."""
    found: dict[str, None] = {}
    begins: dict[str, None] = {}
    todo: list[Any] = [json.loads(source)]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            ends = part.get("end")
            found |= dict.fromkeys(
                end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, str) and end
            )
            if isinstance(part.get("value"), str):
                found[part["value"]] = None
            if isinstance(part.get("begin"), str):
                begins[part["begin"]] = None
            if isinstance(part.get("pattern"), str):
                found |= dict.fromkeys(examples(part["pattern"]))
            todo += [value for key, value in part.items() if key not in ("schema", "json_schema")]
        elif isinstance(part, list):
            todo += part
    return [word.encode() for word in (*found, *begins) if word]


class TagGrammar:
    """`special` maps texts of special tokens to ids; `to_lark` converts GBNF; `layout` sets JSON's whitespace."""

    def __init__(self, special: Mapping[str, int], to_lark: Callable[[str], str], layout: Mapping[str, Any]) -> None:
        self._special = special
        self._layout = dict(layout)
        self._to_lark = to_lark
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []  # grammars of their own
        longest = sorted(special, key=len, reverse=True)
        self._markers = re.compile("(" + "|".join(map(re.escape, longest)) + ")") if longest else None

    def write(self, source: str) -> str:
        """Return the grammar as llguidance takes it."""
        asked = json.loads(source)
        _require(isinstance(asked, dict), asked, "an object")
        asked = asked.get("structural_tag", asked)
        form = asked.get("format") if isinstance(asked, dict) else None
        if form is None:
            form = _convert_legacy(asked)
        start = self._format(form, (), 0)
        lark = "\n".join([f"start: {start}", f"{TEXT}: /(?s:.*)/", *self._rules]) + "\n"
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *self._others]})

    # formats: each writes its match and, given `ends`, one of them after it

    def _format(self, form: Any, ends: Sequence[str], depth: int) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(kind, str) or kind not in _NAMES or depth > MAX_DEPTH:
            raise InvalidRequest(
                f"structural_tag: format type {quote(kind)} is not supported: give one of "
                f"{', '.join(sorted(_NAMES))}, nested at most {MAX_DEPTH} deep"
            )
        if kind == "any_text":
            _refuse_others(form, ("type", "excludes"))
            excludes = form.get("excludes") or []
            _require(
                isinstance(excludes, list) and all(one in ends for one in excludes),
                excludes,
                "only texts that end the part it stands in, as excludes",
            )
            return self._until(ends)
        if kind in ("triggered_tags", "dispatch"):
            return self._write_triggered_tags(
                form if kind == "triggered_tags" else _convert_dispatch(form), ends, depth
            )
        if kind == "sequence":
            return self._sequence(_list(form, "elements"), ends, depth)
        written = self._one(str(kind), form, depth)
        return self._rule(f"{written} {self._any(ends)}") if ends else written

    def _one(self, kind: str, form: Format, depth: int) -> str:
        match kind:
            case "const_string":
                return self._rule(self._text(_string(form, "value")))
            case "json_schema":
                _require(
                    form.get("style", "json") == "json" and not form.get("any_order"),
                    form.get("style"),
                    "JSON in the schema's order",
                )
                schema = form.get("json_schema", {})
                if isinstance(schema, bool):
                    schema = {} if schema else {"not": {}}
                _require(isinstance(schema, dict), schema, "a schema as json_schema")
                return self._rule(f"%json {json.dumps({**schema, 'x-guidance': self._layout})}")
            case "regex":
                from llguidance import regex_to_lark

                return self._rule("/" + regex_to_lark(_string(form, "pattern"), "") + "/")
            case "grammar":
                name = f"g{len(self._others)}"
                self._others.append({"name": name, "lark_grammar": self._to_lark(_string(form, "grammar"))})
                return f"@{name}"
            case "or":
                return self._rule(" | ".join(self._format(one, (), depth + 1) for one in _list(form, "elements")))
            case "tag":
                return self._rule(f"{self._text(_string(form, 'begin'))} {self._rest(form, depth)}")
            case "tags_with_separator":
                return self._write_separated_tags(form, depth)
        least, most = {"optional": (0, 1), "plus": (1, ""), "star": (0, "")}.get(
            kind, (form.get("min", 0), form.get("max", ""))
        )
        _require(
            all(count == "" or isinstance(count, int) and 0 <= count <= MAX_REPEATS for count in (least, most)),
            [least, most],
            f"counts of 0 to {MAX_REPEATS}",
        )
        return self._rule(f"{self._format(form.get('content'), (), depth + 1)}{{{least},{most}}}")

    def _rest(self, form: Format, depth: int) -> str:
        """Write a tag after its beginning."""
        ends = form.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        _require(isinstance(ends, list) and all(isinstance(end, str) for end in ends), ends, "a text or several as end")
        return self._format(form.get("content"), [end for end in ends if end], depth + 1)

    def _sequence(self, elements: list[Any], ends: Sequence[str], depth: int) -> str:
        parts: list[str] = []
        for element in elements:
            _require(isinstance(element, dict), element, "a format as each of elements")
        rest = list(elements)
        while rest:
            form = rest.pop(0)
            if not rest or form.get("type") not in ("any_text", "triggered_tags", "dispatch"):
                parts.append(self._format(form, () if rest else ends, depth + 1))
                continue
            following = rest.pop(0)
            key = {"const_string": "value", "tag": "begin"}.get(following.get("type"))
            _require(key is not None, following.get("type"), "a const_string or a tag after text in a sequence")
            parts.append(self._format(form, [_string(following, key or "")], depth + 1))
            if key == "begin":
                parts.append(self._rest(following, depth))
            if not rest and ends:
                parts.append(self._any(ends))
        return self._rule(" ".join(parts))

    def _write_triggered_tags(self, form: Format, ends: Sequence[str], depth: int) -> str:
        """Write free text in which each trigger is followed by the rest of a tag that begins with it."""
        _refuse_others(form, ("type", "triggers", "tags", "at_least_one", "stop_after_first"))
        tags, triggers = _list(form, "tags"), _list(form, "triggers")
        options: list[str] = []
        for trigger in triggers:
            _require(isinstance(trigger, str) and trigger != "", trigger, "a text as trigger")
            begun = [tag for tag in tags if _string(tag, "begin").startswith(trigger)]
            rests = [f"{self._text(tag['begin'][len(trigger) :])} {self._rest(tag, depth)}" for tag in begun]
            if rests:
                options.append(self._rule(f"{self._until([trigger])} {self._rule(' | '.join(rests))}"))
        begins = tuple(trigger for trigger in triggers if isinstance(trigger, str))
        for tag in tags:
            _require(_string(tag, "begin").startswith(begins), tag["begin"], "a beginning that starts with a trigger")
        within = self._rule(" | ".join(options))
        first = self._rule(" | ".join(self._one("tag", tag, depth + 1) for tag in tags))
        close = self._until(ends)
        if form.get("at_least_one"):
            return self._rule(
                f"{first} {self._any(ends)}" if form.get("stop_after_first") else f"{first} {within}* {close}"
            )
        if form.get("stop_after_first"):
            return self._rule(f"{within} {self._any(ends)} | {close}")
        return self._rule(f"{within}* {close}")

    def _write_separated_tags(self, form: Format, depth: int) -> str:
        tag = self._rule(" | ".join(self._one("tag", tag, depth + 1) for tag in _list(form, "tags")))
        more = "" if form.get("stop_after_first") else f" ( {self._text(_string(form, 'separator'))} {tag} )*"
        return self._rule(f"{tag}{more}" if form.get("at_least_one") else f"( {tag}{more} )?")

    # texts

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body.strip() or json.dumps('')}")
        return name

    def _any(self, texts: Sequence[str]) -> str:
        return self._rule(" | ".join(map(self._text, texts))) if texts else ""

    def _text(self, text: str) -> str:
        """Write a text with its special tokens as tokens: characters alone would not make them."""
        parts = self._markers.split(text) if self._markers else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts if part
        )

    def _until(self, ends: Sequence[str]) -> str:
        """Write any text up to and including the first of `ends`."""
        options = []
        for end in ends:
            parts = [part for part in self._markers.split(end) if part] if self._markers else [end]
            if parts[0] in self._special:
                options.append(f"{TEXT} {self._text(end)}")
            else:
                _require(len(parts) == 1, end, "a special token, or a text without one, behind free text")
                options.append(self._rule(f"{TEXT} {json.dumps(end)}", "[lazy]"))
        return self._rule(" | ".join(options) or TEXT)


def _convert_legacy(body: Any) -> Format:
    """Convert vLLM's older form."""
    _require(isinstance(body, dict) and "structures" in body, body, "format, or structures and triggers")
    tags = [
        {
            "type": "tag",
            "begin": _string(one, "begin"),
            "end": one.get("end", ""),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
        }
        for one in _list(body, "structures")
    ]
    return {"type": "triggered_tags", "triggers": _list(body, "triggers"), "tags": tags}


def _convert_dispatch(form: Format) -> Format:
    _refuse_others(form, ("type", "rules", "loop"))
    rules = _list(form, "rules")
    for rule in rules:
        _require(isinstance(rule, list) and len(rule) == 2, rule, "a pair of a text and a format")
    tags = [{"type": "tag", "begin": begin, "content": content, "end": ""} for begin, content in rules]
    return {
        "type": "triggered_tags",
        "triggers": [rule[0] for rule in rules],
        "tags": tags,
        "stop_after_first": form.get("loop") is False,
    }


def _refuse_others(form: Format, known: Sequence[str]) -> None:
    for key, value in form.items():
        _require(key in known or not value, {key: value}, f"{', '.join(known)} alone in {form.get('type')}")


def _list(form: Any, key: str) -> list[Any]:
    value = form.get(key) if isinstance(form, dict) else None
    _require(isinstance(value, list) and len(value) > 0, value, f"a list of at least one as {key}")
    return list(value or ())


def _string(form: Any, key: str) -> str:
    value = form.get(key) if isinstance(form, dict) else None
    _require(isinstance(value, str), value, f"a text as {key}")
    return str(value)


def _require(ok: bool, value: Any, meant: str) -> None:
    if not ok:
        raise InvalidRequest(f"structural_tag: {quote(value)} is not valid: give {meant}")
