"""Energy counters of the hardware: RAPL of CPUs through the powercap files, NVML of GPUs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.host.gpus import VISIBLE, list_gpus

POWERCAP = "PENSTOCK_POWERCAP"  # the folder of powercap zones, where it is not the usual one
ZONES = "/sys/class/powercap"
Read = Callable[[], float]  # joules since some moment; raises OSError where the counter is gone


class RaplZone:
    """One zone's counter, in microjoules, which begins again at its range."""

    def __init__(self, folder: Path) -> None:
        self._energy = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = int(self._energy.read_text())
        self._sum_uj = 0

    def read(self) -> float:
        now_uj = int(self._energy.read_text())
        step_uj = now_uj - self._last_uj
        self._sum_uj += step_uj if step_uj >= 0 else step_uj + self._range_uj
        self._last_uj = now_uj
        return self._sum_uj / 1e6


def find_zones(folder: Path | None = None) -> list[RaplZone]:
    """Find the packages' zones and their memory's; none where they cannot be read, as for users other than root."""
    folder = folder or Path(os.environ.get(POWERCAP) or ZONES)
    zones = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        with suppress(OSError, ValueError):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                zones.append(RaplZone(zone))
    return zones


def find_gpu(name: str = "0") -> Read | None:
    """Return the counter of a GPU by the driver's library, by its number or UUID; None where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlInit_v2():
        return None
    if name.isdecimal():
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device))
    else:
        failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
    if failed:
        return None

    def read() -> float:
        if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
            raise OSError("NVML does not tell the GPU's energy")
        return millijoules.value / 1e3

    with suppress(OSError):
        read()
        return read
    return None


def find_counter(device: str) -> Read | None:
    """Return the counter of a device, and of the CPU beside a GPU; None where nothing tells."""
    found: list[Read] = [zone.read for zone in find_zones()]
    if device != "cpu":
        visible = list_gpus(os.environ) if VISIBLE in os.environ else ["0"]
        gpu = next(map(find_gpu, visible), None)  # CUDA takes the first
        found = [gpu, *found] if gpu is not None else []
    return _add(found) if found else None


def _add(reads: Sequence[Read]) -> Read:
    return lambda: sum(read() for read in reads)
