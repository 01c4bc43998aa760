"""Read what a request's server is chosen by: its model, the beginning of its prompt, and what it refers to."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.server.engines.prefixes import MAX_BLOCKS, digest_parts

PART_BYTES = 64  # of text: about a block of tokens
PROMPT_FIELDS = ("instructions", "system", "tools", "messages", "input", "prompt", "inputs", "query", "text")
SCOPE_FIELDS = ("cache_salt", "chat_template", "chat_template_kwargs", "reasoning")


class _Body(msgspec.Struct):
    """The fields that count here; others are skipped without being decoded."""

    model: Any = None
    stream: Any = None
    previous_response_id: Any = None
    input_file_id: Any = None
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    chat_template: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    reasoning: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True)
class PromptFacts:
    """`refers_to` is the id of something that one server has."""

    model: str | None = None
    digests: Sequence[bytes] = ()
    num_bytes: int = 0
    refers_to: str | None = None
    is_stream: bool = False


def read_prompt(body: bytes, path: str, tenant: str) -> PromptFacts:
    """Read a body; one that cannot be read has no facts, and its server says what is wrong."""
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
        fields = msgspec.json.decode(body, type=_Body)
        model = fields.model if isinstance(fields.model, str) else None
        scope = [tenant, path, model, *(bytes(getattr(fields, name)) for name in SCOPE_FIELDS)]
        text = bytearray()
        for name in PROMPT_FIELDS:
            text += bytes(getattr(fields, name))
            if len(text) >= MAX_BLOCKS * PART_BYTES:
                break
        refers = next(
            (one for one in (fields.previous_response_id, fields.input_file_id) if isinstance(one, str)), None
        )
        digests = digest_parts(scope, bytes(text), PART_BYTES)
        return PromptFacts(model, digests, len(text), refers, _is_stream(path, fields.stream))
    return PromptFacts()


def _is_stream(path: str, asked: object) -> bool:
    """True if the answer will be a stream: Ollama's are unless they are asked not to be."""
    return asked is True or path.startswith("/api/") and asked is not False or path == "/generate_stream"
