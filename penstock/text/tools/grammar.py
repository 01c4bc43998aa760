"""The grammar of an answer that must be a call: what `tool_choice` "required" or a named function asks for.

The source is in llguidance's dialect of Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidRequest, shown

Schema = dict[str, Any]
_NAME = re.compile(r"[^\W\d][\w.-]*")           # what a name may be where it stands without quotes
_ANY_ARGUMENTS = r"""( any_argument ( ", " any_argument )* )?
any_argument: /[A-Za-z_][A-Za-z0-9_]*/ "=" any_value
any_value: %json {}"""


def call_grammar(tools: Sequence[Mapping[str, Any]], parser: str, name: str | None = None, parallel: bool = True,
                 special: Mapping[str, int] | None = None) -> str:
    """One call or, with `parallel`, one or more, in the form that `parser` reads: of the function `name`, or of any.

    `special` has the ids of the tokenizer's special tokens by their texts; a marker among them is written as that
    token, as its characters alone would not make it."""
    functions = _functions(tools, name)
    if parser not in _FORMS:
        raise InvalidRequest(f"tool parser {shown(parser)} has no grammar; use one of {', '.join(_FORMS)}")
    rules = _FORMS[parser](functions, parallel, special or {})
    return "\n".join(rules) + "\n"


def _functions(tools: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, Schema]:
    """Each function's schema; one without parameters takes any object."""
    schemas: dict[str, Schema] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"a tool must be {{'type': 'function', 'function': {{'name': …}}}}, not {shown(tool)}")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise InvalidRequest(f"the parameters of {shown(function['name'])} must be a JSON schema, not "
                                 f"{shown(parameters)}")
        schemas[function["name"]] = {"type": "object", **parameters}
    if not schemas:
        raise InvalidRequest("a tool call is required but tools is empty; name at least one tool")
    if name is None:
        return schemas
    if name not in schemas:
        raise InvalidRequest(f"tool_choice names {shown(name)}, which is not among the tools; use one of "
                             f"{', '.join(schemas)}")
    return {name: schemas[name]}


def _literal(text: str) -> str:
    return json.dumps(text)


def _marker(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else _literal(text)


def _several(item: str, separator: str, parallel: bool) -> str:
    return f"{item} ( {separator} {item} )*" if parallel else item


def _calls(functions: Mapping[str, Schema], before: str, after: str) -> list[str]:
    """The rule `call`: for each function its name between `before` and `after`, its arguments, a closing brace."""
    rules = ["call: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, (name, schema) in enumerate(functions.items()):
        head = _literal(before + json.dumps(name, ensure_ascii=False) + after)
        rules += [f'call_{place}: {head} arguments_{place} "}}"', f"arguments_{place}: %json {json.dumps(schema)}"]
    return rules


def _hermes(functions: Mapping[str, Schema], parallel: bool, special: Mapping[str, int]) -> list[str]:
    begin, end = _marker("<tool_call>", special), _marker("</tool_call>", special)
    return [
        "start: " + _several("block", r'"\n"', parallel),
        rf'block: {begin} "\n" call "\n" {end}',
        *_calls(functions, '{"name": ', ', "arguments": '),
    ]


def _llama_json(functions: Mapping[str, Schema], parallel: bool, special: Mapping[str, int]) -> list[str]:
    return ["start: " + _several("call", '"; "', parallel), *_calls(functions, '{"name": ', ', "parameters": ')]


def _mistral(functions: Mapping[str, Schema], parallel: bool, special: Mapping[str, int]) -> list[str]:
    """A tokenizer that has [ARGS] belongs to a model of the newer form."""
    begin = _marker("[TOOL_CALLS]", special)
    if "[ARGS]" not in special:
        several = _several("call", '", "', parallel)
        return [f'start: {begin} /[ ]?/ "[" {several} "]"', *_calls(functions, '{"name": ', ', "arguments": ')]
    rules = ["start: call+" if parallel else "start: call",
             "call: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, (name, schema) in enumerate(functions.items()):
        rules += [f"call_{place}: {begin} {_literal(_bare(name))} {_marker('[ARGS]', special)} arguments_{place}",
                  f"arguments_{place}: %json {json.dumps(schema)}"]
    return rules


def _pythonic(functions: Mapping[str, Schema], parallel: bool, special: Mapping[str, int]) -> list[str]:
    rules = [f'start: "[" {_several("call", _literal(", "), parallel)} "]"',
             "call: " + " | ".join(f"call_{place}" for place in range(len(functions)))]
    for place, (name, schema) in enumerate(functions.items()):
        rules.append(f'call_{place}: {_literal(_bare(name) + "(")} arguments_{place} ")"')
        rules += _keywords(f"arguments_{place}", schema)
    if any(rule.endswith(" any_arguments") for rule in rules):
        rules.append("any_arguments: " + _ANY_ARGUMENTS)
    return rules


def _keywords(rule: str, schema: Schema) -> list[str]:
    """Keyword arguments in the order of the schema's properties; `rule_N` is what may follow when none of the first N
    was written."""
    properties, required = schema.get("properties"), schema.get("required") or ()
    if not isinstance(properties, Mapping) or not properties:
        return [f"{rule}: any_arguments"]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    names = list(properties)
    rules, behind = [f'{rule}_{len(names)}: ""'], ""
    for place in reversed(range(len(names))):
        value = {**properties[names[place]], **shared} if isinstance(properties[names[place]], Mapping) else {}
        rules += [f"{rule}_value_{place}: {_literal(_bare(names[place]) + '=')} {rule}_json_{place}",
                  f"{rule}_json_{place}: %json {json.dumps(value)}"]
        is_required = names[place] in required
        passed_over = "" if is_required else f" | {rule}_{place + 1}"
        rules.append(f"{rule}_{place}: {rule}_value_{place}{behind}{passed_over}")
        behind = f' ( ", " {rule}_value_{place} ){"" if is_required else "?"}' + behind
    return [f"{rule}: {rule}_0", *rules]


def _bare(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{shown(name)} cannot stand without quotes in this model's calls; use a name of letters, "
                             "digits, underscores, dots and dashes")
    return name


_FORMS = {"hermes": _hermes, "llama3_json": _llama_json, "mistral": _mistral, "pythonic": _pythonic}
