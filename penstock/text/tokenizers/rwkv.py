"""RWKV's tokenizer: the longest token that matches the bytes of a text, from left to right.

The library has no such model. Its part here is to find added tokens; every text between them reaches the model as one
unknown word, which `GreedyMatcher` encodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import WordLevel

from penstock.errors import InvalidModel, quote
from penstock.text.tokenizers.decoding import byte_of_char

MAX_TOKEN_BYTES = 1024  # published vocabularies have up to 128
BEGINNING = 2  # bytes by which lengths are listed
MARK = "\uffff"  # in no vocabulary: no text between added tokens is a word that the library knows
TEMPLATE_NAME = "rwkv-world"  # files name their chat template
TEMPLATE = """\
{%- for message in messages -%}
{{ {"system": "System", "user": "User"}.get(message.role, "Assistant") }}: {{ message.content | trim }}{{ "\\n\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}
"""
ESCAPES = {"t": "\t", "n": "\n", "r": "\r"}


class GreedyMatcher:
    """The tokens by their bytes, and the lengths to try after each beginning, longest first."""

    def __init__(self, tokens: Mapping[bytes, int], unknown: int | None, word: int) -> None:
        """`word` stands for a text in the library's answer."""
        self.word, self._tokens, self._unknown = word, tokens, unknown
        found: dict[bytes, set[int]] = {}
        for token in tokens:
            found.setdefault(token[:BEGINNING], set()).add(len(token))
        self._lengths = {
            beginning: tuple(sorted(lengths | found.get(beginning[:1], set()), reverse=True))
            for beginning, lengths in found.items()
        }

    def encode(self, text: str) -> Iterator[int]:
        data, at = text.encode(), 0
        tokens, lengths = self._tokens, self._lengths
        while at < len(data):
            known = lengths.get(data[at : at + BEGINNING]) or lengths.get(data[at : at + 1], ())
            for length in known:
                id = tokens.get(data[at : at + length])
                if id is not None:
                    break
            else:
                id, length = self._unknown, 1
            if id is None:
                raise ValueError(f"no token begins with byte 0x{data[at]:02x}, and there is no unknown token")
            yield id
            at += length

    def find_ids(self, backend: Backend, text: str) -> list[int]:
        """Encode a text; the added tokens that the library finds in it are kept."""
        ids: list[int] = []
        (found,) = backend.encode_batch([text], add_special_tokens=False)
        for id, (begin, end) in zip(found.ids, found.offsets):
            if id == self.word:
                ids.extend(self.encode(text[begin:end]))
            else:
                ids.append(id)
        return ids


def unescape(text: str, origin: str) -> bytes:
    """Return the bytes of a token as its file spells them: \\t, \\n, \\r, \\x and two hexadecimal digits; a backslash
    before any other character stands for that."""
    found = bytearray()
    rest = iter(text)
    for char in rest:
        if char != "\\":
            found += char.encode()
            continue
        escaped = next(rest, "")
        digits = next(rest, "") + next(rest, "") if escaped == "x" else ""
        if not escaped or escaped == "x" and (len(digits) < 2 or not set(digits) <= set("0123456789abcdefABCDEF")):
            raise InvalidModel(
                f"{origin}: token {quote(text)} ends in half an escape, or \\x lacks two hexadecimal digits: the file "
                "is damaged; fetch it again"
            )
        found += bytes([int(digits, 16)]) if digits else ESCAPES.get(escaped, escaped).encode()
    if len(found) > MAX_TOKEN_BYTES:
        raise InvalidModel(
            f"{origin}: token {quote(text)} has {len(found)} bytes, and {MAX_TOKEN_BYTES} are possible: the file is "
            "damaged; fetch it again"
        )
    return bytes(found)


def spell(token: bytes) -> str:
    """Write bytes as byte-level tokenizers do, a printable character for each."""
    chars = {value: char for char, value in byte_of_char().items()}
    return "".join(chars[byte] for byte in token)


def build(
    texts: Sequence[str], unknown: int | None, plain: Sequence[int], origin: str
) -> tuple[Backend, GreedyMatcher]:
    """Build from the tokens as the library names them; those of the ids `plain` are matched in texts."""
    values = byte_of_char()
    tokens = {bytes(values[char] for char in texts[id]): id for id in plain if texts[id]}
    if not tokens:
        raise InvalidModel(f"{origin}: no token is a normal one, so that no text can be encoded; fetch the file again")
    lacking = [byte for byte in range(256) if bytes([byte]) not in tokens]
    if lacking and unknown is None:
        raise InvalidModel(
            f"{origin}: no token is byte 0x{lacking[0]:02x}, and there is no unknown_token_id: a text with it could "
            "not be encoded; fetch the file again"
        )
    word = next(iter(tokens.values()))
    backend = Backend(WordLevel({text: id for id, text in enumerate(texts) if text}, unk_token=texts[word]))
    backend.normalizer = normalizers.Prepend(MARK)
    backend.decoder = decoders.ByteLevel()
    return backend, GreedyMatcher(tokens, unknown, word)
