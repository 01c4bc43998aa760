"""A conversation that outgrows the context: its oldest turns go, its system message stays."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from penstock.commands.conversation import Conversation
from penstock.errors import InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from penstock.llm import LLM

ANSWER_TOKENS = 512  # that a turn is given room for, in a context of four times as many or more
TOO_LONG = -1


def fit(llm: LLM, conversation: Conversation, max_tokens: int | None) -> int:
    """Forget the oldest turns until the rest leaves room for an answer of `max_tokens`; the number of turns forgotten.
    The last message stays: where it alone is too long it is refused, and nothing is forgotten."""
    turns, longest = conversation.turns(), llm.service.intake.longest
    wanted = max_tokens or min(ANSWER_TOKENS, longest // 4)

    def room_from(begin: int) -> int:
        return _room(llm, conversation.sent(begin))

    if room_from(turns[0]) >= wanted:
        return 0
    num_forgotten = min(bisect_left(turns, wanted, key=room_from), len(turns) - 1)
    room = room_from(turns[num_forgotten])
    if room < (max_tokens or 1):
        raise InvalidRequest(_refusal(llm, room, max_tokens))
    conversation.forget_before(turns[num_forgotten])
    return num_forgotten


def _room(llm: LLM, messages: list[dict[str, str]]) -> int:
    """Tokens left for an answer; negative where the messages alone have too many."""
    intake = llm.service.intake
    try:
        return max(TOO_LONG, intake.longest - len(intake.encode_messages(messages, cut=True).tokens))
    except PromptTooLong:
        return TOO_LONG


def _refusal(llm: LLM, room: int, max_tokens: int | None) -> str:
    longest, context = llm.service.intake.longest, llm.service.assembly.spec.max_positions
    remedy = (
        "shorten it"
        + (", lower --max-tokens" if max_tokens and room >= 1 else "")
        + (f", or start with --max-model-len up to {context}" if longest < context else "")
    )
    left = f"leaves {room} tokens" if room >= 1 else "leaves no room"
    return f"this message alone is too long: in the context of {longest} tokens it {left} for an answer; {remedy}"
