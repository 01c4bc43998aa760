"""The items of which a response's input consists: messages, calls of functions, their results, reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from penstock.errors import shown
from penstock.server.chat_body import Said
from penstock.server.context import new_id
from penstock.server.media import refuse_media
from penstock.server.script import Script

REFUSED_ITEMS = {
    "item_reference": "send the item itself, or previous_response_id",
    "compaction": "it cannot be read here: send the conversation",
}


def _known_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("input_text", "output_text", "text", "refusal"):
        refuse_media(kind, "input_text")
        raise ValueError(f"content of type {shown(kind)} is not supported: content here is input_text and output_text")
    return part


class Ours(Said):
    """Keys that a client sends back with an answer are without effect."""

    PASSED: ClassVar[frozenset[str]] = frozenset(
        {
            "annotations",
            "created_by",
            "encrypted_content",
            "id",
            "logprobs",
            "namespace",
            "parsed",
            "parsed_arguments",
            "phase",
            "status",
            "type",
        }
    )


class Part(Ours):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None


Content = str | list[Annotated[Part, BeforeValidator(_known_part)]]


class InputMessage(Ours):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(Ours):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Ours):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(Ours):
    text: str


class ReasoningItem(Ours):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None


KNOWN = ("message", "function_call", "function_call_output", "reasoning")


def _known(item: Any) -> Any:
    kind = _kind(item)
    if kind not in KNOWN:
        why = REFUSED_ITEMS.get(kind, f"items here are {', '.join(KNOWN)}")
        raise ValueError(f"an item of type {shown(kind)} is not supported: {why}")
    return item


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("message")]
        | Annotated[FunctionCall, Tag("function_call")]
        | Annotated[FunctionCallOutput, Tag("function_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
        Discriminator(_kind),
    ],
    BeforeValidator(_known),
]


def text_of(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)


def perform(items: Sequence[Item], script: Script) -> None:
    """Write the items down as chat messages."""
    for item in items:
        if isinstance(item, InputMessage):
            script.say("system" if item.role == "developer" else item.role, text_of(item.content))
        elif isinstance(item, FunctionCall):
            script.call(item.call_id, item.name, item.arguments)
        elif isinstance(item, FunctionCallOutput):
            script.result(item.call_id, text_of(item.output))
        else:
            script.think("\n".join(part.text for part in item.content or item.summary))


def listed(item: Item) -> dict[str, Any]:
    """An item as it is kept and shown, with an id."""
    told = item.model_dump(exclude_none=True)
    if isinstance(item, InputMessage):
        kind = "output_text" if item.role == "assistant" else "input_text"
        if isinstance(item.content, str):
            told["content"] = [{"type": kind, "text": item.content}]
        told["content"] = [
            {**part, "annotations": []} if part["type"] == "output_text" else part for part in told["content"]
        ]
        return {"id": new_id("msg_"), "status": "completed", **told}
    if isinstance(item, ReasoningItem):
        told["summary"] = [{"type": "summary_text", **part} for part in told["summary"]]
        if item.content is not None:
            told["content"] = [{"type": "reasoning_text", **part} for part in told["content"]]
        return {"id": new_id("rs_"), **told}
    return {"id": new_id("fc_"), "status": "completed", **told}
