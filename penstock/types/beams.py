"""Beam search: what is asked for, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types.ported import PORTED_BEAMS, take_ported
from penstock.types.values import is_count, is_number, require

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
