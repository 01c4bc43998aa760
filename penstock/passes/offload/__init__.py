"""Weights in host memory (`--cpu-offload-gb`): a pass over finished blocks.

A GPU then holds the other weights, and two buffers that the layers' offloaded ones take turns in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from penstock import layers
from penstock.models.decoder import Decoder, Encoder, Finisher
from penstock.models.spec import ModelSpec
from penstock.passes.offload.block import OffloadedBlock, Stay
from penstock.passes.offload.choose import OffloadQuota
from penstock.passes.offload.pinned import map_to_device, pin
from penstock.passes.offload.stream import WeightStream
from penstock.quant.scheme import StoredWeight

__all__ = ["Offload", "OffloadedBlock", "OffloadQuota", "WeightStream"]

GIB, MIB = 1 << 30, 1 << 20
# Few rows: so many of a stack's matrices, counted once for each row that chose them, are read in place at most.
FEW_SHARE = 0.5  # 2026-11-19, not measured yet
_log = logging.getLogger(__name__)


class Offload:
    """Finish blocks as `finish` does, and leave `num_bytes` of their weights in host memory, whole matrices, or more
    by less than the largest. Stacks of experts go first, since a step reads but some of their matrices."""

    def __init__(self, finish: Finisher, num_bytes: int, spec: ModelSpec, device: torch.device) -> None:
        self.finish_block, self.ops, self.device = finish, finish.ops, device
        described = [spec.layers[index] for index in spec.stage or range(spec.num_layers)]
        self.quota = OffloadQuota(num_bytes, [sum(map(prod, each.parameters().values())) for each in described])
        self.stream = WeightStream(device)

    def __call__(self, block: layers.AnyBlock, is_last: bool) -> layers.AnyBlock:
        made = self.finish_block(block, is_last)
        stacks: dict[int, int] = {}  # of a scheme, the rows that are few
        for part in _walk(made):
            if isinstance(part, layers.Experts):
                rows = int(FEW_SHARE * part.gate_up.num_matrices / part.router.rule.num_chosen)
                for stack in part.stacks():
                    stacks.update((id(scheme), rows) for scheme in _find_weights(stack))
        weights = list(_find_weights(made))
        tiers = [
            [weight for weight in weights if id(weight) in stacks],
            [weight for weight in weights if id(weight) not in stacks],
        ]
        taken = self.quota.take([[sum(each.nbytes for _, each in _tensors(one)) for one in tier] for tier in tiers])
        chosen = [tiers[tier][place] for tier, place in taken]
        if not chosen:
            return made
        stays: list[Stay] = []
        for weight in chosen:
            num_rows = stacks.get(id(weight), 0)
            if num_rows:
                self.stream.limit_few_rows(num_rows)
            stays += self._move(weight, num_rows > 0)
        return OffloadedBlock(made, stays, self.stream)

    def _move(self, weight: StoredWeight, is_read_in_place: bool) -> Iterator[Stay]:
        for name, tensor in _tensors(weight):
            host = pin(tensor)
            setattr(weight, name, host)  # the device's is free
            yield Stay(weight, name, host, map_to_device(host, self.device) if is_read_in_place else None)

    def finish(self, model: Decoder | Encoder) -> None:
        """Make the buffers, and say what stays where."""
        self.stream.allocate()
        blocks = [block for block in model.blocks if isinstance(block, OffloadedBlock)]
        for block in blocks:
            block.place(is_few=False)
        _log.info(
            "%.2f GiB of weights of %d layers stay in host memory and pass through two buffers of %.0f MiB",
            self.quota.chosen / GIB,
            len(blocks),
            self.stream.buffers[0].nbytes / MIB,
        )


def _tensors(weight: StoredWeight) -> list[tuple[str, torch.Tensor]]:
    """List a weight's tensors but for those with a number for each output: biases and scales."""
    return [
        (name, one)
        for name, one in vars(weight).items()
        if isinstance(one, torch.Tensor) and one.dim() > 1 and one.numel()
    ]


def _find_weights(part: Any) -> Iterator[StoredWeight]:
    return (one for one in _walk(part) if isinstance(one, StoredWeight))


def _walk(thing: Any) -> Iterator[Any]:
    """Yield the objects that a block is made of, each once."""
    seen: set[int] = set()
    todo: list[Any] = [thing]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, torch.Tensor | str | bytes | type | ModelSpec):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, Sequence):
            todo += one
        elif type(one).__module__.startswith("penstock."):
            yield one
            todo += getattr(one, "__dict__", {}).values()
