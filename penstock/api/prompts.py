"""Normalise the arguments of a call: one prompt or several, one conversation or several, as a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidRequest, quote
from penstock.text.prompt_encoder import Messages, Prompt
from penstock.types import LoRARequest, SamplingParams
from penstock.types.lora import MAX_LORAS

CONTENT_FORMATS = ("auto", "string", "openai")
Params = SamplingParams | Sequence[SamplingParams] | None
AnyLora = LoRARequest | Sequence[LoRARequest] | None  # several are summed


def list_prompts(prompts: Prompt | Sequence[Prompt] | None, token_ids: Sequence[Any] | None = None) -> list[Prompt]:
    """Return a list of prompts; a list of numbers is one prompt. `token_ids` is vLLM's older argument."""
    if (prompts is None) == (token_ids is None) and token_ids is not None:
        raise InvalidRequest("prompts came with prompt_token_ids: give one of them")
    given = prompts if token_ids is None else token_ids
    if isinstance(given, (str, Mapping)):
        return [given]
    if isinstance(given, (bytes, bytearray)) or not isinstance(given, Iterable):
        raise InvalidRequest(
            f"prompts of type {type(given).__name__} are not supported: give a string, a list of "
            "token ids, a dict, or a list of those"
        )
    items = list(given)
    return [items] if items and isinstance(items[0], int) else items


def list_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return a list of conversations; a list of messages is one."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequest(f"messages={quote(messages)} are not valid: give a list of {{'role': …, 'content': …}}")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)  # type: ignore[list-item, arg-type]


def list_params(params: Params, count: int) -> list[SamplingParams | None]:
    """Return one per prompt; None stands for the model's defaults."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidRequest(
            f"sampling_params {quote(params)} are not supported: give SamplingParams, or a list "
            "with one for each prompt"
        )
    if len(params) != count:
        raise InvalidRequest(f"{count} prompts came with {len(params)} SamplingParams: give one, or one for each")
    return list(params)


def template_values(values: Mapping[str, Any] | None) -> Mapping[str, Any]:
    values = {} if values is None else values
    if not isinstance(values, Mapping) or any(not isinstance(key, str) or key == "messages" for key in values):
        raise InvalidRequest(
            f"chat_template_kwargs={quote(values)} are not valid: give names, other than 'messages', with their values"
        )
    return values


def check_content_format(form: str, conversations: Sequence[Messages]) -> None:
    """Refuse a format that would pass lists of parts on: they are joined as text."""
    if form not in CONTENT_FORMATS:
        raise InvalidRequest(
            f"chat_template_content_format={quote(form)} is unknown: choose one of {', '.join(CONTENT_FORMATS)}"
        )
    if form == "openai" and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for conversation in conversations
        for message in conversation
    ):
        raise InvalidRequest(
            "chat_template_content_format='openai' is not supported with lists of parts: templates "
            "are given texts; leave it out"
        )


def cuts(params: SamplingParams | None) -> bool:
    """True if a prompt that is too long may be truncated."""
    return params is not None and params.truncate_prompt_tokens is not None


def list_loras(asked: AnyLora) -> list[LoRARequest]:
    """Return the adapters of one request as a list, or refuse them."""
    loras = [asked] if isinstance(asked, LoRARequest) else list(asked) if isinstance(asked, list | tuple) else [None]
    if not all(isinstance(one, LoRARequest) for one in loras):
        raise InvalidRequest(
            f"lora_request of type {type(asked).__name__} is not supported: give a LoRARequest, or a list of those"
        )
    if len(loras) > MAX_LORAS or len({one.lora_name for one in loras if one}) < len(loras):
        raise InvalidRequest(f"lora_request sums {len(loras)} adapters: name at most {MAX_LORAS}, each once")
    return [one for one in loras if one is not None]


def spread_loras(loras: AnyLora | Sequence[AnyLora], num_prompts: int) -> list[AnyLora]:
    """Return what each prompt asked for: one for all, or a list with one, None or a list for each."""
    if loras is None or isinstance(loras, LoRARequest):
        return [loras] * num_prompts
    if not isinstance(loras, list | tuple) or len(loras) != num_prompts:
        many = f"{len(loras)} of them" if isinstance(loras, list | tuple) else f"of type {type(loras).__name__}"
        raise InvalidRequest(
            f"lora_request {many} is not supported with {num_prompts} prompts: give one LoRARequest, or a list with "
            "one, None or a list of those to sum for each prompt"
        )
    return list(loras)
