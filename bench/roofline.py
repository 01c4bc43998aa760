"""The least that a GPU must do for a step: bytes through its memory and operations, counted from plans.

A step reads every weight of its layers once, the head's where logits are wanted, and each position of its sequences'
cache once, however many of them share it; it writes the cache of its own tokens. What a step hands from kernel to
kernel is left out: a better kernel would keep it to itself. No step is faster than the slower of its two terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.plan import Output, Plan
from penstock.models.decoder import linears

BYTES, OPERATIONS, GAPS, HOST = "bytes", "operations", "launch gaps", "host time"


@dataclass(frozen=True)
class Ceilings:
    """What a device does at best, measured."""

    bytes_s: float  # read and written by a large copy
    ops_s: float  # of a large product in 16 bits
    layer_ops_s: float  # of one in the layers' own numbers


@dataclass(frozen=True)
class Costs:
    """What a model's tokens cost, all layers together."""

    layer_values: int  # of the matrices
    layer_bytes: int
    head_values: int
    head_bytes: int
    row_bytes: int  # of one token's embedding
    position_bytes: int  # of one position's keys and values
    pair_ops: int  # of one query at one position

    @classmethod
    def of(cls, model: Any, position_bytes: int) -> Costs:
        """Of a decoder as it is loaded."""
        schemes = [linear.scheme for _, linear, _ in linears(model)]
        rows, spec = model.head.rows, model.spec
        embedded = model.embedding.tokens
        return cls(
            sum(s.num_out * s.num_in for s in schemes),
            sum(s.num_bytes for s in schemes),
            rows.num_out * rows.num_in,
            rows.num_bytes,
            embedded.num_bytes // embedded.num_out,
            position_bytes,
            sum(4 * layer.mixer.num_heads * layer.mixer.head_size for layer in spec.layers),
        )


@dataclass(frozen=True)
class Counted:
    """A plan, in numbers."""

    num_rows: int
    num_prompt: int  # tokens of prompts
    num_single: int  # sequences that went on by one token
    num_logits: int
    num_pairs: int  # of a query and a position it sees
    num_positions: int  # of the cache, each once, that were there before or are new

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_single


def count(plan: Plan, common: int = 0) -> Counted:
    """`common`: positions with which all sequences of the plan begin."""
    prompt = single = logits = pairs = own = longest = 0
    for row in plan.rows:
        length = row.start + row.count
        if row.count == 1 and row.output is Output.SAMPLE:
            single += 1
        else:
            prompt += row.count
        if row.output is Output.SAMPLE:
            logits += 1 + len(row.draft)
        pairs += row.count * row.start + row.count * (row.count + 1) // 2
        own += max(0, length - common)
        longest = max(longest, min(length, common))
    return Counted(len(plan.rows), prompt, single, logits, pairs, own + longest)


@dataclass(frozen=True)
class Floor:
    """Of one step: what it moves, what it computes, and how long that takes at best."""

    num_bytes: float
    num_ops: float
    bytes_s: float
    ops_s: float

    @property
    def seconds(self) -> float:
        return max(self.bytes_s, self.ops_s)

    @property
    def bound(self) -> str:
        return BYTES if self.bytes_s >= self.ops_s else OPERATIONS


def floor(step: Counted, costs: Costs, ceilings: Ceilings) -> Floor:
    moved = (
        costs.layer_bytes
        + (costs.head_bytes if step.num_logits else 0)
        + step.num_tokens * costs.row_bytes
        + step.num_positions * costs.position_bytes
    )
    layers = 2.0 * costs.layer_values * step.num_tokens
    others = 2.0 * costs.head_values * step.num_logits + float(costs.pair_ops) * step.num_pairs
    return Floor(
        moved, layers + others, moved / ceilings.bytes_s, layers / ceilings.layer_ops_s + others / ceilings.ops_s
    )


@dataclass(frozen=True)
class Timed:
    """How long the device took for a step, and how long it had nothing to do before it."""

    device_s: float
    idle_s: float


def summary(steps: Sequence[Counted], floors: Sequence[Floor], seconds: float) -> dict[str, Any]:
    """A whole run beside its floor."""
    least = sum(one.seconds for one in floors)
    return {
        "prompt_tokens_computed": sum(step.num_prompt for step in steps),
        "mean_batch": round(sum(step.num_rows for step in steps) / max(1, len(steps)), 1),
        "read_positions": sum(step.num_positions for step in steps),
        "moved_gb": round(sum(one.num_bytes for one in floors) / 1e9, 1),
        "tflop": round(sum(one.num_ops for one in floors) / 1e12, 1),
        "bytes_s": round(sum(one.bytes_s for one in floors), 4),
        "operations_s": round(sum(one.ops_s for one in floors), 4),
        "floor_s": round(least, 4),
        "share_of_floor": round(least / seconds, 3),
    }


def bounds(
    floors: Sequence[Floor], times: Sequence[Timed], gap_shares: Sequence[float] | None = None
) -> dict[str, float]:
    """Where a run's seconds on the device went. A step's own time is put down to the larger of its two terms, but for
    the share of it in which no kernel ran, where that is known."""
    parts = {BYTES: 0.0, OPERATIONS: 0.0, HOST: sum(one.idle_s for one in times)}
    if gap_shares is not None:
        parts[GAPS] = sum(one.device_s * share for one, share in zip(times, gap_shares))
    for at, (least, one) in enumerate(zip(floors, times)):
        parts[least.bound] += one.device_s * (1.0 - (gap_shares[at] if gap_shares is not None else 0.0))
    return {name: round(value, 4) for name, value in parts.items()}


def verdict(parts: dict[str, float], run: dict[str, Any]) -> str:
    """What bounds a run, in a sentence."""
    name = max(parts, key=lambda part: parts[part])
    total = sum(parts.values()) or 1.0
    text = f"{name} ({parts[name] / total:.0%} of the device's time)"
    if name in (BYTES, OPERATIONS):
        text += f"; at the measured ceilings the run would take {run['floor_s']:.3g} s"
    return text
