"""What a user asks for and what comes back. Plain data: no torch, no numpy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import wraps
from typing import Any, ClassVar, NamedTuple, TypeVar

from penstock.errors import InvalidRequest, shown

MAX_SIBLINGS = 256
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_BEAMS = 32
MAX_STRUCTURE_BYTES = 1 << 19
MAX_DRY_LENGTH = 256           # repeated tokens; longer repetitions count as this long
MAX_LOOKBACK = 1 << 15         # tokens in which repetitions are looked for
MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 40
_FINITE = sys.float_info.max
Made = TypeVar("Made")
SAMPLER_RANGES = {
    "dry_multiplier": (0, 1e6, "0 (off) to 1e6"), "dry_base": (1, 1e6, "1 to 1e6"),
    "xtc_probability": (0, 1, "0 (off) to 1"), "xtc_threshold": (0, 1, "0 to 1; over 0.5 it is off"),
    "top_n_sigma": (-_FINITE, _FINITE, "a number; 0 or less is off"), "dynatemp_range": (0, 1e6, "0 (off) to 1e6"),
    "dynatemp_exponent": (0, 1e6, "0 to 1e6"), "mirostat_tau": (0, 1e6, "0 to 1e6"),
    "mirostat_eta": (0, 1, "0 to 1"),
}
# Values of vLLM's that ask for nothing here, None for any; and why others are refused.
Ported = Mapping[str, tuple[tuple[Any, ...] | None, str]]
PORTED: Ported = {
    "spaces_between_special_tokens": (None, ""), "skip_clone": (None, ""), "skip_reading_prefix_cache": (None, ""),
    "flat_logprobs": ((False,), "log probabilities are a dict per position"),
    "extra_args": ((None, {}), "there are no plugins that read it"),
    "stream_interval": ((None, 1), "each output has what one step made"),
    "logprob_token_ids": ((None, []), "give logprobs, the number of the likeliest tokens"),
    "repetition_detection": ((None,), "give dry_multiplier or repetition_penalty against repetitions"),
    "routed_experts_prompt_start": ((0,), "the choice of experts is not reported"),
    "trace_decode_token_ids": ((None, []), "answers are sampled"),
    "use_beam_search": ((False,), "call LLM.beam_search"), "early_stopping": ((False,), "call LLM.beam_search"),
    "length_penalty": ((1.0,), "call LLM.beam_search"),
}
PORTED_STRUCTURES: Ported = {
    "backend": (None, ""), "disable_fallback": (None, ""),
    "disable_additional_properties": ((False, None), "write additionalProperties=false into the schema"),
    "whitespace_pattern": ((None,), "disable_any_whitespace=True leaves whitespace out"),
}
PORTED_BEAMS: Ported = {"include_stop_str_in_output": (None, "")}
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name}={shown(value)} is out of range: it must be {limit}")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max      # neither NaN nor infinite, nor a whole number past all floats


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_ported(ported: Ported, name: str, value: Any) -> None:
    taken, why = ported[name]
    if taken is not None and value not in taken:
        raise InvalidRequest(f"{name}={shown(value)} is not supported: {why}")


def _taking(ported: Ported) -> Callable[[type[Made]], type[Made]]:
    """Let params be made with vLLM's values, too; none is kept."""

    def take(params: type[Made]) -> type[Made]:
        make = params.__init__

        @wraps(make)
        def init(self: Made, *args: Any, **values: Any) -> None:
            for name in ported.keys() & values.keys():
                _check_ported(ported, name, values.pop(name))
            make(self, *args, **values)

        params.__init__ = init              # type: ignore[assignment, method-assign]
        return params

    return take


