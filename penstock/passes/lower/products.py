"""Products with a prologue (RMSNorm) and an epilogue (activation, gate, residual), by how the weight is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock import layers
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.linear import PANEL
from penstock.ops.matmul.product import can_defer_norm, is_skinny
from penstock.ops.triton.tuning import (
    EXACT_TILE_ROWS,
    INT_TILE_ROWS,
    MAX_FP8_TILE_ROWS,
    MAX_INT_TILE_ROWS,
    MAX_SKINNY_ROWS,
)
from penstock.passes.lower.stages import Branch, Flow, Product
from penstock.quant.dense import Dense, Matrix
from penstock.quant.fp8 import Fp8, Fp8Groups
from penstock.quant.ints import Ints
from penstock.quant.packed import Packed

MIN_EPS = 1e-30  # a product without a norm has 0


@dataclass(frozen=True)
class FusedProduct:
    """y = act(norm(x) · weightᵀ + bias), or x = x + that. Without a norm it reads y."""

    linear: layers.Linear
    branch: Branch | None = None
    activation: str | None = None
    gated: bool = False
    adds: bool = False

    def __call__(self, flow: Flow) -> None:
        x = flow.y if self.branch is None else flow.x
        result = self.run(x, flow.x if self.adds else None)
        if self.adds:
            flow.x = result
        else:
            flow.y = result

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        scheme: Any = self.linear.scheme
        epilogue = Epilogue(scheme.bias, self.activation, self.gated, residual)
        return KINDS[type(scheme)].run(scheme, x, epilogue, *self.norm)

    @property
    def norm(self) -> tuple[Tensor | None, float]:
        """The weight, None if it is folded into the product's, and eps; 0 without a norm."""
        if self.branch is None:
            return None, 0.0
        norm: Any = self.branch.norm
        return None if self.branch.folded is not None else norm.weight, norm.eps or MIN_EPS

    def defer(self, x: Tensor) -> tuple[Tensor, float] | None:
        """Multiply a few rows without their norm and return its eps too: whoever reads them applies it."""
        scheme, (weight, eps) = self.linear.scheme, self.norm
        if not isinstance(scheme, Matrix) or not can_defer_norm(x, weight, scheme.bias, eps):
            return None
        return None if is_skinny(x, scheme.weight, weight) else (scheme.ops.product(x, scheme.weight), eps)

    @property
    def row_limits(self) -> tuple[int, ...]:
        scheme: Any = self.linear.scheme
        is_coded = isinstance(scheme, Ints | Fp8Groups)
        return EXACT_TILE_ROWS[:-1] if scheme.ops.exact and not is_coded else KINDS[type(scheme)].row_limits


@dataclass(frozen=True)
class Kind:
    """The call of a scheme's op: `run(scheme, x, epilogue, norm weight, eps)`."""

    run: Callable[..., Tensor]
    norms: bool = True
    row_limits: tuple[int, ...] = ()  # up to each of these numbers of rows, over one, other kernels run


KINDS: dict[type, Kind] = {
    Dense: Kind(lambda s, x, epilogue, *norm: s.ops.linear(x, s.panels, s.num_out, epilogue), norms=False),
    Packed: Kind(lambda s, x, *rest: s.ops.packed_linear(x, s.parts, s.x_bits, *rest)),
    Matrix: Kind(
        lambda s, x, *rest: s.ops.product(x, s.weight, *rest), row_limits=(MAX_SKINNY_ROWS // 2, MAX_SKINNY_ROWS)
    ),
    Fp8: Kind(lambda s, x, *rest: s.ops.fp8_product(x, s.codes, s.scale, *rest)),
    Fp8Groups: Kind(
        lambda s, x, *rest: s.ops.fp8_group_product(x, s.codes, s.scale, s.group, *rest),
        row_limits=(*INT_TILE_ROWS, MAX_FP8_TILE_ROWS),
    ),
    Ints: Kind(
        lambda s, x, *rest: s.ops.int_product(x, s.words, s.scales, s.num_out, *rest),
        row_limits=(*INT_TILE_ROWS[:-1], MAX_INT_TILE_ROWS),
    ),
}


def fuse(product: Product | FusedProduct) -> FusedProduct | None:
    """Return a product that takes a prologue and an epilogue; None if nothing fuses with its kind of weight."""
    if isinstance(product, FusedProduct):
        return product
    known = type(product.linear) is layers.Linear and type(product.linear.scheme) in KINDS
    return FusedProduct(product.linear) if known else None


def can_norm(product: FusedProduct) -> bool:
    return KINDS[type(product.linear.scheme)].norms


def can_gate(product: FusedProduct) -> bool:
    """CPU panels hold 16 outputs: a gate and its value must be in panels of their own, of one part."""
    scheme = product.linear.scheme
    if isinstance(scheme, Packed) and len(scheme.parts) > 1:
        return False
    return not isinstance(scheme, Dense | Packed) or scheme.num_out % (2 * PANEL) == 0


GROUPED: dict[type, Callable[..., Tensor]] = {
    Dense: lambda s, x, *rest: s.ops.grouped_matmul(x, s.panels, *rest),
    Packed: lambda s, x, ids, count, epilogue: s.ops.grouped_packed_matmul(x, s.parts, ids, count, s.x_bits, epilogue),
    Matrix: lambda s, x, *rest: s.ops.grouped_product(x, s.weight, *rest),
    Fp8: lambda s, x, *rest: s.ops.grouped_fp8_product(x, s.codes, s.scale, *rest),
    Fp8Groups: lambda s, x, *rest: s.ops.grouped_fp8_group_product(x, s.codes, s.scale, s.group, *rest),
    Ints: lambda s, x, *rest: s.ops.grouped_int_product(x, s.words, s.scales, *rest),
}


def can_gate_experts(experts: layers.Experts) -> bool:
    """On a CPU gates and their values must be in panels of their own, of one part."""
    scheme: Any = experts.gate_up.scheme
    if type(scheme) not in GROUPED or (isinstance(scheme, Packed) and len(scheme.parts) > 1):
        return False
    is_in_panels = isinstance(scheme, Dense | Packed)
    return not is_in_panels or scheme.num_out // experts.gate_up.num_matrices % (2 * PANEL) == 0


def gate_experts(experts: layers.Experts, x: Tensor, ids: Tensor) -> Tensor:
    """Return act(gate(x)) · up(x) for the chosen experts, by one op."""
    scheme: Any = experts.gate_up.scheme
    epilogue = Epilogue(scheme.bias, experts.activation, True)
    return GROUPED[type(scheme)](scheme, x, ids, experts.gate_up.num_matrices, epilogue)


FOLDED_ROWS = 4096  # at a time
FOLDED_BYTES = 2  # of a value: wider matrices keep their norms apart


def fold(branch: Branch, product: Product) -> Branch | None:
    """Multiply a norm's weight into the 16-bit matrix after it, in place; the norm that is left has ones."""
    norm, scheme = branch.norm, product.linear.scheme
    if not isinstance(norm, layers.RmsNorm) or not isinstance(scheme, Matrix) or scheme.weight.itemsize != FOLDED_BYTES:
        return None
    for first in range(0, scheme.num_out, FOLDED_ROWS):
        rows = scheme.weight[first : first + FOLDED_ROWS]
        rows.copy_((rows.float() * norm.weight).to(rows.dtype))
    ones = layers.RmsNorm(norm.ops, torch.ones(norm.size, device=norm.weight.device), norm.eps)
    return replace(branch, norm=ones, folded=norm.weight)
