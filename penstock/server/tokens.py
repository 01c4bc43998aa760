"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.chat_body import Message, Tool
from penstock.server.context import client_of, json_response, read, server_of, unless_gone
from penstock.server.conversation import make_input
from penstock.server.fields import MAX_MESSAGES, MAX_TOOLS, Body


class TokenizeBody(Body):
    DECISIVE: ClassVar[Mapping[str, str]] = {
        "chat_template": "the model's own is used; give the prompt that yours makes, with add_special_tokens=false"
    }
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


async def tokenize(request: Request) -> Response:
    body = await read(request, TokenizeBody)
    model = await server_of(request).catalog.open(body.model)
    tokenizer, tenant = model.tokenizer, client_of(request).tenant
    if tokenizer is None:
        raise InvalidRequest(f"{model.name} was loaded without a tokenizer")
    if body.messages is not None:
        if tokenizer.chat_template is None:
            raise InvalidRequest(f"{model.name} has no chat template: give a prompt")
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        model.taking.check_length(sum(message.num_chars for message in body.messages), cut=True)
        messages, values = await make_input(
            body.messages,
            tokenizer.chat_template,
            tools,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
        )
        encoding = model.encode_messages(
            messages, values, cut=True, tenant=tenant, add_special_tokens=bool(body.add_special_tokens)
        )
    else:
        encoding = model.encode(
            body.prompt or "",
            cut=True,
            add_special_tokens=body.add_special_tokens is not False,
            tenant=tenant,
            may_be_empty=True,
        )
    tokens = (await unless_gone(request, encoding)).tokens
    answer = {"count": len(tokens), "max_model_len": model.facts.max_model_len, "tokens": tokens}
    answer["token_strs"] = await model.token_texts(tokens) if body.return_token_strs else None
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    body = await read(request, DetokenizeBody)
    model = await server_of(request).catalog.open(body.model)
    if model.tokenizer is None:
        raise InvalidRequest(f"{model.name} was loaded without a tokenizer")
    model.taking.check_ids("tokens", body.tokens)
    return json_response({"prompt": await model.decode(body.tokens)})
