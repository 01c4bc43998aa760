"""Options of vLLM that Penstock has no use for: taken where they change nothing, refused where they would.

Whatever changes an answer, or promises what is not there, is refused with the reason.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import InvalidConfig, shown

_log = logging.getLogger(__name__)

# A value under another name.
SPELLINGS: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto", "gguf": "auto", "hf": "auto"},
    "quantization": {"gguf": None},
    "max_model_len": {"auto": None, -1: None},
}

# Taken at any value, with the reason why nothing changes.
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
        (int, "steps are scheduled and recorded by max_num_seqs and max_num_batched_tokens alone"),
    ),
    "swap_space": (float, "a preempted sequence is computed again"),
    "preemption_mode": (str, "a preempted sequence is computed again"),
    "enable_sleep_mode": (bool, "any model can sleep and wake up"),
    "trust_remote_code": (bool, "no code of a checkpoint is ever run"),
    "code_revision": (str, "no code of a checkpoint is ever run"),
    "disable_custom_all_reduce": (bool, "there is one device"),
    "enable_expert_parallel": (bool, "there is one device"),
    **dict.fromkeys(
        ("compilation_config", "attention_backend", "attention_config", "cuda_graph_sizes", "prefix_caching_hash_algo"),
        (str, "kernels and caches are Penstock's own"),
    ),
    **dict.fromkeys(
        ("guided_decoding_backend", "guided_decoding_disable_fallback"),
        (str, "there is one backend for structured outputs"),
    ),
    **dict.fromkeys(
        ("max_loras", "max_lora_rank", "max_cpu_loras", "long_lora_scaling_factors"),
        (int, "without enable_lora it says nothing"),
    ),
    **dict.fromkeys(
        ("limit_mm_per_prompt", "mm_processor_cache_gb", "disable_mm_preprocessor_cache"), (str, "prompts are texts")
    ),
}

# Taken at these values; the reason why others are not.
LIMITED: dict[str, tuple[type, tuple[Any, ...], str]] = {
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
        (int, (1,), "a model runs on one device: set it to 1, or start a server per device"),
    ),
    "distributed_executor_backend": (str, ("mp", "uni"), "a model runs on one device: leave it out"),
    "enable_lora": (bool, (False,), "adapters are not supported yet: merge them into the weights"),
    "lora_modules": (str, (), "adapters are not supported yet: merge them into the weights"),
    **dict.fromkeys(
        (
            "speculative_config",
            "speculative_model",
            "num_speculative_tokens",
            "spec_model",
            "spec_method",
            "spec_tokens",
        ),
        (str, (), "there is no speculative decoding yet: leave it out, answers are the same without"),
    ),
    "hf_overrides": (str, ({},), "a model's config is read as it is: change config.json"),
    **dict.fromkeys(("rope_scaling", "rope_theta"), (str, (), "a model's config is read as it is: change config.json")),
    "tokenizer_mode": (str, ("auto", "hf", "slow", "fast"), "a tokenizer is read from tokenizer.json or the GGUF file"),
    "tokenizer_revision": (str, (), "a tokenizer is of the model's revision: give tokenizer= a folder"),
    "config_format": (str, ("auto", "hf"), "a model's config is read from config.json or the GGUF file"),
    "model_impl": (str, ("auto", "vllm"), "models run by Penstock's own families"),
    "task": (str, ("auto", "generate", "embed", "embedding", "score"), "models generate text or embed it"),
    "runner": (str, ("auto", "generate", "pooling"), "models generate text or embed it"),
    "convert": (str, ("auto", "none", "embed"), "models generate text or embed it"),
    **dict.fromkeys(
        ("cpu_offload_gb", "num_lookahead_slots", "offload_group_size"),
        (float, (0,), "weights lie on one device: quantize, or choose a smaller model"),
    ),
    "kv_cache_memory_bytes": (int, (), "the cache is sized in tokens: set kv_cache_tokens"),
    "num_gpu_blocks_override": (int, (), "the cache is sized in tokens: set kv_cache_tokens"),
    "structured_outputs_config": (str, ({},), "only its 'backend' is taken: set the rest in StructuredOutputsParams"),
    "logits_processors": (str, ([], ()), "processors are given per request: SamplingParams(logits_processors=[…])"),
    "logprobs_mode": (str, ("raw_logprobs",), "log probabilities are of the model's own distribution"),
    "max_logprobs": (int, tuple(range(65)), "at most 64 log probabilities are reported per token"),
    "disable_sliding_window": (bool, (False,), "windows are as the model was trained: set max_model_len"),
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
        (str, ({},), "Penstock has nothing of the kind: leave it out"),
    ),
}
# Flags of `vllm serve` alone.
SERVER_HARMLESS: dict[str, tuple[type, str]] = {
    "enable_auto_tool_choice": (bool, "tool calls are read wherever a request has tools"),
    **dict.fromkeys(
        ("disable_frontend_multiprocessing", "enable_server_load_tracking"), (bool, "the API has a process of its own")
    ),
    "uvicorn_log_level": (str, "it concerns vLLM's log"),
    "max_log_len": (int, "prompts are never logged"),
}
SERVER_LIMITED: dict[str, tuple[type, tuple[Any, ...], str]] = {
    "api_server_count": (int, (1,), "one process serves the API"),
    "response_role": (str, ("assistant",), "answers are the assistant's"),
    "chat_template_content_format": (str, ("auto", "string"), "templates are given texts"),
    "return_tokens_as_token_ids": (bool, (False,), "ask for return_token_ids in a request"),
}
# Methods of vLLM's LLM that there are not.
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
    """The options that EngineConfig knows, of those a vLLM script passes."""
    known = {option.name: option for option in fields(EngineConfig)}
    ported: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            value = _spelling(name, value)
            if value is not None or known[name].default is None:
                ported[name] = value
        elif not take_option(name, value):
            ported[name] = value  # for EngineConfig to refuse
    return ported


def take_option(name: str, value: Any) -> bool:
    """Take an option of vLLM's that changes nothing, and refuse one that would; False if there is none such."""
    return _take(name, value, HARMLESS, LIMITED)


