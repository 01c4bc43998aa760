"""One model at work: prompts in, stream items and outputs out. What the offline and the async interface share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.answers import Collector
from penstock.assemble import Assembly
from penstock.errors import InvalidRequest
from penstock.intake import Intake, default_params
from penstock.types import BeamSearchParams, SamplingParams, StreamDelta


class Service:
    def __init__(self, assembly: Assembly) -> None:
        settings = assembly.settings
        self.assembly = assembly
        self.engine = assembly.engine
        self.tokenizer = assembly.tokenizer
        self.intake = Intake(assembly.tokenizer, assembly.spec.vocab_size, settings.max_model_len,
                             settings.kv_cache_tokens, assembly.generation_config, settings.seed)
        self.collectors: dict[str, Collector] = {}

    @property
    def default_params(self) -> SamplingParams:
        return default_params(self.assembly.generation_config)

    def submit(self, tokens: Sequence[int], params: SamplingParams | BeamSearchParams, *, prompt: str | None = None,
               priority: int = 0, salt: str = "", pool: bool = False) -> Collector:
        """Queue a prompt. Its outputs gather in the collector as `step` is called."""
        if pool != self.assembly.spec.is_encoder:
            raise InvalidRequest(f"{self.assembly.path} " + (
                "generates text and has no embeddings: use generate, or embed with an embedding model" if pool else
                "is an embedding model and generates no text: use embed"))
        request = self.intake.request(tokens, params, priority=priority, salt=salt, pool=pool)
        self.engine.add(request)
        collector = Collector(request, prompt, self.tokenizer)
        self.collectors[request.id] = collector
        return collector

    def step(self) -> list[tuple[Collector, StreamDelta]]:
        """One engine step: what it added to whom. Finished collectors are let go."""
        items = []
        for delta in self.engine.step():
            collector = self.collectors.get(delta.request_id)
            if collector is None:
                continue
            item, ended_here = collector.push(delta)
            items.append((collector, item))
            if ended_here:
                self.engine.abort(delta.request_id, delta.sibling)
            if collector.finished:
                del self.collectors[delta.request_id]
        return items

    def abort(self, collector: Collector) -> None:
        self.engine.abort(collector.request.id)
        self.collectors.pop(collector.request.id, None)

    def stats(self) -> dict[str, Any]:
        scheduler = self.engine.scheduler
        cache = scheduler.cache
        return {**asdict(scheduler.stats), "num_running": len(scheduler.roster.running),
                "num_waiting": len(scheduler.roster.waiting), "num_evicted_blocks": cache.tree.num_evicted,
                "num_copied_blocks": cache.num_copied, "num_blocks": cache.pool.num_blocks,
                "num_used_blocks": cache.pool.num_used, "num_cached_blocks": cache.pool.num_idle}

    def close(self) -> None:
        self.collectors.clear()
        self.engine.close()
