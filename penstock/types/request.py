"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.types.beams import BeamSearchParams
from penstock.types.sampling import SamplingParams
from penstock.types.structure import GrammarFacts


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
    pool: bool = False  # wants one embedding of the whole prompt instead of tokens
    max_tokens: int = 16  # sampling.max_tokens, resolved against the context length
    seed: int = 0  # sampling.seed, or one drawn at admission
    eos_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # sampling.bad_words as token ids
    dry_breakers: bytes = b""  # a bit for each token id that ends repetitions, the lowest first
    grammar: GrammarFacts | None = None  # of sampling.structured_outputs, where it was tried beforehand
    reasoning: ReasoningBlock | None = None  # what may stand before the answer, where that matters to sampling
    priority: int = 0  # lower runs first
    salt: str = ""  # part of the prefix cache's root: requests share prefixes only within it
    num_public: int = 0  # tokens at the beginning that are shared whatever the salt
    tenant: str = ""  # among several, each is entitled to an equal share of the cache

    @property
    def num_siblings(self) -> int:
        return 1 if self.beam or self.pool else self.sampling.num_siblings

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
