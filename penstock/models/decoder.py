"""The one decoder and the one encoder, and how they are built: parameters are taken one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock import layers
from penstock.errors import InvalidModel
from penstock.models.layer import Norm, Rope
from penstock.models.pooling import Pooling
from penstock.models.spec import AnyBlock, Embedding, Head, ModelSpec, parts
from penstock.ops import OpTable
from penstock.quant.dense import dense as dense
from penstock.quant.fp8 import as_fp8
from penstock.quant.scheme import Scheme


def linears(model: Decoder | Encoder) -> Iterator[tuple[str, layers.Linear, Any]]:
    """Yield every linear of the stack: its name, itself, and the mixer or FFN that it belongs to."""
    for index, (described, block) in enumerate(zip(model.spec.layers, model.blocks)):
        for spec, part in ((described.mixer, block.mixer), (described.ffn, block.ffn)):
            if spec is not None and part is not None:
                for name, linear in list(part.linears()):
                    yield f"layers.{index}.{spec.prefix}.{name}", linear, part


class Decoder:
    """Hidden states of a step's tokens, and the logits of those wanted."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: OpTable,
        embedding: layers.Embedding,
        blocks: Sequence[layers.AnyBlock],
        norm: layers.Norm | None,
        head: layers.Head,
    ) -> None:
        self.spec, self.ops, self.embedding, self.blocks = spec, ops, embedding, list(blocks)
        self.norm, self.head = norm, head

    def forward(
        self, step: layers.StepInputs, memories: Sequence[Any], taps: MutableMapping[int, Tensor] | None = None
    ) -> Tensor:
        """Compute the step's tokens → hidden [T, C], or those of `step.ends` alone → [M, C]. Each layer's memory is
        written on the way; `taps` gets the inputs [T, C] of the layers that it has keys for."""
        x = self.embedding(step)
        for index, (block, memory) in enumerate(zip(self.blocks, memories, strict=True)):
            if taps and index in taps:
                taps[index] = x
            x = block(x, step, memory)
        if step.ends is not None and len(x) != len(step.ends.at):
            x = self.ops.gather(step.ends.at, x)
        return x if self.norm is None or not len(x) else self.norm(x)

    def logits(self, hidden: Tensor, at: Tensor | None = None, adapters: Any = None) -> Tensor:
        """Rows at[M] of hidden [T, C], or all of them → [M, V] float32; `adapters` [M] are the slots of theirs."""
        x = hidden if at is None else self.ops.gather(at, hidden)
        head: Any = self.head  # an adapted one takes them
        return head(x) if adapters is None else head(x, adapters)  # type: ignore[no-any-return]


class Encoder:
    """Hidden states of whole sequences, and one embedding of each."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: OpTable,
        embedding: layers.Embedding,
        blocks: Sequence[layers.AnyBlock],
        pooling: Pooling,
    ) -> None:
        self.spec, self.ops, self.embedding, self.blocks, self.pooling = spec, ops, embedding, list(blocks), pooling

    def forward(self, step: layers.StepInputs, memories: Sequence[Any] = ()) -> Tensor:
        """Compute the step's tokens → hidden [T, C]. Each sequence must be whole in the step."""
        x = self.embedding(step)
        for block in self.blocks:
            x = block(x, step, None)
        return x

    def pool(self, hidden: Tensor, query_start: Tensor) -> Tensor:
        """Pool hidden [T, C] of S sequences → [S, C] float32."""
        return self.ops.pooling(hidden, query_start, self.pooling.mode == "cls", self.pooling.normalize)


MAX_ROPE_BYTES = 1 << 30
ROUTING = ("router", "shared_gate")  # small, and an error changes which experts run
CPU = torch.device("cpu")
TIED = "embedding.tokens"  # the rows of a tied head
Finish = Callable[[layers.AnyBlock, bool], layers.AnyBlock]  # a block, and whether it is the last


class Finisher(Protocol):
    """A pass over each block, and the ops that the model calls."""

    ops: OpTable

    def __call__(self, block: layers.AnyBlock, is_last: bool) -> layers.AnyBlock: ...


