"""Read prompts that mix texts and token ids, as llama-server takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from penstock.errors import InvalidRequest
from penstock.server.common.fields import RequestBody
from penstock.server.http.unknown_keys import NO_MEDIA
from penstock.server.model import MAX_CONCURRENT_PROMPTS, ModelText
from penstock.text.prompt_encoder import Encoded

MAX_PROMPTS = 2048
MAX_TEXTS = 1024  # beside token ids in one prompt
Pieces = str | list[int | str]  # one prompt; texts and ids follow each other


class PromptText(RequestBody):
    """A prompt as an object; it could hold media too."""

    DECISIVE: ClassVar[dict[str, str]] = {"multimodal_data": NO_MEDIA}
    prompt_string: str


PromptList = list[int | str | PromptText | list[int | str]]
AnyPrompt = Annotated[str | PromptText | PromptList, Field(union_mode="left_to_right")]


def list_prompts(prompt: str | PromptText | Sequence[Any]) -> list[Pieces]:
    """Return the prompts: a list with a number in it is one, any other list holds several."""
    if isinstance(prompt, (str, PromptText)):
        return [_read(prompt)]
    if any(isinstance(one, int) for one in prompt):
        return [_read(list(prompt))]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"it has {len(prompt)} prompts: the limit is {MAX_PROMPTS}; send fewer")
    if not prompt:
        raise InvalidRequest("it is empty: give a text, token ids, or a list of them")
    return [_read(one) for one in prompt]


def is_one_prompt(prompt: str | PromptText | Sequence[Any]) -> bool:
    return isinstance(prompt, (str, PromptText)) or any(isinstance(one, int) for one in prompt)


def _read(prompt: str | PromptText | list[Any]) -> Pieces:
    if isinstance(prompt, PromptText):
        return prompt.prompt_string
    if isinstance(prompt, list) and any(isinstance(one, PromptText) for one in prompt):
        raise InvalidRequest("an object is a whole prompt: give a text between token ids")
    return prompt


async def encode_prompts(
    text: ModelText, prompts: Sequence[Pieces], *, tenant: str, cut: bool = False
) -> list[Encoded]:
    """Encode each prompt, a few at a time."""
    encoded: list[Encoded] = []
    for at in range(0, len(prompts), MAX_CONCURRENT_PROMPTS):
        some = prompts[at : at + MAX_CONCURRENT_PROMPTS]
        encoded += await asyncio.gather(*(_encode(text, one, tenant, cut) for one in some))
    return encoded


async def _encode(text: ModelText, prompt: Pieces, tenant: str, cut: bool) -> Encoded:
    """Encode one prompt; a text at its beginning gets the special tokens that the model expects."""
    if isinstance(prompt, str):
        return await text.encode(prompt, cut=cut, tenant=tenant)
    num_texts = sum(isinstance(one, str) for one in prompt)
    if num_texts > MAX_TEXTS:
        raise InvalidRequest(f"a prompt of {num_texts} texts between token ids: the limit is {MAX_TEXTS}; join them")
    tokens: list[int] = []
    for at, piece in enumerate(prompt):
        if isinstance(piece, str):
            encoded = await text.encode(piece, cut=True, add_special_tokens=not at, tenant=tenant, may_be_empty=True)
            tokens += encoded.tokens
        else:
            tokens.append(piece)
    return text.intake.encode(tokens, cut=cut)
