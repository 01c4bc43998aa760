"""Elementwise nonlinearities, plain and gated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _inputs(parts: int) -> Iterator[Example]:
    for kind in KINDS:
        for seed, (num_rows, width) in enumerate([(0, 8), (1, 1536), (3, 1), (5, 31), (13, 100), (40, 1100)]):
            yield {"x": normal(seed, num_rows, parts * width, scale=4.0), "kind": kind}
        wide = [torch.linspace(-120, 120, 1999), *(normal(9, 1999) for _ in range(parts - 1))]
        yield {"x": torch.cat(wide).view(1, -1), "kind": kind}


def _function(kind: str) -> Callable[[Tensor], Tensor]:
    if kind not in KINDS:
        raise ValueError(f"activation kind={kind!r} is not known: use one of {', '.join(KINDS)}")
    return KINDS[kind]


@op(tolerance=TOLERANCE, examples=lambda: _inputs(1))
def activation(x: Tensor, kind: str) -> Tensor:
    """The nonlinearity of each element of x[T, F]."""
    return _function(kind)(x.float()).to(x.dtype)


@op(tolerance=TOLERANCE, examples=lambda: _inputs(2))
def gated_activation(x: Tensor, kind: str) -> Tensor:
    """act(x[:, :F]) · x[:, F:] for x[T, 2F] → [T, F]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (_function(kind)(gate) * up).to(x.dtype)


def finished(y: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str | None, gated: bool) -> Tensor:
    """What a matrix product's reference does with its sums y[T, O]: residual + act(y + bias), or act(gate) · up."""
    y = y if bias is None else y + bias
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = (gate if kind is None else _function(kind)(gate)) * up
    elif kind is not None:
        y = _function(kind)(y)
    return y if residual is None else residual + y
