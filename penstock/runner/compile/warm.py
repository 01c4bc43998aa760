"""Warm-up steps of padding rows, which launch the kernels that real steps will."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch

from penstock import ops
from penstock.ops.triton.tuning import CAPTURED_TOKENS, EXACT_SPLIT_POSITIONS, MIN_HOPPER_TOKENS, SHORT_CONTEXT
from penstock.passes.lower import row_limits
from penstock.runner.cuda.decode_graphs import DecodeGraphs
from penstock.runner.cuda.mixed_graphs import Key, MixedGraphs
from penstock.runner.step import Step, ends_of
from penstock.sampling.row import Chooser

DEVICE, DEVICE_FILTERED, DEVICE_EXTRAS = Chooser.DEVICE, Chooser.DEVICE_FILTERED, Chooser.DEVICE_EXTRAS
Work = Callable[[], None]
FIRST_PROMPT = 100  # tokens of a typical first request
MANY_ROWS = 8192  # for the deterministic GEMM's largest tiles


def first_steps(singles: DecodeGraphs) -> list[Work]:
    """Return the warm-up steps for the first request; they may run side by side."""
    chooser = DEVICE_FILTERED if singles.deterministic else DEVICE
    sizes = singles.sizes[:2] if singles.deterministic else singles.sizes[:1]
    mixed = MixedGraphs(singles, singles.sizes[-1], CAPTURED_TOKENS[0])
    return [
        *(partial(singles.warm, size, False, chooser) for size in sizes),
        *([partial(singles.warm, 1, False, chooser, EXACT_SPLIT_POSITIONS + 1)] if singles.deterministic else []),
        *(partial(mixed.warm, key, chooser) for key in _least_keys(mixed)[:1]),  # the first prompt, padded
        *(partial(_run_mixed, singles, count, chooser, used) for count, used in ((FIRST_PROMPT, 1), (2, None))),
    ]


def later_steps(singles: DecodeGraphs) -> list[Work]:
    """Return the warm-up steps for larger batches, sampling filters and long contexts: one batch size per attention
    kernel, with and without shared prefixes."""
    if singles.deterministic:
        return [partial(_run_move, singles), *_tile_steps(singles)]
    limits = row_limits(singles.model)
    kinds = {
        (singles.num_kv_splits(size, longest), singles.num_prefix_splits(size), bisect_left(limits, size)): (
            size,
            longest,
        )
        for longest in (SHORT_CONTEXT + 1, SHORT_CONTEXT)
        for size in reversed(singles.sizes)
    }
    shared = (True, False) if singles.rows.only_full else (False,)
    mixed = MixedGraphs(singles, singles.sizes[-1], CAPTURED_TOKENS[0])
    return [
        partial(_run_move, singles),
        *(partial(singles.warm, size) for size in singles.sizes[1:2]),
        partial(singles.warm, singles.sizes[0], False, DEVICE_FILTERED),
        partial(_run_mixed, singles, chooser=DEVICE_FILTERED),
        partial(singles.warm, singles.sizes[0], False, DEVICE_EXTRAS),
        partial(_run_mixed, singles, chooser=DEVICE_EXTRAS),
        *(partial(mixed.warm, key, DEVICE) for key in _least_keys(mixed)),
        *(partial(_run_mixed, singles, count) for count in (2, *(limit + 1 for limit in limits))),
        *(
            partial(singles.warm, size, is_shared, DEVICE, longest)
            for size, longest in kinds.values()
            for is_shared in shared
        ),
    ]


def _least_keys(mixed: MixedGraphs) -> list[Key]:
    """The least bucket of tokens for each bucket of sequences, and the least with another kernel for its prompts."""
    keys = [[key for key in sorted(mixed.buckets()) if key[1] == seqs] for seqs in mixed.sequences]
    long = [[key for key in some if key[0] >= MIN_HOPPER_TOKENS] for some in keys]
    return [some[0] for some in (*keys, *long) if some]


def _tile_steps(singles: DecodeGraphs) -> list[Work]:
    """Return one step per tile size of the deterministic GEMM, and one of MANY_ROWS."""
    mixed = MixedGraphs(singles, singles.sizes[-1], CAPTURED_TOKENS[0])
    largest, counts = singles.sizes[-1], [limit + 1 for limit in row_limits(singles.model)]
    sizes = {singles.size(min(rows, largest)) for rows in (*counts, largest)} - set(singles.sizes[:2])
    return [
        *(partial(singles.warm, size, False, DEVICE_FILTERED) for size in sorted(sizes)),
        partial(singles.warm, singles.sizes[0], False, DEVICE_EXTRAS),
        partial(_run_mixed, singles, chooser=DEVICE_EXTRAS),
        *(partial(_run_mixed, singles, rows, DEVICE_FILTERED) for rows in (*counts, MANY_ROWS)),
        *(partial(mixed.warm, key, DEVICE_FILTERED) for key in _least_keys(mixed)),
    ]


def _run_move(singles: DecodeGraphs) -> None:
    blocks = singles.memory.words
    ops.block_move(blocks, torch.full((1, 2), -1, dtype=torch.int64, device=blocks.device))


def _run_mixed(singles: DecodeGraphs, num_tokens: int = 2, chooser: Chooser = DEVICE, used: int | None = None) -> None:
    """Run a mixed step: one 2-token prompt padded to `num_tokens`, with `used` blocks per table (default: all)."""
    rows, model = singles.rows, singles.model
    with torch.inference_mode():
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=rows.last.device)
        starts = torch.arange(0, 4, 2, dtype=torch.int32, device=rows.last.device)
        tables = [
            (table[:1, :used] if paged else table[:1]).contiguous() for table, paged in zip(rows.tables, rows.has_slots)
        ]
        step = Step(
            zeros,
            zeros,
            [torch.full_like(zeros, -1) if has_slots else None for has_slots in rows.has_slots],
            tables,
            starts,
            starts[1:].clone(),
            ops.Work(
                0,
                torch.zeros((1, 2), dtype=torch.int32, device=rows.last.device),
                num_tiles=torch.ones(1, dtype=torch.int32, device=rows.last.device),
                longest=max((table.shape[1] for table in tables), default=0) * singles.memory.block_size,
            ),
        )
        at = torch.ones(1, dtype=torch.int64, device=rows.last.device)
        padding = torch.full((1,), rows.padding_row, dtype=torch.int32, device=rows.last.device)
        step.adapters = rows.find_adapters(padding.long().expand(num_tokens))
        step.ends = ends_of(step, at, zeros[:1], singles.num_kv_splits(1, 1))
        hidden = model.forward(step, singles.caches)
        logits = model.logits(hidden, adapters=rows.find_adapters(padding.long()))
        singles.sample(logits, step.positions[at] + 1, padding, chooser)
