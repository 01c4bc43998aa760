"""Keep control tokens that users spell as text; only those that a chat template writes act as such.

If a message could have inserted a control token, the prompt is rendered again with all such strings removed from what
users wrote. If both renderings have the same control tokens, the template wrote them all. Otherwise it is rendered with
a mark (a character no text has) before every character that can begin a control token; those without a mark are the
template's. Each gets a secret name that the tokenizer also knows, and the real names are encoded as plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.errors import InvalidModel, InvalidRequest

PLAIN = "_-.:"  # occur in names, but begin no control token
SECRET_NAME = "\ufdef[0-9a-f]{32}\ufdef"
MARKS = [chr(code) for code in range(0xFDD0, 0xFDEF)]  # noncharacters: never in exchanged text
# Added tokens that templates write and messages may repeat: reasoning, calls and their results.
REPEATED = re.compile(r"</?(?:think|thinking|reasoning|answer|response|tools?|tool_calls?|tool_responses?)>")


class ControlTokens:
    """The control tokens of one tokenizer; not thread-safe. Added tokens that are not special count if a template
    writes them: some models mark turns with them."""

    def __init__(self, backend: Backend, templates: Iterable[str], vocab_size: Callable[[], int]) -> None:
        self._backend, self._vocab_size = backend, vocab_size
        written = "\n".join(templates)
        added = backend.get_added_tokens_decoder()
        self._tokens = {
            token.content: (id, token)
            for id, token in added.items()
            if token.content.strip()
            and (token.special or token.content in written and not REPEATED.fullmatch(token.content))
        }
        self._whole = re.compile(_either(self._tokens)) if self._tokens else None
        signs = {
            char for text in self._tokens for char in text if not (char.isalnum() or char.isspace() or char in PLAIN)
        }
        self._signs = re.compile("[" + "".join(map(re.escape, sorted({*signs, "&"}))) + "]")
        begins = {text[0] for text in self._tokens} or {"<"}
        self._begins = re.compile("[" + "".join(map(re.escape, sorted(begins))) + "]")
        self._normalizes = any(token.normalized for _, token in self._tokens.values())
        self._ids: dict[int, int] = {}  # real ids by the ids of secret names
        self._names: dict[str, str] = {}

    def read(self, value: Any, render: Callable[[Any], str]) -> tuple[str, str | None]:
        """Return the readable prompt, and the prompt with secret names for the template's control tokens (None if it
        can be encoded as it is)."""
        if self._whole is None or not (self._normalizes or any(self._signs.search(text) for text in strings(value))):
            return render(value), None
        text, expected = render(value), self._find_expected(value, render)
        if not self._normalizes and expected == self._whole.findall(text):
            return text, None
        if not self._names:
            self._name_all()
        marker = MessageMarker(self._mark(value), self._whole, self._begins, self._names)
        hidden, shown, found = marker.read(render(marker.mark(value)))
        if expected is not None and found != expected:
            raise InvalidRequest(
                "a message spells a control token that the chat template would activate: leave it out, or start with "
                "--parse-special-tokens"
            )
        return shown, hidden

    def _find_expected(self, value: Any, render: Callable[[Any], str]) -> list[str] | None:
        """Return the control tokens the template writes if users write none; None if it refuses such messages."""
        assert self._whole is not None

        def plain(text: str) -> str:
            return self._signs.sub("x", text)

        try:
            return self._whole.findall(render(map_strings(value, plain)))
        except InvalidRequest:
            return None

    def _mark(self, value: Any) -> str:
        texts = list(strings(value))
        for mark in MARKS:
            spelled = f"\\u{ord(mark):04x}"  # as in ASCII JSON
            if not any(mark in text or spelled in text.lower() for text in texts):
                return mark
        raise InvalidRequest("the messages have every noncharacter from U+FDD0 to U+FDEE: leave one of them out")

    def _name_all(self) -> None:
        """Give all control tokens secret names, with new ids above all others."""
        backend, size = self._backend, self._vocab_size()
        filler = f"\ufdef{secrets.token_hex(16)}\ufdef"
        backend.add_tokens([AddedToken(filler, special=False, normalized=False)])
        free = backend.token_to_id(filler)
        if free is not None and free < size:  # ids have gaps, and the library fills them
            backend.add_tokens(
                [AddedToken(f"{filler}{number}", special=False, normalized=False) for number in range(size - free)]
            )
        names = {text: f"\ufdef{secrets.token_hex(16)}\ufdef" for text in self._tokens}
        backend.add_special_tokens([_copy(text, token, special=True) for text, (_, token) in self._tokens.items()])
        backend.add_tokens([_copy(names[text], token, special=False) for text, (_, token) in self._tokens.items()])
        self._ids = {
            secret: self._tokens[text][0]
            for text, name in names.items()
            if (secret := backend.token_to_id(name)) is not None and secret >= size
        }
        if len(self._ids) < len(names):
            raise InvalidModel("the tokenizer takes no further tokens: start with --parse-special-tokens")
        self._names = names

    @contextmanager
    def use_hidden_names(self) -> Iterator[None]:
        """Recognise control tokens by their secret names only."""
        self._backend.encode_special_tokens = True
        try:
            yield
        finally:
            self._backend.encode_special_tokens = False

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Recognise no control tokens in text."""
        if self._tokens and not self._names:
            self._name_all()
        with self.use_hidden_names():
            yield

    def shown_ids(self, ids: list[int]) -> list[int]:
        return [self._ids.get(id, id) for id in ids]


def _copy(text: str, token: AddedToken, special: bool) -> AddedToken:
    return AddedToken(
        text, single_word=False, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=special
    )


class MessageMarker:
    def __init__(self, mark: str, whole: re.Pattern[str], begins: re.Pattern[str], names: dict[str, str]) -> None:
        self._begins, self._mark, self._names = begins, mark, names
        # a template may write values as ASCII JSON
        self._marks = re.compile(f"{mark}|\\\\u{ord(mark):04x}", re.IGNORECASE)
        self._found = re.compile(f"({self._marks.pattern})?({whole.pattern})")

    def mark(self, value: Any) -> Any:
        return map_strings(value, lambda text: self._begins.sub(lambda found: self._mark + found[0], text))

    def read(self, text: str) -> tuple[str, str, list[str]]:
        """Return a rendered text with secret names, the readable text, and the control tokens the template wrote."""
        found: list[str] = []

        def name_secretly(match: re.Match[str]) -> str:
            if match[1]:
                return match[2]
            found.append(match[2])
            return self._names[match[2]]

        hidden = self._found.sub(name_secretly, text)
        return self._marks.sub("", hidden), self._marks.sub("", text), found


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_strings(key, change): map_strings(one, change) for key, one in value.items()}
    return [map_strings(one, change) for one in value] if isinstance(value, (list, tuple)) else value


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
            yield from strings(one)


def _either(texts: Iterable[str]) -> str:
    """Return a regex for any of `texts`, longest first, with common prefixes factored out."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(node: dict[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:
        [(char, node)] = node.items()
        run += re.escape(char)
    options = [re.escape(char) + _pattern(after) for char, after in node.items() if char]
    return f"{run}(?:{'|'.join(options)})" + ("?" if "" in node else "") if options else run