def _ids(name: str, values: Seq[int] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    meant = "a list of token ids, each 0 or more"
    _require(isinstance(values, Collection) and not isinstance(values, (str, bytes)), name, values, meant)
    for value in values:
        _require(_is_count(value) and value >= 0, name, value, meant)
    return tuple(values)


def _strings(name: str, values: str | Seq[str] | None) -> tuple[str, ...]:
    if values is None:
        return ()
    meant = "a non-empty string or a list of them"
    _require(isinstance(values, Collection) and not isinstance(values, (bytes, Mapping)), name, values, meant)
    strings = (values,) if isinstance(values, str) else tuple(values)
    for value in strings:
        _require(isinstance(value, str) and value != "", name, value, meant)
    return strings


def _biases(values: Mapping[int, float] | None) -> dict[int, float] | None:
    if values is None:
        return None
    _require(isinstance(values, Mapping), "logit_bias", values, "a map from token id to bias")
    for token, value in values.items():
        _require(_is_count(token) and token >= 0, "logit_bias", token, "a map from token id to bias")
        _require(_is_number(value) and -100 <= value <= 100, "logit_bias", value, "-100 to 100")
    return {token: float(value) for token, value in values.items()} or None


def _callables(name: str, values: Seq[Any] | None) -> tuple[Any, ...] | None:
    if values is None:
        return None
    meant = "a list of callables"
    _require(isinstance(values, Collection) and not isinstance(values, (str, bytes, Mapping)), name, values, meant)
    for value in values:
        _require(callable(value), name, value, meant)
    return tuple(values) or None


@_taking(PORTED_STRUCTURES)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must match, exactly one of six; names follow vLLM's. Afterwards `json` and `structural_tag` are
    JSON text."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Seq[str] | None = None
    grammar: str | None = None                 # Lark, or GBNF, which has `::=`
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None      # free text, and what comes between tags in it
    disable_any_whitespace: bool = False       # JSON without any between its tokens
    strict: bool = True                        # refuse what of a schema cannot be enforced; False: relax and name it

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise InvalidRequest(f"structured_outputs has {shown(given)}: give exactly one of {', '.join(STRUCTURES)}")
        _require(isinstance(self.strict, bool), "strict", self.strict, "True or False")
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, bool), name, value, "True or False")
            object.__setattr__(self, name, bool(value))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _schema_text(self.structural_tag, "structural_tag"))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str) and value != "", name, value, "a non-empty string")
        if self.choice is not None:
            _require(not isinstance(self.choice, str), "choice", self.choice, "a list of strings")
            object.__setattr__(self, "choice", tuple(dict.fromkeys(_strings("choice", self.choice))))
            _require(bool(self.choice), "choice", self.choice, "a list of at least one string")
        size = len(self.source.encode(errors="surrogatepass"))
        if size > MAX_STRUCTURE_BYTES:
            raise InvalidRequest(f"structured_outputs.{given[0]} has {size} bytes: at most {MAX_STRUCTURE_BYTES} are "
                                 "compiled; shorten it")
        try:
            self.source.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"structured_outputs.{given[0]} has half a character (a lone surrogate) at position "
                                 f"{error.start}: remove it") from None

    @property
    def source(self) -> str:
        """All that was written to describe it."""
        texts = (self.json, self.regex, self.grammar, self.structural_tag, "\n".join(self.choice or ()))
        return next((str(text) for text in texts if text), "")


def _schema_text(schema: str | Mapping[str, Any], name: str = "json") -> str:
    meant = f"a {'JSON schema' if name == 'json' else 'structural tag'}, as a dict or as JSON text"
    try:
        if isinstance(schema, str):
            if len(schema) > MAX_STRUCTURE_BYTES:
                raise ValueError(f"it has {len(schema)} characters: at most {MAX_STRUCTURE_BYTES} are compiled")
            if not isinstance(json.loads(schema), (dict, bool)):
                raise ValueError("it is no object")
            return schema
        _require(isinstance(schema, Mapping), name, schema, meant)
        return json.dumps(schema, default=dict)
    except RecursionError:
        raise InvalidRequest(f"structured_outputs.{name} is nested too deeply: flatten it with $ref") from None
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"structured_outputs.{name}={shown(schema)} is not understood ({error}): give {meant}"
                             ) from None


