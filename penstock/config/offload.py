"""Memory of the host that weights and blocks of a cache are offloaded to, and what that leaves on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.options import EngineConfig
from penstock.errors import InvalidConfig

if TYPE_CHECKING:
    from penstock.config.resolve import Facts, GpuFacts

GIB = 1 << 30
NUM_BUFFERS = 2  # on the GPU, that offloaded weights pass through
UNEVEN = 1.25  # a checkpoint's layers whose formats differ may take so much more than their share


@dataclass(frozen=True)
class OffloadUse:
    """Bytes of the weights that stay in host memory, and of the buffers on the GPU that they pass through."""

    host_bytes: int = 0
    buffer_bytes: int = 0


def count_offload(config: EngineConfig, gpu: GpuFacts, stored_bytes: int) -> OffloadUse:
    """Count what `cpu_offload_gb` moves of `stored_bytes`, the weights as they are stored. Embedding, head and what is
    never rounded stay. Buffers hold the most that a layer may have outside: its share and one matrix more."""
    if not config.cpu_offload_gb:
        return OffloadUse()
    wide = 2 if config.dtype == "float32" else 1
    layers = max(1, stored_bytes - wide * (gpu.outer_bytes + gpu.kept_bytes))
    host = min(int(config.cpu_offload_gb * GIB), layers)
    uneven = UNEVEN if gpu.packed_bytes else 1.0
    ratio = min(wide, uneven * stored_bytes / max(1, gpu.weight_bytes))  # to 16 bits a value
    widest, largest = ratio * gpu.layer_bytes, ratio * gpu.layer_matrix_bytes
    return OffloadUse(host, NUM_BUFFERS * int(min(widest, host * widest / layers + largest)))


def require_gpu(config: EngineConfig, why: str) -> None:
    """Refuse offloaded weights on a CPU, where `why` says why it is one."""
    if config.cpu_offload_gb:
        raise InvalidConfig(
            f"cpu_offload_gb={config.cpu_offload_gb:g} keeps weights out of a GPU's memory, but device=cpu ({why}): "
            "leave it out; a CPU reads experts that do not fit from a file by itself"
        )


def require_host_memory(config: EngineConfig, facts: Facts) -> None:
    """Refuse a store of blocks, or weights, that are larger than the free memory."""
    blocks, weights = (each * facts.num_replicas for each in (config.kv_offloading_size, config.cpu_offload_gb))
    engines = f" for each of {facts.num_replicas} engines" if facts.num_replicas > 1 else ""
    free = f"{facts.free_memory_bytes / GIB:.1f} GiB"
    if blocks * GIB > facts.free_memory_bytes:
        raise InvalidConfig(
            f"kv_offloading_size={config.kv_offloading_size:g}{engines} is over the {free} that are free: lower it, or "
            "keep blocks in files with kv_offloading_path"
        )
    if (blocks + weights) * GIB > facts.free_memory_bytes:
        beside = f" beside kv_offloading_size={config.kv_offloading_size:g}" if blocks else ""
        raise InvalidConfig(
            f"cpu_offload_gb={config.cpu_offload_gb:g}{beside}{engines} is over the {free} of memory that are free: "
            "lower it, and quantize so that more of the model fits in the GPU's memory"
        )
