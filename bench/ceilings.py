"""What a GPU copies, reads and multiplies at best, measured before anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIZE = 8192  # of the products
COPIED = 1 << 31  # bytes


def fastest(work: Callable[[], object], count: int = 10) -> float:
    """Seconds, by the device's own clock."""
    import torch

    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(min(times))


def measure() -> dict[str, float]:
    """Copying counts bytes read and written. 8-bit floats are left out where the chip has none."""
    import torch

    tall = torch.randn(COPIED // 2 // SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    other, one = torch.empty_like(tall), torch.randn(SIZE, device="cuda", dtype=torch.bfloat16)
    found = {
        "copy_tb_s": round(2 * COPIED / fastest(lambda: other.copy_(tall)) / 1e12, 2),
        "read_tb_s": round(COPIED / fastest(lambda: tall @ one) / 1e12, 2),
    }
    x, y = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found["bf16_tflop_s"] = round(2 * SIZE**3 / fastest(lambda: x @ y) / 1e12)
    if torch.cuda.get_device_capability() >= (8, 9):
        p, q = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
        unit = torch.ones((), device="cuda")
        seconds = fastest(lambda: torch._scaled_mm(p, q.t(), scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16))
        found["fp8_tflop_s"] = round(2 * SIZE**3 / seconds / 1e12)
    torch.cuda.empty_cache()
    return found


def versions() -> dict[str, Any]:
    import platform

    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
