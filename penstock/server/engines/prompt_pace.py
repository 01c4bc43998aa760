"""Measure how fast prompts get their first tokens, and how long a new one would wait."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.errors import Busy
from penstock.server.engines.in_flight import InFlightRequest

FADING_S = 30.0  # busy seconds after which a measurement counts for a third
MIN_PROMPTS = 8  # measured before anything is refused
MAX_WAIT = 2  # times the TTFT aim
MAX_RETRY_S = 60


class PromptPace:
    """Prompt tokens per second, over the time in which any prompt waits for its first token."""

    def __init__(self, ttft_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without an aim nothing is refused."""
        self.ttft_s = ttft_s
        self._clock = clock
        self._waiting: dict[InFlightRequest, int] = {}  # tokens that those behind it wait for
        self._tokens: Counter[str] = Counter()  # the same, by tenant
        self.restart()

    def restart(self) -> None:
        """Measure anew: the time without an engine says nothing about the next one."""
        self._num_prompts = 0
        self._done, self._busy_s = 0.0, 0.0
        self._at_s = self._clock()

    def find_excess(self, flight: InFlightRequest) -> Busy | None:
        """Return an error if the request would wait for its first token longer than MAX_WAIT times the aim."""
        wait_s = None if self.ttft_s is None else self.estimate_wait_s(flight)
        if self.ttft_s is None or wait_s is None or wait_s <= MAX_WAIT * self.ttft_s:
            return None
        retry = min(MAX_RETRY_S, max(1, math.ceil(wait_s - self.ttft_s)))
        return Busy(
            f"the server is busy: a first token would take {wait_s:.1f} s at the present pace, the limit is "
            f"{MAX_WAIT * self.ttft_s:g} s ({MAX_WAIT} times --ttft-slo-ms); try again in {retry} s, or raise "
            "--ttft-slo-ms",
            retry,
        )

    def estimate_wait_s(self, flight: InFlightRequest) -> float | None:
        """Seconds until the first token; None if no prompt waits, or too few were measured. Tenants take turns, so
        another's long queue counts as long as its own."""
        self._advance()
        if not self._waiting or self._num_prompts < MIN_PROMPTS or not self._done:
            return None
        own = self._tokens[flight.tenant] + len(flight.request.tokens)
        num_tenants = len(self._tokens.keys() | {flight.tenant})
        ahead = min(own * num_tenants, self._tokens.total() + len(flight.request.tokens))
        return ahead * self._busy_s / self._done

    def enter(self, flights: Sequence[InFlightRequest]) -> None:
        """Begin to wait for the prompts of one client request. The later ones give way to other requests."""
        self._advance()
        self._waiting.update(dict.fromkeys(flights, 0))
        self._waiting[flights[0]] = num_tokens = len(flights[0].request.tokens)
        self._tokens[flights[0].tenant] += num_tokens

    def finish(self, flight: InFlightRequest) -> None:
        """Count the prompt of a request whose first token has come."""
        if flight in self._waiting:
            self._advance()
            self._done += len(flight.request.tokens)
            self._num_prompts += 1
            self.leave(flight)

    def leave(self, flight: InFlightRequest) -> None:
        """Forget a request that ends, whether or not it has a token."""
        if flight in self._waiting:
            self._advance()
            self._tokens -= Counter({flight.tenant: self._waiting.pop(flight)})

    def _advance(self) -> None:
        now = self._clock()
        if self._waiting:
            fading = math.exp((self._at_s - now) / FADING_S)
            self._done, self._busy_s = self._done * fading, self._busy_s * fading + now - self._at_s
        self._at_s = now
