"""Anthropic's bodies as chat bodies."""

from __future__ import annotations

import json
from typing import Any

from penstock.server.anthropic.body import MessagesBody, PromptBody, ToolChoice
from penstock.server.anthropic.content import (
    AssistantMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
    text_of,
)
from penstock.server.chat_body import ChatBody
from penstock.server.script import Script, chat_body

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"xhigh": "high", "max": "high"}  # templates know no more than high


def to_chat(body: PromptBody) -> ChatBody:
    values: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "tools": _tools(body),
        "chat_template_kwargs": _template_values(body),
    }
    if body.tool_choice is not None:
        values["tool_choice"] = _choice(body.tool_choice)
        values["parallel_tool_calls"] = False if body.tool_choice.disable_parallel_tool_use else None
    if body.format is not None:
        values["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format.schema_}}
    if body.thinking is not None and body.thinking.type != "disabled":
        values["thinking_token_budget"] = body.thinking.budget_tokens
    if body.is_prefill:
        values |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        values |= {
            "max_tokens": max(1, body.max_tokens),
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return chat_body(values)


def _messages(body: PromptBody) -> list[dict[str, Any]]:
    script = Script()
    if body.system:
        script.say("system", text_of(body.system))
    for message in body.messages:
        if isinstance(message, UserMessage):
            _hear(script, message)
        elif isinstance(message, AssistantMessage):
            _answer(script, message)
        else:
            script.say("system", text_of(message.content))
    return script.messages()


def _hear(script: Script, message: UserMessage) -> None:
    if isinstance(message.content, str):
        return script.say("user", message.content, join=True)
    for part in message.content:
        if isinstance(part, ToolResultBlock):
            text = text_of(part.content)
            script.result(part.tool_use_id, f"Error: {text}" if part.is_error else text)
        else:
            script.say("user", part.text, join=True)


def _answer(script: Script, message: AssistantMessage) -> None:
    if isinstance(message.content, str):
        return script.say("assistant", message.content)
    for part in message.content:
        if isinstance(part, TextBlock):
            script.say("assistant", part.text)
        elif isinstance(part, ThinkingBlock):
            script.think(part.thinking)
        elif isinstance(part, ToolUseBlock):
            script.call(part.id, part.name, json.dumps(part.input, ensure_ascii=False))


def _tools(body: PromptBody) -> list[dict[str, Any]] | None:
    tools = []
    for tool in body.tools or ():
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        tools.append(
            {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
        )
    return tools or None


def _choice(asked: ToolChoice) -> str | dict[str, Any]:
    if asked.type == "tool":
        return {"type": "function", "function": {"name": asked.name}}
    return CHOICES[asked.type]


def _template_values(body: PromptBody) -> dict[str, Any] | None:
    """Variables by which templates turn reasoning on and off; others do not look at them."""
    values: dict[str, Any] = {}
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        values |= {"enable_thinking": thinks, "thinking": thinks}
    effort = body.output_config.effort if body.output_config else None
    if effort is not None:
        values["reasoning_effort"] = EFFORTS.get(effort, effort)
    return values or None
