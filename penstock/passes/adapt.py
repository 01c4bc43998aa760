"""Add to the outputs of linears: the seam of adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock import layers
from penstock.models.decoder import Decoder, Encoder, linears
from penstock.models.spec import ModelSpec, parts_of
from penstock.ops import LoraWeights, OpTable
from penstock.passes.lower import Lower, LoweredBlock
from penstock.passes.lower.products import FusedProduct, fuse
from penstock.passes.lower.stages import AddResidual, Flow, Product, Stage, open_block
from penstock.passes.shard.links import GatherInputs, GatherOutputs, LinkedLinear, ReduceOutputs

Delta = Callable[[Tensor, Tensor, layers.StepInputs], Tensor]  # x[T, C], y[T, O] = linear(x) → [T, O]
Deltas = Callable[[str, layers.Linear], Delta | None]  # by a linear's name
KEPT = ("write_qkv", "add_in_norm", "attend_ends", "mix_ends")  # rules that match beside linears with adapters


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
    """x = x + linear(y), in one product, and then the delta."""

    product: FusedProduct
    delta: Delta

    def __call__(self, flow: Flow) -> None:
        flow.x = self.delta(flow.y, self.product.run(flow.y, flow.x), flow.step)


@dataclass(frozen=True)
class GatheredSum:
    """x = x + linear(y) of all ranks, and then the delta: the sums of one rank, in their order."""

    ops: OpTable
    first: GatherInputs
    linear: layers.Linear
    delta: Delta

    def __call__(self, flow: Flow) -> None:
        y = self.first.mesh.gather(flow.y, self.first.widths)
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


EMBEDDING, PROJECT, HEAD = "embedding.tokens", "embedding.project", "head.rows"


class LoraTable(Mapping[str, LoraWeights]):
    """The low-rank matrices of every linear that may have some, by the linear's name; rooms for `num_slots`."""

    def __init__(self, spec: ModelSpec, num_slots: int) -> None:
        self.spec, self.num_slots = spec, num_slots
        self._merges = spec.merges()
        self._made: dict[str, LoraWeights] = {}

    def make(self, name: str, num_out: int) -> LoraWeights:
        merge = self._merges.get(name)
        return self._made.setdefault(name, LoraWeights(num_out, self.num_slots, len(merge.parts) if merge else 1))

    def __getitem__(self, name: str) -> LoraWeights:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class AddLora:
    """y, with what the adapters of the step's rows add to it."""

    def __init__(self, ops: OpTable, weights: LoraWeights) -> None:
        self.ops, self.weights = ops, weights

    def __call__(self, x: Tensor, y: Tensor, step: layers.StepInputs) -> Tensor:
        return y if step.adapters is None else self.ops.add_lora(x, y, step.adapters, self.weights)


class AdaptedBlock:
    """Called like the block. A step without adapters takes it as `lower` made it."""

    def __init__(self, lowered: layers.AnyBlock, adapted: layers.AnyBlock) -> None:
        self.mixer, self.ffn = adapted.mixer, adapted.ffn
        self.lowered, self.adapted = lowered, adapted

    def __call__(self, x: Tensor, step: layers.StepInputs, memory: Any) -> Tensor:
        return (self.lowered if step.adapters is None else self.adapted)(x, step, memory)


class AdaptedEmbedding(layers.Embedding):
    """An embedding whose rows may have adapters."""

    def __init__(self, embedding: layers.Embedding, weights: LoraWeights) -> None:
        vars(self).update(vars(embedding))
        self.weights = weights

    def rows(self, step: layers.StepInputs) -> Tensor:
        x = super().rows(step)
        return x if step.adapters is None else self.ops.add_lora_rows(step.ids, x, step.adapters, self.weights)


class AdaptedHead(layers.Head):
    """A head whose rows may have adapters."""

    def __init__(self, head: layers.Head, weights: LoraWeights) -> None:
        vars(self).update(vars(head))
        self.weights = weights

    def multiply(self, x: Tensor, adapters: Tensor | None) -> Tensor:
        if adapters is None:
            return super().multiply(x, None)
        if self.project is not None:
            x = self.project.matmul(x)
        return self.ops.add_lora(x, self.rows.matmul(x), adapters, self.weights)


class Adapt:
    """Finish blocks as `lower` does, and give each a second form for steps in which some row has an adapter."""

    def __init__(self, lower: Lower, table: LoraTable) -> None:
        self.lower, self.table, self.ops = lower, table, lower.ops
        self._num_blocks = 0

    def __call__(self, block: layers.AnyBlock, is_last: bool = False) -> layers.AnyBlock:
        lowered = self.lower(block, is_last)
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        for described, part in zip(parts_of(self.table.spec.layers[index]), (block.mixer, block.ffn)):
            if part is None or isinstance(part, layers.Experts):
                continue
            for name, linear in list(part.linears()):
                weights = self.table.make(f"layers.{index}.{described.prefix}.{name}", count_outputs(linear))
                _swap(part, linear, wrap_linear(linear, AddLora(self.ops, weights)))
        stages = join_sums(open_block(block))
        for rule in self.lower.rules:
            if rule.name in KEPT and (is_last or not rule.last):
                stages = rule.apply(stages)
        return AdaptedBlock(lowered, LoweredBlock(block, stages) if stages else block)

    def finish(self, model: Decoder | Encoder) -> None:
        """Adapt what is outside the blocks."""
        tokens = model.embedding.tokens
        project = model.embedding.project
        if project is not None:
            weights = self.table.make(PROJECT, project.scheme.num_out)
            model.embedding.project = AdaptedLinear(project, AddLora(self.ops, weights))
        model.embedding = AdaptedEmbedding(model.embedding, self.table.make(EMBEDDING, tokens.num_in))
        if isinstance(model, Decoder):
            model.head = AdaptedHead(model.head, self.table.make(HEAD, model.head.rows.num_out))
