"""Sampling parameters."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from penstock.errors import InvalidRequest
from penstock.types.speculation import SpeculationParams, read_speculation
from penstock.types.structure import StructuredOutputsParams
from penstock.types.values import (
    PORTED,
    check_ported,
    is_count,
    is_number,
    read_biases,
    read_callables,
    read_ids,
    read_strings,
    require,
    take_ported,
)

MAX_SIBLINGS = 256
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_DRY_LENGTH = 256  # longer repetitions count as this long
MAX_LOOKBACK = 1 << 15  # tokens searched for repetitions
MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 40
MAX_SESSION_CHARS = 128
MAX_SESSION_S = 86400
MAX_FLOAT = sys.float_info.max
TINY = math.ulp(0.0)  # the smallest float above 0

# name → least, most, both in words
NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, MAX_FLOAT, "0 or more"),
    "top_p": (TINY, 1, "over 0 and at most 1"),
    "min_p": (0, 1, "0 to 1"),
    "typical_p": (TINY, 1, "over 0 and at most 1"),
    "repetition_penalty": (TINY, MAX_FLOAT, "over 0"),
    "presence_penalty": (-2, 2, "-2 to 2"),
    "frequency_penalty": (-2, 2, "-2 to 2"),
    "dry_multiplier": (0, 1e6, "0 (off) to 1e6"),
    "dry_base": (1, 1e6, "1 to 1e6"),
    "xtc_probability": (0, 1, "0 (off) to 1"),
    "xtc_threshold": (0, 1, "0 to 1; over 0.5 it is off"),
    "top_n_sigma": (-MAX_FLOAT, MAX_FLOAT, "a number; 0 or less is off"),
    "dynatemp_range": (0, 1e6, "0 (off) to 1e6"),
    "dynatemp_exponent": (0, 1e6, "0 to 1e6"),
    "mirostat_tau": (0, 1e6, "0 to 1e6"),
    "mirostat_eta": (0, 1, "0 to 1"),
    "session_ttl": (TINY, MAX_SESSION_S, f"over 0 and at most {MAX_SESSION_S} seconds"),
}
COUNTS: dict[str, tuple[float, float, str]] = {
    "n": (1, MAX_SIBLINGS, f"1 to {MAX_SIBLINGS}"),
    "best_of": (1, MAX_SIBLINGS, f"n={{n}} to {MAX_SIBLINGS}"),
    "top_k": (-1, math.inf, "0 or -1 (off) or 1 or more"),
    "seed": (-(2**63), 2**64 - 1, "a 64-bit integer"),
    "max_tokens": (1, math.inf, "1 or more, or None for as many as fit"),
    "min_tokens": (0, math.inf, "0 or more"),
    "logprobs": (0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None"),
    "truncate_prompt_tokens": (1, math.inf, "1 or more, or None to refuse"),
    "thinking_token_budget": (-1, math.inf, "0 or more, or -1 or None for any number"),
    "repeat_last_n": (-1, math.inf, "-1 (all) or 0 (off) or 1 or more"),
    "dry_penalty_last_n": (-1, math.inf, "-1 (all) or 0 (off) or 1 or more"),
    "dry_allowed_length": (0, MAX_DRY_LENGTH, f"0 to {MAX_DRY_LENGTH}"),
    "mirostat": (0, 2, "0 (off), 1 or 2"),
    "cache_priority": (0, 100, "0 to 100"),
}
LEFT, RIGHT = SIDES = ("left", "right")
OPTIONAL = frozenset("best_of logprobs max_tokens prompt_logprobs repeat_last_n seed thinking_token_budget".split()) | {
    "truncate_prompt_tokens"
}


class RequestOutputKind(Enum):
    """The content of an unfinished output: all so far, only what is new, or nothing."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@take_ported(PORTED)
