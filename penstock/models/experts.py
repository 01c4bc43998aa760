"""A mixture of experts as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from penstock.models.layer import GatedMlp, Merge, Merges, Shapes, add_prefix, matrix, unite

if TYPE_CHECKING:
    from penstock import layers
    from penstock.models.decoder import Build


@dataclass(frozen=True)
class Routing:
    """Says how experts are chosen and weighed: the fields of `ops.RouterRule`, which explains them."""

    num_chosen: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalizes: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    jitter: float = 0.0


@dataclass(frozen=True)
class Experts:
    """`num_experts` gated MLPs, of which a router chooses a few for each token.

    The experts' matrices are two stacks, each one parameter: `experts.gate_up` [E · 2F, C], `experts.down` [E · C, F].
    """

    prefix: ClassVar[str] = "mlp"
    expert: GatedMlp
    num_experts: int
    routing: Routing
    router_bias: bool = False  # added to the router's logits
    selection_bias: bool = False  # added to scores for the choice alone
    shared: GatedMlp | None = None  # an MLP that every token goes through beside its experts
    shared_gate: bool = False  # sigmoid(gate · x) times the shared MLP's result

    def parameters(self) -> Shapes:
        one, count = self.expert, self.num_experts
        parts: list[Shapes] = [
            matrix("router", count, one.width, self.router_bias),
            {"selection.bias": (count,)} if self.selection_bias else {},
            matrix("experts.gate_up", count * 2 * one.hidden, one.width, one.bias),
            matrix("experts.down", count * one.width, one.hidden, one.bias),
            add_prefix("shared", self.shared),
            matrix("shared_gate", 1, one.width) if self.shared_gate else {},
        ]
        return unite(parts)

    def count_idle(self) -> int:
        """Count the values of the experts that one token does not go through."""
        one, count = self.expert, self.num_experts
        return (count - min(count, self.routing.num_chosen)) * 3 * one.hidden * one.width

    def merges(self) -> Merges:
        one, numbers = self.expert, range(self.num_experts)
        halves = tuple((f"{e}.{half}", one.hidden) for e in numbers for half in ("gate", "up"))
        merges = {
            "experts.gate_up": Merge(halves, num_matrices=self.num_experts),
            "experts.down": Merge(tuple((f"{e}.down", one.width) for e in numbers), num_matrices=self.num_experts),
        }
        if self.shared is not None:
            merges |= {f"shared.{name}": merge for name, merge in self.shared.merges().items()}
        return merges

    def scratch_values(self) -> int:
        shared = 0 if self.shared is None else self.shared.scratch_values()
        return self.num_experts + shared + self.routing.num_chosen * (self.expert.width + self.expert.scratch_values())

    def build(self, build: Build, name: str) -> layers.Experts:
        from penstock import layers
        from penstock.ops import RouterRule

        rule = RouterRule(**asdict(self.routing))
        bias = build.take(f"{name}.selection.bias") if self.selection_bias else None
        return layers.Experts(
            build.ops,
            layers.Router(build.ops, build.linear(f"{name}.router"), rule, bias),
            build.stack(f"{name}.experts.gate_up", self.num_experts),
            build.stack(f"{name}.experts.down", self.num_experts),
            self.expert.activation,
            None if self.shared is None else self.shared.build(build, f"{name}.shared"),
            build.linear(f"{name}.shared_gate") if self.shared_gate else None,
        )


@dataclass(frozen=True)
class WeighedInputExpertsSpec(Experts):
    """Experts that get the token times their weight, instead of giving a result that is."""

    def build(self, build: Build, name: str) -> layers.WeighedInputExperts:
        from penstock import layers

        return layers.WeighedInputExperts(super().build(build, name))
