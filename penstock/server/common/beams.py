"""Beam search in a body: `use_beam_search`, with `n` beams, as vLLM has it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from penstock.errors import InvalidRequest, quote
from penstock.server.common.fields import SamplingBody
from penstock.text.intake import Intake
from penstock.types import BeamSearchParams, SamplingParams
from penstock.types.request import MAX_BEAMS

# What beams, ranked by the model's own probabilities, have no use for.
EXCLUDED = (
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs", "thinking_token_budget"),
    *("logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
)


class BeamBody(BaseModel):
    """Fields of bodies that may ask for beams."""

    use_beam_search: bool = False
    length_penalty: float | None = Field(None, ge=-10, le=10)
    early_stopping: bool | None = None  # no effect: every beam is followed to its end


def find_beams(
    body: BeamBody, params: SamplingParams, num_prompt: int, intake: Intake
) -> SamplingParams | BeamSearchParams:
    """Return `params`, or the beams that the body asks for instead."""
    if not body.use_beam_search:
        return params
    assert isinstance(body, SamplingBody)
    plain, given = SamplingParams(), body.model_fields_set | {"structured_outputs"}  # by several fields
    for name in EXCLUDED:
        value = getattr(params, name)
        if value != getattr(plain, name) and name in given:
            what = "a form of the answer" if name == "structured_outputs" else f"{name}={quote(value)}"
            raise InvalidRequest(f"{what} does not go with use_beam_search: leave one of them out")
    if (body.n or 1) > MAX_BEAMS:
        raise InvalidRequest(f"n={body.n} beams are over the limit of {MAX_BEAMS}: ask for fewer")
    if params.temperature and "temperature" in body.model_fields_set:
        raise InvalidRequest(
            f"temperature={params.temperature:g} does not go with use_beam_search, which draws nothing: give 0"
        )
    asked: dict[str, Any] = {} if body.length_penalty is None else {"length_penalty": body.length_penalty}
    max_tokens = intake.max_tokens(num_prompt, params)
    return BeamSearchParams(beam_width=body.n or 1, max_tokens=max_tokens, ignore_eos=params.ignore_eos, **asked)
