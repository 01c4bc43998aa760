"""The requests of one call: taken in together, run to their end together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.answers import Collector
from penstock.errors import InvalidRequest, PenstockError
from penstock.intake import Encoded
from penstock.interrupts import held_interrupts, watched_interrupts
from penstock.progress import counting_bar
from penstock.service import Service
from penstock.types import BeamSearchParams, SamplingParams

UseTqdm = bool | Callable[..., Any]  # a callable takes tqdm's place
AnyParams = SamplingParams | BeamSearchParams | None


class Batch:
    """Whatever ends a batch early, bad input or Ctrl-C, leaves nothing of it in the engine."""

    def __init__(
        self,
        service: Service,
        encoded: Iterable[Encoded],
        params: Sequence[AnyParams],
        priority: Sequence[int] | None = None,
        pool: bool = False,
    ) -> None:
        """A device may be at work on the first prompts while others are encoded."""
        self.collectors: list[Collector] = []
        self._service = service
        priorities = [0] * len(params) if priority is None else list(priority)
        if len(priorities) != len(params):
            raise InvalidRequest(f"{len(params)} prompts came with {len(priorities)} priorities: give one for each")
        num_tokens, started = 0, pool
        try:
            with watched_interrupts():
                for one, own, rank in zip(encoded, params, priorities):
                    num_tokens += len(one.tokens)
                    with held_interrupts():
                        self.collectors.append(
                            service.submit(one.tokens, own, prompt=one.prompt, priority=rank, salt=one.salt, pool=pool)
                        )
                        started = started or service.start_full(num_tokens)
        except BaseException:
            self._abort()
            raise

    def finish(self, use_tqdm: UseTqdm) -> None:
        waiting = set(self.collectors)
        try:
            with counting_bar(use_tqdm, len(waiting), "Processed prompts") as advance, watched_interrupts():
                while waiting:
                    done = waiting.intersection(self._service.step())
                    waiting -= done
                    advance(len(done))
        except BaseException:
            self._abort()
            raise

    def raise_failure(self) -> None:
        failed = next((collector.error for collector in self.collectors if collector.error), None)
        if failed:
            raise PenstockError(f"the model failed on a request: {failed}")

    def _abort(self) -> None:
        for collector in self.collectors:
            self._service.abort(collector)
