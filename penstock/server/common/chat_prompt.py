"""Turn a conversation into a chat body, and that into a prompt: render messages and tools, constrain the output."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request

from penstock.errors import InvalidRequest
from penstock.server.common.fields import make_sampling_params
from penstock.server.common.structured_outputs import read_constraint
from penstock.server.http.errors import validate, warn
from penstock.server.model import ServedModel
from penstock.server.openai.chat_body import AllowedChoice, ChatBody, Message, NamedChoice
from penstock.text.chat.reasoning import HARMONY, REASONING, Splitter, detect_kind, find_block, new_splitter
from penstock.text.prompt_encoder import Encoded
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.text.tools import TOOL_PARSERS, ToolParser, detect_parser
from penstock.text.tools.describe import describe, normalize_calls, supports_tools
from penstock.text.tools.grammar import call_grammar, is_strict, open_grammar
from penstock.types import SamplingParams, StructuredOutputsParams

ANY_OBJECT = '{"type": "object"}'
MAX_MESSAGES_ON_LOOP = 500  # about 10 µs each


class ChatHistory:
    """Messages in order. Adjacent system texts, and adjacent assistant parts, are merged: templates want roles to
    alternate."""

    def __init__(self) -> None:
        self._messages: list[_ChatMessage] = []
        self._names: dict[str, str] = {}  # function names, by call id

    def add_text(self, role: str, text: str, *, join: bool = False) -> None:
        """Add a text; `join` merges it with a preceding message of the user."""
        self._open_message(role, join or role in ("system", "assistant")).texts.append(text)

    def add_reasoning(self, text: str) -> None:
        self._open_message("assistant").reasoning.append(text)

    def add_call(self, id: str, name: str, arguments: str) -> None:
        self._names[id] = name
        self._open_message("assistant").calls.append(
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def add_result(self, id: str, text: str) -> None:
        message = self._open_message("tool", join=False)
        message.texts.append(text)
        message.more = {"tool_call_id": id, "name": self._names.get(id)}

    def _open_message(self, role: str, join: bool = True) -> _ChatMessage:
        if not join or not self._messages or self._messages[-1].role != role:
            self._messages.append(_ChatMessage(role))
        return self._messages[-1]

    def messages(self) -> list[dict[str, Any]]:
        return [message.to_dict() for message in self._messages]


@dataclass
class _ChatMessage:
    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, str | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(text for text in self.texts if text)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message | {name: value for name, value in self.more.items() if value is not None}


def make_chat_body(values: Mapping[str, Any]) -> ChatBody:
    """Validate translated values as a chat body; an error is the client's."""
    return validate(ChatBody, {name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class ToolCalling:
    """The tools that may be called (`tools`), in chat completions' format; the prompt may list more."""

    tools: list[dict[str, Any]]
    parser: str
    is_forced: bool = False  # the output must be a call
    is_named: bool = False  # the client named the function
    is_narrowed: bool = False  # the prompt lists further tools
    is_parallel: bool = True

    @classmethod
    def from_body(cls, body: ChatBody, tools: list[dict[str, Any]], parser: str) -> ToolCalling:
        choice, is_parallel = body.tool_choice, body.parallel_tool_calls is not False
        if isinstance(choice, NamedChoice):
            named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
            return cls(named, parser, is_forced=True, is_named=True, is_parallel=False)
        if isinstance(choice, AllowedChoice):
            names = choice.names
            allowed = [tool for tool in tools if tool["function"]["name"] in names]
            return cls(
                allowed,
                parser,
                choice.allowed_tools.mode == "required",
                is_narrowed=len(allowed) < len(tools),
                is_parallel=is_parallel,
            )
        return cls(tools, parser, choice == "required", is_parallel=is_parallel)

    def constrain(
        self, text_constraint: StructuredOutputsParams | None, special: Mapping[str, int]
    ) -> tuple[StructuredOutputsParams | None, bool]:
        """Return the constraint on the whole output, and True if it allows free text.

        A forced call leaves no text. With a JSON schema (`text_constraint`) the output is JSON or calls; with a regex,
        choice or grammar there are no calls. Schemas of tools that are not strict may be relaxed.
        """
        strict = any(map(is_strict, self.tools))
        if self.is_forced:
            grammar = call_grammar(self.tools, self.parser, parallel=self.is_parallel, special=special)
            return StructuredOutputsParams(grammar=grammar, strict=strict), False
        if text_constraint is not None:
            schema = ANY_OBJECT if text_constraint.json_object else text_constraint.json
            if schema is None:
                return text_constraint, False
            grammar = open_grammar(self.tools, self.parser, self.is_parallel, special, answer=str(schema))
            return StructuredOutputsParams(grammar=grammar, strict=strict or text_constraint.strict), False
        if not self.is_narrowed and not strict:
            return None, True
        grammar = open_grammar(self.tools, self.parser, self.is_parallel, special)
        return StructuredOutputsParams(grammar=grammar, strict=strict), True


@dataclass(frozen=True)
class ChatPrompt:
    """An encoded chat request, and how to parse its output."""

    encoded: Encoded
    params: SamplingParams
    parser: str | None = None  # of tool calls, if the model may call tools
    named: bool = False  # the client named the function to call
    reasoning: str | None = None  # kind of reasoning markers, if any
    max_calls: int | None = None  # further calls are dropped
    is_exact: bool = False  # constrained: the text begins right after the reasoning
    is_open: bool = False  # free text; only calls in it are constrained

    @classmethod
    async def prepare(
        cls, body: ChatBody, model: ServedModel, tenant: str = "", defaults: SamplingParams | None = None
    ) -> ChatPrompt:
        """Render and encode `body`. `defaults` fill in sampling values, instead of the model's."""
        tokenizer = model.tokenizer
        template = body.chat_template or (tokenizer.chat_template if tokenizer else None)
        if tokenizer is None or template is None:
            raise InvalidRequest(
                f"{model.name} has no chat template: use /v1/completions or a model that has one, or start the server "
                "with --chat-template FILE"
            )
        cut = body.truncate_prompt_tokens is not None
        model.text.intake.check_length(sum(message.num_chars for message in body.messages), cut)
        tools = [
            tool.model_dump(exclude_none=True) for tool in (() if body.tool_choice == "none" else body.tools or ())
        ]
        parser = (model.tool_call_parser or detect_parser(template)) if tools else None
        messages, values = await prepare_template_input(
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
        encoded = await model.text.encode_messages(
            messages, values, cut=cut, tenant=tenant, template=body.chat_template
        )
        kind = model.reasoning_parser or detect_kind(template)
        block = find_block(kind, encoded.prompt or "", values)
        if block is not None and body.continue_final_message and not block.is_open:
            block = None  # its reasoning is over
        constraint, special = read_constraint(body), _find_special_ids(tokenizer) if parser or kind else {}
        is_free, tool_calling = constraint is None, ToolCalling.from_body(body, tools, parser) if parser else None
        if tool_calling is not None:
            constraint, is_free = tool_calling.constrain(constraint, special)
        params = _make_params(
            body, defaults or model.defaults, constraint, _needs_special_tokens(parser, kind, special)
        )
        return cls(
            replace(encoded, reasoning=block, prediction=await _encode_prediction(body, model, tenant)),
            params,
            parser,
            tool_calling is not None and tool_calling.is_named,
            kind if is_free or block is not None else None,
            1 if body.parallel_tool_calls is False else None,
            is_exact=not is_free,
            is_open=is_free and constraint is not None,
        )

    def new_splitter(self) -> Splitter | None:
        return new_splitter(self.reasoning, self.encoded.prompt or "", self.is_exact)

    def new_parser(self) -> ToolParser | None:
        return TOOL_PARSERS[self.parser]() if self.parser else None


async def _encode_prediction(body: ChatBody, model: ServedModel, tenant: str) -> tuple[int, ...]:
    """Encode the predicted output; tokens that no answer can reach are dropped. A prediction only saves time, so one
    that cannot be encoded is no reason to refuse the request."""
    if body.prediction is None or not body.prediction.text:
        return ()
    try:
        encoded = await model.text.encode(
            body.prediction.text, cut=True, add_special_tokens=False, tenant=tenant, may_be_empty=True
        )
    except InvalidRequest:
        return ()
    return tuple(encoded.tokens[: model.text.intake.max_model_len])


def warn_of_unused_budget(request: Request, body: ChatBody, chat_prompt: ChatPrompt) -> None:
    budget = body.thinking_token_budget
    if budget is not None and budget >= 0 and chat_prompt.encoded.reasoning is None:
        why = "the model marks no reasoning" if chat_prompt.reasoning is None else "the answer does not begin with any"
        warn(request, f"a budget of {budget} tokens for thinking has no effect: {why}")


async def prepare_template_input(
    messages: Sequence[Message], *arguments: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Call `build_template_input`, off the event loop if there are many messages."""
    if sum(1 + len(message.tool_calls or ()) for message in messages) <= MAX_MESSAGES_ON_LOOP:
        return build_template_input(messages, *arguments)
    return await asyncio.to_thread(build_template_input, messages, *arguments)


def build_template_input(
    messages: Sequence[Message],
    template: str,
    tools: list[dict[str, Any]],
    add_generation_prompt: bool,
    continue_final_message: bool,
    more: Mapping[str, Any] | None,
    effort: str | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Make the template's messages and variables; tools are described in text if it takes none."""
    rendered = [message.to_template() for message in messages]
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
        return normalize_calls(rendered), values | ({"tools": tools} if tools else {})
    return describe(rendered, tools), values


_special_ids_by_tokenizer: WeakKeyDictionary[Tokenizer, dict[str, int]] = WeakKeyDictionary()


def _find_special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Map texts of special tokens to ids, once per tokenizer: there may be thousands."""
    if tokenizer not in _special_ids_by_tokenizer:
        _special_ids_by_tokenizer[tokenizer] = {tokenizer.token_text(id): id for id in tokenizer.special_ids}
    return _special_ids_by_tokenizer[tokenizer]


def _needs_special_tokens(parser: str | None, kind: str | None, special: Mapping[str, int]) -> bool:
    """True if tool call or reasoning markers may be special tokens."""
    marks = REASONING[kind] if kind is not None else None
    if parser is not None or kind == HARMONY:
        return bool(special)
    return marks is not None and not special.keys().isdisjoint((marks.begin, marks.end))


def _make_params(
    body: ChatBody, defaults: SamplingParams, constraint: StructuredOutputsParams | None, keep_special: bool
) -> SamplingParams:
    max_tokens = body.max_completion_tokens or body.max_tokens
    more: dict[str, Any] = {"structured_outputs": constraint, "thinking_token_budget": body.thinking_token_budget}
    if keep_special and body.skip_special_tokens is None:
        more["skip_special_tokens"] = False
    return make_sampling_params(
        body, defaults, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None, **more
    )
