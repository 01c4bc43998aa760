"""The commands of a chat: their names, help and completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.commands.chat.keyboard import COMMAND
from penstock.commands.chat.settings import DEFAULT, KINDS, NOTES

MAX_COMPLETIONS = 200


@dataclass(frozen=True)
class Slash:
    """A command: the argument in its help, its note, and what completes the argument."""

    argument: str
    note: str
    completes: str = ""  # "settings", "files", "models" or a word


SLASHES = {
    "/help": Slash("", "this list"),
    "/set": Slash("[NAME VALUE]", f"change a sampling parameter, or show them; {DEFAULT} takes one back", "settings"),
    "/system": Slash("[TEXT|off]", "change the system message, or show it", "off"),
    "/schema": Slash("[FILE|off]", "answer in JSON that matches a schema, or show it", "files"),
    "/model": Slash("[NAME]", "go on with another model, or list those here", "models"),
    "/regenerate": Slash("", "answer the last message anew"),
    "/undo": Slash("", "take back the last message and its answer"),
    "/clear": Slash("", "forget the conversation"),
    "/save": Slash("FILE", "write the conversation: JSON if FILE ends in .json, else Markdown", "files"),
    "/load": Slash("FILE", "go on with a conversation saved as JSON", "files"),
    "/bye": Slash("", "leave; Ctrl-D does too"),
}
KEYS = '''Ctrl-C stops the answer, or clears what you typed. Up and Down bring back what you typed; Ctrl-R searches it.
Alt-Enter, or \\ at the end of a line, begins a new line; """ begins and ends a message of several lines.'''


def help_text() -> str:
    rows = [(f"{name} {slash.argument}".strip(), slash.note) for name, slash in SLASHES.items()]
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"{left.ljust(width)}  {note}" for left, note in rows) + f"\n{KEYS}"


class SlashWords:
    """Completes commands and their arguments."""

    def __init__(self, model_names: Callable[[], list[str]]) -> None:
        self._model_names = model_names

    def complete(self, typed: str) -> Iterator[tuple[str, str]]:
        """Yield words that the last one typed may become, with a note."""
        command, space, argument = typed.partition(" ")
        if not space:
            yield from ((name, slash.note) for name, slash in SLASHES.items() if name.startswith(typed))
            return
        kind = SLASHES[command].completes if command in SLASHES else ""
        if kind == "settings":
            yield from ((name, NOTES[name]) for name in KINDS if name.startswith(argument))
        elif kind == "files":
            yield from ((name, "") for name in _files(argument))
        elif kind == "models":
            yield from ((name, "") for name in self._model_names() if name.startswith(argument))
        elif kind and kind.startswith(argument):
            yield kind, ""


def _files(typed: str) -> list[str]:
    """List files and folders whose path begins with `typed`."""
    name = typed.rpartition("/")[2]
    shown = typed[: len(typed) - len(name)]
    try:
        found = sorted(Path(shown or ".").expanduser().iterdir())
    except (OSError, RuntimeError):
        return []
    names = [f"{shown}{path.name}{'/' if path.is_dir() else ''}" for path in found if path.name.startswith(name)]
    return [one for one in names if name.startswith(".") or not one[len(shown) :].startswith(".")][:MAX_COMPLETIONS]


def split(message: str) -> tuple[str, str] | None:
    """Return a command and its argument, or None for a message to the model, such as one that begins with a path."""
    command, _, argument = message.partition(" ")
    if "\n" in message or not command.startswith(COMMAND) or COMMAND in command[1:] or command == COMMAND:
        return None
    return ("/help" if command == "/?" else command), argument.strip()
