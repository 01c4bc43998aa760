"""Stages that replace several: each gives what those give one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from penstock import layers
from penstock.ops import OpTable
from penstock.ops.attention.qkv_attention import is_joined
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.triton.tuning import MAX_WIDE_READ_ROWS, MIN_WIDE_READ_ROWS, grouped_row_limits
from penstock.passes.lower.products import FusedProduct, can_gate, fuse, gate_experts
from penstock.passes.lower.stages import Attend, Flow, Mix, Product
from penstock.quant.fp8 import Fp8


@dataclass(frozen=True)
class NormAdd:
    """x = x + norm(y)"""

    norm: layers.RmsNorm | layers.LayerNorm

    def __call__(self, flow: Flow) -> None:
        norm = self.norm
        if isinstance(norm, layers.RmsNorm):
            flow.x = norm.ops.rms_norm(flow.y, norm.weight, norm.eps, flow.x)
        else:
            flow.x = norm.ops.layer_norm(flow.y, norm.weight, norm.bias, norm.eps, flow.x)


@dataclass(frozen=True)
class HeadNorms:
    """Norms of queries and keys per head, with one eps."""

    q: Tensor | None
    k: Tensor | None
    eps: float

    @classmethod
    def of(cls, attention: layers.Attention) -> HeadNorms | None:
        """None where a norm is of another kind, spans heads, or has an eps of its own."""
        norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        per_head = [norm for norm in norms if isinstance(norm, layers.RmsNorm) and norm.size == attention.head_size]
        epsilons = {norm.eps for norm in per_head} or {0.0}
        if len(per_head) != len(norms) or len(epsilons) > 1:
            return None
        q, k = (getattr(norm, "weight", None) for norm in (attention.q_norm, attention.k_norm))
        return cls(q, k, epsilons.pop())


@dataclass(frozen=True)
class QkvWrite:
    """y = queries, normed and rotated; keys and values go to the cache: one op. `product` makes y, where it may leave
    its norm to this op."""

    attention: layers.Attention
    norms: HeadNorms
    product: FusedProduct | None = None

    def __call__(self, flow: Flow) -> None:
        qkv, source, eps = self.project(flow)
        step, memory = flow.step, flow.memory
        flow.y = self.attention.ops.qkv_write(
            qkv, memory.k, memory.v, step.slots[memory.group], step.positions, *self.shared, memory.k_scale,
            memory.v_scale, source, eps,
        )  # fmt: skip

    @property
    def shared(self) -> tuple[Tensor | None, Tensor | None, float, Tensor | None, Tensor | None]:
        rope = self.attention.rope
        angles = (None, None) if rope is None else (rope.cos, rope.sin)
        return self.norms.q, self.norms.k, self.norms.eps, *angles

    def project(self, flow: Flow) -> tuple[Tensor, Tensor | None, float]:
        """Return qkv; and where it was made without its norm, the rows it was made of and the norm's eps."""
        if self.product is None:
            return flow.y, None, 0.0
        deferred = self.product.defer(flow.x)
        if deferred is None:
            return self.product.run(flow.x, None), None, 0.0
        return deferred[0], flow.x, deferred[1]

    @property
    def row_limits(self) -> tuple[int, ...]:
        return () if self.product is None else self.product.row_limits


@dataclass(frozen=True)
class EndsAttend:
    """Attention in the last block: only tokens that logits are wanted of go on, each a sequence's only query."""

    ops: OpTable
    attend: Attend

    def __call__(self, flow: Flow) -> None:
        select(self.ops, flow)
        if len(flow.x):
            self.attend(flow)


@dataclass(frozen=True)
class EndsMix:
    """Any mixer in the last block: after it only tokens that logits are wanted of go on."""

    ops: OpTable
    mix: Mix

    def __call__(self, flow: Flow) -> None:
        self.mix(flow)
        select(self.ops, flow)


