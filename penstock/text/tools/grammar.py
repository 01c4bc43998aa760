"""Grammars of answers that call tools: one that must be a call (`tool_choice` "required" or a named function), or one
that may be, for given tools and arguments.

Written in llguidance's dialect of Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidRequest, quote

Schema = dict[str, Any]
_NAME = re.compile(r"[^\W\d][\w.-]*")  # a name that may stand without quotes
_ANY_ARGUMENTS = r"""( any_argument ( ", " any_argument )* )?
any_argument: /[A-Za-z_][A-Za-z0-9_]*/ "=" any_value
any_value: %json {}"""
# Whitespace between JSON tokens: too little to fill an answer.
_LAYOUT = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


@dataclass(frozen=True)
class Form:
    """A call syntax. `rules` define `body`, the part after the marker or the whole; a body may hold several calls,
    or bodies repeat with `between` between them."""

    rules: list[str]
    begin: str | None = None  # the marker
    between: str | None = None
    first: str = ""  # without a marker: a character that no other answer begins with
    tags: str = ""  # markers that may precede a body


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    parser: str,
    name: str | None = None,
    parallel: bool = True,
    special: Mapping[str, int] | None = None,
) -> str:
    """Return a grammar of one call (with `parallel` one or more) in `parser`'s form, of the function `name` or of any.

    `special` maps texts of special tokens to ids; a marker among them is written as that token.
    """
    form = _form(_functions(tools, name), parser, parallel, special or {})
    return "\n".join([f"start: {_calls_only(form, parallel)}", *form.rules]) + "\n"


def open_grammar(
    tools: Sequence[Mapping[str, Any]],
    parser: str,
    parallel: bool = True,
    special: Mapping[str, int] | None = None,
    answer: str | None = None,
) -> str:
    """Return a grammar of any text in which a call must be one of these tools; strict tools must match their schema.
    With `answer`, a JSON schema, the text is such JSON, or calls alone."""
    special = special or {}
    functions = _functions(tools, None)
    strict = {tool["function"]["name"] for tool in tools if is_strict(tool)}
    functions = {name: schema if name in strict else {"type": "object"} for name, schema in functions.items()}
    form = _form(functions, parser, parallel, special)
    if answer is not None:
        schema = json.loads(answer)
        schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
        if form.first == "{":
            form = Form(_json_calls(functions))
        start = [f"start: {_calls_only(form, parallel)} | answer", f"answer: {_json(schema)}"]
    elif form.begin is not None:
        lazy = "" if form.begin.startswith("<[") else "[lazy]"
        start = [
            "start: ( lead body )* rest" if parallel else "start: rest | lead body",
            f"lead{lazy}: TEXT {form.begin}",
            "rest: TEXT",
            r"TEXT: /(.|\n)*/",
        ]
    else:
        start = [f"start: {form.tags}body | PLAIN?", rf"PLAIN: /\s*[^\s\{form.first}](.|\n)*/"]
    return "\n".join([*start, *form.rules]) + "\n"


def _form(functions: Mapping[str, Schema], parser: str, parallel: bool, special: Mapping[str, int]) -> Form:
    if parser not in _FORMS:
        raise InvalidRequest(f"tool parser {quote(parser)} has no grammar; use one of {', '.join(_FORMS)}")
    return _FORMS[parser](functions, parallel, special)


def _calls_only(form: Form, parallel: bool) -> str:
    one = "body" if form.begin is None else f"{form.begin} body"
    return f"{one} ( {form.between} {one} )*" if parallel and form.between is not None else one


def _json_calls(functions: Mapping[str, Schema]) -> list[str]:
    """Describe Llama's calls and a JSON answer together, since both begin alike."""
    rules = ["body: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, (name, schema) in enumerate(functions.items()):
        shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        call: Schema = {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
            **shared,
        }
        rules.append(f"call_{place}: {_json(call)}")
    return rules


def is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _functions(tools: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, Schema]:
    """Return each function's schema; one without parameters takes any object."""
    schemas: dict[str, Schema] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"a tool must be {{'type': 'function', 'function': {{'name': …}}}}, not {quote(tool)}")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise InvalidRequest(
                f"the parameters of {quote(function['name'])} must be a JSON schema, not {quote(parameters)}"
            )
        schemas[function["name"]] = {"type": "object", **parameters}
    if not schemas:
        raise InvalidRequest("a tool call is required but tools is empty; name at least one tool")
    if name is None:
        return schemas
    if name not in schemas:
        raise InvalidRequest(
            f"tool_choice names {quote(name)}, which is not among the tools; use one of {', '.join(schemas)}"
        )
    return {name: schemas[name]}


def _literal(text: str) -> str:
    return json.dumps(text)


def _json(schema: Schema) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _LAYOUT})


