"""/v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.server import sse
from penstock.server.chat_body import ChatBody
from penstock.server.context import (
    begin,
    client_of,
    event_stream,
    json_response,
    new_id,
    now,
    read,
    server_of,
    shaped,
    shaped_whole,
    unless_gone,
)
from penstock.server.conversation import Conversation, warn_of_budget
from penstock.server.errors import ApiError
from penstock.server.generation import Generation
from penstock.server.logprobs import chat_logprobs, named, prompt_logprobs
from penstock.server.model import ServedModel
from penstock.server.notices import warn
from penstock.server.turn import Turn
from penstock.types import StreamDelta


async def chat_completions(request: Request) -> Response:
    body = await read(request, ChatBody)
    server = server_of(request)
    model = await server.catalog.open(body.model)
    _check_template(request, body, model)
    conversation = await unless_gone(request, Conversation.prepare(body, model, client_of(request).tenant))
    warn_of_budget(request, body, conversation)
    generation = await begin(request, model, body, [(conversation.encoded, conversation.params)])
    answer = ChatAnswer(body, conversation, generation)
    if body.stream:
        return await event_stream(request, answer.events())
    return json_response(await unless_gone(request, answer.whole()))


def _check_template(request: Request, body: ChatBody, model: ServedModel) -> None:
    if body.chat_template is not None and not server_of(request).config.trust_request_chat_template:
        raise ApiError(
            400,
            "chat_template is not taken from requests here: leave it out, or start the server with "
            "--trust-request-chat-template",
            param="chat_template",
            code="unsupported_parameter",
        )
    template = body.chat_template or (model.tokenizer.chat_template if model.tokenizer else None) or ""
    if body.documents and "documents" not in template:
        warn(request, "documents were ignored: the chat template does not look at them")


class ChatAnswer:
    """One request's answers in OpenAI's shapes."""

    def __init__(self, body: ChatBody, conversation: Conversation, generation: Generation) -> None:
        self.body = body
        self.conversation = conversation
        self.generation = generation
        self.head = {
            "id": body.request_id or new_id("chatcmpl-"),
            "created": now(),
            "model": body.model or generation.model.name,
        }
        count = body.n or 1
        self.turns = [Turn(conversation) for _ in range(count)]

    # whole

    async def whole(self) -> Any:
        async with contextlib.aclosing(self.generation.stream()) as items:
            async for _, batch in items:
                for item in batch:
                    self.turns[item.index].push(item)
        return await shaped_whole(self.generation, self._whole)

    def _whole(self) -> dict[str, Any]:
        choices = [self._choice(index, turn) for index, turn in enumerate(self.turns)]
        usage = self.generation.usage
        answer = {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage(),
            "service_tier": "default",
            "system_fingerprint": self.generation.model.fingerprint,
            "timings": self.generation.times.timings(usage),
            **self.generation.relaxed,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        if self.body.prompt_logprobs is not None:
            positions = self.turns[0].prompt_logprobs
            answer["prompt_logprobs"] = (
                None if positions is None else prompt_logprobs(named(positions, self.generation.model.tokenizer))
            )
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt_ids()
        return answer

    def _prompt_ids(self) -> list[int]:
        """As the model read them: a prompt that may be cut keeps its end."""
        return list(self.generation.flights[0].request.tokens)

    def _usage(self) -> dict[str, Any]:
        """As OpenAI has it; of what a model thinks apart, how much that was."""
        told = self.generation.usage.openai()
        if self.conversation.reasoning is not None:
            num_reasoning = sum(turn.num_reasoning_tokens for turn in self.turns)
            told["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return told

    def _choice(self, index: int, turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None, "reasoning": None}
        if turn.reasoning is not None and self.body.include_reasoning:
            message["reasoning"] = message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [call.openai() for call in turn.calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.stop_reason,
            "token_ids": None,
        }
        if self.body.logprobs:
            choice["logprobs"] = {"content": chat_logprobs(turn.logprobs, self.body.top_logprobs or 0), "refusal": None}
        if turn.forced_closing:
            choice["forced_closing"] = True
        if self.body.return_token_ids:
            choice["token_ids"] = turn.token_ids
        return choice

    # streamed

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        head = {
            **self.head,
            "object": "chat.completion.chunk",
            "system_fingerprint": self.generation.model.fingerprint,
            **({"prompt_token_ids": None} if self.body.return_token_ids else {}),
        }
        begun = [False] * len(self.turns)
        async with contextlib.aclosing(self.generation.stream()) as items:
            async for _, batch in items:
                chunks = await shaped(self.generation.num_in(batch), partial(self._chunks, head, batch, begun))
                if chunks:
                    yield chunks
        usage = self.generation.usage
        if options is not None and options.include_usage:
            yield sse.event(
                {**head, "choices": [], "usage": self._usage(), "timings": self.generation.times.timings(usage)}
            )
        yield sse.DONE

    def _chunks(self, head: dict[str, Any], batch: list[StreamDelta], begun: list[bool]) -> bytes:
        chunks: list[bytes] = []
        for item in batch:
            if not begun[item.index]:
                first = {**head, "prompt_token_ids": self._prompt_ids()} if self.body.return_token_ids else head
                chunks.append(
                    self._chunk(head if any(begun) else first, item.index, {"role": "assistant", "content": ""})
                )
                begun[item.index] = True
            chunks += self._pieces(head, item)
        return b"".join(chunks)

    def _pieces(self, head: dict[str, Any], item: StreamDelta) -> list[bytes]:
        turn = self.turns[item.index]
        deltas = turn.push(item)
        if not self.body.include_reasoning:
            deltas = [delta for delta in deltas if "reasoning_content" not in delta]
        for delta in deltas:
            if "reasoning_content" in delta:
                delta["reasoning"] = delta["reasoning_content"]
        extras: dict[str, Any] = {}
        if self.body.logprobs and item.logprobs:
            extras["logprobs"] = {"content": chat_logprobs(item.logprobs, self.body.top_logprobs or 0), "refusal": None}
        if self.body.return_token_ids and item.token_ids:
            extras["token_ids"] = list(item.token_ids)
        if extras and not deltas:
            deltas = [{"content": ""}]
        chunks = [
            self._chunk(head, item.index, delta, **(extras if at == 0 else {})) for at, delta in enumerate(deltas)
        ]
        if item.finish_reason is not None:
            end: dict[str, Any] = {"finish_reason": turn.finish_reason, "stop_reason": turn.stop_reason}
            if turn.forced_closing:
                end["forced_closing"] = True
            chunks.append(self._chunk(head, item.index, {}, **end))
        return chunks

    def _chunk(self, head: dict[str, Any], index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk = {**head, "choices": [choice]}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self._usage() if options.continuous_usage_stats else None
        if choice["finish_reason"] is not None:
            chunk |= self.generation.relaxed
        if choice["finish_reason"] is not None and not (options and options.include_usage):
            chunk["timings"] = self.generation.times.timings(self.generation.usage)
        return sse.event(chunk)
