"""Energy counters of the hardware: RAPL of CPUs through the powercap files, NVML of GPUs."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from penstock.host.energy_shares import Counter, SharedCounter
from penstock.host.gpus import VISIBLE, list_gpus

POWERCAP = "PENSTOCK_POWERCAP"  # the folder of powercap zones, where it is not the usual one
ZONES = "/sys/class/powercap"


class RaplZone:
    """One zone's counter, in microjoules, which begins again at its range."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._energy = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self.read()

    def read(self) -> int:
        return int(self._energy.read_text())

    def count_joules(self, before: float, now: float) -> float:
        step_uj = now - before
        return (step_uj if step_uj >= 0 else step_uj + self._range_uj) / 1e6


class GpuCounter:
    """A GPU's counter by the driver's library, in millijoules."""

    def __init__(self, name: str) -> None:
        """Open the GPU of this number or UUID; raises OSError where it does not tell."""
        self.name = f"gpu-{name}"
        self._nvml, self._device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        if self._nvml.nvmlInit_v2():
            raise OSError("NVML does not start")
        if name.isdecimal():
            failed = self._nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(self._device))
        else:
            failed = self._nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._device))
        if failed:
            raise OSError(f"NVML knows no GPU {name}")
        self.read()

    def read(self) -> int:
        millijoules = ctypes.c_ulonglong()
        if self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)):
            raise OSError("NVML does not tell the GPU's energy")
        return millijoules.value

    def count_joules(self, before: float, now: float) -> float:
        return max(0.0, now - before) / 1e3


class EnergyMeter:
    """The joules of this process, of several counters."""

    def __init__(self, counters: list[SharedCounter]) -> None:
        self._counters = counters

    def read(self, is_busy: bool = False) -> float:
        """Return the joules until now; from now on the process counts as busy or idle. Raises OSError where a counter
        is gone."""
        return sum(counter.read(is_busy) for counter in self._counters)


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


def find_gpu(name: str = "0") -> GpuCounter | None:
    """Return the counter of a GPU by its number or UUID (GPU-…); None where nothing tells."""
    with suppress(OSError):
        return GpuCounter(name)
    return None


def find_meter(device: str, uuid: str | None = None, folder: Path | None = None) -> EnergyMeter | None:
    """Return the meter of a device, and of the CPU beside a GPU; None where nothing tells. Processes with the same
    `folder` share each counter."""
    found: list[Counter] = list(find_zones())
    if device != "cpu":
        visible = [uuid] if uuid else list_gpus(os.environ) if VISIBLE in os.environ else ["0"]
        gpu = next(map(find_gpu, visible), None)  # CUDA takes the first
        found = found if gpu is None else [gpu, *found]
    with suppress(OSError):
        return EnergyMeter([SharedCounter(counter, folder) for counter in found]) if found else None
    return None
