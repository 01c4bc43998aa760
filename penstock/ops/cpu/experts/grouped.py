from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.ops.cpu.elementwise import activation_number
from penstock.ops.cpu.matmul.packed import planes
from penstock.ops.cpu.runtime.library import TYPES, Kernel, as_integers, as_rows, check_float32
from penstock.ops.experts.grouped import grouped_matmul, grouped_packed_matmul
from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.linear import PANEL
from penstock.ops.matmul.packed import PackedWeight

_matmul = Kernel("grouped_matmul", "pnnnpnnpinpniipn")
_packed_matmul = Kernel("grouped_packed_matmul", "pnnnpnnippppinpniipn")


class _Call:
    """The arguments of both kernels, checked."""

    def __init__(self, x: Tensor, ids: Tensor, num_matrices: int, num_out: int, width: int, epilogue: Epilogue) -> None:
        num_tokens, num_chosen = ids.shape
        self.ids = as_integers(ids, torch.int32)
        rows = as_rows("x", x) if x.dim() == 2 else check_float32("x", x).contiguous().flatten(0, 1)
        shared = num_chosen if x.dim() == 2 else 1
        if rows.shape != (num_tokens * num_chosen // max(shared, 1), width):
            raise ValueError(f"x {tuple(x.shape)} does not fit ids {tuple(ids.shape)} and a weight of width {width}")
        if num_out % (2 * PANEL if epilogue.gated else PANEL):
            raise ValueError(f"{num_out} outputs of a matrix are no whole panels of {PANEL}")
        if epilogue.residual is not None:
            raise ValueError("a grouped product has no residual: combine adds it")
        self.bias, self.num_out = epilogue.bias, num_out
        if self.bias is not None:
            self.bias = check_float32("bias", self.bias).contiguous()
            if self.bias.shape != (num_matrices * num_out,):
                raise ValueError(f"bias has the shape {tuple(self.bias.shape)}, not ({num_matrices * num_out},)")
        self.rows = rows
        self.head = (rows.data_ptr(), rows.stride(0), shared, width, self.ids.data_ptr(), ids.numel(), num_matrices)
        self.activation = -1 if epilogue.activation is None else activation_number(epilogue.activation, epilogue.gated)
        self.gated = epilogue.gated
        self.out = torch.empty(num_tokens, num_chosen, epilogue.num_results(num_out))

    def tail(self, first: int, num_out: int) -> tuple[int | None, ...]:
        """Give the kernels' arguments from num_out on, for the outputs [first, first + num_out) of each matrix."""
        return (
            num_out // 2 if self.gated else num_out,
            None if self.bias is None else self.bias.data_ptr() + 4 * first,
            self.num_out,
            self.activation,
            self.gated,
            self.out.data_ptr() + 4 * first,
            self.out.shape[2],
        )


@grouped_matmul.impl("cpu", exact=True)
def _grouped_matmul(
    x: Tensor, panels: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    panels = panels.contiguous()
    num_out = len(panels) // num_matrices * PANEL
    call = _Call(x, ids, num_matrices, num_out, panels.shape[1], epilogue)
    _matmul(*call.head, panels.data_ptr(), TYPES[panels.dtype], *call.tail(0, num_out))
    return call.out


@grouped_packed_matmul.impl("cpu", exact=True)
def _grouped_packed_matmul(
    x: Tensor,
    parts: Sequence[PackedWeight],
    ids: Tensor,
    num_matrices: int,
    x_bits: int,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Tensor:
    if epilogue.gated and len(parts) > 1:
        raise ValueError("a gated product needs its weight in one part")
    sizes = [part.num_out // num_matrices for part in parts]
    call = _Call(x, ids, num_matrices, sum(sizes), parts[0].width, epilogue)
    first = 0
    for part, size in zip(parts, sizes):
        if size % PANEL or part.width != parts[0].width:
            raise ValueError(f"{size} outputs of a matrix are no whole panels of {PANEL}, or widths differ")
        _packed_matmul(*call.head, part.format.number, *planes(part), x_bits, *call.tail(first, size))
        first += size
    return call.out
