"""Programmatic dependent launch (PDL): a kernel starts before the previous one has ended, and waits for it where it
first needs its results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = (9, 0)
LARGE_SMEM = ((8, 0), HOPPER, (10, 0))  # capabilities with more than 99 KiB of shared memory per program
H200_SMS = 132  # of the GPU that the meta device stands for; only grids depend on it
meta_capability = (0, 0)  # of the GPU that the meta device stands for, set by runner/compile/cross.py


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all previous kernels have ended, then let the next one start. Before this call a kernel may read only
    what never changes, such as weights: an SM's L1 may still hold other values from the previous step."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def start_beside_previous(PDL: tl.constexpr):
    """Run beside the previous kernel, which itself has waited, instead of waiting for it. The kernel must read past L1
    (`.cg`) and end with `outlast_previous`."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def outlast_previous(PDL: tl.constexpr):
    """Wait for the previous kernel in the last program: the next kernel waits for this one alone and may need both."""
    if PDL:
        last = (tl.program_id(0) == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1)
        if last & (tl.program_id(2) == tl.num_programs(2) - 1):
            gdc_wait()


def dot_precision(dtype: torch.dtype) -> str:
    """Return the precision of `tl.dot` that rounds no inputs of this dtype."""
    return "ieee" if dtype == torch.float32 else "tf32"


@lru_cache(maxsize=16)
def has_pdl(device: torch.device) -> bool:
    if device.type == "meta":
        return meta_capability >= HOPPER
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


@lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    if device.type == "meta":
        return meta_capability[0] == HOPPER[0]
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER[0]


@lru_cache(maxsize=16)
def count_sms(device: torch.device) -> int:
    if device.type == "meta":
        return H200_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=16)
def has_large_smem(device: torch.device) -> bool:
    """Return True if a program may use more than 99 KiB of shared memory, as on Hopper and on A100."""
    if device.type == "meta":
        return meta_capability in LARGE_SMEM
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in LARGE_SMEM


class _Turns(threading.local):
    are_kept = False


_turns = _Turns()


@contextmanager
def launch_in_turn() -> Iterator[None]:
    """Start this thread's kernels after the previous one has ended, where what they take for weights may change."""
    before, _turns.are_kept = _turns.are_kept, True
    try:
        yield
    finally:
        _turns.are_kept = before


def pdl_options(x: Tensor) -> dict[str, Any]:
    """Return the launch options of a kernel that waits for the previous one before it writes or reads what may
    change."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(x.device) and not _turns.are_kept else {"PDL": False}
