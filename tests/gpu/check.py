"""Checks by name. Each raises AssertionError, or returns the figures it found."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Figures = dict[str, Any]
CHECKS: dict[str, Callable[[], Figures | None]] = {}


class Skip(Exception):
    """Something that this machine lacks."""


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool
    seconds: float
    told: str = ""
    skipped: bool = False
    trace: str = field(default="", repr=False)

    def __str__(self) -> str:
        state = "skip" if self.skipped else "ok  " if self.passed else "FAIL"
        return f"{state} {self.seconds:6.1f} s  {self.name}  {self.told}".rstrip()


def check(cases: Iterable[tuple[Any, ...]] = ((),)) -> Callable[[Callable[..., Figures | None]], Any]:
    """Enter the decorated function once for each case, under its name and the case's values."""

    def enter(function: Callable[..., Figures | None]) -> Callable[..., Figures | None]:
        for case in cases:
            name = " ".join([function.__name__.replace("_", " "), *(str(value) for value in case)])
            if name in CHECKS:
                raise ValueError(f"check {name!r} is entered already")
            CHECKS[name] = partial(function, *case)
        return function

    return enter


def run(name: str) -> Outcome:
    begun = time.perf_counter()
    try:
        figures = CHECKS[name]() or {}
    except Skip as reason:
        return Outcome(name, True, time.perf_counter() - begun, str(reason), skipped=True)
    except Exception as error:  # whatever it is, the checks after it are of interest too
        told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Outcome(name, False, time.perf_counter() - begun, told, trace=traceback.format_exc())
    told = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
    )
    return Outcome(name, True, time.perf_counter() - begun, told)


def require(true: bool, why: str) -> None:
    """Unlike `assert`, it says the figures."""
    if not true:
        raise AssertionError(why)
