"""Launches like earlier ones: which compiled kernel they take is looked up in one go, where Triton would look at every
argument first. A small model's prompts take the host longer than the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from penstock.ops.triton.keys import functions

KNOWN = (3, 6), (3, 9)  # versions of Triton, of which all launch compiled kernels in the same way
MOST = 256  # launches that a kernel remembers; steps of other sizes are others
ALIGNED = 15  # bits of an address that decide how a kernel may read
ONES = ((1, 1, 1), (1, 1), (1,), ())  # that complete a grid of so many dimensions
_SETTINGS: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
_ENTER: Any = getattr(_SETTINGS, "launch_enter_hook", None)
_EXIT: Any = getattr(_SETTINGS, "launch_exit_hook", None)


class Remembering(JITFunction):  # type: ignore[misc]
    """A kernel that remembers its launches."""

    _known: dict[Any, tuple[Any, ...]]

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            if _ENTER.calls or _EXIT.calls:  # somebody wants to be told of launches
                return self.run(*args, grid=grid, warmup=False, **options)
            device = torch._C._cuda_getDevice()
            # Equal numbers of other types are others, as they are for Triton: 1, 1.0 and True.
            key = (
                device,
                tuple(map(type, args)),
                tuple(options.items()),
                *[(arg.dtype, arg.data_ptr() & ALIGNED) if isinstance(arg, Tensor) else arg for arg in args],
            )
            known = self._known.get(key)
            if known is None:
                made = self.run(*args, grid=grid, warmup=False, **options)
                if made is not None:
                    self._remember(key, made, args, options)
                return made
            run, function, metadata, rest = known
            return run(
                *grid,
                *ONES[len(grid)],
                torch._C._cuda_getCurrentRawStream(device),
                function,
                metadata,
                None,
                None,
                None,
                *args,
                *rest,
            )

        return launch

    def _remember(self, key: Any, made: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        """After those given by their place come arguments given by name, and those that nobody gives."""
        if len(self._known) >= MOST:
            self._known.clear()
        rest = list(self.signature.parameters.values())[len(args) :]
        values = tuple(options.get(one.name, one.default) for one in rest)
        self._known[key] = made.run, made.function, made.packed_metadata, values


def remember_launches() -> None:
    """Have all kernels of ours remember their launches, if this version of Triton launches as is known here."""
    if not KNOWN[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= KNOWN[1]:
        return
    for function in functions():
        if type(function) is JITFunction:
            function.__class__, function._known = Remembering, {}
