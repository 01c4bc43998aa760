"""Tapes of small steps: the second step of a shape is recorded, and later ones are one native call."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from penstock.ops import cpu
from penstock.ops.cpu.runtime import library
from penstock.ops.cpu.runtime.arena import Arena
from penstock.ops.cpu.runtime.tape import Obstacle, Tape, record

MAX_SHAPES = 256
R = TypeVar("R")
_log = logging.getLogger(__name__)


class Tapes(Generic[R]):
    """For each shape: that it was seen, its tape, or the obstacle to one."""

    def __init__(self) -> None:
        self.enabled = True
        self.num_recorded = 0
        self.num_replayed = 0
        self._arena = Arena()
        self._known: OrderedDict[Hashable, Tape[R] | Obstacle | None] = OrderedDict()  # the last used one last
        self._changes = library.changes

    @property
    def obstacles(self) -> list[str]:
        return [known.name for known in self._known.values() if isinstance(known, Obstacle)]

    def run(self, shape: Hashable, function: Callable[[], R]) -> R:
        """Run the function or replay it. It must make the same kernel calls for every step of this shape."""
        if not self.enabled or cpu.path() == "reference":
            return function()
        if self._changes != library.changes:
            self._known.clear()
            self._changes = library.changes
        if shape not in self._known:
            self._known[shape] = None
            if len(self._known) > MAX_SHAPES:
                self._known.popitem(last=False)
            return function()
        self._known.move_to_end(shape)
        known = self._known[shape]
        if known is None:
            return self._record(shape, function)
        if isinstance(known, Obstacle):
            return function()
        self.num_replayed += 1
        return known.replay()

    def _record(self, shape: Hashable, function: Callable[[], R]) -> R:
        result, made = record(function, self._arena)
        self._known[shape] = made
        if isinstance(made, Obstacle):
            _log.debug("steps of %s are not replayed: torch computes %s", shape, made.name)
        else:
            self.num_recorded += 1
        return result
