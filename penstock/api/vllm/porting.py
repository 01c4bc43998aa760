"""Options of vLLM that Penstock does not need: accepted if they change nothing, refused if they would.

Anything that changes an answer, or promises a missing feature, is refused with the reason."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from penstock.config import EngineConfig
from penstock.errors import InvalidConfig, quote

_log = logging.getLogger(__name__)

# The same value under another name.
SPELLINGS: dict[str, dict[Any, Any]] = {
    "distributed_executor_backend": {"uni": "mp"},
    "dtype": {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto", "gguf": "auto", "hf": "auto"},
    "quantization": {"gguf": None},
    "max_model_len": {"auto": None, -1: None},
    "speculative_config": {None: "off", False: "off"},
}

# Accepted at any value, with the reason why nothing changes.
HARMLESS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(
        ("disable_log_stats", "disable_log_requests", "enable_log_requests", "use_tqdm_on_load"),
        (bool, "it concerns vLLM's log"),
    ),
    **dict.fromkeys(
        (
            "enable_chunked_prefill",
            "disable_cascade_attn",
            "use_v2_block_manager",
            "async_scheduling",
            "disable_async_output_proc",
        ),
        (bool, "steps are scheduled by max_num_batched_tokens alone"),
    ),
    **dict.fromkeys(
        (
            "max_seq_len_to_capture",
            "max_context_len_to_capture",
            "max_num_partial_prefills",
            "long_prefill_token_threshold",
            "num_scheduler_steps",
            "max_parallel_loading_workers",
        ),
        (int, "steps and graphs are sized by max_num_seqs and max_num_batched_tokens alone"),
    ),
    "swap_space": (float, "preempted sequences are recomputed"),
    "preemption_mode": (str, "preempted sequences are recomputed"),
    "enable_sleep_mode": (bool, "any model can sleep and wake up"),
    "trust_remote_code": (bool, "a checkpoint's code is never run"),
    "code_revision": (str, "a checkpoint's code is never run"),
    "disable_custom_all_reduce": (bool, "there is one device"),
    **dict.fromkeys(
        ("compilation_config", "attention_backend", "attention_config", "cuda_graph_sizes", "prefix_caching_hash_algo"),
        (str, "kernels and caches are Penstock's own"),
    ),
    **dict.fromkeys(
        ("guided_decoding_backend", "guided_decoding_disable_fallback"),
        (str, "there is one backend for structured outputs"),
    ),
    **dict.fromkeys(
        ("lora_extra_vocab_size", "long_lora_scaling_factors", "max_lora_prefetch"),
        (int, "adapters add no tokens, and ranks and factors come from their own configs"),
    ),
    "fully_sharded_loras": (bool, "a model runs on one device"),
    "lora_dtype": (str, "adapters are kept in the dtype of their files"),
    **dict.fromkeys(
        ("limit_mm_per_prompt", "mm_processor_cache_gb", "disable_mm_preprocessor_cache"), (str, "prompts are texts")
    ),
}

# Accepted at these values, with the reason why others are not.
LIMITED: dict[str, tuple[type, tuple[Any, ...], str]] = {
    **dict.fromkeys(
        ("data_parallel_size", "decode_context_parallel_size"),
        (int, (1,), "a model runs on one device: set it to 1, or start a server per device"),
    ),
    **dict.fromkeys(
        ("speculative_model", "num_speculative_tokens", "spec_model", "spec_method", "spec_tokens"),
        (str, (), "speculative decoding is set by speculative_config alone, a JSON object"),
    ),
    "hf_overrides": (str, ({},), "a model's config is not overridden: change config.json"),
    **dict.fromkeys(
        ("rope_scaling", "rope_theta"), (str, (), "a model's config is not overridden: change config.json")
    ),
    "tokenizer_mode": (str, ("auto", "hf", "slow", "fast"), "a tokenizer is read from tokenizer.json or the GGUF file"),
    "tokenizer_revision": (str, (), "the tokenizer comes from the model's revision: give tokenizer= a folder"),
    "config_format": (str, ("auto", "hf"), "a model's config is read from config.json or the GGUF file"),
    "model_impl": (str, ("auto", "vllm"), "only Penstock's own model families are used"),
    "task": (str, ("auto", "generate", "embed", "embedding", "score"), "models generate text or embed it"),
    "runner": (str, ("auto", "generate", "pooling"), "models generate text or embed it"),
    "convert": (str, ("auto", "none", "embed"), "models generate text or embed it"),
    **dict.fromkeys(
        ("num_lookahead_slots", "offload_group_size"),
        (float, (0,), "weights must fit on one device: quantize, or choose a smaller model"),
    ),
    "kv_offloading_backend": (str, ("native",), "blocks are kept in Penstock's own store"),
    "kv_cache_memory_bytes": (int, (), "the cache is sized in tokens: set kv_cache_tokens"),
    "num_gpu_blocks_override": (int, (), "the cache is sized in tokens: set kv_cache_tokens"),
    "structured_outputs_config": (str, ({},), "only its 'backend' is taken: set the rest in StructuredOutputsParams"),
    "logits_processors": (str, ([], ()), "processors are given per request: SamplingParams(logits_processors=[…])"),
    "logprobs_mode": (str, ("raw_logprobs",), "log probabilities are of the model's own distribution"),
    "max_logprobs": (int, tuple(range(65)), "at most 64 log probabilities are reported per token"),
    "disable_sliding_window": (bool, (False,), "the model's own sliding windows are used: set max_model_len"),
    "calculate_kv_scales": (bool, (False,), "an fp8 cache has no scales to calculate"),
    "enable_prompt_embeds": (bool, (False,), "prompts are texts or token ids"),
    "mm_processor_kwargs": (str, ({},), "prompts are texts or token ids"),
    "hf_token": (str, (True, False), "set HF_TOKEN in the environment"),
    "download_dir": (str, (), "models are kept where PENSTOCK_HOME says"),
    **dict.fromkeys(
        ("pooler_config", "override_pooler_config"), (str, ({},), "an embedding model pools as its files say")
    ),
    **dict.fromkeys(
        (
            "kv_transfer_config",
            "kv_events_config",
            "ec_transfer_config",
            "profiler_config",
            "additional_config",
            "scheduler_cls",
            "worker_cls",
            "worker_extension_cls",
        ),
        (str, ({},), "Penstock does not have it: leave it out"),
    ),
}
# Flags of `vllm serve` alone.
SERVER_HARMLESS: dict[str, tuple[type, str]] = {
    "enable_auto_tool_choice": (bool, "tool calls are read wherever a request has tools"),
    "enable_prompt_tokens_details": (bool, "usage always tells the cached tokens"),
    **dict.fromkeys(
        ("disable_frontend_multiprocessing", "enable_server_load_tracking"), (bool, "the API has a process of its own")
    ),
    "uvicorn_log_level": (str, "it concerns vLLM's log"),
}
SERVER_LIMITED: dict[str, tuple[type, tuple[Any, ...], str]] = {
    "api_server_count": (int, (1,), "one process serves the API"),
    "response_role": (str, ("assistant",), "answers are the assistant's"),
    "chat_template_content_format": (str, ("auto", "string"), "templates are given texts"),
}
# Methods of vLLM's LLM that Penstock lacks.
ABSENT = {
    "classify": "no model with a classifier's head can be loaded yet",
    "reward": "no reward model can be loaded yet",
    "get_metrics": "use stats()",
    "start_profile": "put torch.profiler.profile() around the call",
    "stop_profile": "put torch.profiler.profile() around the call",
    "collective_rpc": "the model runs in this process",
    "apply_model": "the model is no torch module",
}
BACKEND_KEYS = {"backend", "disable_fallback"}  # of structured_outputs_config
TASKS = ("task", "runner", "convert")
GENERATES, EMBEDS = ("generate",), ("embed", "embedding", "score", "pooling")


def port_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the EngineConfig options among those a vLLM script passes."""
    known = {option.name: option for option in fields(EngineConfig)}
    ported: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            value = _spelling(name, value)
            if value is not None or known[name].default is None:
                ported[name] = value
        elif not take_option(name, value):
            ported[name] = value  # EngineConfig refuses it
    return ported


