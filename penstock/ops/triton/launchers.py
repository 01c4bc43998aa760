"""Launchers that threads may load at once.

Some versions of Triton compile a library for every kind of launch, all under one name. Python hands out one module for
all of a name that are loaded again, and puts into it what the last one has: a thread may then find the launcher of
another's kernel there, which takes other arguments.
"""

from __future__ import annotations

from threading import Lock
from types import ModuleType
from typing import Any

from triton.runtime import build

_lock = Lock()


def load_apart() -> None:
    """From now on each library that Triton loads has a module of its own."""
    load: Any = getattr(build, "_load_module_from_path", None)
    if load is None or getattr(load, "is_apart", False):
        return

    def apart(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with _lock:
            own.__dict__.update(vars(load(name, path)))
        return own

    apart.is_apart = True  # type: ignore[attr-defined]
    build._load_module_from_path = apart
