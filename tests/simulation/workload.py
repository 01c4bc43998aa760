"""Requests that arrive in bursts on a virtual clock, drawn from a seed."""

from __future__ import annotations

import random
from typing import Any

from penstock.types import BeamSearchParams, Request, SamplingParams, SpeculationParams
from tests.simulation.model import VOCABULARY
from tests.simulation.scenario import Scenario

SALTS = ("", "", "", "a", "b")
EOS = 0
LONER = 1000  # tokens from here on begin prompts that share nothing


class Workload:
    """`due` gives what has arrived by now. Prompts are cut from a few texts, so that prefixes are shared."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed * 31 + 1)
        self.tenants = random.Random(scenario.seed * 31 + 3)
        self.texts = [[self.rng.randrange(VOCABULARY) for _ in range(scenario.longest)] for _ in range(3)]
        self.texts.append(self.texts[0][: scenario.longest // 2] + self.texts[1][: scenario.longest // 2])
        self.pace = scenario.load * min(scenario.max_num_seqs, 6)
        self.next_s = 0.0
        self.num_made = 0

    def due(self, now_s: float) -> list[Request]:
        arrived: list[Request] = []
        while self.next_s <= now_s:
            burst = self.rng.choice([1, 1, 1, 2, 6])
            together = self.rng.choice(self.texts) if burst > 1 else None
            work = 0
            for _ in range(burst):
                request = self.make(together)
                arrived.append(request)
                work += len(request.tokens) // 2 + request.max_tokens * request.num_siblings
            self.next_s += self.rng.expovariate(1) * work / self.pace
        return arrived

    def make(self, text: list[int] | None = None) -> Request:
        rng, longest = self.rng, self.scenario.longest
        self.num_made += 1
        max_tokens = rng.randint(1, longest // 2)
        room = longest - max_tokens
        special = (
            rng.choice(["n", "n", "best_of", "beam", "beam", "pool", "prompt", "prompt_n"])
            if rng.random() < self.scenario.special_rate
            else ""
        )
        options: dict[str, Any] = {"max_tokens": max_tokens}
        if special in ("n", "prompt_n"):
            options["n"] = rng.choice([2, 3, 5])
        elif special == "best_of":
            options.update(n=1, best_of=rng.choice([2, 4]))
        if special.startswith("prompt"):
            options["prompt_logprobs"] = 0
        if rng.random() < 0.2:
            options["logprobs"] = 0
        if rng.random() < 0.2:
            options["min_tokens"] = rng.randint(0, max_tokens)
        if rng.random() < 0.3:
            options["stop_token_ids"] = [rng.randrange(VOCABULARY), rng.randrange(VOCABULARY)]
        options["ignore_eos"] = rng.random() < 0.5
        beam = (
            BeamSearchParams(
                beam_width=rng.choice([1, 2, 3, 4]),
                max_tokens=min(max_tokens, 8),
                length_penalty=rng.choice([0.0, 1.0, 1.5]),
                ignore_eos=options["ignore_eos"],
            )
            if special == "beam"
            else None
        )
        return Request(
            id=f"r{self.num_made}",
            tokens=tuple(self._prompt(text, room)),
            sampling=SamplingParams(**options, speculation=self._speculation()),
            beam=beam,
            pool=special == "pool",
            max_tokens=beam.max_tokens if beam else max_tokens,
            seed=rng.randrange(1 << 30),
            eos_token_ids=(EOS,),
            priority=rng.randint(0, 3),
            salt=rng.choice(SALTS),
            tenant=self._tenant(),
            cache_priority=3 * (self.num_made % 9 == 4),
            session=f"s{self.num_made % 4}" if self.num_made % 6 == 2 else "",
            session_s=40.0,
        )

    def _speculation(self) -> SpeculationParams | bool | None:
        """Some take no drafts, some few. By number, so that worlds are as they were."""
        if self.num_made % 5 == 1:
            return SpeculationParams(num_speculative_tokens=1 + self.num_made % 3)
        return False if self.num_made % 7 == 3 else None

    def _tenant(self) -> str:
        """One asks for more than the others. Drawn apart, so that worlds of one tenant are as they were."""
        count = self.scenario.num_tenants
        return f"t{min(self.tenants.randrange(count) for _ in range(2))}" if count > 1 else ""

    def _prompt(self, text: list[int] | None, room: int) -> list[int]:
        rng = self.rng
        draw = rng.random()
        if draw < 0.03:  # too long, or empty: to be refused
            return [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 20 * self.scenario.longest]))]
        if draw < 0.15:
            return [LONER + self.num_made] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, room - 1))]
        shared = (text or rng.choice(self.texts))[: rng.randint(0, room)]
        if draw < 0.4 and shared:
            return shared
        return (shared + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, max(1, room // 2)))])[:room]
