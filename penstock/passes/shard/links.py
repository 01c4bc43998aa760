"""Stand-ins for a linear, a norm, a stack or an FFN whose inputs or outputs are spread over ranks.

Each is called like what it replaces, so that layers know nothing of ranks. The classes ending in Link are plain data,
made with the spec; `wrap` makes the rest once the weights are there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock import layers
from penstock.ops import OpTable
from penstock.parallel import Mesh
from penstock.quant.scheme import Scheme


class LinkedLinear(layers.Linear, ABC):
    """A linear with an exchange before or after it. What is inside may be replaced: it gets its own inputs."""

    def __init__(self, linear: layers.Linear, mesh: Mesh) -> None:
        self.linear, self.mesh = linear, mesh

    @property
    def scheme(self) -> Scheme:
        """The rank's own weight."""
        return self.linear.scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        self.linear.scheme = scheme

    @abstractmethod
    def around(self, linear: layers.Linear) -> LinkedLinear:
        """Return the same exchange around another linear."""


class GatherInputs(LinkedLinear):
    """linear([x of all ranks])"""

    def __init__(self, linear: layers.Linear, mesh: Mesh, widths: tuple[int, ...]) -> None:
        super().__init__(linear, mesh)
        self.widths = widths

    def __call__(self, x: Tensor, step: layers.StepInputs) -> Tensor:
        return self.linear(self.mesh.all_gather(x, self.widths), step)

    def around(self, linear: layers.Linear) -> GatherInputs:
        return GatherInputs(linear, self.mesh, self.widths)


class GatherOutputs(LinkedLinear):
    """[linear(x) of all ranks]: column parallel"""

    def __init__(self, linear: layers.Linear, mesh: Mesh, widths: tuple[int, ...]) -> None:
        super().__init__(linear, mesh)
        self.widths = widths

    def __call__(self, x: Tensor, step: layers.StepInputs) -> Tensor:
        return self.mesh.all_gather(self.linear(x, step), self.widths)

    def around(self, linear: layers.Linear) -> GatherOutputs:
        return GatherOutputs(linear, self.mesh, self.widths)


class ReduceOutputs(LinkedLinear):
    """Σ linear(x) over the ranks: row parallel"""

    def __call__(self, x: Tensor, step: layers.StepInputs) -> Tensor:
        return self.mesh.all_reduce(self.linear(x, step))

    def around(self, linear: layers.Linear) -> ReduceOutputs:
        return ReduceOutputs(linear, self.mesh)


class SpanningNorm:
    """A norm over what all ranks have together, of which each goes on with its own."""

    def __init__(self, norm: layers.Norm, mesh: Mesh, link: SpanningLink, ops: OpTable) -> None:
        self.norm, self.mesh, self.link, self.ops = norm, mesh, link, ops
        self.size = link.widths[mesh.rank]
        self.order = None if link.order is None else torch.tensor(link.order, dtype=torch.int64)

    def __call__(self, x: Tensor) -> Tensor:
        whole = self.mesh.all_gather(x.reshape(len(x), self.size), self.link.widths)
        if self.order is not None:
            whole = self.ops.take_columns(whole, self.order)
        normed = self.norm(whole)
        return normed[:, self.link.first : self.link.first + self.size].view(x.shape)


class LocalRouter(layers.Router):
    """Counts the experts it chooses from this rank's first; those of other ranks are −1."""

    def __init__(self, router: layers.Router, first: int, count: int) -> None:
        vars(self).update(vars(router))
        self.first, self.count = first, count

    def __call__(self, x: Tensor, step: layers.StepInputs) -> tuple[Tensor, Tensor]:
        ids, weights = super().__call__(x, step)
        return self.ops.local_ids(ids, self.first, self.count), weights


class SummedStack(layers.Stack):
    """Gives each row the results of its experts, on whichever ranks they are. A sum with −0 leaves every bit."""

    def __init__(self, stack: layers.Stack, mesh: Mesh, ops: OpTable) -> None:
        super().__init__(stack.scheme, stack.num_matrices)
        self.mesh, self.ops = mesh, ops

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        y = super().__call__(x, ids)
        return self.mesh.all_reduce(self.ops.blank_rows(y.view(-1, y.shape[2]), ids.view(-1))).view(y.shape)


