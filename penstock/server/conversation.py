"""From a chat body to a prompt: messages, tools and the answer's form, as the model's template takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request

from penstock.errors import InvalidRequest
from penstock.intake import Encoded
from penstock.server.calling import Calling
from penstock.server.chat_body import ChatBody, Message
from penstock.server.fields import sampling_params
from penstock.server.model import ServedModel
from penstock.server.notices import warn
from penstock.server.structure import structure
from penstock.text.reasoning import REASONING, ReasoningSplitter, detect_kind, find_block, new_splitter
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools import TOOL_PARSERS, ToolParser, detect_parser
from penstock.text.tools.describe import describe, normalized, supports_tools
from penstock.types import SamplingParams, StructuredOutputsParams

MAX_MESSAGES_ON_LOOP = 500  # a message, or a call in it, takes some 10 µs


@dataclass(frozen=True)
class Conversation:
    """What one chat request comes to, and how its answers are to be read."""

    encoded: Encoded
    params: SamplingParams
    parser: str | None = None  # of tool calls, where the model may make them
    named: bool = False  # the client named the function to call
    reasoning: str | None = None  # how it is marked, where the answer may have some
    most_calls: int | None = None  # those beyond it are passed over
    is_exact: bool = False  # the text must match something: it begins right behind the reasoning
    is_open: bool = False  # the text may be any, though calls in it must match

    @classmethod
    async def prepare(
        cls, body: ChatBody, model: ServedModel, tenant: str = "", defaults: SamplingParams | None = None
    ) -> Conversation:
        """`defaults` are the sampling values that the body leaves open, if not the model's."""
        tokenizer = model.tokenizer
        template = body.chat_template or (tokenizer.chat_template if tokenizer else None)
        if tokenizer is None or template is None:
            raise InvalidRequest(f"{model.name} has no chat template, so it is no chat model: use /v1/completions")
        cut = body.truncate_prompt_tokens is not None
        model.taking.check_length(sum(message.num_chars for message in body.messages), cut)
        tools = _tools(body)
        parser = (model.tool_call_parser or detect_parser(template)) if tools else None
        messages, values = await make_input(
            body.messages,
            template,
            tools,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
            body.reasoning_effort,
        )
        if body.documents is not None:
            values["documents"] = [{"text": one} if isinstance(one, str) else one for one in body.documents]
        encoded = await model.encode_messages(messages, values, cut=cut, tenant=tenant, template=body.chat_template)
        kind = model.reasoning_parser or detect_kind(template)
        block = find_block(kind, encoded.prompt or "", values)
        if block is not None and body.continue_final_message and not block.is_open:
            block = None  # the answer has begun
        form, special = structure(body), _special_ids(tokenizer) if parser or kind else {}
        is_any, calling = form is None, Calling.of(body, tools, parser) if parser else None
        if calling is not None:
            form, is_any = calling.form(form, special)
        params = _params(body, defaults or model.defaults, form, _reads_special(parser, kind, special))
        return cls(
            replace(encoded, reasoning=block),
            params,
            parser,
            calling is not None and calling.is_named,
            kind if is_any or block is not None else None,
            1 if body.parallel_tool_calls is False else None,
            is_exact=not is_any,
            is_open=is_any and form is not None,
        )

    def new_splitter(self) -> ReasoningSplitter | None:
        return new_splitter(self.reasoning, self.encoded.prompt or "", self.is_exact)

    def new_parser(self) -> ToolParser | None:
        return TOOL_PARSERS[self.parser]() if self.parser else None


def warn_of_budget(request: Request, body: ChatBody, conversation: Conversation) -> None:
    """Say so where a budget for thinking bounds nothing."""
    budget = body.thinking_token_budget
    if budget is not None and budget >= 0 and conversation.encoded.reasoning is None:
        why = "the model marks no reasoning" if conversation.reasoning is None else "the answer does not begin with any"
        warn(request, f"a budget of {budget} tokens for thinking has no effect: {why}")


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    if body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


async def make_input(said: Sequence[Message], *arguments: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Call `template_input`; off the loop where there is much to go through."""
    if sum(1 + len(message.tool_calls or ()) for message in said) <= MAX_MESSAGES_ON_LOOP:
        return template_input(said, *arguments)
    return await asyncio.to_thread(template_input, said, *arguments)


def template_input(
    said: Sequence[Message],
    template: str,
    tools: list[dict[str, Any]],
    add_generation_prompt: bool,
    continue_final_message: bool,
    more: Mapping[str, Any] | None,
    effort: str | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables as the template takes them; tools are described in words where it knows none."""
    messages = [message.plain() for message in said]
    values: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        "continue_final_message": continue_final_message,
    }
    if effort is not None:
        values |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if "messages" in (more or {}):
        raise InvalidRequest("chat_template_kwargs must not name 'messages': they are a field of their own")
    values |= more or {}
    if supports_tools(template):
        return normalized(messages), values | ({"tools": tools} if tools else {})
    return describe(messages, tools), values


_special: WeakKeyDictionary[Tokenizer, dict[str, int]] = WeakKeyDictionary()


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """There may be thousands: they are spelt once."""
    if tokenizer not in _special:
        _special[tokenizer] = {tokenizer.token_text(id): id for id in tokenizer.special_ids}
    return _special[tokenizer]


def _reads_special(parser: str | None, kind: str | None, special: Mapping[str, int]) -> bool:
    """True if markers of tool calls or reasoning may be special tokens."""
    marks = REASONING[kind] if kind is not None else None
    return bool(special) and (
        parser is not None or marks is not None and not special.keys().isdisjoint((marks.begin, marks.end))
    )


def _params(
    body: ChatBody, defaults: SamplingParams, form: StructuredOutputsParams | None, keep_special: bool
) -> SamplingParams:
    longest = body.max_completion_tokens or body.max_tokens
    more: dict[str, Any] = {"structured_outputs": form, "thinking_token_budget": body.thinking_token_budget}
    if keep_special and body.skip_special_tokens is None:
        more["skip_special_tokens"] = False
    return sampling_params(
        body, defaults, max_tokens=longest, logprobs=(body.top_logprobs or 0) if body.logprobs else None, **more
    )
