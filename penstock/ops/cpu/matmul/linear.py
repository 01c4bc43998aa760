from __future__ import annotations

from torch import Tensor

from penstock.ops.cpu.matmul.epilogue import check_epilogue
from penstock.ops.cpu.runtime.library import TYPES, Kernel, as_rows
from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.linear import linear

_kernel = Kernel("linear", "pnnnpinppniipn")


@linear.impl("cpu", exact=True)
def _linear(x: Tensor, panels: Tensor, num_out: int, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    x, panels = as_rows("x", x), panels.contiguous()
    num_rows, width = x.shape
    if panels.shape[1] != width or not num_out <= panels.shape[0] * 16:
        raise ValueError(f"panels {tuple(panels.shape)} do not give num_out={num_out} for rows of {width} values")
    checked = check_epilogue(x, num_out, epilogue)
    _kernel(
        x.data_ptr(),
        x.stride(0),
        num_rows,
        width,
        panels.data_ptr(),
        TYPES[panels.dtype],
        *checked.arguments(0, num_out),
    )
    return checked.out
