"""Build an engine from a model's name: files, spec, settings, weights, cache, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.api.applied import describe_weights, list_static
from penstock.api.defaults import AUTO, FILE, NEUTRAL, Defaults, find_defaults
from penstock.api.draft_sources import read_sources
from penstock.api.drafting import DraftPart, asks_for_model, find_draft, group_states
from penstock.api.engine.keep import keep_layers
from penstock.api.engine.load import DTYPES, META, Progress, load_weights
from penstock.api.engine.start import EngineOrigin, make_memory, start_engine
from penstock.api.idle_options import find_idle, mark_idle, packed_share, tell_kv_scales
from penstock.api.model_files import call_aside, find_model, load_in_sandbox, make_grammars
from penstock.config import EngineConfig, Facts, GpuFacts, Resolved, choose_plain_dtype, resolve
from penstock.config.ranks import count_ranks
from penstock.draft.function import DraftFunction
from penstock.engine.engine import Engine
from penstock.errors import InvalidConfig, quote
from penstock.host.gpus import Sharers
from penstock.host.machine import free_memory_bytes, held_collector
from penstock.host.stopwatch import Stopwatch
from penstock.models.decoder import Decoder
from penstock.models.files import Checkpoint, open_checkpoint, read_config, read_generation_config
from penstock.models.files.quantized.checkpoint import keep_floats
from penstock.models.load import FP8_CAPABILITY, has_fp8
from penstock.models.spec import ModelSpec, spec_from_config
from penstock.ops import cpu
from penstock.passes.lora_table import LoraTable, make_lora_table
from penstock.passes.outline import count_packed_bytes
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.text.chat.template import read_template
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import Applied

if TYPE_CHECKING:
    from penstock.api.ranks.ranks import Ranks
    from penstock.runner.compile.ahead import AheadCompiler
    from penstock.runner.cuda.decode_graphs import DecodeGraphs


_log = logging.getLogger(__name__)
ALONE = Sharers()


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
    watch: Stopwatch = field(default_factory=Stopwatch)  # phases of the start


def bytes_per_token(spec: ModelSpec, config: EngineConfig, draft: DraftPart | None = None) -> int:
    kept = choose_plain_dtype(config) if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    grouping = group_states(keep_layers(spec, config), kept, config.block_size, draft)
    return len(grouping.groups) * grouping.block_bytes // config.block_size


def held_gpu_bytes(device: str) -> int:
    """Return the GPU memory this process holds for weights, cache and steps; 0 on a CPU."""
    return torch.cuda.memory_reserved() if device == "cuda" else 0


def gpu_uuid(device: str) -> str | None:
    """Return the UUID of the GPU that the engine uses, as the driver writes it: CUDA_VISIBLE_DEVICES chooses it."""
    if device != "cuda":
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    return uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


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
    sharers: Sharers = ALONE,
) -> Assembly:
    """Build everything for one model; the `sharers` share machine and GPU. Without text it has no tokenizer."""
    watch = Stopwatch()
    text = with_text and not config.skip_tokenizer_init
    template = read_template(config.chat_template) if text and config.chat_template is not None else None
    sources = read_sources(config, draft_fn)
    path = find_model(model, config.revision, show_progress)
    with ExitStack() as on_failure:
        checkpoint = None if config.load_format == "dummy" and path.is_dir() else open_checkpoint(path)
        try:
            described = checkpoint.config if checkpoint else read_config(path)
            generation = _generation_config(path, checkpoint, config)
            defaults = find_defaults(config, generation, checkpoint.metadata if checkpoint else None)
            spec = spec_from_config(described, config.max_model_len)
            gpu = partial(_gpu, spec, described, config, checkpoint)
            if asks_for_model(config):  # refuse before a draft model is fetched
                _resolve_settings(spec, described, config, gpu(), offline)
            draft = find_draft(config, spec, path, partial(find_model, progress=show_progress))
            ahead = _compile_ahead(spec, checkpoint, described, config, offline, sharers)
            resolve_for = partial(_resolve_settings, described=described, config=config, offline=offline)
            spec, settings = resolve_for(spec, gpu=gpu(), draft=draft, sharers=sharers)
            ranks = _make_ranks(config, path, spec, sharers.machine, on_failure)
            if ranks is not None:
                room = ranks.gather(described, checkpoint, settings.kv_cache_dtype)
                spec, settings = resolve_for(spec, gpu=None, sharers=sharers, room=room)
                ranks.set_up(spec, settings)
            settings = _tell_idle(settings, config, checkpoint, spec)
            sources.require_drafts(settings)
            stored = checkpoint.quantization if checkpoint else "dummy"
            applied = _list_applied(checkpoint, settings, spec)
            tokenizer = call_aside(load_in_sandbox, path, checkpoint, config, template) if text else None
            cpu.set_num_threads(settings.threads)
            own, mesh = (ranks.share, ranks.mesh) if ranks else (spec, None)
            loras = make_table(own, settings, torch.device(settings.device))
            watch.lap("config")
            loaded = load_weights(checkpoint, own, settings, torch.device(settings.device), progress, loras, mesh)
        finally:
            if checkpoint:
                checkpoint.close()
        watch.lap("weights")
        made = tokenizer.result() if tokenizer else None
        grammars = make_grammars(path, config, made)
        others = sources.make(spec.vocab_size, lambda: made or load_in_sandbox(path, None, config, None))
        engine = start_engine(loaded, settings, grammars, ahead, others, draft, loras, EngineOrigin(path, ranks))
        on_failure.pop_all()
    watch.lap("engine")
    num_bytes = checkpoint.num_bytes if checkpoint else 0
    return Assembly(
        path, spec, settings, generation, made, engine, stored, num_bytes, grammars, defaults, applied, draft, watch
    )


def _list_applied(checkpoint: Checkpoint | None, settings: Resolved, spec: ModelSpec) -> tuple[Applied, ...]:
    """List the ledger's entries of every request."""
    stored = describe_weights(checkpoint, settings, has_fp8(torch.device(settings.device)))
    return list_static(settings, stored, packed_share(checkpoint, settings.device == "cpu"), not spec.is_encoder)


