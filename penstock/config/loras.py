"""Check the options of adapters, and derive how many bytes of them are kept."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.config.options import EngineConfig
from penstock.errors import InvalidConfig

LORA_SHARE = 8  # of the free memory, one part for adapters
GIB = 1 << 30


class MemoryFacts(Protocol):
    """Facts that bound the memory for adapters."""

    @property
    def free_memory_bytes(self) -> int: ...


def count_lora_bytes(facts: MemoryFacts) -> int:
    """Return the memory for adapters where max_cpu_loras does not count them."""
    return facts.free_memory_bytes // LORA_SHARE


def needs_cpu(config: EngineConfig, whole_prompts: bool) -> bool:
    """Return True if adapters are asked for and the model embeds whole prompts, which GPUs do without adapters."""
    return config.enable_lora and whole_prompts


def resolve_loras(
    config: EngineConfig, whole_prompts: bool, lora_bytes: int, gpu_name: str | None
) -> dict[str, tuple[Any, str]]:
    if needs_cpu(config, whole_prompts) and gpu_name is not None:
        raise InvalidConfig(
            f"enable_lora=True with an embedding model needs a CPU, and this is {gpu_name}: set device=cpu, or merge "
            "the adapter into the model (penstock merge)"
        )
    if not config.enable_lora or config.max_cpu_loras:
        return {}
    room = f"as many as fit in {lora_bytes / GIB:.2g} GiB, an eighth of the free memory"
    return {"max_cpu_loras": (None, room)}
