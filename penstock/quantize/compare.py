"""Run two models side by side over a text: losses, divergence of their distributions, error of every layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock import layers
from penstock.errors import InvalidModel, PenstockError
from penstock.models.files.checkpoint import Checkpoint
from penstock.quantize.block import round_inputs
from penstock.quantize.walk import LayerStack, Params, Walk, Wrap

ROWS = 128  # of logits at once
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Text:
    """Windows of tokens, and from which token on each is scored."""

    windows: list[list[int]]
    firsts: list[int]

    @property
    def num_scored(self) -> int:
        return sum(len(window) - first for window, first in zip(self.windows, self.firsts))


@dataclass
class Comparison:
    """Figures of models A and B over the same tokens."""

    first_losses: list[float] = field(default_factory=list)  # nats of each scored token
    second_losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)  # KL(A ‖ B) in nats at each
    num_same: int = 0  # tokens where both have the same first choice
    layers: dict[str, float] = field(default_factory=dict)  # relative error of what a layer adds, for A's inputs

    @property
    def num_tokens(self) -> int:
        return len(self.divergences)

    def summary(self) -> dict[str, float]:
        first, second = (_perplexity(losses) for losses in (self.first_losses, self.second_losses))
        ordered = sorted(self.divergences)
        deltas = [b - a for a, b in zip(self.first_losses, self.second_losses)]
        return {
            "num_tokens": self.num_tokens,
            "perplexity_a": first[0],
            "perplexity_a_error": first[1],
            "perplexity_b": second[0],
            "perplexity_b_error": second[1],
            "perplexity_ratio": second[0] / first[0],
            "perplexity_ratio_error": second[0] / first[0] * statistics.stdev(deltas) / math.sqrt(len(deltas)),
            "kl_mean": math.fsum(ordered) / len(ordered),
            "kl_mean_error": statistics.stdev(ordered) / math.sqrt(len(ordered)),
            "kl_median": ordered[len(ordered) // 2],
            "kl_p99": ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)],
            "kl_max": ordered[-1],
            "same_first_choice": self.num_same / self.num_tokens,
        }


def _perplexity(losses: list[float]) -> tuple[float, float]:
    """Return the perplexity and its standard error, to first order."""
    mean = math.fsum(losses) / len(losses)
    if not mean < 700:
        raise PenstockError(f"a model gives this text {mean:g} nats per token: its weights are damaged")
    return math.exp(mean), math.exp(mean) * statistics.stdev(losses) / math.sqrt(len(losses))


def compare(
    first: Checkpoint, second: Checkpoint, text: Text, progress: Progress = lambda done, total: None
) -> Comparison:
    """Compute in float32 with the weights as each file means them, a block of each model in memory at a time.

    Where a file says that inputs are rounded to 8 bits, they are.
    """
    longest = max(map(len, text.windows))
    stacks = [LayerStack(checkpoint, longest) for checkpoint in (first, second)]
    if stacks[0].spec.vocab_size != stacks[1].spec.vocab_size:
        sizes = " and ".join(f"{stack.checkpoint.path} {stack.spec.vocab_size}" for stack in stacks)
        raise InvalidModel(
            f"the models have different vocabularies, so their answers cannot be compared: {sizes} tokens"
        )
    walk, found = Walk(text.windows), Comparison()
    with torch.inference_mode():
        hidden = _run(stacks, walk, found, progress)
        _judge(stacks, walk, hidden, text, found)
    return found


def _run(stacks: Sequence[LayerStack], walk: Walk, found: Comparison, progress: Progress) -> list[Tensor]:
    counts = [stack.spec.num_layers for stack in stacks]
    wraps = [input_wrap(stack.checkpoint.config) for stack in stacks]
    x = [walk.embed(stack.ends()[0]) for stack in stacks]
    few = Walk(walk.windows[:1])  # enough to find the layers that differ most
    count = few.num_tokens
    for index in range(max(counts)):
        blocks = [_block(stack, index, wrap) for stack, wrap in zip(stacks, wraps) if index < stack.spec.num_layers]
        y = [
            walk.run(blocks[at], stack.memory(index), x[at]) if index < counts[at] else x[at]
            for at, stack in enumerate(stacks)
        ]
        if counts[0] == counts[1] and x[0].shape == x[1].shape:
            given = few.run(blocks[1], stacks[1].memory(index), x[0][:count])
            added = (y[0] - x[0])[:count].square().sum().clamp(min=1e-30)
            found.layers[f"layers.{index}"] = float(((given - y[0][:count]).square().sum() / added).sqrt())
        x = y
        progress(index + 1, max(counts))
    return x


def _block(stack: LayerStack, index: int, wrap: Wrap | None) -> layers.AnyBlock:
    params: Params = stack.params(index)
    return stack.block(index, params, wrap)


def input_wrap(config: dict[str, Any]) -> Wrap | None:
    """Return how the linears of a model's layers round their inputs, by its config; None if they do not."""
    described = config.get("quantization_config")
    groups = described.get("config_groups") if isinstance(described, dict) else None
    for group in groups.values() if isinstance(groups, dict) else ():
        inputs = group.get("input_activations") if isinstance(group, dict) else None
        if isinstance(inputs, dict) and inputs.get("num_bits") == 8 and inputs.get("dynamic"):
            kind = "fp8" if inputs.get("type") == "float" else "int8"
            return round_inputs(kind)
    return None


def _judge(stacks: Sequence[LayerStack], walk: Walk, hidden: list[Tensor], text: Text, found: Comparison) -> None:
    at: list[int] = []
    wanted: list[int] = []
    begin = 0
    for window, first in zip(text.windows, text.firsts):
        at += range(begin + first - 1, begin + len(window) - 1)
        wanted += window[first:]
        begin += len(window)
    ends = [stack.ends()[1:] for stack in stacks]
    rows, tokens = torch.tensor(at), torch.tensor(wanted)
    for first in range(0, len(at), ROWS):
        part, target = rows[first : first + ROWS], tokens[first : first + ROWS]
        logs = []
        for (norm, head), x in zip(ends, hidden):
            given = x[part] if norm is None else norm(x[part])
            logs.append(torch.log_softmax(head(given).float(), -1))
        p, q = logs
        found.divergences += (p.exp() * (p - q)).sum(-1).clamp(min=0).tolist()
        found.num_same += int((p.argmax(-1) == q.argmax(-1)).sum())
        for losses, log in zip((found.first_losses, found.second_losses), logs):
            losses += (-log.gather(1, target[:, None])[:, 0]).tolist()
