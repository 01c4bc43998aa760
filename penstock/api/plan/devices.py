"""GPUs by name: memory as nvidia-smi reports it, bandwidth and dense products as NVIDIA's data sheets have them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from penstock.errors import InvalidConfig, quote
from penstock.host.machine import free_memory_bytes

MIB, GIB = 1 << 20, 1 << 30
# Of an H200's data sheet, measured on one (bench/results/gpu-2026-11-16.json); others are taken to be like it.
READ_SHARE, PRODUCT_SHARE, FP8_SHARE = 4.18 / 4.8, 801 / 989, 1473 / 1979
LAYER_S = 18e-6  # a layer's kernels take at least this, whatever they compute: fitted to the same runs


@dataclass(frozen=True)
class Device:
    """A device as `plan` knows it; speeds are those that programs reach."""

    name: str
    memory_bytes: int
    bytes_s: float
    ops_s: float  # of products in 16 bits; on a CPU, of all
    fp8_ops_s: float = 0.0
    capability: tuple[int, int] = (0, 0)
    layer_s: float = LAYER_S

    @property
    def link_bytes_s(self) -> float:
        """Speed of copies from host memory: 16 lanes of PCIe 5 since Hopper, of PCIe 4 before."""
        return 55e9 if self.capability >= (9, 0) else 25e9

    @property
    def is_gpu(self) -> bool:
        return self.capability > (0, 0)


# name: MiB, TB/s, 16-bit TFLOP/s, FP8 TFLOP/s (both dense, sums in float32), compute capability
_KNOWN: dict[str, tuple[int, float, float, float, tuple[int, int]]] = {
    "A10": (23028, 0.6, 125, 0, (8, 6)),
    "A100-40G": (40960, 1.555, 312, 0, (8, 0)),
    "A100-80G": (81920, 2.039, 312, 0, (8, 0)),
    "A6000": (49140, 0.768, 155, 0, (8, 6)),
    "B200": (183359, 8.0, 2250, 4500, (10, 0)),
    "H100-PCIe": (81559, 2.0, 756, 1513, (9, 0)),
    "H100-NVL": (95830, 3.9, 835, 1671, (9, 0)),
    "H100": (81559, 3.35, 989, 1979, (9, 0)),
    "H200": (143771, 4.8, 989, 1979, (9, 0)),
    "L4": (23034, 0.3, 121, 242, (8, 9)),
    "L40S": (46068, 0.864, 362, 733, (8, 9)),
    "RTX-3090": (24576, 0.936, 71, 0, (8, 6)),
    "RTX-4090": (24564, 1.008, 165, 330, (8, 9)),
    "RTX-5090": (32607, 1.792, 209, 419, (12, 0)),
    "RTX-6000-Ada": (49140, 0.96, 364, 728, (8, 9)),
}


_PLAIN = {re.sub(r"[-_ ]", "", known).lower(): known for known in _KNOWN}
_SAYS_NOTHING = re.compile(r"generation|hbm\w*|sxm\d*|")
_SIZE = re.compile(r"(\d+)gb?")


def find_gpu(name: str, memory_bytes: int = 80 * GIB) -> Device:
    """Find a GPU by its name or the driver's, however its words are joined.

    `memory_bytes` tells those apart that differ in memory alone, if the name does not.
    """
    words = [word for word in re.split(r"[-_ ]+|nvidia|geforce", name.lower()) if not _SAYS_NOTHING.fullmatch(word)]
    sizes = [int(match[1]) for match in map(_SIZE.fullmatch, words) if match]
    unsized = [word for word in words if not _SIZE.fullmatch(word)]
    for asked in ("".join(words), "".join(unsized), "".join(word for word in unsized if word != "pcie")):
        if asked == "a100":
            asked = "a10080g" if (sizes[0] if sizes else memory_bytes / GIB) > 60 else "a10040g"
        for spelled in (asked, f"rtx{asked}", asked.removeprefix("rtx")):
            if spelled in _PLAIN:
                return _device(_PLAIN[spelled])
    raise InvalidConfig(f"--gpu {quote(name)} is unknown: give one of {', '.join(_KNOWN)}")


def known_gpus() -> list[Device]:
    """List the known GPUs, those with less memory first."""
    return sorted(map(_device, _KNOWN), key=lambda device: (device.memory_bytes, device.bytes_s))


def _device(name: str) -> Device:
    mib, tb_s, tflops, fp8, capability = _KNOWN[name]
    return Device(
        f"NVIDIA {name.replace('-', ' ')}",
        mib * MIB,
        tb_s * READ_SHARE * 1e12,
        tflops * PRODUCT_SHARE * 1e12,
        fp8 * FP8_SHARE * 1e12,
        capability,
    )


def parse_memory(text: str) -> int:
    """Parse 24G, 23.5GiB or 800M; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InvalidConfig(f"--memory {quote(text)} is not understood: write it like 24G")
    size = int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1))
    if not 1 << 20 <= size <= 1 << 50:
        raise InvalidConfig(f"--memory {quote(text)} is out of range: it must be 1M to 1024T")
    return size


def here(with_gpu: bool = True) -> Device:
    """Describe this machine's GPU, else its CPU with the memory that is free."""
    import torch

    if with_gpu and torch.cuda.is_available():
        total, capability = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
        try:
            return replace(find_gpu(name, total), name=name, memory_bytes=total)
        except InvalidConfig:
            return Device(name, total, 0.0, 0.0, capability=capability)
    return Device("this CPU", free_memory_bytes(), 0.0, 0.0, layer_s=0.0)
