"""Chat templates: a conversation to one prompt, by the Jinja program that the model's authors wrote.

The program comes with the model and is not trusted: it runs in Jinja's immutable sandbox, sees plain data only, and its
output is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidModel, InvalidRequest

Message = Mapping[str, Any]
MAX_CHARS = 1 << 24  # of a rendered prompt


class ChatTemplate:
    def __init__(self, source: str, origin: str) -> None:
        from jinja2 import TemplateError

        from penstock.text.sandbox import sandbox

        self.origin = origin
        try:
            self._template = sandbox().from_string(source)
        except (TemplateError, RecursionError, ValueError, OverflowError, MemoryError) as error:
            raise InvalidModel(
                f"{origin}: the chat template is damaged ({_line(error)}); use generate with a plain "
                "prompt, or download the model again"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        values: Mapping[str, Any],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """`values` are the template's other variables; `continue_final_message=True` among them leaves the last
        message open, so that the answer continues it."""
        conversation = [_message(message) for message in _listed(messages)]
        values = dict(values)
        resume = bool(values.pop("continue_final_message", False))
        if resume and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message=True continues the last message, add_generation_prompt=True "
                "begins a new one; choose one"
            )
        names = {"tools": tools, "documents": None, **values, "add_generation_prompt": add_generation_prompt}
        names = {**plain(names), "messages": conversation}
        text = self._run(names)
        return _opened(text, conversation[-1]["content"]) if resume else text

    def _run(self, names: Mapping[str, Any]) -> str:
        from penstock.text.sandbox import TICK, Turns

        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate({**names, TICK: Turns()}):
                parts.append(part)
                num_chars += len(part)
                if num_chars > MAX_CHARS:
                    raise ValueError(f"its output exceeds {MAX_CHARS} characters")
        except Exception as error:
            raise InvalidRequest(
                f"the chat template of {self.origin} does not take these messages: {_line(error)}"
            ) from error
        return "".join(parts)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _listed(messages: Sequence[Message]) -> Sequence[Message]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("messages must be a list of at least one {'role': …, 'content': …}")
    return messages


def _message(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"a message must be a table with a 'role', not {str(message)[:80]!r}")
    data: dict[str, Any] = plain(message)
    data["content"] = _content(data.get("content"))
    return data


def _content(content: Any) -> str | None:
    """Text, or the parts of OpenAI's form, joined by line breaks; None beside tool calls."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"a message's content must be text or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or isinstance(part, dict) and part.get("type", "text") != "text":
            raise InvalidRequest(f"a message's content has a part that is no text: {str(part)[:80]!r}")
        texts.append(text)
    return "\n".join(texts)


def plain(value: Any) -> Any:
    """Only data reaches a template: objects have methods that the sandbox cannot judge."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise InvalidRequest(
        f"a chat template takes strings, numbers, lists and tables, not {type(value).__name__}; "
        "describe a tool by its JSON schema"
    )


def _opened(text: str, content: str | None) -> str:
    """The prompt up to the end of the last message's content, without what the template puts after it."""
    final = (content or "").strip()
    at = text.rfind(final) if final else -1
    if at < 0:
        raise InvalidRequest(
            "continue_final_message=True needs a last message with content that the template writes "
            "into the prompt as it is"
        )
    return text[: at + len(final)]
