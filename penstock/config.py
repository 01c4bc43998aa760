"""Engine options: one frozen dataclass. Flags, documentation and checks are generated from its fields."""

from __future__ import annotations

import json
import math
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from penstock.errors import InvalidConfig, shown

GIB = 1 << 30
STEP_TOKENS = 512  # enough to fill the cores, few enough to keep other answers flowing
LEAST_TOKENS = 8192  # of cache, where memory allows
CPU_SEQS, GPU_SEQS = 64, 256
GPU_STEP_TOKENS = 8192
OFFLINE_STEP_TOKENS = 16384  # on a large GPU, where nobody waits for the tokens of others
LARGE_GPU = 64 * GIB
GPU_RESERVE = 3 * GIB  # what the driver, cuBLAS and the recorded steps take, and what is lost between allocations
GPU_FREE_SHARE = 0.95  # of what other processes leave free: what they hold grows, too
INT_BYTES = {"int8": (17 / 16, 17 / 16), "int4": (10 / 16, 17 / 16)}  # a value: of layers, of embedding and head
INT_SCRATCH = GIB // 8  # where integers are widened on a GPU
INT_LOADING = GIB  # what rounding to integers takes
TWICE_RECORDED = 64  # sequences at most whose steps differ with short and long texts, given 4 key heads or more
LOGIT_ROWS = 64  # prompt log probabilities are made from so many rows of logits at a time
POLICIES = ("fcfs", "priority", "lpm", "sjf")
CAPACITIES = ("ondemand", "reserve")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8", "fp8")
DEVICES = ("auto", "cpu", "cuda")
AUTO_KV_DTYPE = "float16"
QUANTIZATIONS = ("int8", "int4", "fp8")
ACTIVATION_DTYPES = ("auto", "float32", "int8")
LOAD_FORMATS = ("auto", "dummy")
MAX_POSITIONS = 2**31 - 1  # they are counted in 32 bits
MAX_CACHE_TOKENS = 2**48


def option(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "least": least, "most": most})


_KINDS = {
    "str": (str, "a string"),
    "int": (int, "a whole number"),
    "bool": (bool, "True or False"),
    "float": (float, "a number"),
    "tuple[str, ...]": (tuple, "a string or a list of strings"),
}


def check_options(config: Any) -> None:
    """Refuse a value of the wrong type, outside its range or unknown, for every field of a config."""
    for option in fields(config):
        value = getattr(config, option.name)
        if value is not None or option.default is not None:
            _check_type(option, value)
            _check_range(option, value)


def _check_type(option: Field[Any], value: Any) -> None:
    choices = option.metadata["choices"]
    if choices and value not in choices:
        raise InvalidConfig(f"{option.name}={shown(value)} is unknown: choose one of {', '.join(choices)}")
    kind, meant = _KINDS[str(option.type).removesuffix(" | None")]
    wrong = type(value) is not kind and not (kind is float and type(value) is int)
    if wrong or kind is tuple and not all(type(part) is str for part in value):
        raise InvalidConfig(f"{option.name}={shown(value)} is not understood: it must be {meant}")
    for text in value if kind is tuple else [value] if kind is str else []:
        if "\0" in text:
            raise InvalidConfig(f"{option.name}={shown(text)} is not understood: it must have no null byte")


def _check_range(option: Field[Any], value: Any) -> None:
    least, most = option.metadata["least"], option.metadata["most"]
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidConfig(f"{option.name}={value} is out of range: it must be {_range(least, most)}")
    if (least is not None and value < least) or (most is not None and value > most):
        far = most is not None and most >= MAX_POSITIONS and value < least  # nobody comes near the other end
        raise InvalidConfig(
            f"{option.name}={shown(value)} is out of range: it must be {_range(least, None if far else most)}"
        )


