"""What Triton's interpreter lacks: products of 16-bit floats, sums that do not follow from a tile's size, and haste."""

from __future__ import annotations

import sys
from typing import Any

import pytest

CHAIN_STEP = 16  # inputs of one instruction


def hasten() -> None:
    """Where it is in use: the language is changed once for a launch, not again by each function that a kernel calls,
    which takes half the time."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        return
    language, change = interpreter.tl, interpreter._patch_lang
    changed: set[Any] = set()  # modules, in the launch that goes on

    def change_once(function: Any) -> Any:
        seen = {value for value in function.__globals__.values() if value is language or value is language.core}
        if seen and seen <= changed:
            return interpreter._LangPatchScope()
        outermost = not changed
        scope = change(function)
        changed.update(seen)
        if outermost:
            restore = scope.restore

            def restored() -> None:
                changed.clear()
                restore()

            scope.restore = restored
        return scope

    interpreter._patch_lang = change_once


@pytest.fixture
def steady_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's products round differently for other numbers of columns: they are made in float64 here, and rounded after
    every CHAIN_STEP inputs, as a tensor core does."""
    import torch

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
        left, right, sums = widened(a), widened(b), d.data
        for first in range(0, left.shape[-1], CHAIN_STEP):
            part = slice(first, first + CHAIN_STEP)
            sums = (np.matmul(left[..., part], right[..., part, :]) + sums).astype(np.float32)
        return interpreter.TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