class RequestOutputKind(Enum):
    """What an engine's outputs hold of an answer under way: all of it so far, what is new, or nothing until its end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@_taking(PORTED)
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
    thinking_token_budget: int | None = None   # tokens of reasoning before its end is written; -1 or None: any number
    guided_decoding: StructuredOutputsParams | None = None    # vLLM's older name of the same; None afterwards
    logits_processors: Seq[Any] | None = None      # callables, see sampling/processors.py; in this process only
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE     # of LLMEngine and AsyncLLMEngine
    # From here on names, defaults and meanings are llama-server's.
    repeat_last_n: int | None = None           # tokens that penalties look back on; None or -1: all, 0: no penalties
    dry_multiplier: float = 0.0                # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1               # tokens looked back on; -1: all (at most MAX_LOOKBACK), 0: off
    dry_sequence_breakers: Seq[str] | None = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0               # 0: off
    xtc_threshold: float = 0.1                 # over 0.5: off
    top_n_sigma: float = -1.0                  # off unless over 0
    dynatemp_range: float = 0.0                # 0: off
    dynatemp_exponent: float = 1.0
    mirostat: int = 0                          # 0: off; version 1 or 2
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    def __post_init__(self) -> None:
        self._check_values()
        self._check_together()

    def __setattr__(self, name: str, value: Any) -> None:
        """Check what is assigned to a name that has a value already; one that is refused leaves the old."""
        values = self.__dict__
        if name in PORTED:
            _check_ported(PORTED, name, value)
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
            _require(self.n <= self.best_of, "best_of", self.best_of, f"n={self.n} to {MAX_SIBLINGS}")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens,
                     f"at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids with detokenize=False")

    def _check_values(self) -> None:
        """Refuse a value that is out of range by itself, and bring each into its one form."""
        _require(_is_count(self.n) and 1 <= self.n <= MAX_SIBLINGS, "n", self.n, f"1 to {MAX_SIBLINGS}")
        if self.best_of is not None:
            _require(_is_count(self.best_of) and 1 <= self.best_of <= MAX_SIBLINGS, "best_of", self.best_of,
                     f"n={self.n} to {MAX_SIBLINGS}")
        _require(_is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _require(_is_count(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "0 or -1 (off) or 1 or more")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "over 0 and at most 1")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        _require(_is_number(self.typical_p) and 0 < self.typical_p <= 1, "typical_p", self.typical_p,
                 "over 0 and at most 1")
        _require(_is_number(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty",
                 self.repetition_penalty, "over 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, value, "-2 to 2")
        if self.seed is not None:
            _require(_is_count(self.seed) and -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        if self.max_tokens is not None:
            _require(_is_count(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens,
                     "1 or more, or None for as many as fit")
        _require(_is_count(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require(_is_count(value) and 0 <= value <= MAX_LOGPROBS, name, value, f"0 to {MAX_LOGPROBS}, or None")
        if self.truncate_prompt_tokens is not None:
            _require(_is_count(self.truncate_prompt_tokens) and self.truncate_prompt_tokens >= 1,
                     "truncate_prompt_tokens", self.truncate_prompt_tokens, "1 or more, or None to refuse")
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        if self.guided_decoding is not None:
            _require(isinstance(self.guided_decoding, StructuredOutputsParams), "guided_decoding",
                     self.guided_decoding, "GuidedDecodingParams or None")
            _require(self.structured_outputs is None, "guided_decoding", self.guided_decoding,
                     "None beside structured_outputs, its newer name")
            object.__setattr__(self, "structured_outputs", self.guided_decoding)
            object.__setattr__(self, "guided_decoding", None)
        _require(self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputsParams),
                 "structured_outputs", self.structured_outputs, "StructuredOutputsParams or None")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        _require(len(self.stop or ()) <= MAX_STOP_STRINGS, "stop", len(self.stop or ()),
                 f"at most {MAX_STOP_STRINGS} strings")
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids) or ())
        allowed = _ids("allowed_token_ids", self.allowed_token_ids)
        if allowed is not None:
            _require(len(allowed) > 0, "allowed_token_ids", [], "None or at least one token id")
        object.__setattr__(self, "allowed_token_ids", allowed)
        budget = self.thinking_token_budget
        _require(budget is None or _is_count(budget) and budget >= -1, "thinking_token_budget", budget,
                 "0 or more, or -1 or None for any number")
        object.__setattr__(self, "thinking_token_budget", None if budget == -1 else budget)
        object.__setattr__(self, "logits_processors", _callables("logits_processors", self.logits_processors))
        _require(isinstance(self.output_kind, RequestOutputKind), "output_kind", self.output_kind,
                 "a RequestOutputKind")
        self._check_samplers()

    def _check_samplers(self) -> None:
        for name, (least, most, meant) in SAMPLER_RANGES.items():
            value = getattr(self, name)
            _require(_is_number(value) and least <= value <= most, name, value, meant)
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            value = getattr(self, name)
            _require(_is_count(value) and value >= -1 or value is None and name == "repeat_last_n", name, value,
                     "-1 (all) or 0 (off) or 1 or more")
        allowed = self.dry_allowed_length
        _require(_is_count(allowed) and 0 <= allowed <= MAX_DRY_LENGTH, "dry_allowed_length", allowed,
                 f"0 to {MAX_DRY_LENGTH}")
        _require(_is_count(self.mirostat) and 0 <= self.mirostat <= 2, "mirostat", self.mirostat, "0 (off), 1 or 2")
        breakers = _strings("dry_sequence_breakers", self.dry_sequence_breakers)
        _require(len(breakers) <= MAX_BREAKERS, "dry_sequence_breakers", len(breakers),
                 f"at most {MAX_BREAKERS} strings")
        for text in breakers:
            _require(len(text) <= MAX_BREAKER_CHARS, "dry_sequence_breakers", text,
                     f"strings of at most {MAX_BREAKER_CHARS} characters")
        object.__setattr__(self, "dry_sequence_breakers", breakers)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Make them from values of which None stands for "not given"; ids in `logit_bias` may be strings."""
        if isinstance(bias := values.get("logit_bias"), Mapping):
            values["logit_bias"] = {int(id) if isinstance(id, str) and id.isdigit() else id: value
                                    for id, value in bias.items()}
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
        object.__setattr__(kept, "logit_bias", _biases(self.logit_bias))
        kept._check_together()
        return kept


