"""The GPUs that this process may use, and how engines of one machine are dealt out to them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Sharers:
    """Numbers of engines, this one included, that share its machine and its GPU."""

    machine: int = 1
    gpu: int = 1


@dataclass(frozen=True)
class EnginePlace:
    """An engine's place: variables of its environment, and those it shares with."""

    env: Mapping[str, str]
    sharers: Sharers


def deal_gpus(number: int, num_engines: int, gpus: Sequence[str], env: Mapping[str, str]) -> EnginePlace:
    """Give engine `number` its GPU: they are dealt out in turn. One engine, or one GPU, needs nothing."""
    if num_engines == 1 or len(gpus) < 2:
        return EnginePlace({}, Sharers(num_engines, num_engines))
    on_gpu = len(range(number % len(gpus), num_engines, len(gpus)))
    named = {VISIBLE: gpus[number % len(gpus)]}
    if VISIBLE not in env and ORDER not in env:
        named[ORDER] = "PCI_BUS_ID"  # as the driver's library counts
    return EnginePlace(named, Sharers(num_engines, on_gpu))


def list_gpus(env: Mapping[str, str]) -> list[str]:
    """List GPUs by the names that CUDA_VISIBLE_DEVICES may give them; those it names, if it is set."""
    if VISIBLE not in env:
        return [str(number) for number in range(_count_gpus())]
    names: list[str] = []
    for name in (part.strip() for part in env[VISIBLE].split(",")):
        if not name or name.startswith("-") or name in names:  # CUDA reads no further
            break
        names.append(name)
    return names


def _count_gpus() -> int:
    """Count the driver's GPUs, without starting CUDA in this process."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint()
    return 0 if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value
