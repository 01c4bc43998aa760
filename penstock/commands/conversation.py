"""A chat's memory: what was said, and how it is saved."""

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

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def drop_last(self) -> None:
        self.messages.pop()

    def save(self, name: str) -> Path:
        """JSON messages for a name that ends in .json, else Markdown. A file of another origin is not overwritten."""
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self._saved:
            raise InvalidRequest(f"{path} exists already; nothing was saved: choose another name")
        text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n" if path.suffix == ".json" else (
            "\n".join(f"## {message['role']}\n\n{message['content'].strip()}\n" for message in self.messages))
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"cannot save {path}: {error.strerror or error}; choose another name") from error
        self._saved.add(path.resolve())
        return path