@_taking(PORTED_BEAMS)
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Keep the `beam_width` likeliest continuations, ranked by summed log probability over length**length_penalty."""

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    ignore_eos: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        _require(_is_count(self.beam_width) and 1 <= self.beam_width <= MAX_BEAMS, "beam_width", self.beam_width,
                 f"1 to {MAX_BEAMS}")
        _require(_is_count(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(_is_number(self.length_penalty) and -10 <= self.length_penalty <= 10, "length_penalty",
                 self.length_penalty, "-10 to 10")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        _require(self.temperature == 0, "temperature", self.temperature, "0: beams rank the raw distribution")


@dataclass(frozen=True)
class ReasoningBlock:
    """The markers around an answer's reasoning. `is_open`: the prompt has opened it; else the answer may."""

    begin: str
    end: str
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way through the engine; everything here is decided before it enters the queue."""

    id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    beam: BeamSearchParams | None = None
    pool: bool = False                 # wants one embedding of the whole prompt instead of tokens
    max_tokens: int = 16               # sampling.max_tokens, resolved against the context length
    seed: int = 0                      # sampling.seed, or one drawn at admission
    eos_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()   # sampling.bad_words as token ids
    dry_breakers: bytes = b""          # a bit for each token id that ends repetitions, the lowest first
    grammar: GrammarFacts | None = None           # of sampling.structured_outputs, where it was tried beforehand
    reasoning: ReasoningBlock | None = None       # what may stand before the answer, where that matters to sampling
    priority: int = 0                  # lower runs first
    salt: str = ""                     # part of the prefix cache's root: requests share prefixes only within it
    num_public: int = 0                # tokens at the beginning that are shared whatever the salt
    tenant: str = ""                   # among several, each is entitled to an equal share of the cache

    @property
    def num_siblings(self) -> int:
        return 1 if self.beam or self.pool else self.sampling.num_siblings

    @property
    def is_guided(self) -> bool:
        """Whether what its tokens spell matters to which may come next."""
        return self.sampling.structured_outputs is not None or self.reasoning is not None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends the answer."""
        ignore_eos = self.beam.ignore_eos if self.beam else self.sampling.ignore_eos
        eos = () if ignore_eos else self.eos_token_ids
        return eos + tuple(self.sampling.stop_token_ids or ())


