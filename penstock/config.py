"""Engine options: one frozen dataclass. Flags, documentation and checks are generated from its fields."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.errors import InvalidConfig, shown

GIB = 1 << 30
STEP_TOKENS = 512           # enough to fill the cores, few enough to keep other answers flowing
LEAST_TOKENS = 8192         # of cache, where memory allows
POLICIES = ("fcfs", "priority", "lpm", "sjf")
CAPACITIES = ("ondemand", "reserve")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8")
AUTO_KV_DTYPE = "float16"
QUANTIZATIONS = ("int8", "int4")
ACTIVATION_DTYPES = ("auto", "float32", "int8")
LOAD_FORMATS = ("auto", "dummy")


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, least: int | None = None,
            most: int | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "least": least, "most": most})


_KINDS = {"str": (str, "a string"), "int": (int, "a whole number"), "bool": (bool, "True or False")}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may set. None means: derived from the model and the machine by `resolve`."""

    tokenizer: str | None = option(None, "folder or .gguf file to take the tokenizer from, if not the model's own")
    revision: str | None = option(None, "branch, tag or commit of a model on the Hugging Face hub")
    load_format: str = option("auto", "auto, or dummy for seeded random weights from config.json alone", LOAD_FORMATS)
    skip_tokenizer_init: bool = option(False, "work on token ids only")
    dtype: str = option("auto", "how matrices are held; auto: as stored, quantized ones packed", DTYPES)
    quantization: str | None = option(None, "pack a checkpoint's unquantized matrices at load", QUANTIZATIONS)
    activation_dtype: str = option("auto", "what packed matrices are multiplied with", ACTIVATION_DTYPES)
    kv_cache_dtype: str = option("auto", "how keys and values are stored; auto: float16", KV_CACHE_DTYPES)
    max_model_len: int | None = option(None, "longest prompt plus answer, in tokens", least=1)
    max_num_seqs: int = option(64, "most sequences in one step", least=1, most=65536)
    max_num_batched_tokens: int | None = option(None, "most tokens in one step; longer prompts are cut", least=1)
    kv_cache_tokens: int | None = option(None, "size of the key/value cache, in tokens", least=1)
    block_size: int = option(16, "positions per cache block", least=1, most=256)
    enable_prefix_caching: bool = option(True, "reuse the cache of equal prompt beginnings")
    scheduling_policy: str = option("fcfs", "who runs first: arrival, priority, longest cached prefix or shortest",
                                     POLICIES)
    capacity: str = option("ondemand", "admit by present need and preempt, or reserve to the end of each answer",
                            CAPACITIES)
    threads: int | None = option(None, "CPU threads", least=1, most=256)
    seed: int = option(0, "seeds dummy weights, and requests without a seed of their own")

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None and option.default is None:
                continue
            choices, least, most = (option.metadata[key] for key in ("choices", "least", "most"))
            if choices and value not in choices:
                raise InvalidConfig(f"{option.name}={shown(value)} is unknown: choose one of {', '.join(choices)}")
            kind, meant = _KINDS[str(option.type).removesuffix(" | None")]
            if type(value) is not kind:
                raise InvalidConfig(f"{option.name}={shown(value)} is not understood: it must be {meant}")
            if (least is not None and value < least) or (most is not None and value > most):
                limit = f"{least} or more" if most is None else f"{least} to {most}"
                raise InvalidConfig(f"{option.name}={value} is out of range: it must be {limit}")

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidConfig(f"unknown option {name!r}: the options are {', '.join(known)}")
        return cls(**options)


@dataclass(frozen=True)
class Facts:
    """What `resolve` may know of model and machine."""

    context: int                 # positions the model was made for
    bytes_per_token: int         # of key/value cache, over all layers
    free_memory_bytes: int
    num_cores: int
    whole_prompts: bool = False  # a prompt must be computed in one step


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


def resolve(config: EngineConfig, facts: Facts) -> Resolved:
    """Fill in what the user left open. Pure: the same inputs give the same settings."""
    derived: dict[str, tuple[Any, str]] = {}
    if config.kv_cache_tokens is None:
        derived["kv_cache_tokens"] = _cache_tokens(config, facts)
    cache_tokens = config.kv_cache_tokens or derived["kv_cache_tokens"][0]
    if config.max_model_len is None:
        if facts.context <= cache_tokens:
            derived["max_model_len"] = facts.context, "the model's context"
        else:
            derived["max_model_len"] = cache_tokens, f"the cache's size; the model's context is {facts.context}"
    elif config.max_model_len > facts.context:
        raise InvalidConfig(f"max_model_len={config.max_model_len} is over the model's context of {facts.context}: "
                            f"set at most {facts.context}")
    longest = config.max_model_len or derived["max_model_len"][0]
    if config.max_num_batched_tokens is None:
        derived["max_num_batched_tokens"] = (
            (max(STEP_TOKENS, longest), "an embedding model computes a prompt in one step") if facts.whole_prompts
            else (STEP_TOKENS, "default"))
    if config.threads is None:
        derived["threads"] = facts.num_cores, "the cores this process may use"
    if config.kv_cache_dtype == "auto":
        derived["kv_cache_dtype"] = AUTO_KV_DTYPE, "half the bytes to read of float32, next to no loss"
    if config.activation_dtype == "auto":
        derived["activation_dtype"] = "int8", "integer products; float32 widens the weights instead"
    final = replace(config, **{name: value for name, (value, _) in derived.items()})
    settings = []
    for option in fields(config):
        value = getattr(final, option.name)
        why = derived[option.name][1] if option.name in derived else (
            "default" if getattr(config, option.name) == option.default else "set by the user")
        settings.append(Setting(option.name, value, why))
    return Resolved(final, tuple(settings))
