"""Add to the outputs of linears: the seam of adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock import layers
from penstock.models.decoder import Decoder, Encoder, linears, store_fp8
from penstock.models.spec import parts_of
from penstock.ops import LoraStacks, LoraWeights, OpTable
from penstock.passes.adapt_stacks import AdaptedExperts, adapt_heads
from penstock.passes.lora_table import EMBEDDING, HEAD, PROJECT, LoraTable
from penstock.passes.lower import Lower, LoweredBlock
from penstock.passes.lower.products import FusedProduct, fuse
from penstock.passes.lower.stages import AddResidual, Flow, Product, Stage, open_block
from penstock.passes.shard.links import GatherInputs, GatherOutputs, LinkedLinear, ReduceOutputs

Delta = Callable[..., Tensor]  # x[T, C], y[T, O] = linear(x), the step → [T, O]
Deltas = Callable[[str, layers.Linear], Delta | None]  # by a linear's name
# Rules that match beside linears with adapters.
KEPT = ("write_qkv", "add_in_norm", "attend_ends", "mix_ends", "gate_in_experts", "add_in_experts")


class AdaptedLinear(layers.Linear):
    """delta(x, linear(x))"""

    def __init__(self, linear: layers.Linear, delta: Delta) -> None:
        super().__init__(linear.scheme)
        self.linear, self.delta = linear, delta

    def __call__(self, x: Tensor, step: layers.StepInputs) -> Tensor:
        return self.delta(x, self.linear(x, step), step)


def adapt(model: Decoder | Encoder, deltas: Deltas) -> None:
    """Wrap the linears that `deltas` has a delta for. No rule of `lower` matches them: they run plain."""
    for name, linear, part in linears(model):
        delta = deltas(name, linear)
        if delta is not None:
            _swap(part, linear, AdaptedLinear(linear, delta))


def _swap(part: Any, old: layers.Linear, new: layers.Linear) -> None:
    """Put `new` where a mixer or FFN holds `old`, by itself or in a list."""
    for name, value in vars(part).items():
        if value is old:
            setattr(part, name, new)
        elif isinstance(value, list) and old in value:
            value[value.index(old)] = new


def wrap_linear(linear: layers.Linear, delta: Delta) -> layers.Linear:
    """Adapt a linear; of one that exchanges with other ranks, what is inside, with its whole inputs and outputs."""
    if isinstance(linear, GatherInputs | ReduceOutputs):
        return linear.around(wrap_linear(linear.linear, delta))
    return AdaptedLinear(linear, delta)


def count_outputs(linear: layers.Linear) -> int:
    """Count the outputs that a delta is added to."""
    if isinstance(linear, GatherOutputs):
        return sum(linear.widths)
    return count_outputs(linear.linear) if isinstance(linear, LinkedLinear) else linear.scheme.num_out


@dataclass(frozen=True)
class AdaptedSum:
    """x = x + linear(y), in one product, and then the delta, which is told what was added to."""

    product: FusedProduct
    delta: Delta

    def __call__(self, flow: Flow) -> None:
        flow.x = self.delta(flow.y, self.product.run(flow.y, flow.x), flow.step, flow.x)


@dataclass(frozen=True)
class GatheredSum:
    """x = x + linear(y) of all ranks, and then the delta: the sums of one rank, in their order."""

    ops: OpTable
    first: GatherInputs
    linear: layers.Linear
    delta: Delta

    def __call__(self, flow: Flow) -> None:
        y = self.first.mesh.all_gather(flow.y, self.first.widths)
        flow.x = self.delta(y, self.ops.add(flow.x, self.linear(y, flow.step)), flow.step)


def join_sums(stages: Sequence[Stage]) -> list[Stage]:
    """Join products of adapted linears with the residual that is added after them."""
    made: list[Stage] = []
    for stage in stages:
        before = made[-1] if made else None
        linear = before.linear if isinstance(before, Product) else None
        if isinstance(stage, AddResidual) and stage.scale == 1.0 and isinstance(linear, AdaptedLinear):
            fused = fuse(Product(linear.linear))
            if fused is not None:
                made[-1] = AdaptedSum(replace(fused, adds=True), linear.delta)
                continue
        if isinstance(stage, AddResidual) and stage.scale == 1.0 and isinstance(linear, GatherInputs):
            adapted = linear.linear
            if isinstance(adapted, AdaptedLinear) and _is_fusable(adapted.linear):
                made[-1] = GatheredSum(stage.ops, linear, adapted.linear, adapted.delta)
                continue
        made.append(stage)
    return made


def _is_fusable(linear: layers.Linear) -> bool:
    """Return True if one rank would add the residual in the product."""
    return isinstance(linear, GatherOutputs) and fuse(Product(linear.linear)) is not None


class AddLora:
    """y, with what the adapters of the step's rows add to it."""

    def __init__(self, ops: OpTable, weights: LoraWeights | LoraStacks) -> None:
        self.ops, self.weights = ops, weights
        self.op = "add_lora_stacks" if isinstance(weights, LoraStacks) else "add_lora"

    def __call__(self, x: Tensor, y: Tensor, step: layers.StepInputs, residual: Tensor | None = None) -> Tensor:
        """y is the product and the residual, if there is one."""
        return self.add(x, y, step.adapters, residual)

    def add(self, x: Tensor, y: Tensor, adapters: Any, residual: Tensor | None = None) -> Tensor:
        if adapters is None:
            return y
        given = () if residual is None or isinstance(self.weights, LoraStacks) else (residual,)
        added: Tensor = getattr(self.ops, self.op)(x, y, adapters, self.weights, *given)
        return added


