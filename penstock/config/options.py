"""Engine options: one frozen dataclass. Flags, documentation and checks are generated from its fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from penstock.config.cache_dtypes import parse_skips
from penstock.config.speculation import AUTO, parse_speculation
from penstock.config.vllm_speculation import spell_option
from penstock.errors import InvalidConfig, InvalidRequest, quote
from penstock.types import SamplingParams

NAMES = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
RARE_NAMES = (
    "presence_penalty",
    "frequency_penalty",
    "repeat_last_n",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)
LENGTH = "max_new_tokens"  # as generation_config.json calls max_tokens
OPTION = "override_generation_config"


def parse_override(text: str) -> dict[str, Any]:
    """Parse values by name; None stands for the neutral value, whatever the model recommends."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidConfig(f'{OPTION}={quote(text)} is not valid: give a JSON object like {{"temperature": 0.5}}')
    for name, value in values.items():
        if name not in (*NAMES, *RARE_NAMES, LENGTH):
            raise InvalidConfig(f"{OPTION} has no {quote(name)}: give {', '.join((*NAMES, *RARE_NAMES))} or {LENGTH}")
        if value is not None:
            _check(name, value)
    return values


def _check(name: str, value: Any) -> None:
    try:
        make_sampling({name: value})
    except InvalidRequest as error:
        raise InvalidConfig(f"{OPTION}: {str(error).replace('max_tokens', LENGTH)}") from None


def make_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """Make parameters of values by generation_config.json's names."""
    return SamplingParams(**{"max_tokens" if name == LENGTH else name: value for name, value in values.items()})


POLICIES = ("fcfs", "priority", "lpm", "sjf")
CAPACITIES = ("ondemand", "reserve")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8", "int4", "fp8")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZATIONS = ("int8", "int4", "fp8")
ACTIVATION_DTYPES = ("auto", "float32", "int8")
BACKENDS = ("mp", "ray")
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")  # Ray's
LOAD_FORMATS = ("auto", "dummy")
MAX_POSITIONS = 2**31 - 1  # they are counted in 32 bits
MAX_CACHE_TOKENS = 2**48
MAX_SLO_MS = 86_400_000  # a day
TTFT_STEPS, TPOT_STEPS = 60, 5  # default aims on a GPU, in measured decode steps without rows


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
        raise InvalidConfig(f"{option.name}={quote(value)} is unknown: choose one of {', '.join(choices)}")
    kind, meant = _KINDS[str(option.type).removesuffix(" | None")]
    wrong = type(value) is not kind and not (kind is float and type(value) is int)
    if wrong or kind is tuple and not all(type(part) is str for part in value):
        raise InvalidConfig(f"{option.name}={quote(value)} is not valid: it must be {meant}")
    for text in value if kind is tuple else [value] if kind is str else []:
        if "\0" in text:
            raise InvalidConfig(f"{option.name}={quote(text)} is not valid: it must have no null byte")


def _check_range(option: Field[Any], value: Any) -> None:
    least, most = option.metadata["least"], option.metadata["most"]
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidConfig(f"{option.name}={value} is out of range: it must be {_range(least, most)}")
    if (least is not None and value < least) or (most is not None and value > most):
        far = most is not None and most >= MAX_POSITIONS and value < least  # the other end is out of reach
        raise InvalidConfig(
            f"{option.name}={quote(value)} is out of range: it must be {_range(least, None if far else most)}"
        )


