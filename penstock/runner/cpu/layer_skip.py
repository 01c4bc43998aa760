"""Find the layers of a model that draft for it, on a short text of its own, before the first request."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from penstock.models.decoder import Decoder
from penstock.runner.cpu.runner import Runner, use_torch
from penstock.runner.step import Step

NUM_TOKENS = 64  # of the text
MIN_SHARE = 0.2  # of all: fewer know nothing
_log = logging.getLogger(__name__)


def choose_layers(runner: Runner, length: int) -> tuple[int, ...]:
    """Leave out the layers that the next token depends on least, one after the other, and return those that promise
    most for drafts of `length` tokens. The text is sampled from the model, in free blocks."""
    model = runner.model
    assert isinstance(model, Decoder)
    count = min(NUM_TOKENS, model.spec.max_model_len, _count_positions(runner))
    with use_torch():
        text = _sample_text(runner, model, count)
        wanted = _find_likeliest(runner, model, range(model.spec.num_layers), text)

        def agree(layers: Sequence[int]) -> float:
            return float((_find_likeliest(runner, model, layers, text) == wanted).float().mean())

        kept = list(range(model.spec.num_layers))
        order = sorted(kept[1:-1], key=lambda layer: -agree([one for one in kept if one != layer]))
        best, best_gain = tuple(kept), 0.0
        least = max(2, int(MIN_SHARE * len(kept)))
        for layer in order[: max(0, len(kept) - least)]:
            kept.remove(layer)
            gain = _estimate_gain(agree(kept), len(kept) / model.spec.num_layers, length)
            if gain > best_gain:
                best, best_gain = tuple(kept), gain
    _log.info("layers that draft: %s of %d", ", ".join(map(str, best)), model.spec.num_layers)
    return best


def _estimate_gain(acceptance: float, cost: float, length: int) -> float:
    """Return tokens per step over its cost, in steps of one token."""
    return sum(acceptance**place for place in range(length + 1)) / (1 + length * cost)


def _count_positions(runner: Runner) -> int:
    groups = runner.memory.grouping.groups
    return len(runner.memory.blocks) // max(1, len(groups)) * runner.memory.block_size


def _make_step(runner: Runner, text: torch.Tensor, start: int, end: int) -> Step:
    """Make a step of a sequence that has the first blocks of the pool to itself, for positions [start, end) of it."""
    size, groups = runner.memory.block_size, runner.memory.grouping.groups
    positions = torch.arange(start, end)
    width = -(-len(text) // size)
    tables = [torch.arange(g * width, (g + 1) * width, dtype=torch.int32)[None] for g in range(len(groups))]
    slots = [table[0, positions // size].long() * size + positions % size for table in tables]
    ends, lengths = torch.tensor([[0, end - start], [end, 0]], dtype=torch.int32)
    return Step(text[start:end], positions, list(slots), tables, ends, lengths[:1])


def _sample_text(runner: Runner, model: Decoder, count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    text = torch.ones(count, dtype=torch.int64)
    for at in range(1, count):
        step = _make_step(runner, text, at - 1, at)
        logits = model.logits(model.forward(step, runner.caches))
        text[at] = torch.multinomial(logits[0].softmax(-1), 1, generator=random)
    return text


def _find_likeliest(runner: Runner, model: Decoder, layers: Sequence[int], text: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token after each of the text, by these layers alone."""
    blocks, caches = [model.blocks[i] for i in layers], [runner.caches[i] for i in layers]
    part = Decoder(model.spec, model.ops, model.embedding, blocks, model.norm, model.head)
    return part.logits(part.forward(_make_step(runner, text, 0, len(text)), caches)).argmax(-1)
