"""POST /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.common.chat_prompt import prepare_template_input
from penstock.server.common.fields import MAX_MESSAGES, MAX_TOOLS, RequestBody
from penstock.server.http.context import cancel_on_disconnect, client_of, json_response, read_body, server_of
from penstock.server.openai.chat_body import ChatTool, Message


class TokenizeBody(RequestBody):
    DECISIVE: ClassVar[Mapping[str, str]] = {
        "chat_template": "only the model's own is used; give the rendered prompt, with add_special_tokens=false"
    }
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ChatTool] | None = Field(None, max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _check_fields(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(RequestBody):
    model: str | None = None
    tokens: list[int]


async def tokenize(request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    model = await server_of(request).catalog.open(body.model)
    tokenizer, tenant = model.tokenizer, client_of(request).tenant
    if tokenizer is None:
        raise InvalidRequest(f"{model.name} was loaded without a tokenizer")
    if body.messages is not None:
        if tokenizer.chat_template is None:
            raise InvalidRequest(f"{model.name} has no chat template: give a prompt")
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        model.text.intake.check_length(sum(message.num_chars for message in body.messages), cut=True)
        messages, values = await prepare_template_input(
            body.messages,
            tokenizer.chat_template,
            tools,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
        )
        encoding = model.text.encode_messages(
            messages, values, cut=True, tenant=tenant, add_special_tokens=bool(body.add_special_tokens)
        )
    else:
        encoding = model.text.encode(
            body.prompt or "",
            cut=True,
            add_special_tokens=body.add_special_tokens is not False,
            tenant=tenant,
            may_be_empty=True,
        )
    tokens = (await cancel_on_disconnect(request, encoding)).tokens
    answer = {"count": len(tokens), "max_model_len": model.facts.max_model_len, "tokens": tokens}
    answer["token_strs"] = await model.text.decode_each(tokens) if body.return_token_strs else None
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    model = await server_of(request).catalog.open(body.model)
    if model.tokenizer is None:
        raise InvalidRequest(f"{model.name} was loaded without a tokenizer")
    model.text.intake.check_ids("tokens", body.tokens)
    return json_response({"prompt": await model.text.decode(body.tokens)})
