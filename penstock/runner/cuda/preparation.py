"""Captures that the engine makes while it is idle, one at a time, the most wanted first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from penstock.runner.cuda.decode_graphs import VARIANTS, DecodeGraphs
from penstock.runner.cuda.mixed_graphs import MixedGraphs
from penstock.sampling.row import Chooser

FIRST_SIZES = (32, 128, 8, 64, 16, 4, 2)  # decode buckets that come before all others, with the largest and the least
Capture = tuple[Callable[[], None], Callable[[], int]]  # makes it; how often it was wanted in vain


class Preparation:
    """The steps that are yet to be captured."""

    def __init__(self, decode: DecodeGraphs, mixed: MixedGraphs, first: Chooser) -> None:
        """`first` is what samples most rows."""
        self._waiting: list[Capture] = []
        if decode.pool.eager:
            return
        choosers = [first, *(chooser for chooser in VARIANTS if chooser > first)]
        keys = decode.buckets()
        plain = [key for key in keys if not key[1]]
        leading = [decode.sizes[-1], decode.sizes[0], *FIRST_SIZES]
        early = [key for size in leading for key in plain if key[0] == size]
        small = [key for key in mixed.buckets() if key[1] == mixed.sequences[0]]
        large = [key for key in mixed.buckets() if key[1] == mixed.sequences[-1]]
        for chooser in choosers:
            decode_captures = partial(_captures, decode.prepare, decode.num_wanted, chooser, chooser is first)
            mixed_captures = partial(_captures, mixed.prepare, mixed.num_wanted, chooser, chooser is first)
            self._waiting += decode_captures(early)
            self._waiting += mixed_captures([*small[::4], *large[::4], *mixed.buckets()])
            self._waiting += decode_captures(key for key in keys if key not in early)
        self._waiting.reverse()

    def step(self) -> bool:
        """Capture one step; False if none is left."""
        if not self._waiting:
            return False
        last = len(self._waiting) - 1
        wanted, place = max((how_often(), place) for place, (_, how_often) in enumerate(self._waiting))
        capture, _ = self._waiting.pop(place if wanted else last)
        capture()
        return bool(self._waiting)


def _captures(
    prepare: Callable[..., None], wanted: Counter[Any], chooser: Chooser, is_counted: bool, keys: Iterable[Any]
) -> list[Capture]:
    """Only what samples most rows is counted as wanted: other sampling is launched in a few kernels."""
    return [
        (partial(prepare, key, chooser), partial(wanted.__getitem__, key) if is_counted else int)
        for key in dict.fromkeys(keys)
    ]
