"""Find options that the user set but that have no effect, with the reason."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import EngineConfig, Resolved
from penstock.config.cache_dtypes import QUANTIZED
from penstock.config.ranks import find_idle_ranks
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.files.quantized.checkpoint import QuantizedCheckpoint, is_requantized


def packed_share(checkpoint: Checkpoint | None, on_cpu: bool) -> float:
    """Return the share of a checkpoint's matrices that are multiplied in codes; 0 for random weights."""
    if checkpoint is None:
        return 0.0
    names = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
    packed = [name for name in names if checkpoint.is_packed(name) or on_cpu and is_requantized(checkpoint, name)]
    return len(packed) / len(names) if names else 0.0


def find_idle(config: EngineConfig, device: str, packed: float, has_cache: bool = True) -> dict[str, str]:
    """Return reasons by option, among those the user set; `packed` is the quantized share of the matrices."""
    idle = find_idle_ranks(config)
    stays_packed = packed > 0 and config.dtype == "auto" and device == "cpu"
    if device == "cpu":
        if config.enforce_eager:
            idle["enforce_eager"] = "graphs are captured on GPUs only"
        if config.gpu_memory_utilization != EngineConfig.gpu_memory_utilization:
            idle["gpu_memory_utilization"] = "the model runs on the CPU; kv_cache_tokens sets its cache"
        if config.quantization and stays_packed and packed == 1.0:
            idle["quantization"] = "the file's matrices are already quantized"
    if config.activation_dtype != "auto":
        if device == "cuda":
            idle["activation_dtype"] = "a GPU's matmuls take 16-bit activations"
        elif not stays_packed and not config.quantization:
            idle["activation_dtype"] = "no matrix is quantized"
    if not config.enable_lora:
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            if getattr(config, name) != getattr(EngineConfig, name):
                idle[name] = "enable_lora is off"
    if config.kv_offloading_path is None and config.kv_offloading_disk_size != EngineConfig.kv_offloading_disk_size:
        idle["kv_offloading_disk_size"] = "kv_offloading_path is not set"
    for name in ("kv_offloading_size", "kv_offloading_path"):
        if getattr(config, name) and not (has_cache and config.enable_prefix_caching):
            idle[name] = "enable_prefix_caching is off" if has_cache else "the model has no KV cache"
    if not has_cache and config.tpot_slo_ms is not None:
        idle["tpot_slo_ms"] = "the model makes embeddings"
    if not has_cache and config.kv_cache_dtype != "auto":
        idle["kv_cache_dtype"] = "the model has no KV cache"
    if config.kv_cache_dtype_skip_layers and (not has_cache or config.kv_cache_dtype not in QUANTIZED):
        kept = f"kv_cache_dtype={config.kv_cache_dtype} quantizes no layer"
        idle["kv_cache_dtype_skip_layers"] = kept if has_cache else "the model has no KV cache"
    if config.chat_template is not None and (config.skip_tokenizer_init or not has_cache):
        idle["chat_template"] = "there is no tokenizer" if config.skip_tokenizer_init else "the model makes embeddings"
    return idle


def tell_kv_scales(checkpoint: Checkpoint | None, settings: Resolved) -> str:
    """Say that the checkpoint's scales of keys and values have no effect; empty if it has none."""
    scales = checkpoint.describe_kv_scales() if isinstance(checkpoint, QuantizedCheckpoint) else ""
    if checkpoint is None or not scales:
        return ""
    why = {
        "fp8": "an fp8 cache has none, and clamps at 448",
        "int8": "an int8 cache has its own, of each token and head",
        "int4": "an int4 cache has its own, of 32 dimensions of each token and head",
    }.get(settings.kv_cache_dtype, f"a {settings.kv_cache_dtype} cache needs none")
    return f"{checkpoint.path}: {scales} have no effect: {why}"


def mark_idle(settings: Resolved, idle: dict[str, str]) -> Resolved:
    """Add these reasons to the settings."""
    marked = (
        replace(one, why=f"without effect: {idle[one.name]}") if one.name in idle else one for one in settings.settings
    )
    return replace(settings, settings=tuple(marked))
