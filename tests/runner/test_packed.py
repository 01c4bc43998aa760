"""Numbers of a mixed step: what its tiles are, how many have queries, and how long the longest prompt is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from penstock.engine.plan import Output, Row  # noqa: E402
from penstock.runner.cuda.packed import MixedShape, PackedRows, max_numbers, read_inputs  # noqa: E402

ROWS = [Row(3, 900, 1, Output.SAMPLE, ()), Row(1, 0, 70, Output.SAMPLE, ()), Row(2, 500, 33, Output.NONE, ())]
PADDED = MixedShape(128, 9, 8, 8, 12, is_padded=True)


def pack(rows: list[Row]) -> PackedRows:
    devices: list[Any] = [
        SimpleNamespace(state=SimpleNamespace(tokens=[7] * 1000), inputs=lambda row, shift: [7] * row.count)
        for _ in rows
    ]
    return PackedRows(rows, devices, 32)


def read(packed: PackedRows, shape: MixedShape, longest: int | None) -> Any:
    numbers = np.full(shape.num_numbers, -9, dtype=np.int32)
    packed.fill(numbers, shape, 5)
    tensors: Any = SimpleNamespace(
        last=torch.zeros(6, dtype=torch.int64), tables=[torch.zeros(6, 64, dtype=torch.int32)], has_slots=[True]
    )
    tensors.find_adapters = lambda rows: None
    return read_inputs(torch.from_numpy(numbers), shape, tensors, 16, 1, None, longest).step.work


def test_tiles_that_have_queries_come_first_and_are_counted() -> None:
    packed = pack(ROWS)
    assert packed.longest == 901 and packed.longest_prompt == 533  # decode rows have no tiles
    exact = read(packed, packed.shape, packed.longest_prompt)
    assert exact.tiles.tolist() == [[2, 32], [2, 0], [1, 64], [1, 32], [1, 0]]
    assert exact.num_tiles.tolist() == [5] and exact.longest == 533
    padded = read(packed, PADDED, None)
    assert padded.tiles.tolist() == exact.tiles.tolist() + [[3, 0]] * 7
    assert padded.num_tiles.tolist() == [5] and padded.longest is None


def test_a_step_of_decode_rows_has_no_tiles() -> None:
    packed = pack(ROWS[:1])
    assert packed.longest_prompt == 0
    work = read(packed, packed.shape, 0)
    assert work.tiles is None and work.num_tiles.tolist() == [0]


def test_there_is_room_for_the_largest_step() -> None:
    for num_tokens, num_sequences in ((1, 1), (16, 16), (2048, 256), (100, 7)):
        shape = MixedShape(num_tokens, num_sequences, 0, num_tokens, num_tokens)
        assert shape.num_numbers <= max_numbers(num_tokens, num_sequences, 1)
