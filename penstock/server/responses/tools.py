"""The tools of a response: functions, and which of them may be called."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.errors import shown
from penstock.server.fields import MAX_TOOLS, Body


class Function(Body):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # without effect: every tool is in the prompt, and the model calls it directly
    allowed_callers: list[str] | None = None
    async_: bool | None = Field(None, alias="async")
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _function(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(
                f"tools of type {shown(kind)} are not supported: the server runs none itself; give functions"
            )
        return tool

    def chat(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}

    def as_json(self) -> dict[str, Any]:
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict if self.strict is not None else False,
        }


class Named(Body):
    type: Literal["function"]
    name: str


class Allowed(Body):
    """The prompt describes every tool, and these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Named] = Field(min_length=1, max_length=MAX_TOOLS)


def _known(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        raise ValueError(
            f"tool_choice of type {shown(kind)} is not supported: choose none, auto, required, a function "
            "or allowed_tools"
        )
    return choice


ToolChoice = Annotated[Literal["none", "auto", "required"] | Named | Allowed, BeforeValidator(_known)]


def chat_tools(tools: list[Function] | None, choice: ToolChoice | None) -> dict[str, Any]:
    """The chat body's tools and tool_choice."""
    tools = tools or []
    if isinstance(choice, (Named, Allowed)):
        wanted = [choice.name] if isinstance(choice, Named) else [one.name for one in choice.tools]
        unknown = set(wanted) - {tool.name for tool in tools}
        if unknown:
            raise ValueError(f"tool_choice names {', '.join(map(shown, sorted(unknown)[:3]))}, not among the tools")
    if isinstance(choice, Named):
        return {
            "tools": [tool.chat() for tool in tools],
            "tool_choice": {"type": "function", "function": {"name": choice.name}},
        }
    if isinstance(choice, Allowed):
        allowed = [{"type": "function", "function": {"name": one.name}} for one in choice.tools]
        return {
            "tools": [tool.chat() for tool in tools],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}},
        }
    return {"tools": [tool.chat() for tool in tools] or None, "tool_choice": choice}
