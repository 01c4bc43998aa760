"""From a chat body to a prompt: messages, tools and the answer's form, as the model's template takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidRequest
from penstock.intake import Encoded
from penstock.server.chat_body import ChatBody, Message, NamedChoice
from penstock.server.fields import sampling_params
from penstock.server.model import ServedModel
from penstock.server.structure import structure
from penstock.text.reasoning import ReasoningSplitter, detect_kind, new_splitter
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools import TOOL_PARSERS, ToolParser, detect_parser
from penstock.text.tools.describe import describe, normalized, supports_tools
from penstock.text.tools.grammar import call_grammar
from penstock.types import SamplingParams, StructuredOutputsParams

MAX_MESSAGES_ON_LOOP = 500          # a message, or a call in it, takes some 10 µs


@dataclass(frozen=True)
class Conversation:
    """What one chat request comes to, and how its answers are to be read."""

    encoded: Encoded
    params: SamplingParams
    parser: str | None = None           # of tool calls, where the model may make them
    named: bool = False                 # the client named the function to call
    reasoning: str | None = None        # how it is marked, where the answer may have some
    most_calls: int | None = None       # those beyond it are passed over

    @classmethod
    async def prepare(cls, body: ChatBody, model: ServedModel, tenant: str = "",
                      defaults: SamplingParams | None = None) -> Conversation:
        """`defaults` are the sampling values that the body leaves open, if not the model's."""
        tokenizer = model.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise InvalidRequest(f"{model.name} has no chat template, so it is no chat model: use /v1/completions")
        template = tokenizer.chat_template
        cut = body.truncate_prompt_tokens is not None
        model.taking.check_length(sum(message.num_chars for message in body.messages), cut)
        tools = _tools(body)
        parser = (model.tool_call_parser or detect_parser(template)) if tools else None
        messages, values = await make_input(body.messages, template, tools, body.add_generation_prompt,
                                            body.continue_final_message, body.chat_template_kwargs,
                                            body.reasoning_effort)
        encoded = await model.encode_messages(messages, values, cut=cut, tenant=tenant)
        form, special = structure(body), _special_ids(tokenizer) if parser else {}
        forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedChoice)
        if parser and forced:
            if form is not None:
                raise InvalidRequest("tool_choice forces a call, which leaves no room for response_format: give one "
                                     "of them")
            form = _call_form(body, tools, parser, special)
        params = _params(body, defaults or model.defaults, form, keep_special=parser is not None and bool(special))
        reasoning = (model.reasoning_parser or detect_kind(template)) if form is None else None
        return cls(encoded, params, parser, isinstance(body.tool_choice, NamedChoice), reasoning,
                   1 if body.parallel_tool_calls is False else None)

    def new_splitter(self) -> ReasoningSplitter | None:
        return new_splitter(self.reasoning, self.encoded.prompt or "")

    def new_parser(self) -> ToolParser | None:
        return TOOL_PARSERS[self.parser]() if self.parser else None


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    if body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


async def make_input(said: Sequence[Message], *arguments: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Call `template_input`; off the loop where there is much to go through."""
    if sum(1 + len(message.tool_calls or ()) for message in said) <= MAX_MESSAGES_ON_LOOP:
        return template_input(said, *arguments)
    return await asyncio.to_thread(template_input, said, *arguments)


def template_input(said: Sequence[Message], template: str, tools: list[dict[str, Any]], add_generation_prompt: bool,
                   continue_final_message: bool, more: Mapping[str, Any] | None, effort: str | None = None,
                   ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables as the template takes them; tools are described in words where it knows none."""
    messages = [message.plain() for message in said]
    values: dict[str, Any] = {"add_generation_prompt": add_generation_prompt and not continue_final_message,
                              "continue_final_message": continue_final_message}
    if effort is not None:
        values |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if "messages" in (more or {}):
        raise InvalidRequest("chat_template_kwargs must not name 'messages': they are a field of their own")
    values |= more or {}
    if supports_tools(template):
        return normalized(messages), values | ({"tools": tools} if tools else {})
    return describe(messages, tools), values


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {tokenizer.token_text(id): id for id in tokenizer.special_ids}


def _call_form(body: ChatBody, tools: list[dict[str, Any]], parser: str, special: dict[str, int],
               ) -> StructuredOutputsParams:
    name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedChoice) else None
    parallel = name is None and body.parallel_tool_calls is not False
    return StructuredOutputsParams(grammar=call_grammar(tools, parser, name, parallel, special))


def _params(body: ChatBody, defaults: SamplingParams, form: StructuredOutputsParams | None, keep_special: bool,
            ) -> SamplingParams:
    longest = body.max_completion_tokens or body.max_tokens
    more: dict[str, Any] = {"structured_outputs": form}
    if keep_special and body.skip_special_tokens is None:
        more["skip_special_tokens"] = False         # a call's markers may be such tokens
    return sampling_params(body, defaults, max_tokens=longest,
                           logprobs=(body.top_logprobs or 0) if body.logprobs else None, **more)
