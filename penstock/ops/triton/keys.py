"""What Triton's cache calls our kernels, whichever of them a process asks for first."""

from __future__ import annotations

import re
import sys
from typing import Any

from triton.runtime.jit import JITFunction

ROOT = "penstock.ops.triton"
PROSE = re.compile(r'''""".*?"""|#[^\n]*''', re.DOTALL)


def functions() -> list[Any]:
    """Those of ours that have been imported."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(ROOT)]
    return [value for module in modules for value in list(vars(module).values()) if isinstance(value, JITFunction)]


def named(function: Any) -> list[Any]:
    """The functions of ours that its source names, as often as it does."""
    known = function.fn.__globals__
    names = re.findall(r"\w+", PROSE.sub("", function.src.partition(":\n")[2]))
    return [
        value
        for name in names
        if isinstance(value := known.get(name), JITFunction)
        and value is not function
        and value.fn.__module__.startswith(ROOT)
    ]


def settle_keys() -> None:
    """Name every function after those that it calls. Else some versions of Triton leave out of a kernel's name what its
    functions read, unless another kernel has named them before: what one process compiled another would not find."""
    settled: set[int] = set()

    def settle(function: Any) -> None:
        if id(function) not in settled:
            settled.add(id(function))
            for other in named(function):
                settle(other)
            _ = function.cache_key

    for function in functions():
        settle(function)
