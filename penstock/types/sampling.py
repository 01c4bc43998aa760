"""How tokens are chosen."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from penstock.errors import InvalidRequest
from penstock.types.ported import PORTED, check_ported, take_ported
from penstock.types.structure import StructuredOutputsParams
from penstock.types.values import is_count, is_number, read_biases, read_callables, read_ids, read_strings, require

MAX_SIBLINGS = 256
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_DRY_LENGTH = 256  # repeated tokens; longer repetitions count as this long
MAX_LOOKBACK = 1 << 15  # tokens in which repetitions are looked for
MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 40
_FINITE = sys.float_info.max
SAMPLER_RANGES = {
    "dry_multiplier": (0, 1e6, "0 (off) to 1e6"),
    "dry_base": (1, 1e6, "1 to 1e6"),
    "xtc_probability": (0, 1, "0 (off) to 1"),
    "xtc_threshold": (0, 1, "0 to 1; over 0.5 it is off"),
    "top_n_sigma": (-_FINITE, _FINITE, "a number; 0 or less is off"),
    "dynatemp_range": (0, 1e6, "0 (off) to 1e6"),
    "dynatemp_exponent": (0, 1e6, "0 to 1e6"),
    "mirostat_tau": (0, 1e6, "0 to 1e6"),
    "mirostat_eta": (0, 1, "0 to 1"),
}


class RequestOutputKind(Enum):
    """The part of an unfinished answer that an engine's outputs hold: all so far, only what is new, or nothing."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@take_ported(PORTED)
@dataclass(kw_only=True)
class SamplingParams:
    """How tokens are chosen. Names and defaults follow vLLM's. Values may be changed: each is checked when it is
    assigned, and all of them together when they are used. A request keeps a copy of its own."""

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
    detokenize: bool = True
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # tokens of reasoning before its end is written; -1 or None: any number
    guided_decoding: StructuredOutputsParams | None = None  # vLLM's older name of the same; None afterwards
    logits_processors: Seq[Any] | None = None  # callables, see sampling/processors.py; in this process only
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of LLMEngine and AsyncLLMEngine
    # From here on names, defaults and meanings are llama-server's.
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
        """Check what is assigned to a name that has a value already; one that is refused leaves the old."""
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
        """Refuse values that contradict one another."""
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
        """Refuse a value that is out of range by itself, and bring each into its one form."""
        require(is_count(self.n) and 1 <= self.n <= MAX_SIBLINGS, "n", self.n, f"1 to {MAX_SIBLINGS}")
        if self.best_of is not None:
            require(
                is_count(self.best_of) and 1 <= self.best_of <= MAX_SIBLINGS,
                "best_of",
                self.best_of,
                f"n={self.n} to {MAX_SIBLINGS}",
            )
        require(is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        require(is_count(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "0 or -1 (off) or 1 or more")
        require(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "over 0 and at most 1")
        require(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        require(
            is_number(self.typical_p) and 0 < self.typical_p <= 1, "typical_p", self.typical_p, "over 0 and at most 1"
        )
        require(
            is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "over 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(is_number(value) and -2 <= value <= 2, name, value, "-2 to 2")
        if self.seed is not None:
            require(is_count(self.seed) and -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        if self.max_tokens is not None:
            require(
                is_count(self.max_tokens) and self.max_tokens >= 1,
                "max_tokens",
                self.max_tokens,
                "1 or more, or None for as many as fit",
            )
        require(is_count(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                require(is_count(value) and 0 <= value <= MAX_LOGPROBS, name, value, f"0 to {MAX_LOGPROBS}, or None")
        if self.truncate_prompt_tokens is not None:
            require(
                is_count(self.truncate_prompt_tokens) and self.truncate_prompt_tokens >= 1,
                "truncate_prompt_tokens",
                self.truncate_prompt_tokens,
                "1 or more, or None to refuse",
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        if self.guided_decoding is not None:
            require(
                isinstance(self.guided_decoding, StructuredOutputsParams),
                "guided_decoding",
                self.guided_decoding,
                "GuidedDecodingParams or None",
            )
            require(
                self.structured_outputs is None,
                "guided_decoding",
                self.guided_decoding,
                "None beside structured_outputs, its newer name",
            )
            object.__setattr__(self, "structured_outputs", self.guided_decoding)
            object.__setattr__(self, "guided_decoding", None)
        require(
            self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputsParams),
            "structured_outputs",
            self.structured_outputs,
            "StructuredOutputsParams or None",
        )
        object.__setattr__(self, "logit_bias", read_biases(self.logit_bias))
        object.__setattr__(self, "bad_words", read_strings("bad_words", self.bad_words))
        object.__setattr__(self, "stop", read_strings("stop", self.stop))
        require(
            len(self.stop or ()) <= MAX_STOP_STRINGS,
            "stop",
            len(self.stop or ()),
            f"at most {MAX_STOP_STRINGS} strings",
        )
        object.__setattr__(self, "stop_token_ids", read_ids("stop_token_ids", self.stop_token_ids) or ())
        allowed = read_ids("allowed_token_ids", self.allowed_token_ids)
        if allowed is not None:
            require(len(allowed) > 0, "allowed_token_ids", [], "None or at least one token id")
        object.__setattr__(self, "allowed_token_ids", allowed)
        budget = self.thinking_token_budget
        require(
            budget is None or is_count(budget) and budget >= -1,
            "thinking_token_budget",
            budget,
            "0 or more, or -1 or None for any number",
        )
        object.__setattr__(self, "thinking_token_budget", None if budget == -1 else budget)
        object.__setattr__(self, "logits_processors", read_callables("logits_processors", self.logits_processors))
        require(isinstance(self.output_kind, RequestOutputKind), "output_kind", self.output_kind, "a RequestOutputKind")
        self._check_samplers()

    def _check_samplers(self) -> None:
        for name, (least, most, meant) in SAMPLER_RANGES.items():
            value = getattr(self, name)
            require(is_number(value) and least <= value <= most, name, value, meant)
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            value = getattr(self, name)
            require(
                is_count(value) and value >= -1 or value is None and name == "repeat_last_n",
                name,
                value,
                "-1 (all) or 0 (off) or 1 or more",
            )
        allowed = self.dry_allowed_length
        require(
            is_count(allowed) and 0 <= allowed <= MAX_DRY_LENGTH,
            "dry_allowed_length",
            allowed,
            f"0 to {MAX_DRY_LENGTH}",
        )
        require(is_count(self.mirostat) and 0 <= self.mirostat <= 2, "mirostat", self.mirostat, "0 (off), 1 or 2")
        breakers = read_strings("dry_sequence_breakers", self.dry_sequence_breakers)
        require(
            len(breakers) <= MAX_BREAKERS, "dry_sequence_breakers", len(breakers), f"at most {MAX_BREAKERS} strings"
        )
        for text in breakers:
            require(
                len(text) <= MAX_BREAKER_CHARS,
                "dry_sequence_breakers",
                text,
                f"strings of at most {MAX_BREAKER_CHARS} characters",
            )
        object.__setattr__(self, "dry_sequence_breakers", breakers)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Make them from values of which None stands for "not given"; ids in `logit_bias` may be strings."""
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

    def settled(self) -> SamplingParams:
        """A copy that nobody else changes, checked as a whole."""
        kept = copy(self)
        object.__setattr__(kept, "logit_bias", read_biases(self.logit_bias))
        kept._check_together()
        return kept