def _range(least: float | None, most: float | None) -> str:
    if least is None or most is None:
        return "a finite number" if least is None else f"{least} or more"
    return f"{least} to {most}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may set. None means: derived from the model and the machine by `resolve`."""

    tokenizer: str | None = option(None, "folder or .gguf file to take the tokenizer from, if not the model's own")
    chat_template: str | None = option(
        None,
        "file with a Jinja chat template, or the template itself, in place of the "
        "model's own; of several models for the first",
    )
    revision: str | None = option(None, "branch, tag or commit of a model on the Hugging Face hub")
    load_format: str = option("auto", "auto, or dummy for seeded random weights from config.json alone", LOAD_FORMATS)
    skip_tokenizer_init: bool = option(False, "work on token ids only")
    parse_special_tokens: bool = option(
        False, "read control tokens that messages spell as such; anyone who writes messages can then forge turns"
    )
    device: str = option("auto", "where the model runs; auto: a GPU that is there and free, else the CPU", DEVICES)
    gpu_memory_utilization: float = option(
        0.9,
        "share of the GPU's memory for this engine's weights, cache and all else, as far as others leave it free",
        least=0.05,
        most=1.0,
    )
    enforce_eager: bool = option(False, "launch a GPU's kernels one by one instead of replaying recorded steps")
    deterministic: bool = option(False, "on a GPU too the same answer, bit for bit, whatever else runs; slower there")
    dtype: str = option("auto", "how matrices are held; auto: as stored, quantized ones packed", DTYPES)
    quantization: str | None = option(
        None, "round a checkpoint's unquantized matrices at load; fp8 is for GPUs", QUANTIZATIONS
    )
    activation_dtype: str = option("auto", "what packed matrices are multiplied with", ACTIVATION_DTYPES)
    kv_cache_dtype: str = option(
        "auto",
        "how keys and values are stored; auto: as dtype says, and where that is auto "
        "float16, on a GPU as the weights; int8 is for CPUs, fp8 for GPUs",
        KV_CACHE_DTYPES,
    )
    max_model_len: int | None = option(None, "longest prompt plus answer, in tokens", least=1, most=MAX_POSITIONS)
    max_num_seqs: int | None = option(None, "most sequences in one step", least=1, most=65535)
    max_num_batched_tokens: int | None = option(
        None, "most tokens in one step; longer prompts are cut", least=1, most=MAX_POSITIONS
    )
    kv_cache_tokens: int | None = option(None, "size of the key/value cache, in tokens", least=1, most=MAX_CACHE_TOKENS)
    block_size: int = option(16, "positions per cache block", least=1, most=256)
    enable_prefix_caching: bool = option(True, "reuse the cache of equal prompt beginnings")
    scheduling_policy: str = option(
        "fcfs", "who runs first: arrival, priority, longest cached prefix or shortest", POLICIES
    )
    capacity: str = option(
        "ondemand", "admit by present need and preempt, or reserve to the end of each answer", CAPACITIES
    )
    threads: int | None = option(None, "CPU threads", least=1, most=256)
    generation_config: str = option(
        "auto",
        "where the sampling defaults come from: auto for the model, vllm for "
        "neutral ones, or a folder that has a generation_config.json",
    )
    override_generation_config: str | None = option(
        None, 'sampling defaults as JSON, over those of generation_config: {"temperature": 0.5}'
    )
    seed: int = option(
        0, "seeds dummy weights, and requests without a seed of their own", least=-(2**63), most=2**64 - 1
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.override_generation_config is not None:
            from penstock.override import parse_override

            parse_override(self.override_generation_config)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """`override_generation_config` may be a dict, too."""
        if isinstance(override := options.get("override_generation_config"), dict):
            options["override_generation_config"] = json.dumps(override, default=str) if override else None
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidConfig(f"unknown option {name!r}: the options are {', '.join(known)}")
        return cls(**options)


@dataclass(frozen=True)
class GpuFacts:
    """What `resolve` may know of a GPU, and of the model on it."""

    name: str
    total_bytes: int
    free_bytes: int
    weight_bytes: int  # at 16 bits
    bytes_per_step_token: int  # of a step's largest intermediate results
    vocab_size: int
    dtype: str = "bfloat16"  # of the checkpoint, where it is a 16-bit one
    bytes_per_sequence: int = 0  # of what its sampling asks for
    has_fp8: bool = True
    checked: bool = True  # models of this architecture have been compared with others on a GPU
    fp8_bytes: int = 0  # of weights, those of the layers' matrices in 8-bit floats
    layer_bytes: int = 0  # of the widest layer's weights, at 16 bits
    outer_bytes: int = 0  # of weight_bytes, embedding's and head's
    largest_bytes: int = 0  # of one matrix at 16 bits
    lacks: str = ""  # what kernels need and is not there, with the remedy


@dataclass(frozen=True)
class Facts:
    """What `resolve` may know of model and machine."""

    context: int  # positions the model was made for
    bytes_per_token: int  # of key/value cache, over all layers
    free_memory_bytes: int
    num_cores: int
    whole_prompts: bool = False  # a prompt must be computed in one step
    offline: bool = False  # answers count, not how soon each token comes
    gpu: GpuFacts | None = None


@dataclass(frozen=True)
class Setting:
    name: str
    value: Any
    why: str


@dataclass(frozen=True)
class Resolved:
    """The options with every None filled in, and the reason for each value."""

    config: EngineConfig
    settings: tuple[Setting, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.config, name)


def _cache_tokens(config: EngineConfig, facts: Facts) -> tuple[int, str]:
    if facts.bytes_per_token == 0:
        return config.max_model_len or facts.context, "the model keeps no cache; one longest request"
    budget = min(GIB, facts.free_memory_bytes // 4)
    fit = max(config.block_size, budget // facts.bytes_per_token)
    wanted = max(4 * (config.max_model_len or facts.context), LEAST_TOKENS)
    if config.max_model_len and fit < config.max_model_len:
        return config.max_model_len, "room for one request of max_model_len"
    if wanted <= fit:
        return wanted, f"room for four requests of the longest length, and for {LEAST_TOKENS} tokens at least"
    return fit, f"what fits in {budget / GIB:.2g} GiB (1 GiB, or a quarter of the free memory if that is less)"


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences for which steps are recorded on a GPU; others are filled up to the next of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def _weight_bytes(config: EngineConfig, gpu: GpuFacts) -> int:
    if config.quantization in INT_BYTES:
        layer, outer = INT_BYTES[config.quantization]
        return int((layer * (gpu.weight_bytes - gpu.outer_bytes) + outer * gpu.outer_bytes) / 2) + INT_SCRATCH
    return (2 if config.dtype == "float32" else 1) * (
        gpu.fp8_bytes if config.quantization == "fp8" else gpu.weight_bytes
    )


def _gpu_share(config: EngineConfig, gpu: GpuFacts) -> tuple[int, str]:
    """What one engine may take, and in words. What others hold is not counted against it while enough is free."""
    wanted, most = config.gpu_memory_utilization * gpu.total_bytes, GPU_FREE_SHARE * gpu.free_bytes
    if wanted <= most:
        return int(wanted), f"{config.gpu_memory_utilization:g} of the GPU's memory"
    return int(most), f"{GPU_FREE_SHARE:g} of what is free of the GPU's memory"


def _gpu_fit(config: EngineConfig, facts: Facts, gpu: GpuFacts) -> int:
    """Tokens of cache in what is left of the GPU's share once weights, a step's results and recorded steps have
    theirs; none where loading already takes more, since a matrix lies beside what becomes of it."""
    wide = 2 if config.dtype == "float32" else 1
    seqs, tokens = config.max_num_seqs or GPU_SEQS, config.max_num_batched_tokens or _gpu_step(facts, gpu)[0]
    rows = sum(size if size > TWICE_RECORDED else 2 * size for size in graph_sizes(seqs))
    logits = 2 * gpu.vocab_size * (2 * rows + 4 * (LOGIT_ROWS + seqs))  # with shared prefixes, too
    wishes = (seqs + 1) * gpu.bytes_per_sequence
    room = _gpu_share(config, gpu)[0] - _weight_bytes(config, gpu)
    if (
        config.quantization in INT_BYTES
        and room < 4 * gpu.largest_bytes + INT_LOADING
        or config.quantization == "fp8"
        and room < wide * gpu.layer_bytes
    ):
        return 0
    left = room - wide * (tokens * gpu.bytes_per_step_token + logits) - wishes - GPU_RESERVE
    return max(0, left) // max(1, facts.bytes_per_token)


def _gpu_cache_tokens(config: EngineConfig, facts: Facts, gpu: GpuFacts) -> tuple[int, str]:
    fit, (share, words) = _gpu_fit(config, facts, gpu), _gpu_share(config, gpu)
    if fit < config.block_size:
        raise InvalidConfig(
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {gpu.total_bytes / GIB:.1f} GiB "
            f"({gpu.free_bytes / GIB:.1f} free) leaves no room for a cache beside "
            f"{_weight_bytes(config, gpu) / GIB:.1f} GiB of weights, since {words} is {share / GIB:.1f} GiB: raise it, "
            "end what else holds the GPU's memory, quantize, or lower max_num_batched_tokens"
        )
    return fit, f"what is left of {words}"


def _device(config: EngineConfig, facts: Facts) -> tuple[str, str]:
    if config.device == "cuda" and facts.gpu is None:
        raise InvalidConfig("device=cuda, but torch sees no GPU: install a CUDA build of torch, or set device=cpu")
    if config.device == "cuda" and facts.gpu is not None and facts.gpu.lacks:
        raise InvalidConfig(f"device=cuda needs {facts.gpu.lacks}, or set device=cpu")
    if config.device != "auto":
        return config.device, "set by the user"
    if facts.gpu is None:
        return "cpu", "there is no GPU that torch can use"
    if facts.gpu.lacks:
        return "cpu", f"a GPU needs {facts.gpu.lacks}"
    if not facts.gpu.checked:
        return "cpu", "models of this kind have not been checked on a GPU"
    if config.kv_cache_dtype == "int8":
        return "cpu", "an int8 cache is for CPUs"
    if config.kv_cache_tokens is None and _gpu_fit(config, facts, facts.gpu) < config.block_size:
        return "cpu", "the GPU's memory has no room for the model"
    return "cuda", facts.gpu.name


def _gpu_step(facts: Facts, gpu: GpuFacts) -> tuple[int, str]:
    """Tokens of a step."""
    if facts.offline and gpu.total_bytes >= LARGE_GPU:
        return OFFLINE_STEP_TOKENS, "default on a large GPU, offline"
    return GPU_STEP_TOKENS, "default on a GPU"


def _on_gpu(config: EngineConfig, facts: Facts, gpu: GpuFacts) -> dict[str, tuple[Any, str]]:
    """What a GPU decides otherwise."""
    if config.kv_cache_dtype == "int8":
        raise InvalidConfig("kv_cache_dtype=int8 is for CPUs: leave it out on a GPU, or set device=cpu")
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


def resolve(config: EngineConfig, facts: Facts) -> Resolved:
    """Fill in what the user left open. Pure: the same inputs give the same settings."""
    device = _device(config, facts)
    gpu = facts.gpu if device[0] == "cuda" else None
    for name in ("kv_cache_dtype", "quantization"):
        if gpu is None and getattr(config, name) == "fp8":
            raise InvalidConfig(f"{name}=fp8 is for GPUs, but device=cpu ({device[1]}): set int8, or leave it out")
    derived: dict[str, tuple[Any, str]] = {"device": device} if config.device == "auto" else {}
    derived |= _on_gpu(config, facts, gpu) if gpu else {}
    if config.max_num_seqs is None:
        derived.setdefault("max_num_seqs", (CPU_SEQS, "default"))
    if config.kv_cache_tokens is None:
        derived["kv_cache_tokens"] = (
            _gpu_cache_tokens(config, facts, gpu) if gpu and facts.bytes_per_token else _cache_tokens(config, facts)
        )
    cache_tokens = config.kv_cache_tokens or derived["kv_cache_tokens"][0]
    if config.max_model_len is None:
        if facts.context <= cache_tokens:
            derived["max_model_len"] = facts.context, "the model's context"
        else:
            derived["max_model_len"] = cache_tokens, f"the cache's size; the model's context is {facts.context}"
    elif config.max_model_len > facts.context:
        raise InvalidConfig(
            f"max_model_len={config.max_model_len} is over the model's context of {facts.context}: "
            f"set at most {facts.context}"
        )
    longest = config.max_model_len or derived["max_model_len"][0]
    if config.max_num_batched_tokens is None:
        least, reason = derived.get("max_num_batched_tokens", (STEP_TOKENS, "default"))
        derived["max_num_batched_tokens"] = (
            (max(least, longest), "an embedding model computes a prompt in one step")
            if facts.whole_prompts
            else (least, reason)
        )
    if config.threads is None:
        derived["threads"] = facts.num_cores, "the cores this process may use"
    if config.kv_cache_dtype == "auto" and gpu is None:
        derived["kv_cache_dtype"] = (
            (AUTO_KV_DTYPE, "half the bytes to read of float32, next to no loss")
            if config.dtype == "auto"
            else (config.dtype, "as dtype says")
        )
    if config.activation_dtype == "auto":
        derived["activation_dtype"] = "int8", "integer products; float32 widens the weights instead"
    final = replace(config, **{name: value for name, (value, _) in derived.items()})
    settings = []
    for option in fields(config):
        value = getattr(final, option.name)
        why = (
            derived[option.name][1]
            if option.name in derived
            else ("default" if getattr(config, option.name) == option.default else "set by the user")
        )
        settings.append(Setting(option.name, value, why))
    return Resolved(final, tuple(settings))
