"""Check single values, and normalise lists and maps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from functools import wraps
from typing import Any, TypeVar

from penstock.errors import InvalidRequest, quote


def require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name}={quote(value)} is out of range: it must be {limit}")


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # excludes NaN, infinity and integers beyond all floats


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_ids(name: str, values: Seq[int] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    meant = "a list of token ids, each 0 or more"
    require(isinstance(values, Collection) and not isinstance(values, (str, bytes)), name, values, meant)
    for value in values:
        require(is_count(value) and value >= 0, name, value, meant)
    return tuple(values)


def read_strings(name: str, values: str | Seq[str] | None) -> tuple[str, ...]:
    if values is None:
        return ()
    meant = "a non-empty string or a list of them"
    require(isinstance(values, Collection) and not isinstance(values, (bytes, Mapping)), name, values, meant)
    strings = (values,) if isinstance(values, str) else tuple(values)
    for value in strings:
        require(isinstance(value, str) and value != "", name, value, meant)
    return strings


def read_biases(values: Mapping[int, float] | None) -> dict[int, float] | None:
    if values is None:
        return None
    require(isinstance(values, Mapping), "logit_bias", values, "a map from token id to bias")
    for token, value in values.items():
        require(is_count(token) and token >= 0, "logit_bias", token, "a map from token id to bias")
        require(is_number(value) and -100 <= value <= 100, "logit_bias", value, "-100 to 100")
    return {token: float(value) for token, value in values.items()} or None


def read_callables(name: str, values: Seq[Any] | None) -> tuple[Any, ...] | None:
    if values is None:
        return None
    meant = "a list of callables"
    require(isinstance(values, Collection) and not isinstance(values, (str, bytes, Mapping)), name, values, meant)
    for value in values:
        require(callable(value), name, value, meant)
    return tuple(values) or None


Made = TypeVar("Made")
# Values that change nothing (None: any), and why others are refused.
Ported = Mapping[str, tuple[tuple[Any, ...] | None, str]]
PORTED: Ported = {
    "spaces_between_special_tokens": (None, ""),
    "skip_clone": (None, ""),
    "skip_reading_prefix_cache": (None, ""),
    "flat_logprobs": ((False,), "logprobs are a dict per position"),
    "extra_args": ((None, {}), "there are no plugins that read it"),
    "stream_interval": ((None, 1), "each output has what one step made"),
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
        raise InvalidRequest(f"{name}={quote(value)} is not supported: {why}")


def take_ported(ported: Ported) -> Callable[[type[Made]], type[Made]]:
    """Let params be constructed with vLLM's other values; none is kept."""

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
