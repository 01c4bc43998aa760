"""Values that vLLM's params have besides: taken where they change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from penstock.errors import InvalidRequest, shown

Made = TypeVar("Made")
# Values that ask for nothing here, None for any; and why others are refused.
Ported = Mapping[str, tuple[tuple[Any, ...] | None, str]]
PORTED: Ported = {
    "spaces_between_special_tokens": (None, ""),
    "skip_clone": (None, ""),
    "skip_reading_prefix_cache": (None, ""),
    "flat_logprobs": ((False,), "log probabilities are a dict per position"),
    "extra_args": ((None, {}), "there are no plugins that read it"),
    "stream_interval": ((None, 1), "each output has what one step made"),
    "logprob_token_ids": ((None, []), "give logprobs, the number of the likeliest tokens"),
    "repetition_detection": ((None,), "give dry_multiplier or repetition_penalty against repetitions"),
    "routed_experts_prompt_start": ((0,), "the choice of experts is not reported"),
    "trace_decode_token_ids": ((None, []), "answers are sampled"),
    "use_beam_search": ((False,), "call LLM.beam_search"),
    "early_stopping": ((False,), "call LLM.beam_search"),
    "length_penalty": ((1.0,), "call LLM.beam_search"),
}
PORTED_STRUCTURES: Ported = {
    "backend": (None, ""),
    "disable_fallback": (None, ""),
    "disable_additional_properties": ((False, None), "write additionalProperties=false into the schema"),
    "whitespace_pattern": ((None,), "disable_any_whitespace=True leaves whitespace out"),
}
PORTED_BEAMS: Ported = {"include_stop_str_in_output": (None, "")}


def check_ported(ported: Ported, name: str, value: Any) -> None:
    taken, why = ported[name]
    if taken is not None and value not in taken:
        raise InvalidRequest(f"{name}={shown(value)} is not supported: {why}")


def take_ported(ported: Ported) -> Callable[[type[Made]], type[Made]]:
    """Let params be made with vLLM's values, too; none is kept."""

    def take(params: type[Made]) -> type[Made]:
        make = params.__init__

        @wraps(make)
        def init(self: Made, *args: Any, **values: Any) -> None:
            for name in ported.keys() & values.keys():
                check_ported(ported, name, values.pop(name))
            make(self, *args, **values)

        params.__init__ = init  # type: ignore[assignment, method-assign]
        return params

    return take
