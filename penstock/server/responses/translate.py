"""A responses body as a chat body, and the conversation that still fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.server.chat_body import ChatBody
from penstock.server.conversation import Conversation
from penstock.server.fields import WHOLE
from penstock.server.model import ServedModel
from penstock.server.responses.body import InputBody, ResponsesBody
from penstock.server.responses.items import Item, perform
from penstock.server.responses.tools import chat_tools
from penstock.server.script import Script, chat_body

EFFORTS = {"max": "xhigh"}


def to_chat(body: InputBody, earlier: Sequence[Item] = ()) -> ChatBody:
    """`earlier` are the items of the responses that this one follows."""
    script = Script()
    if body.instructions:
        script.say("system", body.instructions)
    perform([*earlier, *body.items], script)
    values: dict[str, Any] = {
        "model": body.model,
        "messages": script.messages(),
        "parallel_tool_calls": body.parallel_tool_calls,
        **chat_tools(body.tools, body.tool_choice),
    }
    if body.reasoning is not None and body.reasoning.effort is not None:
        values["reasoning_effort"] = EFFORTS.get(body.reasoning.effort, body.reasoning.effort)
    if body.text is not None and body.text.format is not None:
        values["response_format"] = body.text.format.chat()
    if isinstance(body, ResponsesBody):
        values |= {
            "max_completion_tokens": body.max_output_tokens,
            "stream": bool(body.stream),
            "temperature": body.temperature,
            "top_p": body.top_p,
            "user": body.user,
        }
        if body.wants_logprobs:
            values |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return chat_body(values)


async def fitted(chat: ChatBody, model: ServedModel, tenant: str = "") -> Conversation:
    """The conversation without as many of its oldest turns as do not fit; system messages at its head stay."""
    num_head = next((at for at, message in enumerate(chat.messages) if message.role not in ("system", "developer")), 0)
    starts = [at for at, message in enumerate(chat.messages) if message.role == "user"] or [num_head]
    room = model.facts.max_model_len - (chat.max_completion_tokens or 1)

    async def begun_at(start: int) -> Conversation:
        messages = [*chat.messages[:num_head], *chat.messages[start:]]
        return await Conversation.prepare(
            chat.model_copy(update={"messages": messages, "truncate_prompt_tokens": WHOLE}), model, tenant
        )

    best = await begun_at(num_head)
    first, last = 1, len(starts) - 1  # the shortest cut lies between them
    if len(best.encoded.tokens) <= room:
        return best
    best = await begun_at(starts[last])
    while first < last:
        middle = (first + last) // 2
        tried = await begun_at(starts[middle])
        if len(tried.encoded.tokens) <= room:
            best, last = tried, middle
        else:
            first = middle + 1
    return best