def _range(least: float | None, most: float | None) -> str:
    if least is None or most is None:
        return "a finite number" if least is None else f"{least} or more"
    return f"{least} to {most}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options that a user may set. `resolve` derives those left None from the model and the machine."""

    tokenizer: str | None = option(None, "folder or .gguf file of the tokenizer (default: the model's own)")
    chat_template: str | None = option(
        None, "Jinja chat template, as a file or as text (default: the model's own); with several models, the first's"
    )
    revision: str | None = option(None, "branch, tag or commit on the Hugging Face hub")
    load_format: str = option("auto", "auto, or dummy for random weights, which need only config.json", LOAD_FORMATS)
    skip_tokenizer_init: bool = option(False, "load no tokenizer: token ids only")
    parse_special_tokens: bool = option(
        False, "treat control tokens spelled in messages as such; unsafe: users can forge turns"
    )
    device: str = option("auto", "auto: a free GPU, else the CPU", DEVICES)
    gpu_memory_utilization: float = option(0.9, "share of GPU memory to fill", least=0.05, most=1.0)
    cpu_offload_gb: float = option(
        0.0,
        "GiB of the weights to keep in host memory, from where a GPU reads them in every step",
        least=0.0,
        most=65536.0,
    )
    enforce_eager: bool = option(False, "disable CUDA graphs")
    deterministic: bool = option(
        False, "bitwise reproducible answers on a GPU in any batch; slower (a CPU always has them)"
    )
    dtype: str = option("auto", "dtype of the weights; auto: as stored, quantized ones stay quantized", DTYPES)
    quantization: str | None = option(None, "quantize unquantized weights at load; fp8 needs a GPU", QUANTIZATIONS)
    activation_dtype: str = option("auto", "dtype of activations in quantized matmuls", ACTIVATION_DTYPES)
    kv_cache_dtype: str = option(
        "auto",
        "dtype of the KV cache; auto: dtype, else float16 on a CPU and the weights' on a GPU; int8 and int4 "
        "need a CPU, fp8 a GPU",
        KV_CACHE_DTYPES,
    )
    kv_cache_dtype_skip_layers: str | None = option(
        None, "layers that a quantized KV cache keeps in full: numbers, sliding_window, or both: 0,1,sliding_window"
    )
    max_model_len: int | None = option(
        None, "context length: max tokens of prompt plus answer", least=1, most=MAX_POSITIONS
    )
    max_num_seqs: int | None = option(None, "max sequences per step", least=1, most=65535)
    max_num_batched_tokens: int | None = option(
        None, "max tokens per step; longer prompts are prefilled in chunks", least=1, most=MAX_POSITIONS
    )
    kv_cache_tokens: int | None = option(None, "size of the KV cache, in tokens", least=1, most=MAX_CACHE_TOKENS)
    block_size: int = option(16, "tokens per KV cache block", least=1, most=256)
    enable_prefix_caching: bool = option(True, "reuse the KV cache of shared prompt prefixes")
    kv_offloading_size: float = option(
        0.0, "GiB of memory for KV cache blocks that leave the cache, to restore prefixes from", least=0.0, most=65536.0
    )
    kv_offloading_path: str | None = option(
        None, "folder for KV cache blocks: prefixes are restored from it after a restart, and by other engines"
    )
    kv_offloading_disk_size: float = option(
        16.0, "GiB that kv_offloading_path may take, the oldest dropped first", least=0.001, most=1048576.0
    )
    scheduling_policy: str = option(
        "fcfs", "scheduling order: arrival, priority, longest cached prefix, or shortest job", POLICIES
    )
    capacity: str = option(
        "ondemand", "admit by present need and preempt, or reserve KV cache for whole answers", CAPACITIES
    )
    ttft_slo_ms: float | None = option(
        None,
        "aim for the time to first token; the server refuses requests that would take twice as long "
        f"(default: {TTFT_STEPS} decode steps on a GPU, none refused)",
        least=1,
        most=MAX_SLO_MS,
    )
    tpot_slo_ms: float | None = option(
        None,
        "aim for the time per output token: caps the prompt tokens of a step "
        f"(default: {TPOT_STEPS} decode steps on a GPU)",
        least=0.1,
        most=MAX_SLO_MS,
    )
    speculative_config: str = option(
        AUTO, 'speculative decoding: auto, off, or JSON: {"method": "ngram", "num_speculative_tokens": 4}'
    )
    enable_lora: bool = option(False, "serve LoRA adapters beside the model")
    max_loras: int = option(8, "different adapters, or sums of some, in one step", least=1, most=1024)
    max_lora_rank: int = option(16, "largest rank of an adapter", least=1, most=4096)
    max_cpu_loras: int | None = option(
        None,
        "adapters in memory; others are read from disk when needed (default: an eighth of the free memory)",
        least=1,
        most=65536,
    )
    tensor_parallel_size: int = option(
        1, "tensor-parallel ranks: processes that have a share of each matrix", least=1, most=64
    )
    enable_expert_parallel: bool = option(False, "deal experts out to tensor-parallel ranks, instead of cutting each")
    pipeline_parallel_size: int = option(1, "pipeline stages: processes that have some layers each", least=1, most=256)
    distributed_executor_backend: str = option(
        "mp", "start processes of several ranks here (mp), or by Ray on the machines of its cluster", BACKENDS
    )
    ray_placement: str = option(
        "PACK", "place ranks on as few machines of Ray's cluster as can be, or on different ones", PLACEMENTS
    )
    nnodes: int = option(1, "machines that share a model without Ray", least=1, most=256)
    node_rank: int = option(0, "this machine's number; the server is on 0", least=0, most=255)
    master_addr: str = option("127.0.0.1", "address of machine 0, where it awaits the others")
    master_port: int = option(29501, "port of machine 0, where it awaits the others", least=1, most=65535)
    distributed_secret_file: str | None = option(
        None, "file with the secret that the machines prove to each other (or PENSTOCK_DISTRIBUTED_SECRET)"
    )
    distributed_tls_certfile: str | None = option(None, "encrypt connections between machines: this one's certificate")
    distributed_tls_keyfile: str | None = option(None, "the certificate's key")
    distributed_tls_ca: str | None = option(None, "CA of the certificates of all machines")
    threads: int | None = option(None, "CPU threads of each process", least=1, most=256)
    generation_config: str = option(
        "auto",
        "source of sampling defaults: auto (the model), vllm (neutral), or a folder with a generation_config.json",
    )
    override_generation_config: str | None = option(
        None, 'sampling defaults as JSON, over generation_config: {"temperature": 0.5}'
    )
    seed: int = option(0, "seed of dummy weights, and of requests without their own", least=-(2**63), most=2**64 - 1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.override_generation_config is not None:
            parse_override(self.override_generation_config)
        parse_skips(self.kv_cache_dtype_skip_layers)
        parse_speculation(self.speculative_config)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise InvalidConfig(
                f"max_cpu_loras={self.max_cpu_loras} is under max_loras={self.max_loras}: those of a step are in "
                "memory too; raise it, or lower max_loras"
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Make a config from options by name; those that are JSON may be dicts."""
        if isinstance(override := options.get("override_generation_config"), dict):
            options["override_generation_config"] = json.dumps(override, default=str) if override else None
        if "speculative_config" in options:
            options["speculative_config"] = spell_option(options["speculative_config"])
        if options.get("max_cpu_loras") and "max_loras" not in options:
            options["max_loras"] = min(cls.max_loras, options["max_cpu_loras"])
        known = [option.name for option in fields(cls)]
        if isinstance(named := options.get("kv_cache_dtype_skip_layers"), list | tuple):  # as vLLM has them
            options["kv_cache_dtype_skip_layers"] = ",".join(map(str, named)) or None
        for name in options:
            if name not in known:
                raise InvalidConfig(f"unknown option {name!r}: the options are {', '.join(known)}")
        return cls(**options)
