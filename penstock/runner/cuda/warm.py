"""Steps of nobody's rows: they ask for the kernels that real ones take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from penstock import ops
from penstock.ops.product import FEW_ROWS
from penstock.ops.triton.attention import FEW, LEAST_FEW
from penstock.ops.triton.exact.product import ROWS
from penstock.runner.cuda.graphs import EXTRA, PLAIN, SHORT, WISHING, SingleSteps
from penstock.runner.step import Step, ends_of

Work = Callable[[], None]
FIRST_PROMPT = 100  # tokens, more or less
MANY_ROWS = 8192


def first_steps(singles: SingleSteps) -> list[Work]:
    """What the first request takes. They may run side by side."""
    wishing = WISHING if singles.deterministic else PLAIN
    sizes = singles.sizes[:2] if singles.deterministic else singles.sizes[:1]
    return [
        *(partial(singles.warm, size, False, wishing) for size in sizes),
        *(partial(_mixed, singles, count, wishing, used) for count, used in ((FIRST_PROMPT, 1), (2, None))),
    ]


def later_steps(singles: SingleSteps) -> list[Work]:
    """What comes with a second row, with rows that wish more than a temperature, with more rows and with longer
    sequences: one size for each way that keys are read, with and without positions in common."""
    if singles.deterministic:
        return _of_tiles(singles)
    kinds = {
        (
            singles.num_parts(size, longest),
            singles.num_common_parts(size),
            LEAST_FEW <= size <= FEW,
            size <= FEW_ROWS // 2,
            size <= FEW_ROWS,
        ): (size, longest)
        for longest in (SHORT + 1, SHORT)
        for size in reversed(singles.sizes)
    }
    shared = (True, False) if len(singles.rows.tables) == 1 else (False,)
    return [
        *(partial(singles.warm, size) for size in singles.sizes[1:2]),
        partial(singles.warm, singles.sizes[0], False, WISHING),
        partial(_mixed, singles, wishing=WISHING),
        partial(singles.warm, singles.sizes[0], False, EXTRA),
        partial(_mixed, singles, wishing=EXTRA),
        *(partial(_mixed, singles, count) for count in singles.model.row_counts),
        *(
            partial(singles.warm, size, is_shared, PLAIN, longest)
            for size, longest in kinds.values()
            for is_shared in shared
        ),
    ]


def _of_tiles(singles: SingleSteps) -> list[Work]:
    """Steps of as many rows as exact products have kinds of tiles for, and of so many that one program goes through all
    parts of a product."""
    most = singles.sizes[-1]
    sizes = {singles.size(min(rows, most)) for rows in (*ROWS[1:], most)} - set(singles.sizes[:2])
    return [
        *(partial(singles.warm, size, False, WISHING) for size in sorted(sizes)),
        partial(singles.warm, singles.sizes[0], False, EXTRA),
        partial(_mixed, singles, wishing=EXTRA),
        *(partial(_mixed, singles, rows, WISHING) for rows in (*ROWS[1:], MANY_ROWS)),
    ]


def _mixed(singles: SingleSteps, num_tokens: int = 2, wishing: int = PLAIN, used: int | None = None) -> None:
    """A prompt of two tokens, others of none, and the token after it; so many blocks are `used`, or all there can be,
    which exact attention reads in parts."""
    rows, model = singles.rows, singles.model
    ops.take_exact(singles.deterministic)
    with torch.inference_mode():
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=rows.last.device)
        starts = torch.arange(0, 4, 2, dtype=torch.int32, device=rows.last.device)
        tables = [table[:1, :used].contiguous() for table in rows.tables]
        step = Step(
            zeros,
            zeros,
            [torch.full_like(zeros, -1) for _ in tables],
            tables,
            starts,
            starts[1:].clone(),
            ops.Work(0, torch.zeros((1, 2), dtype=torch.int32, device=rows.last.device)),
        )
        at = torch.ones(1, dtype=torch.int64, device=rows.last.device)
        nobody = torch.full((1,), rows.nobody, dtype=torch.int32, device=rows.last.device)
        hidden = model.forward(step, singles.caches, ends_of(step, at, zeros[:1], singles.num_parts(1, 1)))
        singles.choose(model.logits(hidden), step.positions[at] + 1, nobody, wishing)
