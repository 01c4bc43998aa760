"""Ops on each element of a hidden-state stream, or on whole rows of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.registry import op

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
SWIGLU_OAI, SWIGLU_LIMIT = "swiglu_oai", 7.0  # of gpt-oss: gates only, with both halves clamped
ONE_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
EXPONENTIAL = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@op(tolerance=ONE_ROUNDING, rowwise=True)
def add(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """Return x[T, C] + scale · y, for y[T, C] or y[C]."""
    return (x.float() + scale * y.float()).to(x.dtype)


@op(tolerance=ONE_ROUNDING, rowwise=True)
def scale(x: Tensor, factor: float) -> Tensor:
    """Return x · factor."""
    return (x.float() * factor).to(x.dtype)


@op(tolerance={torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}, rowwise=True)
def softcap(x: Tensor, cap: float) -> Tensor:
    """Bound x smoothly: cap · tanh(x / cap)."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


@op(tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}, rowwise=True)
def gather(at: Tensor, x: Tensor) -> Tensor:
    """Return rows at[M] of x[T, C] → [M, C]."""
    return x[at]


@op(tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}, rowwise=True)
def take_columns(x: Tensor, order: Tensor) -> Tensor:
    """Return columns order[M] of x[T, C] → [T, M]."""
    return x[:, order]


@op(tolerance={torch.float32: 0.0}, rowwise=True)
def local_ids(ids: Tensor, first: int, count: int, clamps: bool = False) -> Tensor:
    """Count ids of [first, first + count) from first; others become -1, or 0 if `clamps`."""
    local = ids - first
    return torch.where((local < 0) | (local >= count), 0 if clamps else -1, local)


@op(tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}, rowwise=True)
def blank_rows(x: Tensor, ids: Tensor) -> Tensor:
    """Set the rows of x[T, C] whose ids[T] are negative to -0, which added to any number leaves its bits."""
    return torch.where(ids[:, None] < 0, torch.full((), -0.0, dtype=x.dtype, device=x.device), x)


@op(tolerance=EXPONENTIAL)
def activation(x: Tensor, kind: str) -> Tensor:
    """Apply the nonlinearity `kind` to each element of x[T, F]."""
    return find_activation(kind)(x.float()).to(x.dtype)


@op(tolerance=EXPONENTIAL)
def gated_activation(x: Tensor, kind: str) -> Tensor:
    """Return act(gate) · up for x[…, 2F] = [gate, up] → […, F]."""
    gate, up = x.float().chunk(2, dim=-1)
    return gate_by(kind, gate, up).to(x.dtype)


def gate_by(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return act(gate) · up, in plain PyTorch."""
    if kind == SWIGLU_OAI:
        return ACTIVATIONS["quick_gelu"](gate.clamp(max=SWIGLU_LIMIT)) * (up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1)
    return find_activation(kind)(gate) * up


def find_activation(kind: str) -> Callable[[Tensor], Tensor]:
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation {kind!r} is unknown: use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[kind]
