"""A chat's memory: what was said, how much of it is still sent, and how it is saved."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.errors import InvalidRequest


class Conversation:
    def __init__(self, system: str | None) -> None:
        self._system = system
        self._saved: set[Path] = set()
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self._begin = len(self.messages)  # of what is sent after the system message

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def drop_last(self) -> None:
        self.messages.pop()

    def turns(self) -> list[int]:
        """Where each turn that is still sent begins."""
        return [at for at in range(self._begin, len(self.messages)) if self.messages[at]["role"] == "user"]

    def sent(self, begin: int | None = None) -> list[dict[str, str]]:
        """The system message and the turns that are still sent; those from `begin` on, if it is given."""
        system = self.messages[:1] if self._system else []
        return [*system, *self.messages[self._begin if begin is None else begin :]]

    def forget_before(self, begin: int) -> None:
        """Send no turn that lies before this one any more. They are saved nevertheless."""
        self._begin = begin

    def save(self, name: str) -> Path:
        """JSON messages for a name that ends in .json, else Markdown. A file of another origin is not overwritten."""
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