def select(ops: OpTable, flow: Flow) -> None:
    """Keep the rows of `step.ends` alone."""
    ends = flow.step.ends
    if ends is None:
        return
    flow.step = ends.step
    if not len(ends.at):
        flow.x = flow.x[:0]
        return
    flow.y = ops.gather(ends.at, flow.y.flatten(1)).view(-1, *flow.y.shape[1:])
    flow.x = ops.gather(ends.at, flow.x)
    if flow.kept is not None:
        flow.kept = ops.gather(ends.at, flow.kept)


@dataclass(frozen=True)
class JoinedAttention:
    """For a few decode rows one kernel writes keys and values and attends; else two."""

    write: QkvWrite
    attend: Attend | EndsAttend

    def __call__(self, flow: Flow) -> None:
        attention, step, memory = self.write.attention, flow.step, flow.memory
        work, group = step.work, memory.group
        if work is None or step.ends is not None or memory.k_scale is not None:
            joined = False
        else:
            joined = is_joined(work, attention.window)
        if not joined:
            self.write(flow)
            self.attend(flow)
            return
        assert work is not None
        qkv, source, eps = self.write.project(flow)
        y = attention.ops.qkv_attention(
            qkv, memory.k, memory.v, step.slots[group], step.positions, step.tables[group], step.lengths,
            attention.scale, attention.window, attention.softcap, attention.alibi, *self.write.shared, source, eps,
            work.num_kv_splits, *attention.sinks,
        )  # fmt: skip
        flow.y = y.flatten(1)

    @property
    def row_limits(self) -> tuple[int, ...]:
        return *self.write.row_limits, MIN_WIDE_READ_ROWS - 1, MAX_WIDE_READ_ROWS


@dataclass(frozen=True)
class FusedExperts:
    """y = experts(y), or x = x + that: gates in the experts' first product, the residual in their sum."""

    experts: layers.Experts
    gates: bool = False
    adds: bool = False

    def __call__(self, flow: Flow) -> None:
        experts, x, step = self.experts, flow.y, flow.step
        rows, ids, weights = experts.route(x, step)
        if self.gates:
            hidden = gate_experts(experts, rows, ids)
        else:
            hidden = experts.ops.gated_activation(experts.gate_up(rows, ids), experts.activation)
        shared = None if experts.shared is None else self.run_shared(experts.shared, x, step)
        gate = None if experts.shared_gate is None else experts.shared_gate(x, step)
        residual = flow.x if self.adds else None
        y = experts.ops.combine(experts.down(hidden, ids), weights, shared, gate, residual)
        if self.adds:
            flow.x = y
        else:
            flow.y = y

    @property
    def row_limits(self) -> tuple[int, ...]:
        stack, shared = self.experts.gate_up, self.experts.shared
        linears = [self.experts.router.linear, *((shared.gate_up, shared.down) if shared else ())]
        products = [fuse(Product(linear)) for linear in linears]
        limits = {limit for product in products if product is not None for limit in product.row_limits}
        num_chosen = self.experts.router.rule.num_chosen
        return tuple(sorted(limits.union(grouped_row_limits(num_chosen, stack.num_matrices))))

    def run_shared(self, mlp: layers.GatedMlp, x: Tensor, step: layers.StepInputs) -> Tensor:
        product = fuse(Product(mlp.gate_up)) if self.gates else None
        if product is None or not can_gate(product):
            return mlp(x, step)
        return mlp.down(replace(product, activation=mlp.activation, gated=True).run(x, None), step)


@dataclass(frozen=True)
class Fp8Mlp:
    """Both products of a gated MLP in FP8, with FP8 rows between them."""

    first: FusedProduct
    down: FusedProduct

    def __call__(self, flow: Flow) -> None:
        gate_up, down = self.first.linear.scheme, self.down.linear.scheme
        assert isinstance(gate_up, Fp8) and isinstance(down, Fp8)
        y = gate_up.ops.fp8_mlp(
            flow.y if self.first.branch is None else flow.x, gate_up.codes, gate_up.scale, down.codes, down.scale,
            Epilogue(gate_up.bias, self.first.activation, True),
            Epilogue(down.bias, residual=flow.x if self.down.adds else None), *self.first.norm,
        )  # fmt: skip
        if self.down.adds:
            flow.x = y
        else:
            flow.y = y
