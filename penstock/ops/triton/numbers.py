"""Arithmetic that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def apply_activation(x, KIND: tl.constexpr):
    """Apply the nonlinearity KIND; "" for none."""
    if KIND == "silu":
        y = x * sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        y = tl.maximum(x, 0.0)
    elif KIND == "relu2":
        y = tl.maximum(x, 0.0)
        y = y * y
    elif KIND == "quick_gelu":
        y = x * sigmoid(1.702 * x)
    else:
        y = x
    return y


@triton.jit
def apply_gate(y, up, KIND: tl.constexpr):
    """Return act(y) · up; gpt-oss's activation clamps both."""
    if KIND == "swiglu_oai":
        y, up = tl.where(y > 7.0, 7.0, y), tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = y * sigmoid(1.702 * y) * (up + 1.0)
    else:
        y = apply_activation(y, KIND) * up
    return y


@triton.jit
def norm_factor(x, width, eps, BLOCK: tl.constexpr):
    """Return the factor by which an RMS norm multiplies the values x[width]."""
    at = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        y = tl.load(x + start + at, mask=start + at < width, other=0.0).to(tl.float32)
        squares += y * y
    return tl.rsqrt(tl.sum(squares, 0) / width + eps)


@triton.jit
def saturate(x, DTYPE: tl.constexpr):
    """Cast x to DTYPE; finite values beyond the range of float16 or FP8 become its largest. FP8 has no infinity: it
    becomes NaN."""
    x = x.to(tl.float32)
    if DTYPE == tl.float16:  # noqa: SIM300
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -65504.0), 65504.0), x)
    if DTYPE == tl.float8e4nv:  # noqa: SIM300
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -448.0), 448.0), float("nan"))
    return x.to(DTYPE)


@triton.jit
def mix_bits(x):
    """Hash x to 32 bits."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
