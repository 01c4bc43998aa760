from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.runtime.library import Kernel, as_rows, check_float32
from penstock.ops.sampling.choose import SUM_BLOCK, above, argmax, weight_sums

_argmax_kernel = Kernel("argmax", "pnnnp")
_above_kernel = Kernel("above", "pnnnpnp")
_sums_kernel = Kernel("weight_sums", "pnnnppp")


@argmax.impl("cpu", exact=True)
def _argmax(x: Tensor) -> Tensor:
    x = as_rows("x", x)
    out = torch.empty(x.shape[0], dtype=torch.int32)
    _argmax_kernel(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], out.data_ptr())
    return out


@above.impl("cpu", exact=True)
def _above(x: Tensor, least: Tensor, room: int) -> Tensor:
    x, least = as_rows("x", x), check_float32("least", least).contiguous()
    out = torch.empty(x.shape[0], 1 + room, dtype=torch.int32)
    _above_kernel(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], least.data_ptr(), room, out.data_ptr())
    return out


@weight_sums.impl("cpu", exact=True)
def _weight_sums(x: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    x, top = as_rows("x", x), check_float32("top", top).contiguous()
    temperature = check_float32("temperature", temperature).contiguous()
    out = torch.empty(x.shape[0], -(-x.shape[1] // SUM_BLOCK))
    _sums_kernel(
        x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], top.data_ptr(), temperature.data_ptr(), out.data_ptr()
    )
    return out
