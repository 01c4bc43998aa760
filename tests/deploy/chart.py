"""Render the chart without Helm: as much of Go's templates as it uses, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TAG = re.compile(r"\s*\{\{-\s*(.*?)\s*\}\}|\{\{\s*(.*?)\s*\}\}", re.S)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s|]+|\|')


def render(
    chart: Path, values: dict[str, Any], release: str = "llm", namespace: str = "models"
) -> list[dict[str, Any]]:
    """Return the documents of all templates, with `values` over the chart's own."""
    own = yaml.safe_load((chart / "values.yaml").read_text())
    scope = {"Values": merge(own, values), "Release": {"Name": release, "Namespace": namespace}}
    texts = [render_text(path.read_text(), scope) for path in sorted((chart / "templates").glob("*.yaml"))]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def merge(own: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    found = dict(own)
    for name, value in over.items():
        assert name in own, f"values.yaml has no {name}"
        nested = isinstance(value, dict) and isinstance(own[name], dict) and own[name]
        found[name] = merge(own[name], value) if nested and set(value) <= set(own[name]) else value
    return found


def render_text(text: str, dot: Any) -> str:
    parts: list[tuple[str, str]] = []
    at = 0
    for tag in TAG.finditer(text):
        parts += [("text", text[at : tag.start()]), ("tag", tag[1] if tag[1] is not None else tag[2])]
        at = tag.end()
    walk = iter([*parts, ("text", text[at:])])
    return _block(walk, dot, dot, True)[0]


def _block(parts: Iterator[tuple[str, str]], dot: Any, root: Any, shown: bool) -> tuple[str, str]:
    """Render up to the `else` or `end` that belongs here; returns the text and which of them it was."""
    out = ""
    for kind, text in parts:
        if kind == "text":
            out += text
        elif text in ("end", "else"):
            return (out if shown else ""), text
        elif text.startswith(("if ", "range ")):
            out += _branch(parts, text, dot, root, shown)
        else:
            out += _show(evaluate(text, dot, root)) if shown else ""
    return out, ""


def _branch(parts: Iterator[tuple[str, str]], text: str, dot: Any, root: Any, shown: bool) -> str:
    word, condition = text.split(" ", 1)
    is_not = condition.startswith("not ")
    value = evaluate(condition.removeprefix("not "), dot, root) if shown else None
    if word == "range":
        inside = list(_inner(parts))
        return "".join(_block(iter(inside), item, root, True)[0] for item in value or ())
    chosen = shown and bool(value) != is_not
    out, ended = _block(parts, dot, root, chosen)
    if ended == "else":
        out += _block(parts, dot, root, shown and not chosen)[0]
    return out


def _inner(parts: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    depth = 1
    for kind, text in parts:
        depth += kind == "tag" and text.startswith(("if ", "range "))
        depth -= kind == "tag" and text == "end"
        if not depth:
            return
        yield kind, text


def evaluate(text: str, dot: Any, root: Any) -> Any:
    stages: list[list[str]] = [[]]
    for word in WORD.findall(text):
        if word == "|":
            stages.append([])
        else:
            stages[-1].append(word)
    value: list[Any] = []
    for words in stages:
        name, *rest = words
        found = [_word(word, dot, root) for word in rest] + value
        value = [FUNCTIONS[name](*found) if name in FUNCTIONS else _word(name, dot, root)]
    return value[0]


def _word(word: str, dot: Any, root: Any) -> Any:
    if word.startswith('"') or word.isdigit():
        return json.loads(word)
    assert word.startswith("."), f"the chart uses {word!r}, which this does not know"
    value = dot if word == "." else root
    for name in filter(None, word.split(".")):
        value = value[name]
    return value


def _show(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


FUNCTIONS: dict[str, Any] = {
    "quote": lambda value: json.dumps(_show(value)),
    "toJson": json.dumps,
    "add": lambda a, b: int(a) + int(b),
    "div": lambda a, b: int(a) // int(b),
    "printf": lambda form, *values: form % values,
}
