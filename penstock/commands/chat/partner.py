"""The model one chats with, which may be changed for another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.commands.flags.options import open_llm
from penstock.errors import InvalidModel

if TYPE_CHECKING:
    from penstock.api.llm import LLM


class Partner:
    """Holds one loaded model at a time: two may not fit the memory."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self._options = name, options
        self.llm = _open(name, options)

    def change(self, name: str) -> None:
        """Load another model. If it cannot be had, keep this one, or load it again."""
        _check(name, self._options)
        self.llm.close()
        before, self.name = self.name, name
        try:
            self.llm = _open(name, self._options)
        except BaseException:
            self.name = before
            self.llm = _open(before, self._options)
            raise

    def close(self) -> None:
        self.llm.close()


def _open(name: str, options: dict[str, Any]) -> LLM:
    llm = open_llm(name, options)
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        llm.close()
        raise InvalidModel(
            f"{name} has no chat template: use `penstock run` with a prompt, or start with --chat-template FILE"
        )
    return llm


def _check(name: str, options: dict[str, Any]) -> None:
    """Refuse a model that is not one, before the loaded one is closed."""
    from penstock.hub import resolve_model
    from penstock.models.files import open_checkpoint, read_config
    from penstock.models.spec import spec_from_config

    path = resolve_model(name, options.get("revision"))
    if options.get("load_format") == "dummy" and path.is_dir():
        spec_from_config(read_config(path))
        return
    checkpoint = open_checkpoint(path)
    try:
        spec_from_config(checkpoint.config)
    finally:
        checkpoint.close()
