"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.common.beams import find_beams
from penstock.server.common.chat_prompt import ChatPrompt, warn_of_unused_budget
from penstock.server.common.defaults import take_defaults
from penstock.server.common.message_builder import MessageBuilder
from penstock.server.engines.direct import OpenBody, join_deltas
from penstock.server.generation import Generation
from penstock.server.http import sse
from penstock.server.http.context import (
    cancel_on_disconnect,
    client_of,
    event_stream,
    format_whole,
    json_response,
    new_id,
    now,
    read_body,
    run_formatting,
    server_of,
    start_generation,
)
from penstock.server.http.errors import ApiError, warn
from penstock.server.model import ServedModel
from penstock.server.openai.chat_body import ChatBody
from penstock.server.openai.logprobs import add_token_texts, count_top, format_chat_logprobs, format_prompt_logprobs
from penstock.types import StreamDelta, TokenLogprobs
from penstock.types.speculation import PREDICTION


async def chat_completions(request: Request) -> Response:
    body = await read_body(request, ChatBody)
    server = server_of(request)
    take_defaults(body, server.config)
    model = await server.catalog.open(body.model)
    _check_template(request, body, model)
    chat_prompt = await cancel_on_disconnect(request, ChatPrompt.prepare(body, model, client_of(request).tenant))
    warn_of_unused_budget(request, body, chat_prompt)
    encoded = chat_prompt.encoded
    params = find_beams(body, chat_prompt.params, len(encoded.tokens), model.text.intake)
    generation = await start_generation(request, model, body, [(encoded, params)])
    answer = ChatAnswer(body, chat_prompt, generation)
    server.traces.name(generation.trace, str(answer.head["id"]))
    if body.stream:
        return await event_stream(request, answer.events(), begin=answer.write_to)
    return json_response(await cancel_on_disconnect(request, answer.collect()))


def _check_template(request: Request, body: ChatBody, model: ServedModel) -> None:
    if body.chat_template is not None and not server_of(request).config.trust_request_chat_template:
        raise ApiError(
            400,
            "chat_template is not allowed in requests: leave it out, or start the server with "
            "--trust-request-chat-template",
            param="chat_template",
            code="unsupported_parameter",
        )
    template = body.chat_template or (model.tokenizer.chat_template if model.tokenizer else None) or ""
    if body.documents and "documents" not in template:
        warn(request, "documents were ignored: the chat template does not use them")


