"""Present tools to a chat template, or in plain messages if it knows no tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_INSTRUCTIONS = """You can call functions to help with the user's request. Here are the functions you may call, each \
as a JSON signature, between <tools></tools> tags:
<tools>
{signatures}
</tools>

To call a function, answer with a JSON object that has the function's name and its arguments, between \
<tool_call></tool_call> tags; repeat the block to call several functions:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>
Each result comes back between <tool_response></tool_response> tags."""


def supports_tools(chat_template: str | None) -> bool:
    return re.search(r"\btools\b", chat_template or "") is not None


def normalize_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Parse each call's arguments into an object, as templates expect; OpenAI's form has JSON text. Text that is not
    an object (a truncated answer) stays."""
    plain = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        plain.append(message)
    return plain


def describe(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rewrite a conversation for a template without tool support: tools go to the system message, calls and results
    to text in Hermes form."""
    plain: list[dict[str, Any]] = []
    for message in normalize_calls(messages):
        if message.get("role") == "tool":
            _add_response(plain, message, joins=bool(plain) and plain[-1].get("role") == "tool")
        else:
            plain.append(_with_text_calls(message))
    plain = [{**message, "role": "user"} if message.get("role") == "tool" else message for message in plain]
    if not tools:
        return plain
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(signatures=signatures)
    if plain and plain[0].get("role") == "system":
        before = _text(plain[0].get("content"))
        plain[0]["content"] = f"{before}\n\n{instructions}" if before else instructions
        return plain
    return [{"role": "system", "content": instructions}, *plain]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"].strip() or "{}", strict=False)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _with_text_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.pop("tool_calls", None)
    if not calls:
        return message
    blocks = [f"<tool_call>\n{_call_text(call)}\n</tool_call>" for call in calls]
    before = _text(message.get("content"))
    return {**message, "content": "\n".join([before, *blocks] if before else blocks)}


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    return json.dumps(
        {"name": function.get("name", ""), "arguments": function.get("arguments") or {}}, ensure_ascii=False
    )


def _add_response(plain: list[dict[str, Any]], message: dict[str, Any], joins: bool) -> None:
    """Join consecutive results into one message: templates want user and assistant to alternate."""
    block = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
    if joins:
        plain[-1]["content"] += "\n" + block
    else:
        plain.append({"role": "tool", "content": block})


def _text(content: Any) -> str:
    """Return the text, or the text parts of OpenAI's form joined by line breaks."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "\n".join(part for part in parts if isinstance(part, str))
