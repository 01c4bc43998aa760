"""Save, restore and erase a client's session: its blocks are the engine's, its tokens are kept here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.messages import EraseSession, SaveSession
from penstock.errors import quote
from penstock.host.session_records import SessionRecord, digest_scope
from penstock.server.common.fields import SamplingBody
from penstock.server.generation import Usage
from penstock.server.http.context import cancel_on_disconnect, client_of, server_of
from penstock.server.http.errors import ApiError
from penstock.server.state import make_salt
from penstock.types import SamplingParams

if TYPE_CHECKING:
    from starlette.requests import Request

    from penstock.server.model import ServedModel


@dataclass(frozen=True)
class SessionCall:
    """A client's call about a session, and the name under which its tokens are kept."""

    request: Request
    model: ServedModel
    session: str
    record: str
    asked: SamplingBody

    @property
    def tenant(self) -> str:
        return client_of(self.request).tenant

    @property
    def record_name(self) -> str:
        """Name the record for this model alone: another has other tokens."""
        facts = self.model.facts
        return f"{facts.architecture} {facts.vocab_size} {facts.num_bytes} {self.record}"

    @property
    def missing(self) -> ApiError:
        why = f"there is no session {quote(self.session)}: send a request with it first"
        return ApiError(404, why, param="session")


async def save(call: SessionCall) -> int:
    """Put all of a session into the store, and keep its tokens; returns how many."""
    message = SaveSession(call.tenant, call.session)
    answers = await asyncio.gather(*(engine.controls.ask(message) for engine in call.model.running.engines))
    for answer in answers:
        if answer.error is not None:
            raise ApiError(400, answer.error, param="session")
    found = max(answers, key=lambda answer: int(answer.values["num_positions"])).values
    if not found["num_positions"]:
        raise call.missing
    record = SessionRecord(tuple(found["tokens"]), digest_scope(found["loras"], found["salt"]))
    try:
        await asyncio.to_thread(call.model.sessions.write, call.tenant, call.record_name, record)
    except OSError as error:
        raise ApiError(
            500,
            f"session {quote(call.session)} cannot be saved ({error.strerror or error}): --kv-offloading-path must be "
            "a folder that the server's user alone may read, and can write",
        ) from None
    return len(record.tokens)


async def restore(call: SessionCall) -> tuple[int, int]:
    """Bring a saved session back into the cache by a request with its prefix; returns its tokens, and how many the
    cache or the store had."""
    model, server = call.model, server_of(call.request)
    record = await asyncio.to_thread(model.sessions.read, call.tenant, call.record_name)
    if record is None:
        raise ApiError(404, f"no session was saved as {quote(call.record)}: save it first", param="session")
    loras = [(use.name, use.scale) for use in model.loras.resolve(call.asked.model, None)]
    if digest_scope(loras, make_salt(call.tenant, call.asked.cache_salt or "")) != record.scope:
        raise ApiError(
            400,
            f"session {quote(call.record)} was saved with another adapter or cache_salt: name the same in model and "
            "cache_salt",
            param="session",
        )
    tokens = record.tokens[: model.facts.max_model_len - 1]
    encoded = model.text.intake.encode({"prompt_token_ids": list(tokens)})
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    generation = await server.generate(model, client_of(call.request), call.asked, [(encoded, params)])
    await cancel_on_disconnect(call.request, generation.wait())
    usage: Usage = generation.usage
    return usage.num_prompt, usage.num_cached


async def erase(call: SessionCall) -> int:
    """Let a session's prefix be evicted as any other, and drop its tokens; returns how many it had."""
    message = EraseSession(call.tenant, call.session)
    answers = await asyncio.gather(*(engine.controls.ask(message) for engine in call.model.running.engines))
    record = await asyncio.to_thread(call.model.sessions.erase, call.tenant, call.record_name)
    found = [int(answer.values.get("num_positions", 0)) for answer in answers if answer.error is None]
    count = max([*found, len(record.tokens) if record else 0])
    if not count:
        raise call.missing
    return count
