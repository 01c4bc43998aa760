"""Make Triton's cache keys of our kernels independent of the order of first use."""

from __future__ import annotations

import re
import sys
from typing import Any

from triton.runtime.jit import JITFunction

ROOT = "penstock.ops.triton"
PROSE = re.compile(r'''""".*?"""|#[^\n]*''', re.DOTALL)


def list_kernels() -> list[Any]:
    """Return our `@triton.jit` functions that have been imported."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(ROOT)]
    return [value for module in modules for value in list(vars(module).values()) if isinstance(value, JITFunction)]


def find_callees(function: Any) -> list[Any]:
    """Return those of our functions that a function's code names, as often as it does."""
    known = function.fn.__globals__
    names = re.findall(r"\w+", PROSE.sub("", function.src.partition(":\n")[2]))
    return [
        value
        for name in names
        if isinstance(value := known.get(name), JITFunction)
        and value is not function
        and value.fn.__module__.startswith(ROOT)
    ]


def fix_cache_keys() -> None:
    """Compute every function's key after those of its callees. Otherwise some versions of Triton leave the globals of a
    callee out of a kernel's key unless another kernel was keyed first, and processes miss each other's kernels."""
    done: set[int] = set()

    def compute(function: Any) -> None:
        if id(function) not in done:
            done.add(id(function))
            for callee in find_callees(function):
                compute(callee)
            _ = function.cache_key

    for function in list_kernels():
        compute(function)
