"""Read what a request's server is chosen by: its model, the beginning of its prompt, and what it refers to."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.server.engines.prefixes import MAX_BLOCKS, digest_parts

MAX_SIBLINGS = 1024
PART_BYTES = 64  # of text: about a block of tokens
PROMPT_FIELDS = ("instructions", "system", "tools", "messages", "input", "prompt", "inputs", "query", "text")
SCOPE_FIELDS = ("cache_salt", "chat_template", "chat_template_kwargs", "reasoning")


class _Body(msgspec.Struct):
    """The fields that count here; others are skipped without being decoded."""

    model: Any = None
    stream: Any = None
    previous_response_id: Any = None
    input_file_id: Any = None
    session: Any = None
    n: Any = None
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
    """`refers_to` is the id of something that one server has, `session` names a session among all tenants' ones."""

    model: str | None = None
    digests: Sequence[bytes] = ()
    num_bytes: int = 0
    refers_to: str | None = None
    is_stream: bool = False
    session: str | None = None
    num_rows: int = 0  # of an engine


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
        session = name_session(tenant, fields.session)
        num_rows = fields.n if isinstance(fields.n, int) and 1 <= fields.n <= MAX_SIBLINGS else 1
        return PromptFacts(model, digests, len(text), refers, _is_stream(path, fields.stream), session, num_rows)
    return PromptFacts()


def name_session(tenant: str, session: object) -> str | None:
    """Name a tenant's session, by which the server that holds it is remembered; None if there is none."""
    if not isinstance(session, str) or not session:
        return None
    return "session:" + hashlib.blake2b(repr((tenant, session)).encode(), digest_size=16).hexdigest()


def _is_stream(path: str, asked: object) -> bool:
    """True if the answer will be a stream: Ollama's are unless they are asked not to be."""
    return asked is True or path.startswith("/api/") and asked is not False or path == "/generate_stream"
