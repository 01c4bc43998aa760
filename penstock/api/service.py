"""One model at work: prompts in, deltas and outputs out. Shared by the offline and the async interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.api.assemble import Assembly
from penstock.api.prompts import AnyLora, list_loras
from penstock.engine.engine import Engine
from penstock.engine.executor import DropLora, LoadLora
from penstock.errors import InvalidRequest, PenstockError, quote
from penstock.host.interrupts import held_interrupts, watched_interrupts
from penstock.host.progress import counting_bar
from penstock.models.lora import fingerprint
from penstock.text.answers import Collector
from penstock.text.chat.reasoning import detect_kind, prompt_block
from penstock.text.intake import Intake
from penstock.text.prompt_encoder import Encoded
from penstock.types import BeamSearchParams, LoRARequest, LoraUse, ReasoningBlock, RequestMetrics, SamplingParams

if TYPE_CHECKING:
    from penstock.engine.plan import Plan


class LoraNumbers:
    """Numbers the adapters that were asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_lazy = False  # read adapters when their requests are scheduled, beside the steps of others
        self._numbers: dict[tuple[str, int, str], int] = {}
        self._next = count(1)

    def resolve(self, lora: AnyLora) -> tuple[LoraUse, ...]:
        """Return the adapters of a request; raises InvalidModel or InvalidRequest for one that cannot be used."""
        if lora is None:
            return ()
        loras = list_loras(lora)
        return tuple(LoraUse(one.lora_name, self._find(one), float(one.scale)) for one in loras if one.scale != 0)

    def _find(self, lora: LoRARequest) -> int:
        key = lora.lora_name, lora.lora_int_id, lora.lora_path
        number = self._numbers.get(key)
        if number is None:
            number = next(self._next)
            seen = fingerprint(Path(lora.lora_path)) if self.is_lazy else ""
            answer = self._engine.control(LoadLora(number, lora.lora_path, seen))
            if answer.error is not None:
                raise InvalidRequest(f"lora_request {quote(lora.lora_name)}: {answer.error}")
            self._numbers[key] = number
        return number

    def add(self, lora: LoRARequest) -> bool:
        return all(self._find(one) for one in list_loras(lora))

    def list_ids(self) -> set[int]:
        return {id for _, id, _ in self._numbers}

    def remove(self, lora: LoRARequest | int) -> bool:
        """Free an adapter that no request uses, by its id; False if there is none."""
        id = lora.lora_int_id if isinstance(lora, LoRARequest) else lora
        found = {key: number for key, number in self._numbers.items() if key[1] == id}
        for key, number in found.items():
            answer = self._engine.control(DropLora(number))
            if answer.error is not None:
                raise InvalidRequest(f"lora_int_id={id}: {answer.error}")
            del self._numbers[key]
        return bool(found)


EPOCH_S = time.time() - time.monotonic()  # monotonic, so that intervals survive clock changes


