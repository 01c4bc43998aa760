"""Kernels that begin before the one before them has ended, and wait for it where they first need what it wrote."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = (9, 0)
ROOMY = ((8, 0), HOPPER, (10, 0))
assumed = (0, 0)  # the capability of the GPU that tensors on the meta device stand for


@triton.jit
def await_others(EARLY: tl.constexpr):
    """Go on once the kernels before this one have ended; let the next one begin to wait. Only what never changes, such
    as weights, may be read before: nothing promises that a processor's own cache does not hold of all else what was
    there the step before."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_beside(EARLY: tl.constexpr):
    """In place of `await_others`, for a kernel that needs nothing of the one before it, which awaits others: once that
    one lets this one begin, what was before both of them has ended. It reads that past the processors' own caches
    (`.cg`), and must end with `outlast`."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def outlast(EARLY: tl.constexpr):
    """End after the kernel before: the next one waits for this one alone, and may need both. The last program does, as
    all others have begun by then."""
    if EARLY:
        last = (tl.program_id(0) == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1)
        if last & (tl.program_id(2) == tl.num_programs(2) - 1):
            gdc_wait()


@lru_cache(maxsize=16)
def _early(device: torch.device) -> bool:
    if device.type == "meta":
        return assumed >= HOPPER
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


@lru_cache(maxsize=16)
def is_roomy(device: torch.device) -> bool:
    """Whether a program may have more than 99 KiB of shared memory, as on Hopper and on A100."""
    if device.type == "meta":
        return assumed in ROOMY
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in ROOMY


def early(x: Tensor) -> dict[str, Any]:
    """The options of a kernel that calls `await_others` on every path before it writes, or reads what may change."""
    begins = _early(x.device)
    return {"EARLY": begins, "launch_pdl": True} if begins else {"EARLY": False}
