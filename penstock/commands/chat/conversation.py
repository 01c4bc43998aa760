"""A chat's messages: what was said, what is still sent, how they fit the context, and how they are saved."""

from __future__ import annotations

import json
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidRequest, PromptTooLong
from penstock.host.files import MIB, UnreadableFile, read_regular

if TYPE_CHECKING:
    from penstock.api.llm import LLM


ROLES = ("system", "user", "assistant")
MAX_SAVED_BYTES = 32 * MIB


class ChatMemory:
    def __init__(self, system: str | None) -> None:
        self.system = system
        self._saved: set[Path] = set()
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._begin = len(self.messages)  # first message sent after the system message

    def set_system(self, system: str | None) -> None:
        """Change the system message; None takes it away."""
        rest = self.messages[bool(self.system) :]
        begin = self._begin - bool(self.system)
        self.system = system
        self.clear()
        self._begin += begin
        self.messages += rest

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def drop_last(self) -> None:
        self.messages.pop()

    def drop_turn(self) -> str:
        """Take back the last message of the user with what follows it; return the message."""
        at = max((at for at, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if at is None:
            raise InvalidRequest("there is no message yet: type one")
        message = self.messages[at]["content"]
        del self.messages[at:]
        if self._begin > len(self.messages):
            self._begin = int(bool(self.system))
        return message

    def turns(self) -> list[int]:
        """Return where each turn that is still sent begins."""
        return [at for at in range(self._begin, len(self.messages)) if self.messages[at]["role"] == "user"]

    def sent_messages(self, begin: int | None = None) -> list[dict[str, str]]:
        """Return the system message and the turns that are still sent, from `begin` on if given."""
        system = self.messages[:1] if self.system else []
        return [*system, *self.messages[self._begin if begin is None else begin :]]

    def forget_before(self, begin: int) -> None:
        """Stop sending turns before `begin`; they are still saved."""
        self._begin = begin

    def save(self, name: str) -> Path:
        """Save as JSON if `name` ends in .json, else as Markdown. Do not overwrite other files."""
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self._saved:
            raise InvalidRequest(f"{path} exists already; nothing was saved: choose another name")
        text = (
            json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
            if path.suffix == ".json"
            else ("\n".join(f"## {message['role']}\n\n{message['content'].strip()}\n" for message in self.messages))
        )
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"cannot save {path}: {error.strerror or error}; choose another name") from error
        self._saved.add(path.resolve())
        return path

    def load(self, name: str) -> int:
        """Replace the conversation by one saved as JSON; return its number of messages."""
        path = Path(name).expanduser()
        messages = _read_messages(path)
        self.system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.clear()
        self.messages = messages
        self._saved.add(path.resolve())
        return len(messages)


def _read_messages(path: Path) -> list[dict[str, str]]:
    remedy = "name a file that /save wrote as JSON"
    try:
        found = json.loads(read_regular(path, MAX_SAVED_BYTES))
    except UnreadableFile as error:
        raise InvalidRequest(f"cannot load {path}: {error.reason}; {remedy}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"cannot load {path}: it is not JSON; {remedy}") from None
    if not isinstance(found, list) or not found or not all(map(_is_message, found)):
        raise InvalidRequest(f"cannot load {path}: it is no list of messages with role and content; {remedy}")
    roles = [message["role"] for message in found]
    if "system" in roles[1:] or "user" not in roles[:2] or roles[0] == "assistant":
        raise InvalidRequest(f"cannot load {path}: a system message may only be first, then the user begins; {remedy}")
    return [{"role": message["role"], "content": message["content"]} for message in found]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in ROLES and isinstance(value.get("content"), str)


ANSWER_TOKENS = 512  # reserved for an answer, if the context is at least four times as long
TOO_LONG = -1


def fit(llm: LLM, conversation: ChatMemory, max_tokens: int | None) -> int:
    """Drop the oldest turns until an answer of `max_tokens` fits; return their number. The last message stays: if it
    alone is too long it is refused, and nothing is dropped."""
    turns, longest = conversation.turns(), llm.service.intake.longest
    wanted = max_tokens or min(ANSWER_TOKENS, longest // 4)

    def room_from(begin: int) -> int:
        return _room(llm, conversation.sent_messages(begin))

    if room_from(turns[0]) >= wanted:
        return 0
    num_forgotten = min(bisect_left(turns, wanted, key=room_from), len(turns) - 1)
    room = room_from(turns[num_forgotten])
    if room < (max_tokens or 1):
        raise InvalidRequest(_refusal(llm, room, max_tokens))
    conversation.forget_before(turns[num_forgotten])
    return num_forgotten


def _room(llm: LLM, messages: list[dict[str, str]]) -> int:
    """Return the tokens left for an answer; negative if the messages alone are too long."""
    intake = llm.service.intake
    try:
        return max(TOO_LONG, intake.longest - len(intake.encode_messages(messages, cut=True).tokens))
    except PromptTooLong:
        return TOO_LONG


def _refusal(llm: LLM, room: int, max_tokens: int | None) -> str:
    longest, context = llm.service.intake.longest, llm.service.assembly.spec.max_positions
    remedy = (
        "shorten it"
        + (", lower --max-tokens" if max_tokens and room >= 1 else "")
        + (f", or start with --max-model-len up to {context}" if longest < context else "")
    )
    left = f"leaves {room} tokens" if room >= 1 else "leaves no room"
    return f"this message alone is too long: in the context of {longest} tokens it {left} for an answer; {remedy}"
