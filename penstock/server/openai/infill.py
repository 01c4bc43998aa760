"""Fill-in-the-middle prompts, for every API that has them."""

from __future__ import annotations

from penstock.server.http.errors import ApiError
from penstock.server.model import ServedModel
from penstock.text.infill import Gap, InfillTokens, Room, trim
from penstock.text.prompt_encoder import Encoded
from penstock.types import SamplingParams

OUTPUT_TOKENS = 256  # reserved for the output if max_tokens is unset


def find_infill_tokens(model: ServedModel, param: str) -> InfillTokens:
    """Find the model's fill-in-the-middle tokens; ApiError if it has none."""
    infill_tokens = model.tokenizer.infill if model.tokenizer is not None else None
    if infill_tokens is None:
        raise ApiError(
            400,
            f"{model.name!r} does not support insert: its vocabulary has no fill-in-the-middle tokens; "
            "use a code model that has them (Qwen-Coder, StarCoder, CodeLlama, "
            "DeepSeek-Coder, CodeGemma, Codestral), or leave the text after the gap out",
            param=param,
        )
    return infill_tokens


def make_infill_room(model: ServedModel, num_answer: int | None, num_halves: int | None = None) -> Room:
    """Return the prompt's room beside an output of `num_answer` tokens; `num_halves` bounds the text around the gap."""
    num_tokens = max(1, model.text.intake.longest - (num_answer or min(OUTPUT_TOKENS, model.text.intake.longest // 2)))
    return Room(num_tokens, min(num_tokens, num_halves or num_tokens))


async def encode_infill(
    model: ServedModel, gap: Gap, room: Room | None, *, add_special_tokens: bool = True, tenant: str = ""
) -> Encoded:
    """Encode a gap, cut to `room`; without room a long one is refused."""
    intake = model.text.intake
    if room is not None:
        gap = trim(gap, room)
    else:
        intake.check_length(len(gap.prefix) + len(gap.suffix), cut=False)
    with intake.explain_too_long(False):
        tokens = await model.text.service.encode_infill(
            gap, room, add_special_tokens, None if room else intake.limit(False), tenant
        )
    return intake.wrap_tokens(tokens, gap.prefix)


def stop_at_infill_end(params: SamplingParams, infill_tokens: InfillTokens) -> SamplingParams:
    """Stop at the tokens that end a fill."""
    if params.ignore_eos:
        return params
    return params.clone(stop_token_ids=list(dict.fromkeys([*(params.stop_token_ids or ()), *infill_tokens.ends])))
