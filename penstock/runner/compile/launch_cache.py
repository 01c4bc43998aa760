"""A cache of launches: a repeated launch finds its compiled kernel with one lookup instead of Triton's argument by
argument dispatch, which for a small model's prefill takes the host longer than the device computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from penstock.runner.compile.cache_keys import list_kernels

VERIFIED = (3, 6), (3, 9)  # Triton versions whose launcher takes the same arguments
MAX_LAUNCHES = 256  # per kernel; other batch sizes are other launches
ALIGNMENT = 15  # address bits that Triton specializes on
PLAIN = (int, float, str, type(None))  # arguments that are their own key
GRID_PADDING = ((1, 1, 1), (1, 1), (1,), ())  # completes a grid of 0 to 3 dimensions
_SETTINGS: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
_ENTER: Any = getattr(_SETTINGS, "launch_enter_hook", None)
_EXIT: Any = getattr(_SETTINGS, "launch_exit_hook", None)


class CachedKernel(JITFunction):  # type: ignore[misc]
    """A kernel that caches its launches. `cache_launches` makes a `JITFunction` one by changing its class."""

    _launches: dict[Any, tuple[Any, ...]]

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            if _ENTER.calls or _EXIT.calls:  # a profiler wants to see launches
                return self.run(*args, grid=grid, warmup=False, **options)
            device = torch._C._cuda_getDevice()
            flat: list[Any] = []
            for arg in args:
                if isinstance(arg, tuple):
                    flat += arg
                else:
                    flat.append(arg)
            # Key on the type too: Triton specializes 1, 1.0 and True differently.
            key = (
                device,
                tuple(map(type, flat)),
                tuple(options.items()),
                *[
                    (arg.dtype, arg.data_ptr() & ALIGNMENT)
                    if isinstance(arg, Tensor)
                    else arg
                    if isinstance(arg, PLAIN)
                    else _key_of(arg)
                    for arg in flat
                ],
            )
            known = self._launches.get(key)
            if known is None:
                compiled = self.run(*args, grid=grid, warmup=False, **options)
                if compiled is not None:
                    self._store(key, compiled, args, options)
                return compiled
            run, function, metadata, rest = known
            return run(
                *grid,
                *GRID_PADDING[len(grid)],
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

    def _store(self, key: Any, compiled: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        """Store a launch with the arguments after the positional ones: those given by name, then defaults."""
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        rest = list(self.signature.parameters.values())[len(args) :]
        values = tuple(options.get(one.name, one.default) for one in rest)
        self._launches[key] = compiled.run, compiled.function, compiled.packed_metadata, values


def _key_of(arg: Any) -> Any:
    """The part of a rare argument that Triton specializes on: of a TMA descriptor all but the place it describes."""
    return (arg.base.dtype, *arg.block_shape, arg.layout, arg.padding) if hasattr(arg, "block_shape") else arg


@cache
def _cached_class(kind: Any) -> Any:
    """The class of kernels of a kind, Triton's or Gluon's, that cache their launches."""
    return CachedKernel if kind is JITFunction else type(f"Cached{kind.__name__}", (CachedKernel, kind), {})


def cache_launches() -> None:
    """Make all of our kernels cache their launches, for Triton versions whose launcher is verified."""
    if not VERIFIED[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= VERIFIED[1]:
        return
    for kernel in list_kernels():
        if not isinstance(kernel, CachedKernel):
            kind: Any = type(kernel)
            kernel.__class__, kernel._launches = _cached_class(kind), {}
