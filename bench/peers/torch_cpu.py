"""What the engines on top of torch have in common: which dtype serves them best, and how they are kept to AVX2."""

from __future__ import annotations

from pathlib import Path


def best_dtype(cpu: str) -> str:
    """bfloat16 where the CPU multiplies it and may use that; it is emulated, hundreds of times slower, elsewhere."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if cpu != "avx2" and ("avx512_bf16" in flags or "amx_bf16" in flags) else "float32"


def hold_to_avx2() -> None:
    """torch's own kernels obey ATEN_CPU_CAPABILITY; others ask these functions which of theirs to load."""
    import torch

    for name in (
        "_is_avx512_supported",
        "_is_avx512_bf16_supported",
        "_is_vnni_supported",
        "_is_amx_tile_supported",
        "_is_amx_fp16_supported",
    ):
        if hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: False)
