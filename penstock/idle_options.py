"""Options that the user set and that change nothing here, with the reason."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import EngineConfig, Resolved
from penstock.models.files.checkpoint import Checkpoint


def packed_share(checkpoint: Checkpoint | None) -> float:
    """The part of a checkpoint's matrices that the file holds quantized; 0 for random weights."""
    names = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2] if checkpoint else []
    packed = [name for name in names if checkpoint and checkpoint.stored(name) is not None]
    return len(packed) / len(names) if names else 0.0


def find_idle(config: EngineConfig, device: str, packed: float, has_cache: bool = True) -> dict[str, str]:
    """`packed` is a share of the matrices; the options are those that the user gave."""
    idle: dict[str, str] = {}
    stays_packed = packed > 0 and config.dtype == "auto" and device == "cpu"
    if device == "cpu":
        if config.enforce_eager:
            idle["enforce_eager"] = "steps are recorded on GPUs only"
        if config.gpu_memory_utilization != EngineConfig.gpu_memory_utilization:
            idle["gpu_memory_utilization"] = "the model runs on the CPU; kv_cache_tokens sets its cache"
        if config.quantization and stays_packed and packed == 1.0:
            idle["quantization"] = "the file's matrices are quantized already and stay as they are"
    if config.activation_dtype != "auto":
        if device == "cuda":
            idle["activation_dtype"] = "a GPU's products take activations in 16 bits"
        elif not stays_packed and not config.quantization:
            idle["activation_dtype"] = "no matrix is packed"
    if not has_cache and config.kv_cache_dtype != "auto":
        idle["kv_cache_dtype"] = "the model keeps no cache"
    if config.chat_template is not None and (config.skip_tokenizer_init or not has_cache):
        idle["chat_template"] = "there is no tokenizer" if config.skip_tokenizer_init else "the model makes embeddings"
    return idle


def mark_idle(settings: Resolved, idle: dict[str, str]) -> Resolved:
    """The settings with these reasons."""
    marked = (
        replace(one, why=f"without effect: {idle[one.name]}") if one.name in idle else one for one in settings.settings
    )
    return replace(settings, settings=tuple(marked))
