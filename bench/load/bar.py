"""Progress on standard error, where that is a terminal."""

from __future__ import annotations

import sys


class Bar:
    """What is being done, and how many of its requests have ended."""

    def __enter__(self) -> Bar:
        from tqdm import tqdm

        self._bar = tqdm(total=0, file=sys.stderr, dynamic_ncols=True, unit="request", disable=None, mininterval=0.5)
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def begin(self, total: int) -> None:
        self._bar.reset(total)

    def note(self, text: str) -> None:
        self._bar.set_description_str(text)

    def advance(self) -> None:
        self._bar.update(1)
