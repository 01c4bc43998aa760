"""Fill in the options that the user left open, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from penstock.config.cache_dtypes import AUTO_KV_DTYPE
from penstock.config.loras import count_lora_bytes, needs_cpu, resolve_loras
from penstock.config.offload import OffloadUse, count_offload, require_gpu, require_host_memory
from penstock.config.options import TPOT_STEPS, TTFT_STEPS, EngineConfig
from penstock.config.ranks import ON_CPUS, count_ranks, resolve_ranks
from penstock.config.speculation import AUTO, MODEL_METHODS, OFF, REJECTION, parse_speculation
from penstock.config.vllm_speculation import SAID_AUTO
from penstock.errors import InvalidConfig

GIB = 1 << 30
STEP_TOKENS = 512  # enough to fill the cores, few enough to keep other answers flowing
MIN_CACHE_TOKENS = 8192  # where memory allows
CPU_SEQS, GPU_SEQS = 64, 256
GPU_STEP_TOKENS = 8192
OFFLINE_STEP_TOKENS = 16384  # on a large GPU: offline, a long step delays no stream
LARGE_GPU = 64 * GIB
GPU_RESERVE = 3 * GIB  # driver, cuBLAS, captured graphs and fragmentation
GPU_FREE_SHARE = 0.95  # of what other processes leave free: what they hold grows, too
CPU_CACHES = ("int8", "int4")
INT_BYTES = {"int8": (17 / 16, 17 / 16), "int4": (10 / 16, 17 / 16)}  # a value: of layers, of embedding and head
INT_SCRATCH = GIB // 8  # where integers are widened on a GPU
LORA_RANK_STEP = 16  # ranks that a GPU's slots are a multiple of
DRAFT_LOGIT_ROWS = 8 * 32  # float32 rows of a drafting model's steps, counted at 16 bits
INT_LOADING = GIB  # to quantize to integers
DEFAULT = "default"  # the reason of a value neither set nor derived


@dataclass(frozen=True)
class GpuFacts:
    """Facts of a GPU, and of the model on it, that `resolve` reads."""

    name: str
    total_bytes: int
    free_bytes: int
    weight_bytes: int  # at 16 bits
    bytes_per_step_token: int  # of a step's largest intermediate results
    vocab_size: int
    dtype: str = "bfloat16"  # of the checkpoint, where it is a 16-bit one
    bytes_per_sequence: int = 0  # of its sampling parameters
    has_fp8: bool = True
    checked: bool = True  # models of this architecture have been compared with others on a GPU
    fp8_bytes: int = 0  # of weights, those of the layers' matrices in 8-bit floats
    layer_bytes: int = 0  # of the widest layer's weights, at 16 bits
    outer_bytes: int = 0  # of weight_bytes, embedding's and head's
    largest_bytes: int = 0  # of one matrix at 16 bits
    lacks: str = ""  # a requirement of the kernels that is missing, with the remedy
    prompt_logit_rows: int = 0  # of logits made at once for prompt log probabilities
    captured_tokens: int = 0  # of the largest step with prompts that is captured
    packed_bytes: int = 0  # of weights as the checkpoint codes them; 0 if it has none quantized
    lora_bytes: int = 0  # of an adapter of all linears, for each rank, at 16 bits
    kept_bytes: int = 0  # of weight_bytes, those of matrices that no quantization rounds
    layer_matrix_bytes: int = 0  # of a layer's largest matrix, or stack of experts, at 16 bits
    draft_bytes: int = 0  # of a drafting model's own weights, at 16 bits
    draft_step_bytes: int = 0  # of each token of a step that are kept for it, at 16 bits


@dataclass(frozen=True)
class Facts:
    """Facts of model and machine that `resolve` reads."""

    context: int  # positions the model was made for
    bytes_per_token: int  # of key/value cache, over all layers
    free_memory_bytes: int
    num_cores: int
    whole_prompts: bool = False  # a prompt must be computed in one step
    no_drafts: str = ""  # why the model cannot verify drafts, if it cannot
    offline: bool = False  # answers count, not how soon each token comes
    gpu: GpuFacts | None = None
    num_layers: int = 1
    num_replicas: int = 1  # engines that share the machine

    @property
    def num_threads(self) -> int:
        return max(1, self.num_cores // self.num_replicas)


@dataclass(frozen=True)
class Setting:
    """An option's value and the reason for it."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Resolved(EngineConfig):
    """The options with every None filled in, and the reason for each value."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_tokens: int
    threads: int
    settings: tuple[Setting, ...]
    caps_prompts: bool = False  # beside decode rows, by measured step costs
    keeps_packed: bool = False  # quantized matrices stay as the checkpoint codes them
    lora_bytes: int = 0  # of memory for adapters, where max_cpu_loras is None

    def __post_init__(self) -> None:
        """The options were checked as the user gave them."""


def _cache_tokens(config: EngineConfig, facts: Facts) -> tuple[int, str]:
    if facts.bytes_per_token == 0:
        return config.max_model_len or facts.context, "the model keeps no cache; one longest request"
    budget = min(GIB, facts.free_memory_bytes // 4) // facts.num_replicas
    fit = max(config.block_size, budget // facts.bytes_per_token)
    wanted = max(4 * (config.max_model_len or facts.context), MIN_CACHE_TOKENS)
    if config.max_model_len and fit < config.max_model_len:
        return config.max_model_len, "room for one request of max_model_len"
    if wanted <= fit:
        return wanted, f"room for four requests of the longest length, and for {MIN_CACHE_TOKENS} tokens at least"
    limit = "1 GiB, or a quarter of the free memory if that is less"
    return fit, f"what fits in {budget / GIB:.2g} GiB ({limit}{_name_replicas(facts)})"


def _name_replicas(facts: Facts) -> str:
    return f", for {facts.num_replicas} replicas" if facts.num_replicas > 1 else ""


def _weight_bytes(config: EngineConfig, gpu: GpuFacts) -> int:
    """Count the weights that are on the GPU, and the buffers beside them."""
    is_widened = config.quantization in INT_BYTES or bool(gpu.packed_bytes) and _can_keep_codes(config, True)
    offload = offload_use(config, gpu)
    on_gpu = stored_bytes(config, gpu) - offload.host_bytes + offload.buffer_bytes
    return on_gpu + (INT_SCRATCH if is_widened else 0)


def offload_use(config: EngineConfig, gpu: GpuFacts) -> OffloadUse:
    return count_offload(config, gpu, stored_bytes(config, gpu))


def stored_bytes(config: EngineConfig, gpu: GpuFacts) -> int:
    """Count the weights, wherever they lie."""
    if config.quantization in INT_BYTES:
        layer, outer = INT_BYTES[config.quantization]
        kept = gpu.kept_bytes
        rounded = layer * (gpu.weight_bytes - gpu.outer_bytes - kept) + outer * gpu.outer_bytes
        return int(rounded / 2) + kept
    if gpu.packed_bytes and _can_keep_codes(config, True):
        return gpu.packed_bytes
    return (2 if config.dtype == "float32" else 1) * (
        gpu.fp8_bytes if config.quantization == "fp8" else gpu.weight_bytes
    )


def _gpu_share(config: EngineConfig, gpu: GpuFacts) -> tuple[int, str]:
    """Bytes that one engine may take, and in words. Memory of other processes counts only where too little is free."""
    wanted, most = config.gpu_memory_utilization * gpu.total_bytes, GPU_FREE_SHARE * gpu.free_bytes
    if wanted <= most:
        return int(wanted), f"{config.gpu_memory_utilization:g} of the GPU's memory"
    return int(most), f"{GPU_FREE_SHARE:g} of what is free of the GPU's memory"


def _gpu_fit(config: EngineConfig, facts: Facts, gpu: GpuFacts) -> int:
    """Return the cache tokens that fit beside weights, activations and captured graphs; 0 if loading needs more."""
    wide = 2 if config.dtype == "float32" else 1
    seqs, tokens = config.max_num_seqs or GPU_SEQS, config.max_num_batched_tokens or _gpu_step(facts, gpu)[0]
    logits = 2 * gpu.vocab_size * (2 * seqs + 4 * (gpu.prompt_logit_rows + seqs))  # captured graphs share theirs
    row_params = (seqs + 1) * gpu.bytes_per_sequence
    room = _gpu_share(config, gpu)[0] - _weight_bytes(config, gpu)
    if (
        (config.quantization in INT_BYTES or gpu.packed_bytes and _can_keep_codes(config, True))
        and room < 4 * gpu.largest_bytes + INT_LOADING
        or (config.quantization == "fp8" or config.cpu_offload_gb)
        and room < wide * gpu.layer_bytes
    ):
        return 0
    if config.enable_lora:
        room -= wide * config.max_loras * -(-config.max_lora_rank // LORA_RANK_STEP) * LORA_RANK_STEP * gpu.lora_bytes
    room -= wide * (gpu.draft_bytes + tokens * gpu.draft_step_bytes)
    logits += 2 * gpu.vocab_size * DRAFT_LOGIT_ROWS if _drafts_by_model(config) else 0
    captured = 0 if config.enforce_eager else min(tokens, gpu.captured_tokens)  # graphs have memory of their own
    left = room - wide * ((tokens + captured) * gpu.bytes_per_step_token + logits) - row_params - GPU_RESERVE
    return max(0, left) // max(1, facts.bytes_per_token)


def gpu_room(config: EngineConfig, facts: Facts) -> tuple[int, int, int]:
    """Return the bytes that an engine may take of the GPU, those its weights are counted with, and the tokens of cache
    that fit."""
    assert facts.gpu is not None
    return _gpu_share(config, facts.gpu)[0], _weight_bytes(config, facts.gpu), _gpu_fit(config, facts, facts.gpu)


def _gpu_cache_tokens(config: EngineConfig, facts: Facts, gpu: GpuFacts) -> tuple[int, str]:
    fit, (share, words) = _gpu_fit(config, facts, gpu), _gpu_share(config, gpu)
    if fit < config.block_size:
        raise InvalidConfig(
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {gpu.total_bytes / GIB:.1f} GiB "
            f"({gpu.free_bytes / GIB:.1f} free) leaves no room for a cache beside "
            f"{_weight_bytes(config, gpu) / GIB:.1f} GiB of weights{_name_draft(gpu)}, since {words} is "
            f"{share / GIB:.1f} GiB: raise it, end what else holds the GPU's memory, quantize, lower "
            "max_num_batched_tokens, or keep more weights in the host's memory with cpu_offload_gb"
        )
    return fit, f"what is left of {words}"


def _name_draft(gpu: GpuFacts) -> str:
    return f" and {gpu.draft_bytes / GIB:.1f} GiB of the drafting model's" if gpu.draft_bytes else ""


def _device(config: EngineConfig, facts: Facts) -> tuple[str, str]:
    if config.device == "cuda" and facts.gpu is None:
        raise InvalidConfig("device=cuda, but torch sees no GPU: install a CUDA build of torch, or set device=cpu")
    if config.device == "cuda" and facts.gpu is not None and facts.gpu.lacks:
        raise InvalidConfig(f"device=cuda needs {facts.gpu.lacks}, or set device=cpu")
    if config.device != "auto":
        return config.device, "set by the user"
    if count_ranks(config) > 1:
        return "cpu", ON_CPUS
    if facts.gpu is None:
        return "cpu", "there is no GPU that torch can use"
    if facts.gpu.lacks:
        return "cpu", f"a GPU needs {facts.gpu.lacks}"
    if not facts.gpu.checked:
        return "cpu", "models of this kind have not been checked on a GPU"
    if needs_cpu(config, facts.whole_prompts):
        return "cpu", "adapters of embedding models are for CPUs"
    if config.kv_cache_dtype in CPU_CACHES:
        return "cpu", f"an {config.kv_cache_dtype} cache is for CPUs"
    can_move = config.kv_cache_tokens is None and not config.cpu_offload_gb  # who asks for a GPU's is told what to do
    if can_move and _gpu_fit(config, facts, facts.gpu) < config.block_size:
        return "cpu", "the GPU's memory has no room for the model"
    return "cuda", facts.gpu.name


def _gpu_step(facts: Facts, gpu: GpuFacts) -> tuple[int, str]:
    """Default tokens of a step, and why."""
    if facts.offline and gpu.total_bytes >= LARGE_GPU:
        return OFFLINE_STEP_TOKENS, "default on a large GPU, offline"
    return GPU_STEP_TOKENS, "default on a GPU"


def _on_gpu(config: EngineConfig, facts: Facts, gpu: GpuFacts) -> dict[str, tuple[Any, str]]:
    """Defaults that differ on a GPU."""
    if config.kv_cache_dtype in CPU_CACHES:
        raise InvalidConfig(
            f"kv_cache_dtype={config.kv_cache_dtype} is for CPUs: leave it out on a GPU, or set device=cpu"
        )
    for name, value in (("kv_cache_dtype", config.kv_cache_dtype), ("quantization", config.quantization)):
        if value == "fp8" and not gpu.has_fp8:
            raise InvalidConfig(
                f"{name}=fp8 needs a GPU of compute capability 8.9 or later; {gpu.name} is older: leave it out"
            )
    derived: dict[str, tuple[Any, str]] = {}
    dtype = gpu.dtype if config.dtype == "auto" else config.dtype
    if config.dtype == "auto":
        derived["dtype"] = dtype, "as the checkpoint has it, in 16 bits"
    if config.kv_cache_dtype == "auto":
        derived["kv_cache_dtype"] = dtype, "as the weights" if config.dtype == "auto" else "as dtype says"
    if config.max_num_seqs is None:
        derived["max_num_seqs"] = GPU_SEQS, "default on a GPU"
    if config.max_num_batched_tokens is None:
        derived["max_num_batched_tokens"] = _gpu_step(facts, gpu)
    return derived


def _aims(config: EngineConfig, facts: Facts, gpu: GpuFacts | None) -> tuple[bool, dict[str, tuple[Any, str]]]:
    """Return whether prompts are capped beside decode rows, and why aims that the user left open are so."""
    aims = {"ttft_slo_ms": (config.ttft_slo_ms, TTFT_STEPS), "tpot_slo_ms": (config.tpot_slo_ms, TPOT_STEPS)}
    is_given = any(aim is not None for aim, _ in aims.values())
    caps = not facts.whole_prompts and (is_given or gpu is not None and not facts.offline)
    left_open = {name: steps for name, (aim, steps) in aims.items() if aim is None}
    if caps:
        return True, {name: (None, f"{steps} decode steps, as measured") for name, steps in left_open.items()}
    why = (
        "prompts are computed whole"
        if facts.whole_prompts
        else f"prompts are not capped {'offline' if gpu else 'on a CPU'}"
    )
    return False, {name: (None, why) for name in left_open}


def _drafts_by_model(config: EngineConfig) -> bool:
    speculation = parse_speculation(config.speculative_config)
    return speculation is not None and speculation.method in MODEL_METHODS


def _require_lines(config: EngineConfig) -> None:
    speculation = parse_speculation(config.speculative_config)
    if speculation is not None and speculation.verification == REJECTION:
        raise InvalidConfig(
            f"speculative_config: verification={REJECTION} draws on the host and cannot be used on a GPU: leave it "
            "out, or set device=cpu"
        )
    if speculation is not None and speculation.tree:
        raise InvalidConfig(
            "speculative_config: tree=true cannot be used on a GPU, which verifies lines of draft tokens: leave tree "
            "out, or set device=cpu"
        )


def _why_no_drafts(config: EngineConfig, facts: Facts, gpu: GpuFacts | None) -> str | None:
    """Return why nothing is drafted although the user did not say so; None if it is, or the user said so."""
    is_left_open = gpu is not None and config.speculative_config == AUTO
    reason = facts.no_drafts or ("on a GPU drafts must be asked for: set it to a JSON object" if is_left_open else "")
    if not reason or parse_speculation(config.speculative_config) is None:
        return None
    if config.speculative_config not in (AUTO, SAID_AUTO):
        raise InvalidConfig(
            f"speculative_config={config.speculative_config} cannot be used: {reason}; leave it out, "
            "answers are the same without"
        )
    return reason


def _loras(config: EngineConfig, facts: Facts, gpu: GpuFacts | None) -> dict[str, tuple[Any, str]]:
    return resolve_loras(config, facts.whole_prompts, count_lora_bytes(facts), None if gpu is None else gpu.name)


def _require_cpu_formats(config: EngineConfig, why: str) -> None:
    require_gpu(config, why)
    for name in ("kv_cache_dtype", "quantization"):
        if getattr(config, name) == "fp8":
            raise InvalidConfig(f"{name}=fp8 is for GPUs, but device=cpu ({why}): set int8, or leave it out")


def resolve(config: EngineConfig, facts: Facts) -> Resolved:
    """Fill in what the user left open. Pure: the same inputs give the same settings."""
    ranks = resolve_ranks(config, facts)
    device = _device(config, facts)
    gpu = facts.gpu if device[0] == "cuda" else None
    if gpu is None:
        _require_cpu_formats(config, device[1])
    require_host_memory(config, facts)
    derived: dict[str, tuple[Any, str]] = {"device": device} if config.device == "auto" else {}
    derived |= _on_gpu(config, facts, gpu) if gpu else {}
    derived |= {} if config.max_num_seqs or "max_num_seqs" in derived else {"max_num_seqs": (CPU_SEQS, DEFAULT)}
    if config.kv_cache_tokens is None:
        derived["kv_cache_tokens"] = (
            _gpu_cache_tokens(config, facts, gpu) if gpu and facts.bytes_per_token else _cache_tokens(config, facts)
        )
    cache_tokens = config.kv_cache_tokens or derived["kv_cache_tokens"][0]
    if config.max_model_len is None:
        derived["max_model_len"] = (
            (facts.context, "the model's context")
            if facts.context <= cache_tokens
            else (cache_tokens, f"the cache's size; the model's context is {facts.context}")
        )
    elif config.max_model_len > facts.context:
        raise InvalidConfig(
            f"max_model_len={config.max_model_len} is over the model's context of {facts.context}: "
            f"set at most {facts.context}"
        )
    longest = config.max_model_len or derived["max_model_len"][0]
    if config.max_num_batched_tokens is None:
        least, reason = derived.get("max_num_batched_tokens", (STEP_TOKENS, DEFAULT))
        derived["max_num_batched_tokens"] = (
            (max(least, longest), "an embedding model computes a prompt in one step")
            if facts.whole_prompts
            else (least, reason)
        )
    derived |= ranks
    if config.kv_cache_dtype == "auto" and gpu is None:
        derived["kv_cache_dtype"] = (
            (AUTO_KV_DTYPE, "half the bytes to read of float32, next to no loss")
            if config.dtype == "auto"
            else (config.dtype, "as dtype says")
        )
    if gpu is not None:
        _require_lines(config)
    if (why := _why_no_drafts(config, facts, gpu)) is not None:
        derived["speculative_config"] = OFF, why
    caps_prompts, aims = _aims(config, facts, gpu)
    derived |= aims | _loras(config, facts, gpu)
    if config.activation_dtype == "auto":
        derived["activation_dtype"] = "int8", "integer products; float32 widens the weights instead"
    values = {option.name: getattr(config, option.name) for option in fields(config)}
    values |= {name: each for name, (each, _) in derived.items()} | {"keeps_packed": _can_keep_codes(config, bool(gpu))}
    reasons = {
        option.name: DEFAULT if getattr(config, option.name) == option.default else "set by the user"
        for option in fields(config)
    }
    reasons |= {name: why for name, (_, why) in derived.items()}
    settings = tuple(Setting(name, values[name], why) for name, why in reasons.items())
    return Resolved(**values, settings=settings, caps_prompts=caps_prompts, lora_bytes=count_lora_bytes(facts))


def _can_keep_codes(config: EngineConfig, on_gpu: bool) -> bool:
    """Return True unless quantized matrices are widened: as asked, or to be rounded anew on a GPU."""
    return config.dtype == "auto" and not (on_gpu and config.quantization)
