from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.library import Kernel, integers, rows
from penstock.ops.gather import gather

_kernel = Kernel("gather", "pnpnnnp")


@gather.impl("cpu", exact=True)
def _gather(at: Tensor, x: Tensor) -> Tensor:
    at, x = integers(at, torch.int64), rows("x", x)
    out = torch.empty(at.shape[0], x.shape[1])
    _kernel(at.data_ptr(), at.shape[0], x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], out.data_ptr())
    return out