def take_flag(name: str, value: Any) -> bool:
    """As `take_option`, for flags of `vllm serve`; one that starts with a brace is JSON."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidConfig(f"{name}={shown(value)} is no JSON: {error}") from None
    if name in TASKS:
        _log.info("%s=%s has no effect: the model's files say what it does", name, shown(value))
    return take_option(name, value) or _take(name, value, SERVER_HARMLESS, SERVER_LIMITED)


def _take(
    name: str,
    value: Any,
    harmless: Mapping[str, tuple[type, str]],
    limited: Mapping[str, tuple[type, tuple[Any, ...], str]],
) -> bool:
    if name in harmless:
        _log.info("%s=%s has no effect: %s", name, shown(value), harmless[name][1])
        return True
    if name not in limited:
        return False
    if name == "structured_outputs_config" and _backend_only(value):
        return True
    _, taken, why = limited[name]
    if value is not None and value not in [one for one in taken if isinstance(one, bool) == isinstance(value, bool)]:
        raise InvalidConfig(f"{name}={shown(value)} is not supported: {why}")
    return True


def _backend_only(config: Any) -> bool:
    given = config if isinstance(config, Mapping) else getattr(config, "__dict__", {"": config})
    return not set(given) - BACKEND_KEYS


def _spelling(name: str, value: Any) -> Any:
    text = str(value).removeprefix("torch.") if name == "dtype" and value is not None else value
    others = SPELLINGS.get(name, {})
    return others.get(text, text) if type(text) in (str, int) else text


def check_task(options: Mapping[str, Any], is_encoder: bool, model: str) -> None:
    """Refuse a model that does not do what `task`, `runner` or `convert` ask of it."""
    for name in TASKS:
        value = options.get(name)
        if value in (GENERATES if is_encoder else EMBEDS):
            does = "embeds texts and generates none" if is_encoder else "generates text and has no embeddings"
            raise InvalidConfig(f"{name}={value!r}, but {model} {does}: leave it out, or choose another model")