def take_option(name: str, value: Any) -> bool:
    """Accept a vLLM option that changes nothing, refuse one that would; False if it is unknown."""
    return _take(name, value, HARMLESS, LIMITED)


def take_flag(name: str, value: Any) -> bool:
    """Like `take_option`, for flags of `vllm serve`; a value that starts with a brace is JSON."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidConfig(f"{name}={quote(value)} is not valid JSON: {error}") from None
    if name in TASKS:
        _log.info("%s=%s has no effect: the model's files decide", name, quote(value))
    return take_option(name, value) or _take(name, value, SERVER_HARMLESS, SERVER_LIMITED)


def _take(
    name: str,
    value: Any,
    harmless: Mapping[str, tuple[type, str]],
    limited: Mapping[str, tuple[type, tuple[Any, ...], str]],
) -> bool:
    if name in harmless:
        _log.info("%s=%s has no effect: %s", name, quote(value), harmless[name][1])
        return True
    if name not in limited:
        return False
    if name == "structured_outputs_config" and _backend_only(value):
        return True
    _, taken, why = limited[name]
    if value is not None and value not in [one for one in taken if isinstance(one, bool) == isinstance(value, bool)]:
        raise InvalidConfig(f"{name}={quote(value)} is not supported: {why}")
    return True


def _backend_only(config: Any) -> bool:
    given = config if isinstance(config, Mapping) else getattr(config, "__dict__", {"": config})
    return not set(given) - BACKEND_KEYS


def _spelling(name: str, value: Any) -> Any:
    text = str(value).removeprefix("torch.") if name == "dtype" and value is not None else value
    others = SPELLINGS.get(name, {})
    return others.get(text, text) if type(text) in (str, int, bool, type(None)) else text


def check_task(options: Mapping[str, Any], is_encoder: bool, model: str) -> None:
    """Refuse a model that does not do what `task`, `runner` or `convert` ask."""
    for name in TASKS:
        value = options.get(name)
        if value in (GENERATES if is_encoder else EMBEDS):
            does = "embeds texts and generates none" if is_encoder else "generates text and has no embeddings"
            raise InvalidConfig(f"{name}={value!r}, but {model} {does}: leave it out, or choose another model")


DEFAULT_MODEL = "smollm2"


class EngineArgs:
    """A model's name and options; its `vars` are the arguments of LLM."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        EngineConfig.from_options(**port_options(options))
        self.model = model
        vars(self).update(options)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option; options not given are absent from the result."""
        parser.add_argument("--model", default=DEFAULT_MODEL, help="folder, .gguf file, short name or org/name")
        kinds = get_type_hints(EngineConfig)
        for option in fields(EngineConfig):
            _add_flag(parser, option.name, kinds[option.name], option.metadata["help"])
        for name, taken in (*HARMLESS.items(), *LIMITED.items()):
            if name not in kinds:
                _add_flag(parser, name, taken[0], argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        known = {option.name for option in fields(EngineConfig)} | set(HARMLESS) | set(LIMITED) | {"model"}
        return cls(**{name: value for name, value in vars(args).items() if name in known})


class AsyncEngineArgs(EngineArgs):
    """EngineArgs for AsyncLLMEngine."""


def _add_flag(parser: argparse.ArgumentParser, name: str, kind: Any, help: str) -> None:
    dashed = f"--{name.replace('_', '-')}"
    plain = next((part for part in getattr(kind, "__args__", ()) if part is not type(None)), kind)
    if plain is bool:
        parser.add_argument(dashed, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help)
    else:
        parser.add_argument(dashed, type=plain if plain in (int, float) else str, default=argparse.SUPPRESS, help=help)
