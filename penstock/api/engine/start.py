"""Start an engine: pool, scheduler and the executor of its device, or of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.api.drafting import DraftPart, group_states
from penstock.cache.group import Grouping
from penstock.cache.kv import KVCache
from penstock.config import Resolved
from penstock.config.speculation import parse_speculation
from penstock.draft.drafter import Drafter
from penstock.draft.drafters import make_drafters
from penstock.engine.engine import Engine
from penstock.engine.scheduling.prompt_cap import PromptCap
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.speculation import SpeculationController
from penstock.host.machine import settle_collector
from penstock.models.decoder import Decoder, Encoder
from penstock.passes.lora_table import LoraTable
from penstock.runner.cpu.runner import Runner
from penstock.runner.loras import LoraBank
from penstock.runner.memory import BlockMemory
from penstock.runner.store.open import WHOLE, open_store
from penstock.sampling.grammar.compiler import GrammarCompiler

if TYPE_CHECKING:
    from penstock.api.ranks.ranks import Ranks
    from penstock.runner.compile.ahead import AheadCompiler


@dataclass(frozen=True)
class EngineOrigin:
    """The model's files, by which the KV store names blocks, and its other ranks. Without files there is no store."""

    path: Path | None = None
    ranks: Ranks | None = None


def count_blocks(grouping: Grouping, settings: Resolved) -> int:
    """Count the blocks of the pool: each group has room for all tokens."""
    ahead_tokens = max((group.ahead for group in grouping.groups), default=0)  # the longest sequence must fit with them
    return -(-(settings.kv_cache_tokens + ahead_tokens) // settings.block_size) * len(grouping.groups)


def make_memory(num_blocks: int, grouping: Grouping, settings: Resolved, device: torch.device) -> BlockMemory:
    return BlockMemory(num_blocks, settings.block_size, grouping, settings.kv_cache_dtype, device)


def start_engine(
    model: Decoder | Encoder,
    settings: Resolved,
    grammars: GrammarCompiler | None = None,
    ahead: AheadCompiler | None = None,
    others: Sequence[Drafter] = (),
    draft: DraftPart | None = None,
    loras: LoraTable | None = None,
    origin: EngineOrigin = EngineOrigin(),  # noqa: B008
) -> Engine:
    """Make an engine, whose cache has the owners of the pool's blocks, and whose runner their bytes. With other ranks,
    `model` is rank 0's share."""
    ranks = origin.ranks
    if draft is not None:
        draft.resolve(settings)
    spec = ranks.spec if ranks else model.spec
    grouping = group_states(spec, settings.kv_cache_dtype, settings.block_size, draft)
    num_blocks = count_blocks(grouping, settings)
    own = ranks.cut_cache(grouping, settings) if ranks else grouping
    memory = make_memory(num_blocks, own, settings, torch.device(settings.device))
    part = ranks.find_part(grouping, settings) if ranks else WHOLE
    store, offloading = open_store(settings, origin.path, spec, grouping, part) or (None, None)
    if ranks and store is not None and offloading is not None:
        offloading = replace(offloading, store=ranks.share_store(store, memory))
    prefixes = settings.enable_prefix_caching
    cache = KVCache(num_blocks, settings.block_size, grouping.groups, prefixes, offloading=offloading)
    drafters = make_drafters(parse_speculation(settings.speculative_config), others)
    scheduler = Scheduler(
        cache,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        policy=settings.scheduling_policy,
        capacity=settings.capacity,
        speculation=_controller(settings, draft),
        prompt_cap=_prompt_cap(settings),
        exact_starts=settings.device != "cpu" and drafters is not None,
    )
    if loras is not None:
        scheduler.enable_loras(settings.max_loras, settings.max_cpu_loras, settings.lora_bytes)
        scheduler.roster.loras.memory.sum_rank = loras.sum_rank
        if offloading is not None:
            offloading.names.find_adapters = scheduler.roster.loras.memory.describe
    bank = None if loras is None else LoraBank(loras, settings.max_lora_rank)
    if settings.device == "cpu":
        on_cpu = Runner(model, memory, grammars, drafters, draft.memories() if draft else (), bank, store)
        if draft is not None:
            draft.load(on_cpu, num_blocks * grouping.block_bytes, settings)
        if ranks is not None:
            scheduler.num_batches = ranks.layout.num_stages
            return Engine(scheduler, ranks.join(on_cpu), overlap=ranks.layout.num_stages - 1)
        return Engine(scheduler, on_cpu)
    from penstock.runner.cuda.make import make_runner

    runner = make_runner(model, memory, settings, grammars, drafters, store, bank)
    _warm(runner, ahead, draft, settings)
    settle_collector()
    return Engine(scheduler, runner, overlap=1, prepare=partial(runner.prepare, ahead.done if ahead else None))


def _warm(runner: Any, ahead: AheadCompiler | None, draft: DraftPart | None, settings: Resolved) -> None:
    """Compile a GPU's first kernels, and load its drafting model."""
    if ahead:
        ahead.wait()
    runner.warm()
    if draft is not None:
        draft.load(runner, runner.memory.blocks.nbytes, settings)


def _controller(settings: Resolved, draft: DraftPart | None) -> SpeculationController | None:
    asked = parse_speculation(settings.speculative_config)
    if asked is None:
        return None
    return SpeculationController(draft.ahead if draft else 0, asked.disable_by_batch_size)


def _prompt_cap(settings: Resolved) -> PromptCap | None:
    aims_s = (None if aim is None else aim / 1e3 for aim in (settings.tpot_slo_ms, settings.ttft_slo_ms))
    return PromptCap(*aims_s) if settings.caps_prompts else None
