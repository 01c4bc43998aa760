"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.types.sampling import SamplingParams
from penstock.types.structure import GrammarFacts
from penstock.types.values import PORTED_BEAMS, is_count, is_number, require, take_ported

MAX_BEAMS = 32


@take_ported(PORTED_BEAMS)
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Keep the `beam_width` likeliest continuations, ranked by summed log probability over length**length_penalty."""

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    ignore_eos: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        require(
            is_count(self.beam_width) and 1 <= self.beam_width <= MAX_BEAMS,
            "beam_width",
            self.beam_width,
            f"1 to {MAX_BEAMS}",
        )
        require(is_count(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        require(
            is_number(self.length_penalty) and -10 <= self.length_penalty <= 10,
            "length_penalty",
            self.length_penalty,
            "-10 to 10",
        )
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        require(self.temperature == 0, "temperature", self.temperature, "0: beams rank the raw distribution")


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


@dataclass(frozen=True)
class LoraUse:
    """One adapter of a request. Each load of a name gets a number of its own, which is never used again."""

    name: str
    number: int
    scale: float = 1.0


@dataclass(frozen=True)
class ReasoningBlock:
    """The markers around an answer's reasoning. `is_open`: the prompt opened it; else the answer may."""

    begin: str
    end: str
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt; everything here is decided before it is queued."""

    id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    beam: BeamSearchParams | None = None
    pool: bool = False  # embed the whole prompt instead of generating
    max_tokens: int = 16  # sampling.max_tokens, resolved against the context length
    seed: int = 0  # sampling.seed, or one drawn at admission
    eos_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # sampling.bad_words as token ids
    dry_breakers: bytes = b""  # bitmask of token ids that end repetitions, lowest first
    grammar: GrammarFacts | None = None  # of sampling.structured_outputs, if tried earlier
    reasoning: ReasoningBlock | None = None  # reasoning before the answer, if sampling depends on it
    prediction: tuple[int, ...] = ()  # tokens that the client expects in the answer: drafts
    num_truncated_tokens: int = 0  # of the prompt's beginning
    num_dropped_messages: int = 0  # of the conversation's beginning
    loras: tuple[LoraUse, ...] = ()  # summed in this order
    priority: int = 0  # lower runs first
    salt: str = ""  # part of the prefix cache's root: prefixes are shared only within it
    num_public: int = 0  # leading tokens shared across salts
    tenant: str = ""  # tenants get equal shares of the cache
    cache_priority: int = 0  # its prefix is evicted after those of lower priority
    session: str = ""  # whose path is evicted after all others, for `session_s` after the answer
    session_s: float = 0.0
    hand_over: bool = False  # ends with the first token, and its prompt's blocks are in the store: others go on
    blocks_from: str = ""  # HOST:PORT of the server that computed its prompt and has the blocks

    @property
    def num_siblings(self) -> int:
        return 1 if self.beam or self.pool else self.sampling.num_siblings

    @property
    def lora_key(self) -> str:
        """Name the adapters and their scales; empty without any."""
        return "+".join(f"{one.number}*{one.scale!r}" for one in self.loras)

    @property
    def is_guided(self) -> bool:
        """True if a grammar or a reasoning block constrains its tokens."""
        return self.sampling.structured_outputs is not None or self.reasoning is not None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends the answer."""
        ignore_eos = self.beam.ignore_eos if self.beam else self.sampling.ignore_eos
        eos = () if ignore_eos else self.eos_token_ids
        return eos + tuple(self.sampling.stop_token_ids or ())
