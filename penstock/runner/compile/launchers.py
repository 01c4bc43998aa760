"""Make Triton's launcher loading thread-safe.

Some versions of Triton compile a launcher library per signature, all under one module name. Python reuses one module
for all of them and overwrites its contents: a thread may then find the launcher of another thread's kernel.
"""

from __future__ import annotations

from threading import Lock
from types import ModuleType
from typing import Any

from triton.runtime import build

_lock = Lock()


def isolate_launchers() -> None:
    """Replace Triton's loader by one that gives each library a module of its own."""
    load: Any = getattr(build, "_load_module_from_path", None)
    if load is None or getattr(load, "is_isolated", False):
        return

    def load_isolated(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with _lock:
            own.__dict__.update(vars(load(name, path)))
        return own

    load_isolated.is_isolated = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_isolated