def _make_ranks(
    config: EngineConfig, path: Path, spec: ModelSpec, num_replicas: int, on_failure: ExitStack
) -> Ranks | None:
    """Make the other ranks of a model; None if there is one rank only."""
    if count_ranks(config) == 1:
        return None
    from penstock.api.ranks.ranks import Ranks

    ranks = Ranks(config, path, spec, num_replicas)
    on_failure.callback(ranks.close)
    return ranks


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
    sharers: Sharers = ALONE,
    room: int | None = None,
) -> tuple[ModelSpec, Resolved]:
    """The settings, and the spec for the longest sequence that they allow. `room`: free memory of all machines."""
    settings = resolve(
        config,
        Facts(
            spec.max_positions,
            bytes_per_token(spec, config, draft),
            free_memory_bytes() if room is None else room,
            cpu.available_cores(),
            num_layers=spec.num_layers,
            whole_prompts=spec.is_encoder,
            no_drafts=_why_no_drafts(spec),
            offline=offline,
            gpu=None if gpu is None else _share_gpu(gpu, draft, sharers.gpu),
            num_replicas=sharers.machine,
        ),
    )
    if settings.max_model_len != spec.max_model_len:
        spec = spec_from_config(described, settings.max_model_len)
    return keep_layers(spec, settings), settings


def _share_gpu(gpu: GpuFacts, draft: DraftPart | None, num_sharers: int) -> GpuFacts:
    """Facts for one of the engines that share a GPU, with a drafting model in each."""
    gpu = replace(gpu, total_bytes=gpu.total_bytes // num_sharers)
    if draft is None:
        return gpu
    return replace(gpu, draft_bytes=draft.count_gpu_weights(), draft_step_bytes=draft.count_gpu_features())


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
    if told := tell_kv_scales(checkpoint, settings):
        _log.log(logging.WARNING if settings.kv_cache_dtype == "fp8" else logging.INFO, "%s", told)
    return mark_idle(settings, idle)


def make_table(spec: ModelSpec, settings: Resolved, device: torch.device) -> LoraTable | None:
    slots = settings.max_loras, settings.max_lora_rank, DTYPES.get(settings.dtype), device
    return make_lora_table(spec, *slots) if settings.enable_lora else None


def _may_use_gpu(config: EngineConfig) -> bool:
    return config.device != "cpu" and torch.cuda.is_available()


def _gpu(
    spec: ModelSpec, described: Mapping[str, Any], config: EngineConfig, checkpoint: Checkpoint | None
) -> GpuFacts | None:
    if not _may_use_gpu(config):
        return None
    from penstock.runner.cuda.gpu import gpu_facts

    facts = gpu_facts(spec, _stored_dtype(described))
    packed_bytes = count_packed_bytes(checkpoint, spec, facts.has_fp8) if checkpoint else 0
    return replace(facts, packed_bytes=packed_bytes)


def _stored_dtype(described: Mapping[str, Any]) -> str:
    return str(described.get("dtype") or described.get("torch_dtype") or "")


def _compile_ahead(
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    described: Mapping[str, Any],
    config: EngineConfig,
    offline: bool,
    sharers: Sharers,
) -> AheadCompiler | None:
    """Have the kernels compiled that a GPU will probably need, before it is opened. Without them it goes on as well."""
    from penstock.runner.cuda import gpu

    driver = gpu.cuda_driver() if config.device != "cpu" and torch.version.cuda and find_spec("triton") else None
    if driver is None or spec.is_encoder or (config.device == "auto" and spec.architecture not in gpu.CHECKED):
        return None
    driver_facts = call_aside(gpu.read_driver, driver)
    try:
        # This imports Triton, which takes as long as starting the driver.
        from penstock.runner.compile.ahead import start_compiling
        from penstock.runner.compile.cross import hash_compiler

        seen = driver_facts.result()
        if seen is None:
            return None
        spec, settings = _resolve_settings(
            spec, described, config, gpu.likely_facts(spec, _stored_dtype(described), seen), offline, None, sharers
        )
        if settings.device != "cuda":
            return None
        wanted = repr(
            (
                spec.embedding,
                spec.layers,
                spec.norm,
                spec.head,
                checkpoint.quantization if checkpoint else "",
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
        kept = keep_floats(checkpoint) if checkpoint and seen.capability >= FP8_CAPABILITY else checkpoint
        steps = partial(outline, spec, settings, seen.num_sms, kept)
        begun = start_compiling(steps, wanted, seen, cpu.available_cores())
        call_aside(hash_compiler)
        return begun
    except Exception as error:
        _log.debug("kernels are not compiled ahead: %r", error)
        return None


def outline(spec: ModelSpec, settings: Resolved, num_sms: int, checkpoint: Checkpoint | None = None) -> DecodeGraphs:
    """The steps of a GPU's engine on the meta device, its matrices stored as the checkpoint's."""
    from penstock.runner.cuda.decode_graphs import make_decode_graphs

    model = load_weights(checkpoint, spec, settings, META, loras=make_table(spec, settings, META))
    assert isinstance(model, Decoder)
    grouping = group_states(spec, settings.kv_cache_dtype, settings.block_size, None)
    seqs, memory = settings.max_num_seqs, make_memory(1, grouping, settings, META)
    with torch.inference_mode():
        return make_decode_graphs(model, memory, seqs, num_sms, True, settings.deterministic)
