"""POST /tokenize and /detokenize, as in vLLM and SGLang (`prompt`) and in llama-server (`content`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.common.chat_prompt import prepare_template_input
from penstock.server.common.fields import MAX_MESSAGES, MAX_TOOLS, RequestBody
from penstock.server.common.prompts import MAX_PROMPTS
from penstock.server.http.context import cancel_on_disconnect, client_of, json_response, read_body, server_of
from penstock.server.model import ServedModel
from penstock.server.openai.chat_body import ChatTool, Message
from penstock.text.prompt_encoder import Encoded


class TokenizeBody(RequestBody):
    DECISIVE: ClassVar[Mapping[str, str]] = {
        "chat_template": "only the model's own is used; give the rendered prompt, with add_special_tokens=false"
    }
    model: str | None = None
    prompt: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] | None = None
    # llama-server's
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    # vLLM's
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ChatTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None  # "none": without the tools

    @model_validator(mode="after")
    def _check_fields(self) -> TokenizeBody:
        if sum(one is not None for one in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("give one of prompt, content and messages")
        return self


class DetokenizeBody(RequestBody):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


async def tokenize(request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    model = await server_of(request).catalog.open(body.model)
    tokenizer, tenant = model.tokenizer, client_of(request).tenant
    if tokenizer is None:
        raise InvalidRequest(f"{model.name} was loaded without a tokenizer")
    if body.content is not None:
        return json_response({"tokens": await cancel_on_disconnect(request, _encode_content(body, model, tenant))})
    if body.messages is not None:
        if tokenizer.chat_template is None:
            raise InvalidRequest(f"{model.name} has no chat template: give a prompt")
        given = () if body.tool_choice == "none" else body.tools or ()
        tools = [tool.model_dump(exclude_none=True) for tool in given]
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
        if isinstance(body.prompt, list):
            return json_response(await cancel_on_disconnect(request, _encode_several(body, model, tenant)))
        encoding = _encode_text(body.prompt or "", body, model, tenant)
    tokens = (await cancel_on_disconnect(request, encoding)).tokens
    answer = {"count": len(tokens), "max_model_len": model.facts.max_model_len, "tokens": tokens}
    answer["token_strs"] = await model.text.decode_each(tokens) if body.return_token_strs else None
    return json_response(answer)


async def _encode_text(text: str, body: TokenizeBody, model: ServedModel, tenant: str) -> Encoded:
    add_special_tokens = body.add_special_tokens is not False
    return await model.text.encode(
        text, cut=True, add_special_tokens=add_special_tokens, tenant=tenant, may_be_empty=True
    )


async def _encode_several(body: TokenizeBody, model: ServedModel, tenant: str) -> dict[str, Any]:
    """Encode each of several prompts, as SGLang does."""
    tokens = [(await _encode_text(text, body, model, tenant)).tokens for text in body.prompt or ()]
    return {"count": [len(one) for one in tokens], "max_model_len": model.facts.max_model_len, "tokens": tokens}


async def _encode_content(body: TokenizeBody, model: ServedModel, tenant: str) -> list[Any]:
    """Encode as llama-server does: token ids, or with their pieces; a piece that is no UTF-8 is a list of bytes."""
    text, content = model.text, body.content or ""
    text.intake.check_length(len(content), cut=True)
    with text.intake.explain_too_long(True):
        limit = text.intake.limit(True)
        ids = await text.service.encode(content, body.add_special, limit, tenant, body.parse_special)
    if not body.with_pieces:
        return ids
    assert text.tokenizer is not None
    spelling = text.tokenizer.spelling
    if spelling.decoder.kind == "pairs":
        texts = await text.decode_each(ids)
        return [{"id": id, "piece": piece} for id, piece in zip(ids, texts)]
    return [{"id": id, "piece": _show_piece(spelling[id])} for id in ids]


def _show_piece(piece: str | bytes) -> str | list[int]:
    if isinstance(piece, str):
        return piece
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    model = await server_of(request).catalog.open(body.model)
    if model.tokenizer is None:
        raise InvalidRequest(f"{model.name} was loaded without a tokenizer")
    model.text.intake.check_ids("tokens", body.tokens)
    hidden = model.tokenizer.special_ids if body.skip_special_tokens else frozenset[int]()
    text = await model.text.decode([id for id in body.tokens if id not in hidden])
    return json_response({"prompt": text, "content": text, "text": text})  # vLLM's name, llama-server's, SGLang's
