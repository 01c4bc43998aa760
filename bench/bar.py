"""Progress on standard error, where that is a terminal."""

from __future__ import annotations

import sys


class Bar:
    """What is being done, and how much of it."""

    def __init__(self, unit: str) -> None:
        self._unit = unit

    def __enter__(self) -> Bar:
        from tqdm import tqdm

        self._bar = tqdm(total=0, file=sys.stderr, dynamic_ncols=True, unit=self._unit, disable=None, mininterval=0.5)
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def begin(self, total: int) -> None:
        self._bar.reset(total)

    def note(self, text: str) -> None:
        self._bar.set_description_str(text)

    def advance(self, count: int = 1) -> None:
        self._bar.update(count)

    def making(self, name: str, done: int, total: int) -> None:
        self.note(f"making {name}: {100 * done // total} %")