class GatheredStack(layers.Stack):
    """Matrices of which each rank has some outputs, and reads what all ranks have as inputs."""

    def __init__(self, stack: layers.Stack, mesh: Mesh, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        super().__init__(stack.scheme, stack.num_matrices)
        self.mesh, self.inputs, self.outputs = mesh, inputs, outputs

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        y = super().__call__(self._gather(x, self.inputs), ids)
        return self._gather(y, self.outputs)

    def _gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        return self.mesh.all_gather(x.view(-1, x.shape[2]), widths).view(*x.shape[:2], sum(widths))


class ReducedExperts(layers.Experts):
    """Experts of which each rank computes a part of the sum."""

    def __init__(self, experts: layers.Experts, mesh: Mesh) -> None:
        vars(self).update(vars(experts))
        self.experts, self.mesh = experts, mesh

    def __call__(self, x: Tensor, step: layers.StepInputs) -> Tensor:
        return self.mesh.all_reduce(self.experts(x, step))


class VocabularyRows:
    """The rows of a vocabulary, of which each rank holds some: of an embedding, of a head, or of both."""

    def __init__(self, scheme: Scheme, mesh: Mesh, widths: tuple[int, ...], ops: OpTable) -> None:
        self.scheme, self.mesh, self.widths, self.ops = scheme, mesh, widths, ops
        self.num_out, self.num_in = sum(widths), scheme.num_in
        self.first, self.count = sum(widths[: mesh.rank]), widths[mesh.rank]

    @property
    def num_bytes(self) -> int:
        return self.scheme.num_bytes

    def matmul(self, x: Tensor) -> Tensor:
        return self.mesh.all_gather(self.scheme.matmul(x), self.widths)

    def rows(self, ids: Tensor) -> Tensor:
        """Each row comes from the rank that has it; the others add −0, which leaves every bit."""
        found = self.scheme.rows(self.ops.local_ids(ids, self.first, self.count, True))
        return self.mesh.all_reduce(self.ops.blank_rows(found, self.ops.local_ids(ids, self.first, self.count)))


@dataclass(frozen=True)
class GatherLink:
    """A linear that needs the inputs of all ranks, and computes a part of the outputs that all need."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    keeps_outputs = False

    def wrap(self, part: layers.Linear, mesh: Mesh, ops: OpTable) -> LinkedLinear:
        return GatherInputs(GatherOutputs(part, mesh, self.outputs), mesh, self.inputs)


@dataclass(frozen=True)
class ReduceLink:
    """A linear that has a part of the inputs, and computes a part of the sum."""

    keeps_outputs = True

    def wrap(self, part: layers.Linear, mesh: Mesh, ops: OpTable) -> LinkedLinear:
        return ReduceOutputs(part, mesh)


@dataclass(frozen=True)
class SpanningLink:
    """A norm over `widths` of all ranks; `order` are the columns to take of them, where some repeat those of others."""

    widths: tuple[int, ...]
    first: int  # of this rank's columns, in the whole
    order: tuple[int, ...] | None = None
    keeps_outputs = True

    def wrap(self, part: layers.Norm, mesh: Mesh, ops: OpTable) -> SpanningNorm:
        return SpanningNorm(part, mesh, self, ops)


@dataclass(frozen=True)
class LocalLink:
    """A router whose experts are on several ranks."""

    first: int
    count: int
    keeps_outputs = True

    def wrap(self, part: layers.Router, mesh: Mesh, ops: OpTable) -> LocalRouter:
        return LocalRouter(part, self.first, self.count)


@dataclass(frozen=True)
class SumLink:
    """The last stack of experts that are on several ranks."""

    keeps_outputs = True

    def wrap(self, part: layers.Stack, mesh: Mesh, ops: OpTable) -> SummedStack:
        return SummedStack(part, mesh, ops)


@dataclass(frozen=True)
class GatherStackLink:
    """The last stack of experts whose outputs are on several ranks."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    keeps_outputs = True

    def wrap(self, part: layers.Stack, mesh: Mesh, ops: OpTable) -> GatheredStack:
        return GatheredStack(part, mesh, self.inputs, self.outputs)


@dataclass(frozen=True)
class ReduceExpertsLink:
    """Experts of which each rank computes a part of the sum."""

    keeps_outputs = True

    def wrap(self, part: layers.Experts, mesh: Mesh, ops: OpTable) -> ReducedExperts:
        return ReducedExperts(part, mesh)


@dataclass(frozen=True)
class VocabularyLink:
    """The rows of a vocabulary, `widths` on each rank."""

    widths: tuple[int, ...]
    keeps_outputs = False

    def wrap(self, part: Scheme, mesh: Mesh, ops: OpTable) -> VocabularyRows:
        return VocabularyRows(part, mesh, self.widths, ops)
