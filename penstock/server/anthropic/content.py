"""The content of Anthropic's messages: blocks of text, thinking, calls of tools and their results."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.errors import shown
from penstock.server.chat_body import Said

REFUSED = {
    "image": "models here take text only: describe the image",
    "document": "models here take text only: send the document's text in a text block",
    "search_result": "send the result's text in a text block",
    "container_upload": "the server runs no containers",
}


def _known(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind not in KNOWN:
        why = REFUSED.get(kind, "blocks here are text, thinking, tool_use and tool_result")
        raise ValueError(f"content of type {shown(kind)} is not supported: {why}")
    return block


class Block(Said):
    """These keys are without effect."""

    PASSED: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "caller", "citations", "id", "model", "stop_reason", "stop_sequence", "type", "usage"}
    )


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # without effect: nothing is signed here


class RedactedThinkingBlock(Block):
    """Without effect: only Anthropic can read it."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Text = Annotated[TextBlock, BeforeValidator(_known)]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Text] | None = None
    is_error: bool = False


KNOWN = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
UserContent = Annotated[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")], BeforeValidator(_known)]
AssistantContent = Annotated[
    Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")],
    BeforeValidator(_known),
]


class UserMessage(Block):
    role: Literal["user"]
    content: str | list[UserContent]


class AssistantMessage(Block):
    role: Literal["assistant"]
    content: str | list[AssistantContent]


class SystemMessage(Block):
    role: Literal["system"]
    content: str | list[Text]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def text_of(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())