def _marker(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else _literal(text)


def _several(item: str, separator: str, parallel: bool) -> str:
    return f"{item} ( {separator} {item} )*" if parallel else item


def _calls(functions: Mapping[str, Schema], before: str, after: str) -> list[str]:
    """Write the rule `call`: each function's name between `before` and `after`, its arguments, a closing brace."""
    rules = ["call: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, (name, schema) in enumerate(functions.items()):
        head = _literal(before + json.dumps(name, ensure_ascii=False) + after)
        rules += [f'call_{place}: {head} arguments_{place} "}}"', f"arguments_{place}: {_json(schema)}"]
    return rules


def _hermes(functions: Mapping[str, Schema], parallel: bool, special: Mapping[str, int]) -> Form:
    rules = [
        rf'body: "\n" call "\n" {_marker("</tool_call>", special)}',
        *_calls(functions, '{"name": ', ', "arguments": '),
    ]
    return Form(rules, _marker("<tool_call>", special), r'"\n"')


def _llama_json(functions: Mapping[str, Schema], parallel: bool, special: Mapping[str, int]) -> Form:
    rules = ["body: " + _several("call", '"; "', parallel), *_calls(functions, '{"name": ', ', "parameters": ')]
    return Form(rules, first="{", tags=_tag("<|python_tag|>", special))


def _mistral(functions: Mapping[str, Schema], parallel: bool, special: Mapping[str, int]) -> Form:
    """Write Mistral's form; a tokenizer with [ARGS] belongs to the newer one."""
    begin = _marker("[TOOL_CALLS]", special)
    if "[ARGS]" not in special:
        rules = [
            f'body: /[ ]?/ "[" {_several("call", _literal(", "), parallel)} "]"',
            *_calls(functions, '{"name": ', ', "arguments": '),
        ]
        return Form(rules, begin)
    rules = ["body: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, (name, schema) in enumerate(functions.items()):
        rules += [
            f"call_{place}: {_literal(_bare(name))} {_marker('[ARGS]', special)} arguments_{place}",
            f"arguments_{place}: {_json(schema)}",
        ]
    return Form(rules, begin, between="")


def _pythonic(functions: Mapping[str, Schema], parallel: bool, special: Mapping[str, int]) -> Form:
    rules = [
        f'body: "[" {_several("call", _literal(", "), parallel)} "]"',
        "call: " + " | ".join(f"call_{place}" for place in range(len(functions))),
    ]
    for place, (name, schema) in enumerate(functions.items()):
        rules.append(f'call_{place}: {_literal(_bare(name) + "(")} arguments_{place} ")"')
        rules += _keywords(f"arguments_{place}", schema)
    if any(rule.endswith(" any_arguments") for rule in rules):
        rules.append("any_arguments: " + _ANY_ARGUMENTS)
    return Form(rules, first="[", tags=_tag("<|python_start|>", special))


def _harmony(functions: Mapping[str, Schema], parallel: bool, special: Mapping[str, int]) -> Form:
    constrain, message = _marker("<|constrain|>", special), _marker("<|message|>", special)
    rules = ["body: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, (name, schema) in enumerate(functions.items()):
        head = _literal(f"commentary to=functions.{_bare(name)} ")
        rules += [
            f'call_{place}: {head} {constrain} "json" {message} arguments_{place}',
            f"arguments_{place}: {_json(schema)}",
        ]
    return Form(rules, _marker("<|channel|>", special), _marker("<|call|>", special))


def _tag(text: str, special: Mapping[str, int]) -> str:
    return f"{_marker(text, special)}? " if text in special else ""


def _keywords(rule: str, schema: Schema) -> list[str]:
    """Write keyword arguments in schema order; `rule_N` follows if none of the first N was written."""
    properties, required = schema.get("properties"), schema.get("required") or ()
    if not isinstance(properties, Mapping) or not properties:
        return [f"{rule}: any_arguments"]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    names = list(properties)
    rules, behind = [f'{rule}_{len(names)}: ""'], ""
    for place in reversed(range(len(names))):
        value = {**properties[names[place]], **shared} if isinstance(properties[names[place]], Mapping) else {}
        rules += [
            f"{rule}_value_{place}: {_literal(_bare(names[place]) + '=')} {rule}_json_{place}",
            f"{rule}_json_{place}: {_json(value)}",
        ]
        is_required = names[place] in required
        passed_over = "" if is_required else f" | {rule}_{place + 1}"
        rules.append(f"{rule}_{place}: {rule}_value_{place}{behind}{passed_over}")
        behind = f' ( ", " {rule}_value_{place} ){"" if is_required else "?"}' + behind
    return [f"{rule}: {rule}_0", *rules]


def _bare(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{quote(name)} cannot be written without quotes in this model's calls; use a name of letters, "
            "digits, underscores, dots and dashes"
        )
    return name


_FORMS = {"hermes": _hermes, "llama3_json": _llama_json, "mistral": _mistral, "pythonic": _pythonic, "openai": _harmony}
