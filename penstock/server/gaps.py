"""Filling in between two texts, for every API that asks for it."""

from __future__ import annotations

from penstock.intake import Encoded
from penstock.server.errors import ApiError
from penstock.server.model import ServedModel
from penstock.text.infill import Gap, Marks, Room, trim
from penstock.types import SamplingParams

HALVES_TOKENS = 2048  # of the text on both sides, where it is cut
ANSWER_TOKENS = 256  # kept free for an answer whose length is not given


def find_marks(model: ServedModel, param: str) -> Marks:
    """The model's tokens for filling in; refused where it has none."""
    marks = model.tokenizer.infill if model.tokenizer is not None else None
    if marks is None:
        raise ApiError(
            400,
            f"{model.name!r} does not support insert: its vocabulary has no tokens for filling in "
            "between two texts; use a code model that has them (Qwen-Coder, StarCoder, CodeLlama, "
            "DeepSeek-Coder, CodeGemma, Codestral), or leave the text after the gap out",
            param=param,
        )
    return marks


def room_for(model: ServedModel, num_answer: int | None, num_halves: int | None = None) -> Room:
    """A prompt's tokens beside an answer of `num_answer`; at most `num_halves` for the texts next to the gap."""
    num_tokens = max(1, model.taking.longest - (num_answer or min(ANSWER_TOKENS, model.taking.longest // 2)))
    return Room(num_tokens, min(num_tokens, num_halves or num_tokens))


async def encode_gap(
    model: ServedModel, gap: Gap, room: Room | None, *, add_special_tokens: bool = True, tenant: str = ""
) -> Encoded:
    """A prompt, cut to `room`; without that refused where it is too long."""
    intake = model.taking
    if room is not None:
        gap = trim(gap, room)
    else:
        intake.check_length(len(gap.prefix) + len(gap.suffix), cut=False)
    with intake.explain_too_long(False):
        tokens = await model.text.encode_infill(
            gap, room, add_special_tokens, None if room else intake.limit(False), tenant
        )
    return intake.encoded(tokens, gap.prefix)


def end_with_gap(params: SamplingParams, marks: Marks) -> SamplingParams:
    """End the answer where the model says that nothing is left to fill in."""
    if params.ignore_eos:
        return params
    return params.clone(stop_token_ids=list(dict.fromkeys([*(params.stop_token_ids or ()), *marks.ends])))
