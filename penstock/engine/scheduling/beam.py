"""Beam search: which continuations live on. Pure bookkeeping over log probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.sequence import Sequence
from penstock.types import BeamSearchParams


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation."""

    tokens: tuple[int, ...]  # without the prompt
    score: float  # summed log probability
    finish_reason: str


@dataclass(frozen=True)
class Choice:
    """A continuation that lives on: `parent` followed by `token`."""

    parent: Sequence
    token: int
    score: float


@dataclass(eq=False)
class BeamGroup:
    """The beams of one request. It advances once every live beam has its candidates."""

    params: BeamSearchParams
    stop_token_ids: frozenset[int]
    live: list[Sequence] = field(default_factory=list)
    finished: list[Hypothesis] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return all(beam.candidates for beam in self.live)

    def advance(self) -> list[Choice]:
        """The continuations to go on with, best first; an empty list ends the search."""
        best = sorted(
            (
                (beam.score + logprob, i, token)
                for i, beam in enumerate(self.live)
                for token, logprob in beam.candidates
            ),
            key=lambda c: (-c[0], c[1], c[2]),
        )
        choices: list[Choice] = []
        for score, i, token in best:
            beam = self.live[i]
            if token in self.stop_token_ids:
                output = tuple(beam.tokens[beam.num_prompt :]) + (token,)
                self.finished.append(Hypothesis(output, score, "stop"))
            elif len(choices) < self.params.beam_width:
                choices.append(Choice(beam, token, score))
            if len(choices) == self.params.beam_width:
                break
        if self.live[0].num_output + 1 >= self.params.max_tokens:
            for choice in choices:
                output = tuple(choice.parent.tokens[choice.parent.num_prompt :]) + (choice.token,)
                self.finished.append(Hypothesis(output, choice.score, "length"))
            return []
        return choices

    def best(self) -> list[Hypothesis]:
        """The finished continuations by score over length**length_penalty, at most beam_width of them."""
        penalty = self.params.length_penalty
        ranked = sorted(self.finished, key=lambda one: float(-one.score / len(one.tokens) ** penalty))
        return ranked[: self.params.beam_width]
