"""What Triton's interpreter lacks: products of 16-bit floats, and sums that do not follow from a tile's size."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def steady_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's products round differently for other numbers of columns: they are made in float64 here."""
    if torch.cuda.is_available():
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def widened(x: Any) -> Any:
        if x.dtype == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if x.dtype.primitive_bitwidth == 8:
            return interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16).astype(np.float64)
        return x.data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        sums = np.matmul(widened(a), widened(b)) + d.data
        return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
