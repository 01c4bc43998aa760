"""Seconds of steps: by a device's speeds (a roofline), or by steps of the model's first layers that were timed here."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Protocol

from penstock.api.plan.costs import Matrices, Memories
from penstock.api.plan.devices import Device

WEIGHTS, CACHE, PRODUCTS, LAUNCHES = "reading weights", "reading the KV cache", "arithmetic", "starting kernels"
COPIES = "reading weights in host memory"
FEW_SHARE = 0.5  # as in penstock/passes/offload


@dataclass(frozen=True)
class Demand:
    """Requests at once, each of so many tokens."""

    concurrency: int
    prompt: int
    output: int
    max_rows: int  # of a step
    max_tokens: int


class StepTimes(Protocol):
    def decode(self, rows: int, length: float) -> dict[str, float]:
        """Return the seconds of a step of `rows` at `length`, by what they are spent on."""

    def prefill(self, length: int, count: int, num_steps: int) -> float:
        """Return the seconds of `count` prompts of this length, computed in so many steps."""


class Roofline:
    """Kernels follow one another: what a step reads and what it multiplies take their times in turn."""

    def __init__(
        self, device: Device, matrices: Matrices, memories: Memories, num_layers: int, fp8: bool, host_bytes: int = 0
    ) -> None:
        """`host_bytes` of the matrices are in the host's memory."""
        self._host_bytes = host_bytes
        self._device, self._matrices, self._memories = device, matrices, memories
        self._layer_ops_s = device.fp8_ops_s if fp8 and device.fp8_ops_s else device.ops_s
        self._fixed_s = num_layers * device.layer_s

    def _weights(self, tokens: float, logits: float) -> tuple[float, float]:
        """Return the seconds of reading matrices and of multiplying with them."""
        each, device = self._matrices, self._device
        num_bytes = each.touched_bytes(tokens) + (each.head_bytes if logits else 0)
        layers = 2.0 * each.used_values() * tokens / self._layer_ops_s
        read_s = (num_bytes + tokens * each.row_bytes) / device.bytes_s
        return read_s, layers + 2.0 * each.head_values * logits / device.ops_s

    def _copies(self, tokens: float) -> float:
        """Return the seconds of a step's copies from the host. Few rows read the experts that they chose in place."""
        each = self._matrices
        experts = min(self._host_bytes, sum(one.num_bytes for one in each.experts))
        chosen = tokens * min((one.chosen_share for one in each.experts), default=1.0)
        share = chosen if chosen <= FEW_SHARE else 1.0
        return (self._host_bytes - experts * (1.0 - share)) / self._device.link_bytes_s

    def decode(self, rows: int, length: float) -> dict[str, float]:
        read_s, ops_s = self._weights(rows, rows)
        parts = {
            WEIGHTS: read_s,
            CACHE: rows * self._memories.read_bytes(length) / self._device.bytes_s,
            PRODUCTS: ops_s + rows * self._memories.decode_ops(length) / self._device.ops_s,
            LAUNCHES: self._fixed_s,
        }
        if self._host_bytes:  # beside the rest
            parts[COPIES] = max(0.0, self._copies(rows) - sum(parts.values()))
        return parts

    def prefill(self, length: int, count: int, num_steps: int) -> float:
        tokens = length * count / num_steps
        read_s, ops_s = self._weights(tokens, count / num_steps)
        attention_s = count * self._memories.prompt_ops(length) / self._device.ops_s
        cache_s = count * self._memories.read_bytes(length) / self._device.bytes_s
        computes_s = num_steps * (read_s + ops_s + self._fixed_s) + attention_s + cache_s
        return max(computes_s, num_steps * self._copies(tokens))


@dataclass(frozen=True)
class Speed:
    """Expected times of a load on a device; speeds in tokens per second."""

    prefill_tokens_s: float  # of one prompt
    ttft_s: float  # alone
    burst_ttft_s: float  # of the last, when all come at once
    tpot_s: float  # beside the others
    decode_tokens_s: float  # of all rows together
    output_tokens_s: float  # of all requests, their prompts' time included
    single_tokens_s: float  # decoding alone
    bound: dict[str, float]  # shares of a decode step


def forecast_speed(times: StepTimes, load: Demand) -> Speed:
    rows = min(load.concurrency, load.max_rows)
    waves = load.concurrency / rows
    length = load.prompt + load.output / 2
    alone_s = times.prefill(load.prompt, 1, ceil(load.prompt / load.max_tokens))
    burst_s = times.prefill(load.prompt, rows, ceil(rows * load.prompt / load.max_tokens))
    parts = times.decode(rows, length)
    step_s = sum(parts.values())
    total_s = waves * (burst_s + (load.output - 1) * step_s)
    return Speed(
        prefill_tokens_s=load.prompt / alone_s,
        ttft_s=alone_s,
        burst_ttft_s=waves * burst_s + (waves - 1) * (load.output - 1) * step_s,
        tpot_s=step_s,
        decode_tokens_s=rows / step_s,
        output_tokens_s=load.concurrency * load.output / total_s,
        single_tokens_s=1.0 / sum(times.decode(1, length).values()),
        bound={name: seconds / step_s for name, seconds in parts.items()},
    )
