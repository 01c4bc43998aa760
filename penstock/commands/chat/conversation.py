"""A chat's messages: what was said, what is still sent, how they fit the context, and how they are saved."""

from __future__ import annotations

import json
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from penstock.api.llm import LLM


class ChatMemory:
    def __init__(self, system: str | None) -> None:
        self._system = system
        self._saved: set[Path] = set()
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self._begin = len(self.messages)  # first message sent after the system message

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def drop_last(self) -> None:
        self.messages.pop()

    def turns(self) -> list[int]:
        """Return where each turn that is still sent begins."""
        return [at for at in range(self._begin, len(self.messages)) if self.messages[at]["role"] == "user"]

    def sent_messages(self, begin: int | None = None) -> list[dict[str, str]]:
        """Return the system message and the turns that are still sent, from `begin` on if given."""
        system = self.messages[:1] if self._system else []
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
