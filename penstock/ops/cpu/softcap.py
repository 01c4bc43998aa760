from __future__ import annotations

from torch import Tensor

from penstock.ops.cpu.library import Kernel, empty_like, float32
from penstock.ops.softcap import softcap

_kernel = Kernel("softcap", "pnfp")


@softcap.impl("cpu", exact=True)
def _softcap(x: Tensor, cap: float) -> Tensor:
    x = float32("x", x).contiguous()
    out = empty_like(x)
    _kernel(x.data_ptr(), x.numel(), cap, out.data_ptr())
    return out
