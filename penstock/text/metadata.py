"""The tokenizer's part of a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from penstock.errors import InvalidModel
from penstock.text import spm
from penstock.text.vocabulary import REMEDY

KEY = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
NAMED = ("bos", "eos", "eot", "eom", "cls", "seperator", "mask")  # as the format spells them


class Metadata:
    """The tokenizer's keys, each checked for its type before use."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin
        self.texts = self.array("tokens", str)
        if not self.texts:
            raise InvalidModel(f"{origin}: {KEY}tokens is missing or empty; {REMEDY}")
        self.kinds = self.array("token_type", int, len(self.texts)) or [spm.NORMAL] * len(self.texts)
        for id in self.of_kind(spm.UNUSED):  # rows without a token that only make the embedding rounder
            if self.texts[id] == f"[PAD{id}]":
                self.texts[id] = ""

    def _value(self, key: str, kind: type, name: str) -> Any:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) and kind is int):
            raise InvalidModel(f"{self.origin}: {key}={str(value)[:40]!r} must be {name}; {REMEDY}")
        return value

    def text(self, key: str) -> str | None:
        return cast("str | None", self._value(KEY + key, str, "a string"))

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(KEY + key, bool, "true or false")
        return default if value is None else value

    def id(self, key: str) -> int | None:
        """A token's id; one outside the vocabulary counts as not given."""
        value = self._value(KEY + key, int, "a token id")
        return value if value is not None and 0 <= value < len(self.texts) else None

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        values = self._value(KEY + key, (list, tuple), "a list") or []  # type: ignore[arg-type]
        if not set(map(type, values)) <= {kind}:
            raise InvalidModel(f"{self.origin}: {KEY}{key} must hold only {kind.__name__} values; {REMEDY}")
        if values and length is not None and len(values) != length:
            raise InvalidModel(f"{self.origin}: {KEY}{key} has {len(values)} entries for {length} tokens; {REMEDY}")
        return list(values)

    def of_kind(self, *kinds: int) -> list[int]:
        return [id for id, kind in enumerate(self.kinds) if kind in kinds]

    def ids_of(self, text: str) -> list[int]:
        return [id for id, other in enumerate(self.texts) if other == text]

    def special(self) -> list[str]:
        """Control tokens, and what the file names as beginning and end whatever their kind."""
        named = [self.id(f"{name}_token_id") for name in NAMED]
        ids = self.of_kind(spm.UNKNOWN, spm.CONTROL) + [id for id in named if id is not None]
        return [self.texts[id] for id in dict.fromkeys(ids)]

    @property
    def architecture(self) -> str | None:
        return cast("str | None", self._value("general.architecture", str, "a string"))

    def templates(self) -> dict[str, str]:
        found = {}
        for key in self.values:
            if key == TEMPLATE_KEY or key.startswith(TEMPLATE_KEY + "."):
                found[key[len(TEMPLATE_KEY) + 1 :] or "default"] = self._value(key, str, "a string")
        return found
