"""Chat templates: compile, render, and read them from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import InvalidConfig, InvalidModel, InvalidRequest, quote
from penstock.host.files import MIB, UnreadableFile, read_regular

Message = Mapping[str, Any]
MAX_CHARS = 1 << 24  # of a rendered prompt


class ChatTemplate:
    def __init__(self, source: str, origin: str) -> None:
        from jinja2 import TemplateError

        from penstock.text.chat.sandbox import sandbox

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
        """Render `messages`; `values` are other variables. `continue_final_message=True` leaves the last message
        open, so that the answer continues it."""
        conversation = [_message(message) for message in _check_messages(messages)]
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
        return _cut_after_last(text, conversation[-1]["content"]) if resume else text

    def _run(self, names: Mapping[str, Any]) -> str:
        from penstock.text.chat.sandbox import TICK, LoopCounter

        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate({**names, TICK: LoopCounter()}):
                parts.append(part)
                num_chars += len(part)
                if num_chars > MAX_CHARS:
                    raise ValueError(f"its output exceeds {MAX_CHARS} characters")
        except Exception as error:
            raise InvalidRequest(
                f"the chat template of {self.origin} rejects these messages: {_line(error)}"
            ) from error
        return "".join(parts)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_messages(messages: Sequence[Message]) -> Sequence[Message]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("messages must be a non-empty list of {'role': …, 'content': …}")
    return messages


def _message(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"a message must be an object with a 'role', not {str(message)[:80]!r}")
    data: dict[str, Any] = plain(message)
    data["content"] = _content(data.get("content"))
    return data


def _content(content: Any) -> str | None:
    """Return the text, or the parts of OpenAI's form joined by line breaks; None beside tool calls."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"a message's content must be text or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or isinstance(part, dict) and part.get("type", "text") != "text":
            raise InvalidRequest(f"a message's content has a part that is not text: {str(part)[:80]!r}")
        texts.append(text)
    return "\n".join(texts)


def plain(value: Any) -> Any:
    """Copy plain data only: the sandbox cannot judge the methods of objects."""
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
        f"a chat template takes strings, numbers, lists and dicts, not {type(value).__name__}; "
        "describe a tool by its JSON schema"
    )


def _cut_after_last(text: str, content: str | None) -> str:
    final = (content or "").strip()
    at = text.rfind(final) if final else -1
    if at < 0:
        raise InvalidRequest(
            "continue_final_message=True needs a last message with content that the template writes "
            "into the prompt as it is"
        )
    return text[: at + len(final)]


MAX_TEMPLATE_BYTES = MIB
WRITTEN = ("{{", "{%", "{#")  # occur in templates, never in file names


def read_template(text: str) -> str:
    """Return the template in the file `text`, or `text` itself if it is a template. Refuse one that does not
    compile."""
    is_text = any(sign in text for sign in WRITTEN)
    source = text if is_text else _read(text)
    if not source.strip():
        raise InvalidConfig(f"chat_template={quote(text)} is empty: name a file with a Jinja template")
    _check(source, "chat_template" if is_text else f"chat_template={quote(text)}")
    return source


def _read(path: str) -> str:
    try:
        return read_regular(Path(path).expanduser(), MAX_TEMPLATE_BYTES).decode()
    except UnreadableFile as error:
        raise InvalidConfig(
            f"chat_template={quote(path)} cannot be read: {error.reason}; give a file, or the template itself"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(
            f"chat_template={quote(path)} is not UTF-8 text: {error}; convert it, for example with iconv"
        ) from None


def _check(source: str, name: str) -> None:
    from jinja2 import TemplateSyntaxError

    from penstock.text.chat.sandbox import sandbox

    try:
        sandbox().from_string(source)
    except TemplateSyntaxError as error:
        raise InvalidConfig(
            f"{name} is not a Jinja template: line {error.lineno}: {quote(error.message or '')}"
        ) from None
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise InvalidConfig(f"{name} cannot be compiled: {quote(str(error))}; write a simpler one") from None
