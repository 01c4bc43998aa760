"""Build an engine from a model's name: files, spec, settings, weights, cache, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from penstock.api.applied import list_static
from penstock.api.defaults import AUTO, FILE, NEUTRAL, Defaults, find_defaults
from penstock.api.draft_sources import read_sources
from penstock.api.drafting import DraftPart, asks_for_model, find_draft, group_states
from penstock.api.idle_options import find_idle, mark_idle, packed_share
from penstock.api.model_files import find_model, load_in_sandbox, make_grammars
from penstock.cache.group import Grouping
from penstock.cache.kv import KVCache
from penstock.config import AUTO_KV_DTYPE, EngineConfig, Facts, GpuFacts, Resolved, resolve
from penstock.config.speculation import parse_speculation
from penstock.draft.drafter import Drafter
from penstock.draft.drafters import make_drafters
from penstock.draft.function import DraftFunction
from penstock.engine.engine import Engine
from penstock.engine.scheduling.prompt_cap import PromptCap
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.speculation import SpeculationController
from penstock.errors import InvalidConfig, quote
from penstock.host.machine import free_memory_bytes, held_collector, settle_collector
from penstock.models.decoder import Decoder, Encoder
from penstock.models.files import Checkpoint, open_checkpoint, read_config, read_generation_config
from penstock.models.load import PACKED
from penstock.models.spec import ModelSpec, spec_from_config
from penstock.ops import cpu
from penstock.passes.adapt import LoraTable, make_lora_table
from penstock.passes.load import load_lowered
from penstock.passes.outline import count_packed_bytes
from penstock.runner.cpu.runner import Runner
from penstock.runner.loras import LoraBank
from penstock.runner.memory import BlockMemory
from penstock.runner.store.open import open_store
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.text.chat.template import read_template
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import Applied

if TYPE_CHECKING:
    from penstock.runner.compile.ahead import AheadCompiler
    from penstock.runner.cuda.decode_graphs import DecodeGraphs

Progress = Callable[[int, int], None]
Made = TypeVar("Made")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
META = torch.device("meta")
_log = logging.getLogger(__name__)


@dataclass
class Assembly:
    """Everything that serves one model in this process."""

    path: Path
    spec: ModelSpec
    settings: Resolved
    generation_config: dict[str, Any]
    tokenizer: Tokenizer | None
    engine: Engine
    quantization: str = ""  # how most weights are stored
    num_bytes: int = 0  # of all weights as stored
    grammars: GrammarCompiler | None = None
    defaults: Defaults = Defaults(())
    applied: tuple[Applied, ...] = ()  # to every request: the ledger's entries
    draft: DraftPart | None = None


def bytes_per_token(spec: ModelSpec, config: EngineConfig, draft: DraftPart | None = None) -> int:
    kept = config.kv_cache_dtype
    if kept == "auto":
        kept = AUTO_KV_DTYPE if config.dtype == "auto" else config.dtype
    grouping = group_states(spec, kept, config.block_size, draft)
    return len(grouping.groups) * grouping.block_bytes // config.block_size


def held_gpu_bytes(device: str) -> int:
    """Return the GPU memory this process holds for weights, cache and steps; 0 on a CPU."""
    return torch.cuda.memory_reserved() if device == "cuda" else 0


@held_collector()
def assemble(
    model: str,
    config: EngineConfig,
    *,
    show_progress: bool = False,
    progress: Progress | None = None,
    offline: bool = False,
    with_text: bool = True,
    draft_fn: DraftFunction | None = None,
    num_replicas: int = 1,
) -> Assembly:
    """Build everything for one model. Without text there is no tokenizer: another process has it. `num_replicas`
    engines share the machine."""
    text = with_text and not config.skip_tokenizer_init
    template = read_template(config.chat_template) if text and config.chat_template is not None else None
    sources = read_sources(config, draft_fn)
    path = find_model(model, config.revision, show_progress)
    dummy = config.load_format == "dummy"
    checkpoint = None if dummy and path.is_dir() else open_checkpoint(path)
    try:
        described = checkpoint.config if checkpoint else read_config(path)
        generation = _generation_config(path, checkpoint, config)
        defaults = find_defaults(config, generation, checkpoint.metadata if checkpoint else None)
        spec = spec_from_config(described, config.max_model_len)
        if asks_for_model(config):  # refuse before a draft model is fetched
            _resolve_settings(spec, described, config, _gpu(spec, described, config, checkpoint), offline)
        draft = find_draft(config, spec, path, partial(find_model, progress=show_progress))
        ahead = _compile_ahead(spec, described, config, offline, num_replicas)
        spec, settings = _resolve_settings(
            spec, described, config, _gpu(spec, described, config, checkpoint), offline, draft, num_replicas
        )
        settings = _tell_idle(settings, config, checkpoint, spec)
        sources.require_drafts(settings)
        stored = checkpoint.quantization if checkpoint else "dummy"
        applied = list_static(settings, stored, packed_share(checkpoint, settings.device == "cpu"), not spec.is_encoder)
        tokenizer = _aside(load_in_sandbox, path, checkpoint, config, template) if text else None
        cpu.set_num_threads(settings.threads)
        loras = _make_lora_table(spec, settings, torch.device(settings.device))
        loaded = _load(checkpoint, spec, settings, torch.device(settings.device), progress, loras)
    finally:
        if checkpoint:
            checkpoint.close()
    made = tokenizer.result() if tokenizer else None
    grammars = make_grammars(path, config, made)
    others = sources.make(spec.vocab_size, lambda: made or load_in_sandbox(path, None, config, None))
    return Assembly(
        path,
        spec,
        settings,
        generation,
        made,
        start_engine(loaded, settings, grammars, ahead, others, draft, loras, path),
        stored,
        checkpoint.num_bytes if checkpoint else 0,
        grammars,
        defaults,
        applied,
        draft,
    )


def _generation_config(path: Path, checkpoint: Checkpoint | None, config: EngineConfig) -> dict[str, Any]:
    """Return the generation config that the user names, else the model's."""
    if config.generation_config in (AUTO, NEUTRAL):
        return checkpoint.generation_config if checkpoint else read_generation_config(path)
    folder = Path(config.generation_config).expanduser()
    if not config.generation_config or not (folder / FILE).is_file():
        raise InvalidConfig(
            f"generation_config={quote(config.generation_config)} is no folder with a {FILE}: name "
            f"one, or give {AUTO} for the model's own or {NEUTRAL} for neutral values"
        )
    return read_generation_config(folder)