class Build:
    """Makes layers out of `take(name)`, a tensor, and `hold(name, bias)`, a matrix in its storage scheme, both on
    `device`. Each block goes through `finish` before the next one is read."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: OpTable,
        take: Callable[[str], Tensor],
        hold: Callable[[str, Tensor | None], Scheme],
        device: torch.device = CPU,
        finish: Finish | None = None,
    ) -> None:
        self.spec, self.ops, self.take, self.hold, self.device, self.finish = spec, ops, take, hold, device, finish
        self.names = spec.parameters().keys()
        self.ropes: dict[Rope, layers.RopeTable] = {}

    def matrix(self, name: str) -> Scheme:
        bias = f"{name}.bias"
        return self.hold(f"{name}.weight", self.take(bias) if bias in self.names else None)

    def linear(self, name: str) -> layers.Linear:
        return layers.Linear(self.matrix(name))

    def stack(self, name: str, num_matrices: int) -> layers.Stack:
        scheme: Any = self.matrix(name)
        return layers.Stack(scheme, num_matrices)

    def heads(self, weights: Tensor) -> layers.HeadLinear | layers.HeadProduct:
        return hold_heads(self.ops, weights)

    def optional(self, name: str, norm: Norm | None) -> layers.Norm | None:
        return None if norm is None else norm.build(self, name)

    def rope(self, rope: Rope | None) -> layers.RopeTable | None:
        """Build the table of a rope once for all layers that turn alike."""
        if rope is None:
            return None
        if rope not in self.ropes:
            length = self.spec.max_model_len
            if 4 * rope.size * length > MAX_ROPE_BYTES:
                raise InvalidModel(
                    f"max_model_len={length} needs {4 * rope.size * length} bytes of rope tables, over "
                    f"{MAX_ROPE_BYTES}: set a smaller max_model_len"
                )
            self.ropes[rope] = layers.RopeTable(
                self.ops, rope.frequencies(), length, rope.attention_factor, self.device, rope.interleaved
            )
        return self.ropes[rope]

    def block(self, name: str, block: AnyBlock) -> layers.AnyBlock:
        values = {field.name: getattr(block, field.name) for field in fields(block)}  # type: ignore[arg-type]
        values |= {field: part.build(self, f"{name}.{prefix}") for field, prefix, part in parts(block)}
        made: layers.AnyBlock = getattr(layers, type(block).__name__)(self.ops, **values)
        return made

    def embedding(self, e: Embedding) -> layers.Embedding:
        positions = None
        if e.num_positions:
            positions = dense(self.ops, self.take("embedding.positions.weight")[e.position_offset :])
        return layers.Embedding(
            self.ops,
            self.matrix("embedding.tokens"),
            self.linear("embedding.project") if e.row != e.width else None,
            e.scale,
            positions,
            self.take("embedding.types.weight")[0].float().clone() if e.num_types else None,
            self.optional("embedding.norm", e.norm),
        )

    def head(self, head: Head, embedding: layers.Embedding | None) -> layers.Head:
        """Build the head; a tied one takes the embedding's rows, where there is an embedding."""
        rows = embedding.tokens if head.tied and embedding else self.matrix(TIED if head.tied else "head.rows")
        project = self.matrix("head.project") if head.row != head.width else None
        bias = self.take("head.bias") if head.bias else None
        return layers.Head(self.ops, rows, project, bias, head.divisor, head.softcap)

    def model(self, pooling: Pooling) -> Decoder | Encoder:
        spec = self.spec
        embedding = self.embedding(spec.embedding) if spec.is_first else None
        stack: list[layers.AnyBlock] = []
        for index in spec.stage or range(spec.num_layers):
            block = self.block(f"layers.{index}", spec.layers[index])
            stack.append(self.finish(block, index == spec.num_layers - 1) if self.finish else block)
        if spec.head is None:
            assert embedding is not None
            return Encoder(spec, self.ops, embedding, stack, pooling)
        norm = self.optional("norm", spec.norm) if spec.is_last else None
        head: Any = self.head(spec.head, embedding) if spec.is_last else None  # other stages compute no logits
        first: Any = embedding or layers.Received(spec.width)  # called alike
        return Decoder(spec.cut(), self.ops, first, stack, norm, head)


def hold_heads(ops: OpTable, weights: Tensor) -> layers.HeadLinear | layers.HeadProduct:
    """Store a matrix for each head [H, O, C] as the weights' device reads them best."""
    return layers.HeadLinear(ops, weights) if weights.is_cpu else layers.HeadProduct(ops, weights)


def store_fp8(block: layers.AnyBlock, is_last: bool = False) -> layers.AnyBlock:
    """Round a block's matrices to FP8 where their shapes allow it."""
    for part in (block.mixer, block.ffn):
        for name, linear in part.linears() if part else ():
            if name not in ROUTING:
                linear.scheme = as_fp8(linear.scheme)
    if isinstance(block.ffn, layers.Experts):
        for stack in block.ffn.stacks():
            stack.scheme = as_fp8(stack.scheme)
    return block
