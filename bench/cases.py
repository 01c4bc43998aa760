"""What is measured: prompts of random tokens, how many come out, and which figure counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Measure = Literal["prefill", "decode", "total"]
UNITS = {"prefill": "tokens/s", "decode": "tokens/s", "total": "s"}


class WrongLength(Exception):
    """An engine did not answer with as many tokens as it was asked for."""


@dataclass(frozen=True)
class Case:
    """`num_seqs` prompts handed over at once, each `num_shared` common tokens and `num_prompt` of its own."""

    name: str
    num_seqs: int
    num_prompt: int
    num_output: int
    measure: Measure
    num_shared: int = 0

    @property
    def unit(self) -> str:
        return UNITS[self.measure]

    @property
    def num_tokens(self) -> int:
        """Of all sequences together, when they are finished."""
        return self.num_seqs * (self.num_shared + self.num_prompt + self.num_output)

    def prompts(self, seed: str, vocab_size: int) -> list[list[int]]:
        """The same for every engine, never the same twice. The ends of a vocabulary, with its marks, are left out."""
        source = random.Random(f"{seed}/{self.name}")
        low, high = vocab_size // 16, vocab_size - vocab_size // 16
        shared = [source.randrange(low, high) for _ in range(self.num_shared)]
        return [shared + [source.randrange(low, high) for _ in range(self.num_prompt)] for _ in range(self.num_seqs)]

    def value(self, result: dict[str, Any]) -> float:
        """The figure, in `unit`. The first token of an answer belongs to its prompt, so decoding begins after it."""
        if self.measure == "total":
            return float(result["total_s"])
        if self.measure == "prefill":
            return self.num_seqs * (self.num_shared + self.num_prompt) / float(result["total_s"])
        num_decoded = sum(result["num_outputs"]) - result["num_first"]
        return float(num_decoded / (result["total_s"] - result["first_s"]))

    def check(self, result: dict[str, Any], engine: str) -> None:
        if result["num_outputs"] != [self.num_output] * self.num_seqs:
            raise WrongLength(
                f"{engine}, {self.name}: {result['num_outputs']} tokens came out, "
                f"{self.num_seqs} x {self.num_output} were asked for"
            )

    def warm_up(self) -> Case:
        """As the case, but short where only time is spent."""
        return replace(self, num_output=min(self.num_output, 8), num_shared=min(self.num_shared, 64))

    def shrunk(self, factor: int) -> Case:
        """A sketch of the case, for trying out the harness."""

        def part(count: int) -> int:
            return max(min(count, 2), count // factor)

        return replace(
            self,
            num_prompt=part(self.num_prompt),
            num_output=part(self.num_output),
            num_shared=self.num_shared // factor,
        )


CASES = {
    case.name: case
    for case in (
        Case("prefill-512", 1, 512, 1, "prefill"),
        Case("decode-128", 1, 1, 129, "decode"),
        Case("decode-128-at-1024", 1, 1024, 129, "decode"),
        *(Case(f"batch-{num}", num, 16, 65, "decode") for num in (4, 8, 16, 32)),
        Case("shared-16", 16, 16, 64, "total", num_shared=600),
    )
}
TITLES = {
    "prefill-512": "prefill 512",
    "decode-128": "decode",
    "decode-128-at-1024": "decode at 1024",
    "shared-16": "16 sharing 600, s",
} | {f"batch-{num}": f"batch {num}" for num in (4, 8, 16, 32)}


def speedup(case: Case, ours: float, theirs: float) -> float:
    """How many times faster `ours` is, whichever way the figure points."""
    return theirs / ours if case.measure == "total" else ours / theirs


def longest(cases: Sequence[Case]) -> int:
    return max(case.num_shared + case.num_prompt + case.num_output for case in cases)
