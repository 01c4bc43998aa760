"""Fusion for a device: rules replace neighbouring stages of a block by one that gives the same.

`Lower` is called with each block while a model is loaded. A block that no rule matches stays plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock import layers
from penstock.models.decoder import Decoder, store_fp8
from penstock.ops import OpTable
from penstock.passes.lower.rules import RULES, Rule, fold_norm
from penstock.passes.lower.stages import Flow, Stage, open_block

__all__ = ["RULES", "Lower", "LoweredBlock", "Rule", "row_limits"]


class LoweredBlock:
    """Called like the block it was made of."""

    def __init__(self, block: layers.AnyBlock, stages: Sequence[Stage]) -> None:
        self.mixer, self.ffn, self.stages = block.mixer, block.ffn, tuple(stages)

    def __call__(self, x: Tensor, step: layers.StepInputs, memory: Any) -> Tensor:
        flow = Flow(x, step, memory)
        for stage in self.stages:
            stage(flow)
            if flow.step is not step and not len(flow.x):  # no logits are wanted
                break
        return flow.x

    @property
    def row_limits(self) -> set[int]:
        """Numbers of rows up to which some stage takes one kernel, and beyond which another."""
        return {limit for stage in self.stages for limit in getattr(stage, "row_limits", ())}


class Lower:
    """Finish blocks for the device and exactness of `ops`: fold norms, store as FP8 where asked, fuse."""

    def __init__(self, ops: OpTable, fp8: bool = False, rules: Sequence[Rule] = RULES) -> None:
        self.ops, self.fp8 = ops, fp8
        self.rules = [r for r in rules if ops.device in r.devices and (r.exact or not ops.exact)]

    def __call__(self, block: layers.AnyBlock, is_last: bool = False) -> layers.AnyBlock:
        opened = stages = open_block(block)
        for rule in self.rules:
            if rule.make is fold_norm:  # before the matrices are rounded
                stages = rule.apply(stages)
        if self.fp8:
            store_fp8(block)
        for rule in self.rules:
            if rule.make is not fold_norm and (is_last or not rule.last):
                stages = rule.apply(stages)
        is_plain = len(stages) == len(opened) and all(a is b for a, b in zip(stages, opened))
        return block if is_plain else LoweredBlock(block, stages)


def row_limits(model: Decoder) -> list[int]:
    """Where a larger step takes other kernels: warm-up runs one step of each class."""
    return sorted({limit for block in model.blocks for limit in getattr(block, "row_limits", ())})
