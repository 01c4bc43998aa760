from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.runtime.library import TYPES, Kernel, as_integers
from penstock.ops.embedding import embedding

_kernel = Kernel("embedding", "pnpinnp")


@embedding.impl("cpu", exact=True)
def _embedding(ids: Tensor, panels: Tensor, width: int) -> Tensor:
    if panels.shape[1] != width:
        raise ValueError(f"panels hold rows of {panels.shape[1]} values, not of width={width}")
    ids, panels = as_integers(ids, torch.int64), panels.contiguous()
    out = torch.empty(ids.shape[0], width)
    _kernel(
        ids.data_ptr(), ids.shape[0], panels.data_ptr(), TYPES[panels.dtype], panels.shape[0], width, out.data_ptr()
    )
    return out