class Service:
    """Submits requests to an engine and collects their outputs."""

    def __init__(self, assembly: Assembly) -> None:
        settings = assembly.settings
        self.assembly, self.engine, self.tokenizer = assembly, assembly.engine, assembly.tokenizer
        self.intake = Intake(
            tokenizer=assembly.tokenizer,
            vocab_size=assembly.spec.vocab_size,
            max_model_len=settings.max_model_len,
            cache_tokens=settings.kv_cache_tokens,
            generation_config=assembly.generation_config,
            seed=settings.seed,
            grammars=assembly.grammars,
            parse_special=settings.parse_special_tokens,
        )
        self.collectors: dict[str, Collector] = {}
        self.loras = LoraNumbers(assembly.engine)
        self.engine.watch = self._note_start

    @property
    def default_params(self) -> SamplingParams:
        return self.assembly.defaults.params

    def _params_for(self, num_prompt: int) -> SamplingParams:
        """Return the default parameters, with max_tokens that fit after the prompt."""
        params = self.default_params
        return params.clone(max_tokens=max(1, min(params.max_tokens or 1, self.intake.longest - num_prompt)))

    def streamable(self, params: SamplingParams | None) -> SamplingParams | None:
        """Refuse parameters whose result is only known at the end."""
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params of type {type(params).__name__} cannot be streamed: give "
                "SamplingParams; beams come whole from beam_search"
            )
        if params is not None and params.num_siblings > params.n:
            raise InvalidRequest(
                f"best_of={params.best_of} over n={params.n} cannot be streamed, since the best are "
                "only known at the end: use generate, or leave best_of out"
            )
        return None if params is None else params.copy_checked()

    @held_interrupts()
    def submit(
        self,
        encoded: Encoded,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        pool: bool = False,
        lora: AnyLora = None,
    ) -> Collector:
        """Queue a prompt, with the model's defaults if `params` is None. `step` adds outputs to the collector."""
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
            params = self._params_for(len(encoded.tokens))
        encoded = replace(
            encoded, reasoning=self._find_block(encoded, params), loras=self.loras.resolve(lora) or encoded.loras
        )
        request = self.intake.request(encoded, params, priority=priority, pool=pool)
        self.engine.add(request)
        collector = Collector(request, encoded.prompt, self.tokenizer)
        collector.held = self.intake.compile_grammar(request.sampling)
        collector.metrics = RequestMetrics(_now())
        collector.engine_applied = self.assembly.applied
        self.collectors[request.id] = collector
        return collector

    def _note_start(self, plan: Plan) -> None:
        for admission in plan.admissions:
            collector = self.collectors.get(admission.request.id)
            if collector is not None and collector.metrics is not None:
                collector.metrics.first_scheduled_time = collector.metrics.first_scheduled_time or _now()

    def _find_block(self, encoded: Encoded, params: SamplingParams | BeamSearchParams) -> ReasoningBlock | None:
        """Return the reasoning block an answer may begin with, if the params give it a budget."""
        if not isinstance(params, SamplingParams) or params.thinking_token_budget is None:
            return None
        tokenizer = self.intake.need_tokenizer("thinking_token_budget")
        kind = detect_kind(tokenizer.chat_template)
        if kind is None:
            raise InvalidRequest(
                f"thinking_token_budget={params.thinking_token_budget}: the chat template marks no "
                "reasoning; leave it out"
            )
        return prompt_block(kind, tokenizer, encoded.tokens, encoded.prompt)

    def start_full(self, num_tokens: int) -> bool:
        """Start a step that prompts of `num_tokens` fill, while more are submitted. Only on an asynchronous device,
        and only if no later request would join the step."""
        scheduler = self.engine.scheduler
        in_order = not (scheduler.policy.displaces or scheduler.policy.overtakes)
        is_full = num_tokens >= scheduler.max_num_batched_tokens
        return bool(self.engine.overlap) and in_order and is_full and self.engine.start()

    @held_interrupts()
    def step(self) -> list[Collector]:
        """Run one engine step and pass its deltas to their collectors; return and release those that finished."""
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
                finished[delta.request_id] = collector  # other deltas of this step may be beams of the same request
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


UseTqdm = bool | Callable[..., Any]  # a callable replaces tqdm
AnyParams = SamplingParams | BeamSearchParams | None


class Batch:
    """Requests that leave nothing in the engine if bad input or Ctrl-C ends them early."""

    def __init__(
        self,
        service: Service,
        encoded: Iterable[Encoded],
        params: Sequence[AnyParams],
        priority: Sequence[int] | None = None,
        pool: bool = False,
        loras: Sequence[AnyLora] | None = None,
    ) -> None:
        """Submit all; a device may work on the first prompts while others are encoded."""
        self.collectors: list[Collector] = []
        self._service = service
        priorities = [0] * len(params) if priority is None else list(priority)
        if len(priorities) != len(params):
            raise InvalidRequest(f"{len(params)} prompts came with {len(priorities)} priorities: give one for each")
        num_tokens, started = 0, pool
        try:
            with watched_interrupts():
                asked = [None] * len(params) if loras is None else loras
                for one, own, rank, lora in zip(encoded, params, priorities, asked):
                    num_tokens += len(one.tokens)
                    with held_interrupts():
                        self.collectors.append(service.submit(one, own, priority=rank, pool=pool, lora=lora))
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
                self._service.engine.save(everything=True)
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