@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters with vLLM's names and defaults. Values may be changed: each is checked on assignment, and
    all together on use. A request keeps its own copy."""

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: str | Seq[str] | None = None
    allowed_token_ids: Seq[int] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Seq[str] | None = None
    stop_token_ids: Seq[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Seq[int] | None = None  # report these instead of the likeliest tokens
    detokenize: bool = True
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = LEFT  # of a prompt that is cut: the left loses its beginning, the right its end
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # tokens of reasoning before it is closed; -1 or None: unlimited
    guided_decoding: StructuredOutputsParams | None = None  # vLLM's older name of structured_outputs; None afterwards
    logits_processors: Seq[Any] | None = None  # callables, see sampling/processors.py; in this process only
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of LLMEngine and AsyncLLMEngine
    speculation: SpeculationParams | bool | None = (
        None  # a dict limits drafts, False is none, None as the engine is set
    )
    session: str | None = None  # a name: prefix and answer stay in the cache, evicted after all else
    session_ttl: float = 600.0  # seconds after the answer until that ends
    cache_priority: int = 0  # prefixes of a lower one are evicted first
    # From here on: llama-server's names, defaults and meanings.
    repeat_last_n: int | None = None  # tokens that penalties look back on; None or -1: all, 0: no penalties
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # tokens looked back on; -1: all (at most MAX_LOOKBACK), 0: off
    dry_sequence_breakers: Seq[str] | None = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1  # over 0.5: off
    top_n_sigma: float = -1.0  # off unless over 0
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 0: off; version 1 or 2
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    def __post_init__(self) -> None:
        self._check_values()
        self._check_together()

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a value assigned to a name; a refused one leaves the old."""
        values = self.__dict__
        if name in PORTED:
            check_ported(PORTED, name, value)
            return
        if name not in values:
            if name not in self.__dataclass_fields__:
                raise AttributeError(f"SamplingParams has no {name!r}: its values are {', '.join(values)}")
            values[name] = value
            return
        before = values.copy()
        object.__setattr__(self, "structured_outputs" if name == "guided_decoding" else name, value)
        try:
            self._check_values()
        except InvalidRequest:
            values.update(before)
            raise

    def _check_together(self) -> None:
        """Refuse values that contradict each other."""
        if self.best_of is not None:
            require(self.n <= self.best_of, "best_of", self.best_of, f"n={self.n} to {MAX_SIBLINGS}")
        if self.max_tokens is not None:
            require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens={self.max_tokens}",
            )
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids with detokenize=False")

    def _check_values(self) -> None:
        """Refuse a value that is out of range by itself, and normalise each."""
        for ranges, is_kind in ((COUNTS, is_count), (NUMBERS, is_number)):
            for name, (least, most, meant) in ranges.items():
                value = getattr(self, name)
                if value is not None or name not in OPTIONAL:
                    require(is_kind(value) and least <= value <= most, name, value, meant.format(n=self.n))
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        require(isinstance(self.output_kind, RequestOutputKind), "output_kind", self.output_kind, "a RequestOutputKind")
        meant = f"a name of 1 to {MAX_SESSION_CHARS} characters, or None"
        is_name = isinstance(self.session, str) and 0 < len(self.session) <= MAX_SESSION_CHARS
        require(self.session is None or is_name, "session", self.session, meant)
        require(self.truncation_side in SIDES, "truncation_side", self.truncation_side, " or ".join(SIDES))
        self._check_structure()
        self._check_lists()
        object.__setattr__(self, "speculation", read_speculation(self.speculation))
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)

    def _check_structure(self) -> None:
        for name in ("guided_decoding", "structured_outputs"):
            value = getattr(self, name)
            meant = "GuidedDecodingParams or None" if name == "guided_decoding" else "StructuredOutputsParams or None"
            require(value is None or isinstance(value, StructuredOutputsParams), name, value, meant)
        if self.guided_decoding is not None:
            require(
                self.structured_outputs is None,
                "guided_decoding",
                self.guided_decoding,
                "None beside structured_outputs, its newer name",
            )
            object.__setattr__(self, "structured_outputs", self.guided_decoding)
            object.__setattr__(self, "guided_decoding", None)

    def _check_lists(self) -> None:
        object.__setattr__(self, "logit_bias", read_biases(self.logit_bias))
        object.__setattr__(self, "stop_token_ids", read_ids("stop_token_ids", self.stop_token_ids) or ())
        object.__setattr__(self, "logits_processors", read_callables("logits_processors", self.logits_processors))
        allowed = read_ids("allowed_token_ids", self.allowed_token_ids)
        require(allowed is None or len(allowed) > 0, "allowed_token_ids", [], "None or at least one token id")
        object.__setattr__(self, "allowed_token_ids", allowed)
        listed = read_ids("logprob_token_ids", self.logprob_token_ids)
        fits = listed is None or len(listed) <= MAX_LOGPROBS
        require(fits, "logprob_token_ids", listed, f"None or at most {MAX_LOGPROBS} token ids")
        object.__setattr__(self, "logprob_token_ids", listed or None)
        limits = {"bad_words": sys.maxsize, "stop": MAX_STOP_STRINGS, "dry_sequence_breakers": MAX_BREAKERS}
        for name, most in limits.items():
            strings = read_strings(name, getattr(self, name))
            require(len(strings) <= most, name, len(strings), f"at most {most} strings")
            object.__setattr__(self, name, strings)
        for text in self.dry_sequence_breakers or ():
            require(
                len(text) <= MAX_BREAKER_CHARS,
                "dry_sequence_breakers",
                text,
                f"strings of at most {MAX_BREAKER_CHARS} characters",
            )

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Build from values of which None means "not set"; ids in `logit_bias` may be strings."""
        if isinstance(bias := values.get("logit_bias"), Mapping):
            values["logit_bias"] = {
                int(id) if isinstance(id, str) and id.isdigit() else id: value for id, value in bias.items()
            }
        keeps_none = {"max_tokens"}
        return cls(**{name: value for name, value in values.items() if value is not None or name in keeps_none})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def num_siblings(self) -> int:
        return self.best_of or self.n

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def has_xtc(self) -> bool:
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    def clone(self, **changes: Any) -> SamplingParams:
        return replace(self, **changes)

    def copy_checked(self) -> SamplingParams:
        """Return a private copy, checked as a whole."""
        kept = copy(self)
        object.__setattr__(kept, "logit_bias", read_biases(self.logit_bias))
        kept._check_together()
        return kept
