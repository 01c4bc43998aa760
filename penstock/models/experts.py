"""A mixture of experts as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.models.layer import GatedMlp, Merges, Shapes, add_prefix, matrix, unite

if TYPE_CHECKING:
    from penstock import layers
    from penstock.models.decoder import Build


@dataclass(frozen=True)
class Experts:
    """`num_experts` gated MLPs, of which a router chooses `num_chosen` for each token."""

    prefix: ClassVar[str] = "mlp"
    expert: GatedMlp
    num_experts: int
    num_chosen: int

    @property
    def names(self) -> list[str]:
        return [f"experts.{index}" for index in range(self.num_experts)]

    def parameters(self) -> Shapes:
        router = matrix("router", self.num_experts, self.expert.width)
        return unite([router, *(add_prefix(name, self.expert) for name in self.names)])

    def merges(self) -> Merges:
        return {f"{name}.{part}": merge for name in self.names for part, merge in self.expert.merges().items()}

    def scratch_values(self) -> int:
        return self.expert.width + self.num_chosen * self.expert.scratch_values()

    def build(self, build: Build, name: str) -> layers.Experts:
        from penstock import layers

        router = build.linear(f"{name}.router")
        experts = [self.expert.build(build, f"{name}.{expert}") for expert in self.names]
        gate_up, down = [one.gate_up for one in experts], [one.down for one in experts]
        return layers.Experts(build.ops, router, gate_up, down, self.expert.activation, self.num_chosen)