class Logprob(NamedTuple):
    """Log probability of one token under the model's raw distribution, and its rank there (1 = likeliest). There may be
    a million of them: of tuples that hold no others the collector of garbage looks at each only once."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]     # one position: the chosen (or prompt) token first, then the likeliest ones


@dataclass(slots=True)
class Delta:
    """What one step added to one sibling of a request. Nobody changes it once it is made."""

    request_id: str
    sibling: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    embedding: tuple[float, ...] | None = None
    finish_reason: str | None = None   # stop, length, abort, error
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    cumulative_logprob: float | None = None   # beams: set with the finish
    error: str | None = None
    unfit: bool = False                # the error is the request's own fault
    complete: bool = False             # the last token is text: with it the answer is all that its grammar allows
    forced_closing: bool = False       # a token was chosen to end the answer validly within its budget
    mu: float | None = None            # mirostat's after the last token, with which another engine goes on


@dataclass(frozen=True)
class GrammarFacts:
    """Results of trying a grammar."""

    closing: tuple[int, ...] | None            # a short whole answer
    searchable: bool                           # a way to an end can be looked for within a step
    min_tokens: int | None = None              # no answer has fewer; None: not looked for
    shortest: tuple[int, ...] | None = None    # an answer of `min_tokens`, if one was found
    relaxed: tuple[str, ...] = ()              # keywords of a schema that are not enforced, each with its place

    def decides(self, max_tokens: int) -> bool:
        """It is known whether an answer of `max_tokens` can match."""
        return self.min_tokens is not None or self.closing is not None and len(self.closing) <= max_tokens

    def within(self, max_tokens: int) -> tuple[int, ...] | None:
        """A whole answer; where `closing` is too long for the budget, the shortest if that is known."""
        if self.closing is not None and len(self.closing) <= max_tokens:
            return self.closing
        return self.shortest or self.closing

    def require_fit(self, max_tokens: int) -> None:
        """Refuse a budget that no answer fits into; only where that is certain."""
        path = self.within(max_tokens)
        if (path is None or len(path) > max_tokens) and max_tokens < (self.min_tokens or 0):
            raise InvalidRequest(f"max_tokens={max_tokens} is too small for any answer that matches: at least "
                                 f"{self.min_tokens} tokens are needed")


@dataclass
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None   # stop, length, error
    stop_reason: int | str | None = None   # the stop string or token id; None after an end-of-sequence token
    forced_closing: bool = False       # its budget ran short, and tokens were chosen that end it validly
    relaxed: tuple[str, ...] = ()      # keywords of its schema that were not enforced, each with its place

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When a request came, began and ended, in seconds since the epoch; names are vLLM's."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def first_token_latency(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt with its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None           # why an answer has finish_reason="error"
    metrics: RequestMetrics | None = None
    lora_request: ClassVar[None] = None               # vLLM's: there are no adapters, and no encoder beside the decoder
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None


@dataclass(frozen=True)
class StreamDelta:
    """What a stream yields: the new text and tokens of one answer."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None    # with the first tokens, where asked for
    forced_closing: bool = False       # from here on; see CompletionOutput
    relaxed: tuple[str, ...] = ()      # with the last of an answer; see CompletionOutput


@dataclass
class BeamSearchSequence:
    """One beam: prompt and continuation together, as in vLLM."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None


@dataclass
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0
