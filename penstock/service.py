"""One model at work: prompts in, stream items and outputs out. What the offline and the async interface share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.answers import Collector
from penstock.assemble import Assembly
from penstock.errors import InvalidRequest
from penstock.intake import Intake
from penstock.interrupts import held_interrupts
from penstock.text.reasoning import detect_kind, prompt_block
from penstock.types import BeamSearchParams, ReasoningBlock, RequestMetrics, SamplingParams

if TYPE_CHECKING:
    from penstock.engine.plan import Plan

EPOCH_S = time.time() - time.monotonic()  # differences of times stay right while a clock is set


class Service:
    def __init__(self, assembly: Assembly) -> None:
        settings = assembly.settings
        self.assembly = assembly
        self.engine = assembly.engine
        self.tokenizer = assembly.tokenizer
        self.intake = Intake(
            assembly.tokenizer,
            assembly.spec.vocab_size,
            settings.max_model_len,
            settings.kv_cache_tokens,
            assembly.generation_config,
            settings.seed,
            assembly.grammars,
            settings.parse_special_tokens,
        )
        self.collectors: dict[str, Collector] = {}
        self.engine.watch = self._note_start

    @property
    def default_params(self) -> SamplingParams:
        return self.assembly.defaults.params

    def _params_for(self, num_prompt: int) -> SamplingParams:
        """The defaults, with an answer no longer than there is room for after such a prompt."""
        params = self.default_params
        return params.clone(max_tokens=max(1, min(params.max_tokens or 1, self.intake.longest - num_prompt)))

    def streamable(self, params: SamplingParams | None) -> SamplingParams | None:
        """Refuse what only the end of all answers can decide."""
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params of type {type(params).__name__} cannot be streamed: give "
                "SamplingParams; beams come whole from beam_search"
            )
        if params is not None and params.num_siblings > params.n:
            raise InvalidRequest(
                f"best_of={params.best_of} over n={params.n} cannot be streamed, because the best are "
                "known at the end only: use generate, or leave best_of out"
            )
        return None if params is None else params.settled()

    @held_interrupts()
    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        prompt: str | None = None,
        priority: int = 0,
        salt: str = "",
        pool: bool = False,
    ) -> Collector:
        """Queue a prompt, with the model's own defaults where there are no `params`. Its outputs gather in the
        collector as `step` is called."""
        if pool != self.assembly.spec.is_encoder:
            raise InvalidRequest(
                f"{self.assembly.path} "
                + (
                    "generates text and has no embeddings: use generate, or embed with an embedding model"
                    if pool
                    else "is an embedding model and generates no text: use embed"
                )
            )
        if params is None:
            params = self._params_for(len(tokens))
        request = self.intake.request(
            tokens, params, priority=priority, salt=salt, pool=pool, reasoning=self._find_block(tokens, params, prompt)
        )
        self.engine.add(request)
        collector = Collector(request, prompt, self.tokenizer)
        collector.held = self.intake.compiled(request.sampling)
        collector.metrics = RequestMetrics(_now())
        self.collectors[request.id] = collector
        return collector

    def _note_start(self, plan: Plan) -> None:
        for admission in plan.admissions:
            collector = self.collectors.get(admission.request.id)
            if collector is not None and collector.metrics is not None:
                collector.metrics.first_scheduled_time = collector.metrics.first_scheduled_time or _now()

    def _find_block(
        self, tokens: Sequence[int], params: SamplingParams | BeamSearchParams, prompt: str | None
    ) -> ReasoningBlock | None:
        """The reasoning that an answer may begin with, where the params give it a budget."""
        if not isinstance(params, SamplingParams) or params.thinking_token_budget is None:
            return None
        tokenizer = self.intake.need_tokenizer("thinking_token_budget")
        kind = detect_kind(tokenizer.chat_template)
        if kind is None:
            raise InvalidRequest(
                f"thinking_token_budget={params.thinking_token_budget}: the chat template marks no "
                "reasoning; leave it out"
            )
        return prompt_block(kind, tokenizer, tokens, prompt)

    def start_full(self, num_tokens: int) -> bool:
        """Start a step that prompts of so many tokens fill, while more are taken in: on a device that works beside the
        host, and only if nobody who comes later would be in it."""
        scheduler = self.engine.scheduler
        in_order = not (scheduler.policy.displaces or scheduler.policy.overtakes)
        is_full = num_tokens >= scheduler.max_num_batched_tokens
        return bool(self.engine.overlap) and in_order and is_full and self.engine.start()

    @held_interrupts()
    def step(self) -> list[Collector]:
        """One engine step, its deltas handed to their collectors. Those that are finished are returned and let go."""
        begin = time.perf_counter()
        finished: dict[str, Collector] = {}
        deltas = self.engine.step()
        now = _now()
        for delta in deltas:
            collector = self.collectors.get(delta.request_id)
            if collector is None:
                continue
            metrics = collector.metrics
            if metrics is not None:
                metrics.last_token_time = now
                if metrics.first_token_time is None:
                    metrics.first_token_time = now
            if collector.push(delta):
                self.engine.abort(delta.request_id, delta.sibling, reason="stop")
            if collector.finished:
                finished[delta.request_id] = collector  # further deltas of this step may be other beams
        for id, collector in finished.items():
            del self.collectors[id]
            if collector.metrics is not None:
                collector.metrics.finished_time = now
        self.engine.scheduler.stats.step_s += time.perf_counter() - begin
        return list(finished.values())

    @held_interrupts()
    def abort(self, collector: Collector) -> None:
        self.engine.abort(collector.request.id)
        self.collectors.pop(collector.request.id, None)

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def close(self) -> None:
        self.collectors.clear()
        self.engine.watch = None
        self.engine.close()
        if self.tokenizer is not None:
            self.tokenizer.rest()


def _now() -> float:
    return EPOCH_S + time.monotonic()
