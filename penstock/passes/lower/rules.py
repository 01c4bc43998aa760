"""The fusion rules: each names the stages it matches and makes one of them.

The order counts: a later rule may match what an earlier one made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock import layers
from penstock.ops import OpTable
from penstock.passes.lower import products
from penstock.passes.lower.fused import (
    EndsAttend,
    EndsMix,
    Fp8Mlp,
    FusedExperts,
    HeadNorms,
    JoinedAttention,
    NormAdd,
    QkvWrite,
)
from penstock.passes.lower.products import FusedProduct, can_gate, can_gate_experts, can_norm, fuse
from penstock.passes.lower.stages import (
    Activate,
    AddResidual,
    Attend,
    Branch,
    FeedExperts,
    Mix,
    OutputNorm,
    Product,
    Stage,
    Write,
)
from penstock.quant.fp8 import Fp8

AnyProduct = Product | FusedProduct


@dataclass(frozen=True)
class Rule:
    """`make(*stages)` returns the stages to put in place of those that match `pattern`, or None."""

    name: str
    pattern: tuple[tuple[type, ...], ...]
    devices: tuple[str, ...]
    exact: bool  # also where bits may not depend on the batch
    last: bool  # in the last block alone
    make: Callable[..., Sequence[Stage] | None]

    def apply(self, stages: Sequence[Stage]) -> list[Stage]:
        made, at, length = list(stages), 0, len(self.pattern)
        while at <= len(made) - length:
            window = made[at : at + length]
            found = None
            if all(type(stage) in types for stage, types in zip(window, self.pattern)):
                found = self.make(*window)
            if found is None:
                at += 1
            else:
                made[at : at + length] = found
                at += len(found)
        return made


RULES: list[Rule] = []


def rule(
    *pattern: Any, devices: tuple[str, ...] = ("cpu", "cuda"), exact: bool = True, last: bool = False
) -> Callable[[Callable[..., Sequence[Stage] | None]], Callable[..., Sequence[Stage] | None]]:
    def register(make: Callable[..., Sequence[Stage] | None]) -> Callable[..., Sequence[Stage] | None]:
        types = tuple(getattr(one, "__args__", (one,)) for one in pattern)
        RULES.append(Rule(make.__name__, types, devices, exact, last, make))
        return make

    return register


@rule(Branch, Product, devices=("cuda",))
def fold_norm(branch: Branch, product: Product) -> Sequence[Stage] | None:
    """rms_norm, matmul → the norm's weight in the matrix's; a GEMV then reads no norm weights."""
    folded = products.fold(branch, product)
    return None if folded is None else [folded, product]


@rule(Write)
def write_qkv(write: Write) -> Sequence[Stage] | None:
    """Head norms, rope, cache write → `qkv_write`."""
    norms, rope = HeadNorms.of(write.attention), write.attention.rope
    return None if norms is None or (rope and rope.interleaved) else [QkvWrite(write.attention, norms)]


@rule(Branch, Product)
def norm_in_product(branch: Branch, product: Product) -> Sequence[Stage] | None:
    """rms_norm, matmul → matmul with a norm prologue."""
    fused = fuse(product)
    if fused is None or not isinstance(branch.norm, layers.RmsNorm) or not can_norm(fused):
        return None
    return [replace(fused, branch=branch)]


@rule(AnyProduct, Activate)
def gate_in_product(product: AnyProduct, activate: Activate) -> Sequence[Stage] | None:
    """matmul, gated_activation → matmul with a gated epilogue."""
    fused = fuse(product)
    if fused is None or not activate.gated or not can_gate(fused):
        return None
    return [replace(fused, activation=activate.kind, gated=True)]


@rule(AnyProduct, Activate)
def activate_in_product(product: AnyProduct, activate: Activate) -> Sequence[Stage] | None:
    """matmul, activation → matmul with an activation epilogue."""
    fused = fuse(product)
    return None if fused is None or activate.gated else [replace(fused, activation=activate.kind)]


@rule(AnyProduct, AddResidual)
def add_in_product(product: AnyProduct, add: AddResidual) -> Sequence[Stage] | None:
    """matmul, add → matmul with a residual epilogue."""
    fused = fuse(product)
    return None if fused is None or add.scale != 1.0 else [replace(fused, adds=True)]


@rule(FeedExperts)
def gate_in_experts(feed: FeedExperts) -> Sequence[Stage] | None:
    """grouped product, gated_activation → grouped product with a gated epilogue; a shared expert's likewise."""
    return [FusedExperts(feed.experts, gates=True)] if can_gate_experts(feed.experts) else None


@rule(FeedExperts | FusedExperts, AddResidual)
def add_in_experts(feed: FeedExperts | FusedExperts, add: AddResidual) -> Sequence[Stage] | None:
    """combine, add → combine with a residual."""
    if add.scale != 1.0:
        return None
    return [FusedExperts(feed.experts, gates=isinstance(feed, FusedExperts) and feed.gates, adds=True)]


@rule(OutputNorm, AddResidual)
def add_in_norm(norm: OutputNorm, add: AddResidual) -> Sequence[Stage] | None:
    """norm, add → norm with a residual."""
    if add.scale != 1.0 or not isinstance(norm.norm, layers.RmsNorm | layers.LayerNorm):
        return None
    return [NormAdd(norm.norm)]


@rule(FusedProduct, AnyProduct, devices=("cuda",))
def join_fp8_mlp(first: FusedProduct, second: AnyProduct) -> Sequence[Stage] | None:
    """Two FP8 products of a gated MLP → `fp8_mlp`, which rounds the rows between them in one kernel."""
    down = fuse(second)
    if down is None or not first.gated or not all(isinstance(one.linear.scheme, Fp8) for one in (first, down)):
        return None
    return [Fp8Mlp(first, down)]


@rule(Attend, last=True)
def attend_ends(attend: Attend) -> Sequence[Stage] | None:
    """attention, and all after it, in the last block: only for the tokens that logits are wanted of."""
    return [EndsAttend(attend.attention.ops, attend)]


@rule(Mix, last=True)
def mix_ends(mix: Mix) -> Sequence[Stage] | None:
    """any other mixer in the last block → what follows runs only for the tokens that logits are wanted of."""
    ops: OpTable | None = getattr(mix.mixer, "ops", None)
    return None if ops is None else [EndsMix(ops, mix)]


@rule(FusedProduct, QkvWrite, devices=("cuda",), exact=False)
def defer_norm(product: FusedProduct, write: QkvWrite) -> Sequence[Stage] | None:
    """norm, matmul, qkv_write → for a few rows the write applies the norm, so that the GEMM does not wait for it."""
    return None if product.branch is None else [replace(write, product=product)]


@rule(QkvWrite, Attend | EndsAttend, devices=("cuda",), exact=False)
def join_attention(write: QkvWrite, attend: Attend | EndsAttend) -> Sequence[Stage] | None:
    """qkv_write, attention → `qkv_attention` for a few decode rows."""
    return [JoinedAttention(write, attend)]