class ChatAnswer:
    def __init__(self, body: ChatBody, chat_prompt: ChatPrompt, generation: Generation) -> None:
        self.body = body
        self.chat_prompt = chat_prompt
        self.generation = generation
        self.head = {
            "id": body.request_id or new_id("chatcmpl-"),
            "created": now(),
            "model": body.model or generation.model.name,
        }
        count = body.n or 1
        self.builders = [MessageBuilder(chat_prompt) for _ in range(count)]
        self._has_usage_chunks = body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)
        self._is_plain = self.builders[0].is_plain and not (
            body.logprobs or body.return_token_ids or self._has_usage_chunks
        )
        self._templates: dict[int, sse.EventTemplate] = {}  # of chunks with content alone
        self._chunk_head = {
            **self.head,
            "object": "chat.completion.chunk",
            "system_fingerprint": generation.model.fingerprint,
        }
        self._has_begun = [False] * count
        self._num_sent = 0  # tokens of the chunks so far

    async def collect(self) -> Any:
        async with contextlib.aclosing(self.generation.stream()) as items:
            async for _, batch in items:
                for item in batch:
                    self.builders[item.index].push(item)
        return await format_whole(self.generation, self._format)

    def _format(self) -> dict[str, Any]:
        choices = [self._format_choice(index, builder) for index, builder in enumerate(self.builders)]
        usage = self.generation.usage
        answer = {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._format_usage(),
            "service_tier": "default",
            "system_fingerprint": self.generation.model.fingerprint,
            "timings": self.generation.times.format_timings(usage),
            **self.generation.relaxed,
            **self.generation.ledger,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        if self.body.prompt_logprobs is not None:
            positions = self.builders[0].prompt_logprobs
            answer["prompt_logprobs"] = (
                None
                if positions is None
                else format_prompt_logprobs(add_token_texts(positions, self.generation.model.tokenizer))
            )
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self._list_prompt_ids()
        return answer

    def _list_prompt_ids(self) -> list[int]:
        """Return the tokens as the model read them: a truncated prompt keeps its end."""
        return list(self.generation.flights[0].request.tokens)

    def _format_usage(self) -> dict[str, Any]:
        """Format the usage, with reasoning tokens if the model marks them, and those of a prediction."""
        usage = self.generation.usage.to_openai()
        details: dict[str, int] = {}
        if self.chat_prompt.reasoning is not None:
            details["reasoning_tokens"] = sum(builder.num_reasoning_tokens for builder in self.builders)
        if self.chat_prompt.encoded.prediction:
            predicted = [flight.collector.drafts.of(PREDICTION) for flight in self.generation.flights]
            details["accepted_prediction_tokens"] = accepted = sum(one.num_accepted for one in predicted)
            details["rejected_prediction_tokens"] = sum(one.num_verified for one in predicted) - accepted
        if details:
            usage["completion_tokens_details"] = details
        return usage

    def _format_choice(self, index: int, builder: MessageBuilder) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": builder.content, "refusal": None, "reasoning": None}
        if builder.reasoning is not None and self.body.include_reasoning:
            message["reasoning"] = message["reasoning_content"] = builder.reasoning
        if builder.calls:
            message["tool_calls"] = [call.to_openai() for call in builder.calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": builder.finish_reason,
            "stop_reason": builder.stop_reason,
            "token_ids": None,
        }
        if self.body.logprobs:
            choice["logprobs"] = {"content": self._format_logprobs(builder.logprobs), "refusal": None}
        if builder.forced_closing:
            choice["forced_closing"] = True
        if self.body.return_token_ids:
            choice["token_ids"] = builder.token_ids
        return choice

    def _format_logprobs(self, positions: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        num_top = count_top(self.body, self.body.top_logprobs)
        return format_chat_logprobs(positions, num_top, self.body.return_tokens_as_token_ids)

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        async with contextlib.aclosing(self.generation.stream()) as items:
            async for _, batch in items:
                chunks = await run_formatting(self.generation.count_logprobs(batch), partial(self._encode_batch, batch))
                if chunks:
                    yield chunks
        usage = self.generation.usage
        if options is not None and options.include_usage:
            yield sse.event(
                {
                    **self._chunk_head,
                    "choices": [],
                    "usage": self._format_usage(),
                    "timings": self.generation.times.format_timings(usage),
                }
            )
        yield sse.DONE

    def write_to(self, body: OpenBody) -> None:
        self.generation.write_to(body, self._encode_directly)

    def _encode_directly(self, batch: list[StreamDelta], join: bool) -> bytes:
        """Encode a batch; only content is joined: a part of a message may end within a joined delta."""
        if not self._is_plain:
            return self._encode_batch(batch)
        if join:
            batch = join_deltas(batch)
        chunks = []
        for item in batch:
            if item.text and self._has_begun[item.index]:
                self.builders[item.index].add_text(item)
                chunks.append(self._encode_content(self._chunk_head, item.index, item.text))
            else:
                chunks.append(self._encode_batch([item]))
        return b"".join(chunks)

    def _encode_batch(self, batch: list[StreamDelta]) -> bytes:
        chunks: list[bytes] = []
        for item in batch:
            if not self._has_begun[item.index]:
                chunks.append(self._encode_begin(item.index))
                self._has_begun[item.index] = True
            chunks += self._encode_delta(self._chunk_head, item)
        return b"".join(chunks)

    def _encode_begin(self, index: int) -> bytes:
        head = self._chunk_head
        if self.body.return_token_ids and not any(self._has_begun):
            head = {**head, "prompt_token_ids": self._list_prompt_ids()}
        return self._encode_chunk(head, index, {"role": "assistant", "content": ""})

    def _encode_delta(self, head: dict[str, Any], item: StreamDelta) -> list[bytes]:
        builder = self.builders[item.index]
        self._num_sent += len(item.token_ids)
        deltas = builder.push(item)
        if not self.body.include_reasoning:
            deltas = [delta for delta in deltas if "reasoning_content" not in delta]
        for delta in deltas:
            if "reasoning_content" in delta:
                delta["reasoning"] = delta["reasoning_content"]
        extras: dict[str, Any] = {}
        if self.body.logprobs and item.logprobs:
            extras["logprobs"] = {"content": self._format_logprobs(item.logprobs), "refusal": None}
        if self.body.return_token_ids and item.token_ids:
            extras["token_ids"] = list(item.token_ids)
        if extras and not deltas:
            deltas = [{"content": ""}]
        parts: list[tuple[dict[str, Any], dict[str, Any]]]
        parts = [(delta, extras if at == 0 else {}) for at, delta in enumerate(deltas)]
        if item.finish_reason is not None:
            end: dict[str, Any] = {"finish_reason": builder.finish_reason, "stop_reason": builder.stop_reason}
            if builder.forced_closing:
                end["forced_closing"] = True
            if self._has_usage_chunks and parts:  # as in vLLM, each chunk's usage is over that of the one before
                parts[-1][1].update(end)
            else:
                parts.append(({}, end))
        return [self._encode_chunk(head, item.index, delta, **more) for delta, more in parts]

    def _encode_content(self, head: dict[str, Any], index: int, text: str) -> bytes:
        template = self._templates.get(index)
        if template is None:
            chunk = self._make_chunk(head, index, {"content": sse.TEXT})
            template = self._templates[index] = sse.EventTemplate(chunk)
        return template.fill(text)

    def _encode_chunk(self, head: dict[str, Any], index: int, delta: dict[str, Any], **more: Any) -> bytes:
        if not more and len(delta) == 1 and "content" in delta and not self._has_usage_chunks:
            return self._encode_content(head, index, delta["content"])
        return sse.event(self._make_chunk(head, index, delta, **more))

    def _make_chunk(self, head: dict[str, Any], index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk = {**head, "choices": [choice]}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = None
            if options.continuous_usage_stats:
                chunk["usage"] = {**self._format_usage(), **self.generation.usage.count(self._num_sent)}
        if choice["finish_reason"] is not None:
            chunk |= self.generation.relaxed
            if all(builder.finish_reason is not None for builder in self.builders):
                chunk |= self.generation.ledger
        if choice["finish_reason"] is not None and not (options and options.include_usage):
            chunk["timings"] = self.generation.times.format_timings(self.generation.usage)
        return chunk