class AdaptedBlock:
    """Called like the block. A step without adapters takes it as `lower` made it."""

    def __init__(self, lowered: layers.AnyBlock, adapted: layers.AnyBlock) -> None:
        self.mixer, self.ffn = adapted.mixer, adapted.ffn
        self.lowered, self.adapted = lowered, adapted

    def __call__(self, x: Tensor, step: layers.StepInputs, memory: Any) -> Tensor:
        return (self.lowered if step.adapters is None else self.adapted)(x, step, memory)


class AdaptedEmbedding(layers.Embedding):
    """An embedding whose rows may have adapters."""

    def __init__(self, embedding: layers.Embedding, weights: LoraWeights | LoraStacks) -> None:
        vars(self).update(vars(embedding))
        self.weights = weights
        self.op = "add_lora_columns" if isinstance(weights, LoraStacks) else "add_lora_rows"

    def rows(self, step: layers.StepInputs) -> Tensor:
        x = super().rows(step)
        return x if step.adapters is None else getattr(self.ops, self.op)(step.ids, x, step.adapters, self.weights)


class AdaptedHead(layers.Head):
    """A head whose rows may have adapters."""

    def __init__(self, head: layers.Head, weights: LoraWeights | LoraStacks) -> None:
        vars(self).update(vars(head))
        self.added = AddLora(self.ops, weights)

    def __call__(self, x: Tensor, adapters: Any = None) -> Tensor:
        """x[M, C] → logits [M, V]; adapters[M] are the slots of each row's adapters."""
        if adapters is None:
            return super().__call__(x)
        if self.project is not None:
            x = self.project.matmul(x)
        return self.finish(self.added.add(x, self.rows.matmul(x), adapters))


class Adapt:
    """Finish blocks as `lower` does, and give each a second form for steps in which some row has an adapter."""

    def __init__(self, lower: Lower, table: LoraTable, first: int = 0) -> None:
        """`first`: the layer that the first block is."""
        self.lower, self.table, self.ops = lower, table, lower.ops
        self._next = first

    def __call__(self, block: layers.AnyBlock, is_last: bool = False) -> layers.AnyBlock:
        lowered = self._finish(block, is_last)
        index, self._next = self._next, self._next + 1
        for described, part in zip(parts_of(self.table.spec.layers[index]), (block.mixer, block.ffn)):
            name = f"layers.{index}.{described.prefix}"
            if isinstance(part, layers.Experts):
                opened: Any = block
                if type(part) not in (layers.Experts, layers.WeighedInputExperts):
                    continue
                if self.table.bases is not None:
                    opened.ffn = self._adapt_experts(part, name)
                elif self.table.is_whole:
                    self._adapt_beside_experts(part, name)
            elif part is not None:
                self._adapt_linears(part, part.linears(), name)
                if self.table.bases is not None and type(part) is layers.LatentAttention:
                    adapt_heads(part, described, self.table, name)
        stages = join_sums(open_block(block))
        for rule in self.lower.rules:
            if rule.name in KEPT and (is_last or not rule.last):
                stages = rule.apply(stages)
        adapted = LoweredBlock(block, stages) if stages else block
        return adapted if lowered is None else AdaptedBlock(lowered, adapted)

    def _adapt_linears(self, part: Any, linears: Iterable[tuple[str, layers.Linear]], name: str) -> None:
        for own, linear in list(linears):
            weights = self.table.make(f"{name}.{own}", count_outputs(linear), linear.scheme.num_in, linear.scheme)
            _swap(part, linear, wrap_linear(linear, AddLora(self.ops, weights)))

    def _adapt_experts(self, experts: layers.Experts, name: str) -> AdaptedExperts:
        """Adapt a copy: steps without adapters take what `lower` made of the experts themselves."""
        adapted = AdaptedExperts(experts, self.table, name)
        self._adapt_beside_experts(adapted, name)
        return adapted

    def _adapt_beside_experts(self, experts: layers.Experts, name: str) -> None:
        """Adapt the linears that every token goes through."""
        self._adapt_linears(experts.router, [("router", experts.router.linear)], name)
        if experts.shared is not None:
            self._adapt_linears(experts.shared, experts.shared.linears(), f"{name}.shared")
        if experts.shared_gate is not None:
            self._adapt_linears(experts, [("shared_gate", experts.shared_gate)], name)

    def _finish(self, block: layers.AnyBlock, is_last: bool) -> layers.AnyBlock | None:
        """Lower the block for steps without adapters. On a GPU there are none: one graph serves any rows, and norms
        stay apart from matrices, since adapters need what the norms give."""
        if not self.table.is_on_gpu:
            return self.lower(block, is_last)
        if self.lower.fp8:
            store_fp8(block)
        return None

    def finish(self, model: Decoder | Encoder) -> None:
        """Adapt what is outside the blocks."""
        embedding: Any = model.embedding  # `Received` on a later pipeline stage
        if isinstance(embedding, layers.Embedding):
            project, tokens = embedding.project, embedding.tokens
            if project is not None:
                weights = self.table.make(PROJECT, project.scheme.num_out, project.scheme.num_in, project.scheme)
                embedding.project = AdaptedLinear(project, AddLora(self.ops, weights))
            weights = self.table.make(EMBEDDING, tokens.num_in, tokens.num_out, tokens)
            model.embedding = AdaptedEmbedding(embedding, weights)
        if isinstance(model, Decoder) and isinstance(model.head, layers.Head):
            rows = model.head.rows
            model.head = AdaptedHead(model.head, self.table.make(HEAD, rows.num_out, rows.num_in, rows))
        self.table.allocate()
