"""Memory for weights in huge pages, where the system leaves that to the program: a step reads all of it, and one entry
of the processor's address cache then stands for 2 MiB instead of 4 KiB."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE = 1 << 21  # bytes of a page
MIN_BYTES = 1 << 22
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def make_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Make a tensor to be written; a large one on a CPU asks for huge pages first."""
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    if ADVICE is not None and tensor.is_cpu and tensor.nbytes >= MIN_BYTES:
        begin = -(-tensor.data_ptr() // HUGE) * HUGE
        end = (tensor.data_ptr() + tensor.nbytes) // HUGE * HUGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ADVICE)  # advice may be refused
    return tensor
