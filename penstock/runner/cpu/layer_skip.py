"""Find the layers of a model that draft for it, on a short text of its own, before the first request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.models.decoder import Decoder
from penstock.ops import Work
from penstock.runner.cpu.runner import use_torch
from penstock.runner.memory import BlockMemory
from penstock.runner.step import Step

NUM_TOKENS = 64  # of the text
MIN_SHARE = 0.2  # of all: fewer know nothing
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """A model with a cache that is not in use yet."""

    model: Decoder
    memory: BlockMemory
    caches: Sequence[Any]
    tile_tokens: int = 0  # queries that attention takes at once on a GPU

    def choose_layers(self, length: int) -> tuple[int, ...]:
        """Leave out the layers that the next token depends on least, one after the other, and return those that promise
        most for drafts of `length` tokens. The text is sampled from the model."""
        num_layers = self.model.spec.num_layers
        count = min(NUM_TOKENS, self.model.spec.max_model_len, self._count_positions())
        with use_torch():
            text = self._sample_text(count)
            wanted = self._find_likeliest(range(num_layers), text)

            def agree(layers: Sequence[int]) -> float:
                return float((self._find_likeliest(layers, text) == wanted).float().mean())

            kept = list(range(num_layers))
            order = sorted(kept[1:-1], key=lambda layer: -agree([one for one in kept if one != layer]))
            best, best_gain = tuple(kept), 0.0
            least = max(2, int(MIN_SHARE * len(kept)))
            for layer in order[: max(0, len(kept) - least)]:
                kept.remove(layer)
                gain = _estimate_gain(agree(kept), len(kept) / num_layers, length)
                if gain > best_gain:
                    best, best_gain = tuple(kept), gain
        _log.info("layers that draft: %s of %d", ", ".join(map(str, best)), num_layers)
        return best

    def _count_positions(self) -> int:
        groups = self.memory.grouping.groups
        return len(self.memory.blocks) // max(1, len(groups)) * self.memory.block_size

    def _make_step(self, text: torch.Tensor, start: int, end: int) -> Step:
        """Make a step of a sequence that has the first blocks of the pool to itself, for positions [start, end)."""
        size, groups, device = self.memory.block_size, self.memory.grouping.groups, text.device
        positions = torch.arange(start, end, device=device)
        width = -(-len(text) // size)
        tables = [
            torch.arange(g * width, (g + 1) * width, dtype=torch.int32, device=device)[None] for g in range(len(groups))
        ]
        slots = [table[0, positions // size].long() * size + positions % size for table in tables]
        starts = torch.tensor([0, end - start], dtype=torch.int32, device=device)
        lengths = torch.tensor([end], dtype=torch.int32, device=device)
        return Step(text[start:end], positions, list(slots), tables, starts, lengths, self._split(end - start, end))

    def _split(self, count: int, end: int) -> Work | None:
        """Split attention for a GPU."""
        if not self.tile_tokens or count == 1:
            return Work(1) if self.tile_tokens else None
        tiles = [(0, first) for first in range(0, count, self.tile_tokens)]
        device = self.memory.blocks.device
        num_tiles = torch.tensor([len(tiles)], dtype=torch.int32, device=device)
        return Work(0, torch.tensor(tiles, dtype=torch.int32, device=device), num_tiles=num_tiles, longest=end)

    def _sample_text(self, count: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(0)
        text = torch.ones(count, dtype=torch.int64, device=self.memory.blocks.device)
        for at in range(1, count):
            logits = self.model.logits(self.model.forward(self._make_step(text, at - 1, at), self.caches))
            text[at] = torch.multinomial(logits[0].float().softmax(-1).cpu(), 1, generator=random)[0]
        return text

    def _find_likeliest(self, layers: Sequence[int], text: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token after each of the text, by these layers alone."""
        model = self.model
        blocks, caches = [model.blocks[i] for i in layers], [self.caches[i] for i in layers]
        part = Decoder(model.spec, model.ops, model.embedding, blocks, model.norm, model.head)
        return part.logits(part.forward(self._make_step(text, 0, len(text)), caches)).argmax(-1)


def _estimate_gain(acceptance: float, cost: float, length: int) -> float:
    """Return tokens per step over its cost, in steps of one token."""
    return sum(acceptance**place for place in range(length + 1)) / (1 + length * cost)