def _resolve_settings(
    spec: ModelSpec,
    described: Mapping[str, Any],
    config: EngineConfig,
    gpu: GpuFacts | None,
    offline: bool,
    draft: DraftPart | None = None,
    num_replicas: int = 1,
) -> tuple[ModelSpec, Resolved]:
    """The settings, and the spec for the longest sequence that they allow."""
    settings = resolve(
        config,
        Facts(
            spec.max_positions,
            bytes_per_token(spec, config, draft),
            free_memory_bytes(),
            cpu.available_cores(),
            whole_prompts=spec.is_encoder,
            no_drafts=_why_no_drafts(spec),
            offline=offline,
            gpu=None if gpu is None else replace(gpu, total_bytes=gpu.total_bytes // num_replicas),
            num_replicas=num_replicas,
        ),
    )
    if settings.max_model_len != spec.max_model_len:
        spec = spec_from_config(described, settings.max_model_len)
    return spec, settings


def _why_no_drafts(spec: ModelSpec) -> str:
    """Return why drafts cannot be verified; empty if they can."""
    if spec.is_encoder:
        return "the model makes embeddings"
    is_recurrent = any(state is not None and state.kind == "recurrent" for state in spec.states())
    return "a recurrent state cannot go back to before a rejected draft" if is_recurrent else ""


def _tell_idle(settings: Resolved, config: EngineConfig, checkpoint: Checkpoint | None, spec: ModelSpec) -> Resolved:
    """Warn of options that have no effect here."""
    idle = find_idle(config, settings.device, packed_share(checkpoint, settings.device == "cpu"), not spec.is_encoder)
    for name, why in idle.items():
        _log.warning("%s=%s has no effect: %s", name, getattr(config, name), why)
    return mark_idle(settings, idle)


def _make_lora_table(spec: ModelSpec, settings: Resolved, device: torch.device) -> LoraTable | None:
    slots = settings.max_loras, settings.max_lora_rank, DTYPES.get(settings.dtype), device
    return make_lora_table(spec, *slots) if settings.enable_lora else None


def _load(
    checkpoint: Checkpoint | None,
    spec: ModelSpec,
    settings: Resolved,
    device: torch.device,
    progress: Progress | None = None,
    loras: LoraTable | None = None,
) -> Decoder | Encoder:
    return load_lowered(
        checkpoint,
        spec,
        dtype=DTYPES.get(settings.dtype),
        quantization=settings.quantization or (PACKED if settings.keeps_packed and device.type == "cuda" else None),
        rounded=settings.activation_dtype == "int8",
        dummy_seed=settings.seed if settings.load_format == "dummy" or device == META else None,
        progress=progress,
        device=device,
        exact=settings.deterministic,
        loras=loras,
    )


def _may_use_gpu(config: EngineConfig) -> bool:
    return config.device != "cpu" and torch.cuda.is_available()


def _gpu(
    spec: ModelSpec, described: Mapping[str, Any], config: EngineConfig, checkpoint: Checkpoint | None
) -> GpuFacts | None:
    if not _may_use_gpu(config):
        return None
    from penstock.runner.cuda.gpu import gpu_facts

    packed_bytes = count_packed_bytes(checkpoint, spec) if checkpoint else 0
    return replace(gpu_facts(spec, _stored_dtype(described)), packed_bytes=packed_bytes)


def _stored_dtype(described: Mapping[str, Any]) -> str:
    return str(described.get("dtype") or described.get("torch_dtype") or "")


def _compile_ahead(
    spec: ModelSpec, described: Mapping[str, Any], config: EngineConfig, offline: bool, num_replicas: int
) -> AheadCompiler | None:
    """Have the kernels compiled that a GPU will probably need, before it is opened. Without them it goes on as well."""
    from penstock.runner.cuda import gpu

    driver = gpu.cuda_driver() if config.device != "cpu" and torch.version.cuda and find_spec("triton") else None
    if driver is None or spec.is_encoder or (config.device == "auto" and spec.architecture not in gpu.CHECKED):
        return None
    glimpse = _aside(gpu.read_driver, driver)
    try:
        # This imports Triton, which takes as long as starting the driver.
        from penstock.runner.compile.ahead import start_compiling
        from penstock.runner.compile.cross import hash_compiler

        seen = glimpse.result()
        if seen is None:
            return None
        spec, settings = _resolve_settings(
            spec, described, config, gpu.likely_facts(spec, _stored_dtype(described), seen), offline, None, num_replicas
        )
        if settings.device != "cuda":
            return None
        wanted = repr(
            (
                spec.embedding,
                spec.layers,
                spec.norm,
                spec.head,
                replace(
                    settings,
                    kv_cache_tokens=0,
                    seed=0,
                    generation_config=AUTO,
                    override_generation_config=None,
                    chat_template=None,
                    settings=(),
                ),
            )
        )
        begun = start_compiling(partial(outline, spec, settings, seen.num_sms), wanted, seen, cpu.available_cores())
        _aside(hash_compiler)
        return begun
    except Exception as error:
        _log.debug("kernels are not compiled ahead: %r", error)
        return None


def outline(spec: ModelSpec, settings: Resolved, num_sms: int) -> DecodeGraphs:
    """The steps of a GPU's engine on the meta device."""
    from penstock.runner.cuda.decode_graphs import make_decode_graphs

    model = _load(None, spec, settings, META, loras=_make_lora_table(spec, settings, META))
    assert isinstance(model, Decoder)
    grouping = group_states(spec, settings.kv_cache_dtype, settings.block_size, None)
    with torch.inference_mode():
        return make_decode_graphs(
            model, _memory(1, grouping, settings, META), settings.max_num_seqs, num_sms, True, settings.deterministic
        )


def _memory(num_blocks: int, grouping: Grouping, settings: Resolved, device: torch.device) -> BlockMemory:
    return BlockMemory(num_blocks, settings.block_size, grouping, settings.kv_cache_dtype, device)


def start_engine(
    model: Decoder | Encoder,
    settings: Resolved,
    grammars: GrammarCompiler | None = None,
    ahead: AheadCompiler | None = None,
    others: Sequence[Drafter] = (),
    draft: DraftPart | None = None,
    loras: LoraTable | None = None,
    path: Path | None = None,
) -> Engine:
    """The pool's blocks twice: their owners in the cache, their bytes in the runner. `path`: the model's files, after
    which the store of blocks names them; without it there is none."""
    if draft is not None:
        draft.resolve(settings)
    grouping = group_states(model.spec, settings.kv_cache_dtype, settings.block_size, draft)
    ahead_tokens = max((group.ahead for group in grouping.groups), default=0)  # the longest sequence must fit with them
    num_blocks = -(-(settings.kv_cache_tokens + ahead_tokens) // settings.block_size) * len(grouping.groups)
    memory = _memory(num_blocks, grouping, settings, torch.device(settings.device))
    store, offloading = open_store(settings, path, model.spec, grouping) or (None, None)
    prefixes = settings.enable_prefix_caching
    cache = KVCache(num_blocks, settings.block_size, grouping.groups, prefixes, offloading=offloading)
    drafters = make_drafters(parse_speculation(settings.speculative_config), others)
    scheduler = Scheduler(
        cache,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        policy=settings.scheduling_policy,
        capacity=settings.capacity,
        speculation=None if drafters is None else SpeculationController(draft.ahead if draft else 0),
        prompt_cap=_prompt_cap(settings),
        exact_starts=settings.device != "cpu" and drafters is not None,
    )
    if loras is not None:
        scheduler.enable_loras(settings.max_loras, settings.max_cpu_loras, sums=settings.device == "cpu")
        if offloading is not None:
            offloading.names.find_adapters = scheduler.roster.loras.memory.describe
    bank = None if loras is None else LoraBank(loras, settings.max_lora_rank)
    if settings.device == "cpu":
        on_cpu = Runner(model, memory, grammars, drafters, draft.memories() if draft else (), bank, store)
        if draft is not None:
            draft.load(on_cpu, num_blocks * grouping.block_bytes, settings)
        return Engine(scheduler, on_cpu)
    from penstock.runner.cuda.make import make_runner

    runner = make_runner(model, memory, settings, grammars, drafters, store, bank)
    if ahead:
        ahead.wait()
    runner.warm()
    settle_collector()
    return Engine(scheduler, runner, overlap=1, prepare=partial(runner.prepare, ahead.done if ahead else None))


def _prompt_cap(settings: Resolved) -> PromptCap | None:
    aims_s = (None if aim is None else aim / 1e3 for aim in (settings.tpot_slo_ms, settings.ttft_slo_ms))
    return PromptCap(*aims_s) if settings.caps_prompts else None


def _aside(function: Callable[..., Made], *values: Any) -> Future[Made]:
    """Begin a call in a thread of its own: kernels that pack weights leave Python to it."""
    thread = ThreadPoolExecutor(1)
    begun = thread.submit(function, *values)
    thread.shutdown(wait=False)
    return begun
